"""Optimizers that average by themselves: OneBitAdam and Signum."""

from cgx_ops.torch.optim.optimizers import OneBitAdam, Signum

__all__ = ["OneBitAdam", "Signum"]
