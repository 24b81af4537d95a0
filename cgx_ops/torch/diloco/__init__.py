"""Outer loops: DiLoCo and SparseLoCo."""

from cgx_ops.torch.diloco.loop import DiLoCo, sparse_loco

__all__ = ["DiLoCo", "sparse_loco"]
