"""Synchronize the ranks of an outer loop when they start or regroup.

1. compare settings and parameters across ranks; all ranks raise if they differ
2. copy one rank's outer parameters, outer optimizer state and step count to all ranks, and the
   highest count of exchanges, which determines their noise
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from cgx_ops._core.consistency import require_same
from cgx_ops.errors import InvalidArgument
from cgx_ops.methods.outer_loop import Schedule
from cgx_ops.torch.averaging.arithmetic import full_precision
from cgx_ops.torch.averaging.exact import gather_over
from cgx_ops.torch.averaging.exchange import Exchange
from cgx_ops.torch.backend import process_group

CALLER = "DiLoCo"


class OuterLoop(Protocol):
    """The attributes of a DiLoCo that ranks compare and exchange."""

    schedule: Schedule
    fragments: list[list[int]]
    names: list[str]
    parameters: list[nn.Parameter]
    outer_parameters: list[nn.Parameter]
    outer_optimizer: Optimizer
    exchange: Exchange
    mean_over: str
    steps: int
    applied: int

    def restart(self) -> None:
        """Set the parameters to the outer parameters."""


def synchronize(loop: OuterLoop, *, is_new: bool) -> None:
    """Make all ranks continue from the same state. Collective over the loop's group.

    Args:
        loop: this rank's.
        is_new: whether it was just created; it then takes the state of the others. If all are new,
            the first rank's parameters become the outer parameters.

    Raises:
        InvalidArgument: settings or parameters differ between ranks; every rank raises it.
    """
    group = loop.exchange.group
    remedy = "Use the same arguments on all ranks"
    require_same(CALLER, _shared(loop), gather_over(group), remedy, error=InvalidArgument)
    mine = (-1 if is_new else loop.applied, loop.steps, loop.exchange.steps)
    everyones: list[Any] = [None] * group.size()
    dist.all_gather_object(everyones, mine, group)
    applied, steps, *_ = max(everyones, key=lambda each: each[0])
    source = next(rank for rank, each in enumerate(everyones) if each[0] == applied)
    if applied > 0:
        state = [loop.outer_optimizer.state_dict()]
        dist.broadcast_object_list(state, dist.get_global_rank(group, source), group)
        if mine[0] < applied:
            loop.outer_optimizer.load_state_dict(state[0])
    with full_precision(), process_group.uncompressed():
        for parameter, outer in zip(loop.parameters, loop.outer_parameters, strict=True):
            # A broadcast follows the memory order, which may differ between ranks.
            values = outer.detach().to(parameter.device).contiguous()
            dist.broadcast(values, dist.get_global_rank(group, source), group)
            outer.copy_(values)
    if mine[0] < applied or is_new:
        loop.exchange.residuals.tensors.clear()  # they belong to averages of other ranks
        loop.restart()
    loop.applied, loop.steps = max(applied, 0), steps
    loop.exchange.steps = max(exchanges for *_, exchanges in everyones)


def _shared(loop: OuterLoop) -> dict[str, object]:
    """Return the settings that must be the same on all ranks."""
    schedule, exchange = loop.schedule, loop.exchange
    parameters = [
        f"{name} {str(p.dtype).removeprefix('torch.')}{list(p.shape)} in fragment {fragment}"
        for fragment, members in enumerate(loop.fragments)
        for name, p in ((loop.names[i], loop.parameters[i]) for i in members)
    ]
    return {
        "sync_every": schedule.sync_every,
        "fragments": schedule.fragments,
        "fragment_sync_delay": schedule.fragment_sync_delay,
        "fragment_update_alpha": schedule.fragment_update_alpha,
        "config": exchange.config,
        "rules": exchange.rules,
        "carrier": exchange.carrier,
        "mean_over": loop.mean_over,
        "outer_optimizer": _settings(loop.outer_optimizer),
        **{f"parameter {i}": each for i, each in enumerate(parameters)},
    }


def _settings(optimizer: Optimizer) -> str:
    groups: Sequence[dict[str, Any]] = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__} {groups}"
