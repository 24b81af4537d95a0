"""Communication hooks for DistributedDataParallel, and buckets that follow a plan.

Register a hook with `model.register_comm_hook(state, hook)`. `quantized_allreduce_hook` is the
usual choice; `CommHookType` lists all hooks by name.
"""

from cgx_ops.torch.ddp.arrivals import Arrivals
from cgx_ops.torch.ddp.deep_gradient.hook import DeepGradientState, deep_gradient_hook
from cgx_ops.torch.ddp.hook import (
    QuantizedAllreduceState,
    bf16_compress_wrapper,
    quantized_allreduce_hook,
)
from cgx_ops.torch.ddp.hook_types import CommHookType
from cgx_ops.torch.ddp.plan import planned_buckets
from cgx_ops.torch.ddp.planned_hook import PlannedAllreduceState, planned_allreduce_hook
from cgx_ops.torch.ddp.power_sgd.hook import PowerSGDState, batched_power_sgd_hook, power_sgd_hook

__all__ = [
    "Arrivals",
    "CommHookType",
    "DeepGradientState",
    "PlannedAllreduceState",
    "PowerSGDState",
    "QuantizedAllreduceState",
    "batched_power_sgd_hook",
    "bf16_compress_wrapper",
    "deep_gradient_hook",
    "planned_allreduce_hook",
    "planned_buckets",
    "power_sgd_hook",
    "quantized_allreduce_hook",
]
