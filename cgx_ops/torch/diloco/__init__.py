"""Outer loops: DiLoCo and SparseLoCo.

loop.py: both; fragments.py: which parameters a fragment has; ranks.py: the same start on all ranks.
"""

from cgx_ops.torch.diloco.loop import DiLoCo, sparse_loco

__all__ = ["DiLoCo", "sparse_loco"]
