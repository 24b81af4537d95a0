"""planned_buckets(): DistributedDataParallel with one bucket for each group of a plan."""

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
    """Return keywords that make DistributedDataParallel create one bucket for each group of a plan.

    The buckets apply from the second step on; in the first step they follow the order of the
    parameters. DistributedDataParallel fills buckets in the order in which gradients became ready
    in the first step. If this is not the plan's order, buckets have the planned sizes but partly
    other tensors.

    Collective, like DistributedDataParallel itself: the ranks compare their plans if cgx_ops can
    connect them.

    Args:
        plan: a plan of all parameters that require gradients, by name. They must have one dtype and
            be on one device.
        module: the model before it is wrapped.
        process_group: the process group for DistributedDataParallel. None: the default group if
            there is one yet.

    Returns:
        Keyword arguments for DistributedDataParallel.

    Raises:
        MismatchError: ranks have different plans. Every rank raises it; the text names the first
            parameter that differs.
        InvalidArgument: the plan belongs to another model; the text names the first parameter that
            differs.
        Unsupported: this PyTorch has one size for all buckets (before 2.13), or the parameters have
            several dtypes.

    Example:
        >>> import inspect
        >>> import torch
        >>> import torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> from cgx_ops.planner import Plan
        >>> from cgx_ops.torch import ddp
        >>> dist.init_process_group("cgx", store=dist.HashStore(), rank=0, world_size=1)
        >>> module = torch.nn.Linear(64, 64)
        >>> plan = Plan(("weight", "bias"), (4096, 64), (4, 32), ((1, 0),))
        >>> if "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel).parameters:
        ...     model = DistributedDataParallel(module, **ddp.planned_buckets(plan, module))
        >>> dist.destroy_process_group()
    """
    if _KEYWORD not in inspect.signature(DistributedDataParallel).parameters:
        raise Unsupported(
            f"this PyTorch's DistributedDataParallel has no {_KEYWORD}: use PyTorch 2.13 or later, "
            "or bucket_cap_mb without a plan"
        )
    parameters = {name: p for name, p in named_layers(module) if p.requires_grad}
    numels = {name: parameter.numel() for name, parameter in parameters.items()}
    planned = dict(zip(map(layer_name, plan.names), plan.numels, strict=True))
    for name in [*numels, *planned]:
        if numels.get(name) != planned.get(name):
            raise InvalidArgument(
                f"the plan belongs to another model: parameter {name!r} has {numels.get(name)} "
                f"values here and {planned.get(name)} in the plan (None: no such parameter)"
            )
    if len({parameter.dtype for parameter in parameters.values()}) > 1:
        raise Unsupported(
            "the parameters have several dtypes, which never share a bucket: plan the parameters "
            "of one dtype only"
        )
    _agree(plan, process_group)
    size = next((parameter.element_size() for parameter in parameters.values()), 0)
    # DDP closes a bucket with the tensor that reaches the limit: put it halfway into the last one.
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
        return  # cgx_ops cannot connect these ranks
    plan.agree(communicator)
