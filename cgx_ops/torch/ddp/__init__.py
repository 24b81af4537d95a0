"""Communication hooks for DistributedDataParallel, and the buckets of a plan."""

from cgx_ops.torch.ddp.arrivals import Arrivals
from cgx_ops.torch.ddp.hook import (
    CommHookType,
    DeepGradientState,
    PlannedAllreduceState,
    PowerSGDState,
    QuantizedAllreduceState,
    batched_power_sgd_hook,
    bf16_compress_wrapper,
    deep_gradient_hook,
    planned_allreduce_hook,
    planned_buckets,
    power_sgd_hook,
    quantized_allreduce_hook,
)

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
