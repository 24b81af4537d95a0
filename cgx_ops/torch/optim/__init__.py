"""Optimizers that average over ranks themselves, and send a momentum in one bit.

They need each rank's own gradients: use a model without DistributedDataParallel, or one with the
hook `CommHookType.NOOP`, which only copies parameters and buffers at the start.
"""

from cgx_ops.torch.optim.one_bit_adam import OneBitAdam
from cgx_ops.torch.optim.signum import Signum

__all__ = ["OneBitAdam", "Signum"]
