"""Optimizers that average over ranks, and send a momentum in one bit instead of gradients.

    from cgx_ops.torch.optim import OneBitAdam, Signum
    optimizer = OneBitAdam(model.parameters(), lr=1e-3, warmup_steps=1000)

Gradients must be each rank's own: a model without DistributedDataParallel, or in one with the hook
CommHookType.NOOP, which copies parameters and buffers at the start. base.py: their base class.
"""

from cgx_ops.torch.optim.one_bit_adam import OneBitAdam
from cgx_ops.torch.optim.signum import Signum

__all__ = ["OneBitAdam", "Signum"]
