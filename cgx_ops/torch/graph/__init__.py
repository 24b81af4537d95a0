"""Operators of torch.ops.cgx for eager and compiled code, and collectives of the core as a Work."""
