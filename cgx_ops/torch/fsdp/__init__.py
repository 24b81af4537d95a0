"""Compressed collectives for FSDP2: gradients' reduce-scatter, and optionally weights' all-gather.

`compress` sets them up for a model that `fully_shard` wrapped. `GRADIENTS` and `WEIGHTS` are the
settings of QSDP: 8 bits in buckets of 1024, with randomly shifted grids for the weights. `LOCO` is
the error feedback of LoCo. `Differences` sends changes of the weights. `PowerSGD` averages over the
replicas of HSDP in low rank.
"""

from cgx_ops.torch.fsdp.differences import Differences
from cgx_ops.torch.fsdp.feedback import LOCO, Feedback
from cgx_ops.torch.fsdp.hooks import GRADIENTS, WEIGHTS, compress
from cgx_ops.torch.fsdp.power_sgd import PowerSGD
from cgx_ops.torch.fsdp.state import State

__all__ = [
    "GRADIENTS",
    "LOCO",
    "WEIGHTS",
    "Differences",
    "Feedback",
    "PowerSGD",
    "State",
    "compress",
]
