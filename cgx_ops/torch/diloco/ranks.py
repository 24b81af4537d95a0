"""The ranks of an outer loop (diloco.py): what they have in common when they meet.

1. settings and parameters are alike, or all ranks get an error that names both sides
2. one rank's anchors, outer optimizer's state and count of steps become those of all, exactly; so
   does the highest number of exchanges, from which their random choices follow
"""

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.optim import Optimizer

from cgx_ops.errors import InvalidArgument
from cgx_ops.torch.averaging.arithmetic import full_precision
from cgx_ops.torch.backend import process_group

if TYPE_CHECKING:
    from cgx_ops.torch.diloco.loop import DiLoCo


def meet(loop: "DiLoCo", *, is_new: bool) -> None:
    """Have all ranks go on alike. Collective over the loop's group.

    Args:
        loop: this rank's.
        is_new: whether it has just been made: then it takes what the others have. Where all are
            new, the first rank's parameters are the anchors.

    Raises:
        InvalidArgument: ranks differ (on every rank).
    """
    group = loop.exchange.group
    mine = (-1 if is_new else loop.applied, loop.steps, loop.exchange.steps, _told(loop))
    everyones: list[Any] = [None] * group.size()
    dist.all_gather_object(everyones, mine, group)
    _require_alike([told for *_, told in everyones])

    applied, steps, *_ = max(everyones, key=lambda each: each[0])
    source = next(rank for rank, each in enumerate(everyones) if each[0] == applied)
    if applied > 0:
        state = [loop.outer_optimizer.state_dict()]
        dist.broadcast_object_list(state, dist.get_global_rank(group, source), group)
        if mine[0] < applied:
            loop.outer_optimizer.load_state_dict(state[0])
    with full_precision(), process_group.uncompressed():
        for parameter, anchor in zip(loop.parameters, loop.anchors, strict=True):
            # What is broadcast goes by memory, whose order may be another one elsewhere.
            values = anchor.detach().to(parameter.device).contiguous()
            dist.broadcast(values, dist.get_global_rank(group, source), group)
            anchor.copy_(values)
    if mine[0] < applied or is_new:
        loop.exchange.residuals.tensors.clear()  # of averages that are not its own
        loop.restart()
    loop.applied, loop.steps = max(applied, 0), steps
    loop.exchange.steps = max(exchanges for *_, exchanges, _ in everyones)


# ---- 1. what must be alike -----------------------------------------------------------------------


def _told(loop: "DiLoCo") -> dict[str, Any]:
    """Return what ranks must have alike, in words."""
    schedule, exchange = loop.schedule, loop.exchange
    parameters = [
        f"{name} {str(p.dtype).removeprefix('torch.')}{list(p.shape)} in fragment {fragment}"
        for fragment, places in enumerate(loop.fragments)
        for name, p in ((loop.names[i], loop.parameters[i]) for i in places)
    ]
    return {
        "sync_every": schedule.sync_every,
        "fragments": schedule.fragments,
        "fragment_sync_delay": schedule.fragment_sync_delay,
        "fragment_update_alpha": schedule.fragment_update_alpha,
        "config": str(exchange.config),
        "rules": repr(exchange.rules),
        "carrier": exchange.carrier,
        "mean_over": loop.mean_over,
        "outer_optimizer": _settings(loop.outer_optimizer),
        **{f"parameter {i}": each for i, each in enumerate(parameters)},
    }


def _settings(optimizer: Optimizer) -> str:
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__} {groups}"


def _require_alike(told: list[dict[str, Any]]) -> None:
    for rank, other in enumerate(told):
        for name in told[0] | other:
            first, second = told[0].get(name), other.get(name)
            if first != second:
                raise InvalidArgument(
                    f"DiLoCo: rank 0 has {name} {first}, rank {rank} {second}: ranks must be given "
                    "the same"
                )
