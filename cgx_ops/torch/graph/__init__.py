"""Operators of torch.ops.cgx, eager and compiled, and collectives of the core as a Work.

functional.py, ops.py: the public functions and their operators; gradients.py: compress_grads.
inductor.py: how compiled graphs lower them; rewrite.py, rewrite_groups.py: compress_collectives.
work.py: start() of any collective; carried.py: allreduces that torch's collectives carry.
"""
