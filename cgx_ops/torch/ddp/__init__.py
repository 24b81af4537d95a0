"""Communication hooks for DistributedDataParallel, and the buckets of a plan.

state.py and bucket.py: what all hooks share. hook.py: the quantized allreduce. power_sgd/ and
deep_gradient/: those methods. hook_types.py: all hooks by name. groups.py: buckets joined to a
plan's groups; plan.py: buckets of a plan's sizes; arrivals.py: records when gradients are ready.
models.py: names of layers. automatic.py: registers the hook over the backend "cgx".
unused_parameters.py: parameters that no rank uses in a step.
"""

from cgx_ops.torch.ddp.arrivals import Arrivals
from cgx_ops.torch.ddp.deep_gradient.hook import DeepGradientState, deep_gradient_hook
from cgx_ops.torch.ddp.groups import PlannedAllreduceState, planned_allreduce_hook
from cgx_ops.torch.ddp.hook import (
    QuantizedAllreduceState,
    bf16_compress_wrapper,
    quantized_allreduce_hook,
)
from cgx_ops.torch.ddp.hook_types import CommHookType
from cgx_ops.torch.ddp.plan import planned_buckets
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
