"""Outer loops for slow links: DiLoCo and SparseLoCo.

Ranks train independently and average their progress every few steps, compressed and in the
background.
"""

from cgx_ops.torch.diloco.loop import DiLoCo
from cgx_ops.torch.diloco.sparse_loco import sparse_loco

__all__ = ["DiLoCo", "sparse_loco"]
