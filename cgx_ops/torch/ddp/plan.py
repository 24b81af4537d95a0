"""DistributedDataParallel in the groups of a plan: one bucket for each."""

import inspect
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cgx_ops.errors import InvalidArgument, Unsupported
from cgx_ops.planner import Plan
from cgx_ops.torch._compat.parallel import group_or_default
from cgx_ops.torch.averaging.layers import layer_name, named_layers
from cgx_ops.torch.backend.groups import communicator_of

_MIB = 1 << 20
_KEYWORD = "bucket_cap_mb_list"


def planned_buckets(
    plan: Plan, module: nn.Module, process_group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Return the keywords with which DistributedDataParallel makes a bucket of each group.

        plan = Plan.of({n: p.numel() for n, p in module.named_parameters()}, ready, costs)
        model = DistributedDataParallel(module, **planned_buckets(plan, module))

    From the second step on; in the first one buckets follow the parameters' order. They hold
    gradients in the order in which they became ready then: where that is not the plan's order,
    buckets have its sizes, but not quite its tensors. Parameters are of one dtype, on one device.

    Collective, as DistributedDataParallel itself is: ranks compare their plans, if cgx_ops has a
    communicator of the group (backend "cgx", or mpirun).

    Args:
        plan: of all parameters that need gradients, by name.
        module: the model, before it is wrapped.
        process_group: DistributedDataParallel's; None: the default one, if there is one yet.

    Raises:
        MismatchError: on every rank; it names the first parameter that differs.
        InvalidArgument: the plan is of another model; it names the first parameter that differs.
        Unsupported: this PyTorch has one size for all buckets (before 2.13), or the parameters have
            several dtypes.
    """
    if _KEYWORD not in inspect.signature(DistributedDataParallel).parameters:
        raise Unsupported(
            f"this PyTorch's DistributedDataParallel has no {_KEYWORD}: use 2.13 or later, or "
            "without a plan bucket_cap_mb"
        )
    parameters = {name: p for name, p in named_layers(module) if p.requires_grad}
    numels = {name: parameter.numel() for name, parameter in parameters.items()}
    planned = dict(zip(map(layer_name, plan.names), plan.numels, strict=True))
    for name in [*numels, *planned]:
        if numels.get(name) != planned.get(name):
            raise InvalidArgument(
                f"the plan is of another model: parameter {name!r} has {numels.get(name)} values "
                f"here and {planned.get(name)} in the plan (None: there is no such parameter)"
            )
    if len({parameter.dtype for parameter in parameters.values()}) > 1:
        raise Unsupported(
            "parameters of several dtypes never share a bucket, and a plan does not know them: "
            "plan for one dtype"
        )
    _agree(plan, process_group)
    size = next((parameter.element_size() for parameter in parameters.values()), 0)
    # A bucket closes with the tensor by which it reaches its limit: halfway through its last.
    limits = [
        size * (sum(plan.numels[i] for i in group) - plan.numels[group[-1]] / 2) / _MIB
        for group in plan.groups
    ]
    return {_KEYWORD: limits}


def _agree(plan: Plan, group: dist.ProcessGroup | None) -> None:
    if group is None and not dist.is_initialized():
        return
    try:
        communicator = communicator_of(group_or_default(group))
    except InvalidArgument:
        return  # ranks that only torch connects
    plan.agree(communicator)
