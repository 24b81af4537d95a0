"""Optimizers that average over ranks themselves, and send a compressed momentum.

They need each rank's own gradients: use a model without DistributedDataParallel, or one with the
hook `CommHookType.NOOP`, which only copies parameters and buffers at the start.
"""

from cgx_ops.torch.optim.compressed_adamw import CompressedAdamW
from cgx_ops.torch.optim.signum import Signum

__all__ = ["CompressedAdamW", "Signum"]
