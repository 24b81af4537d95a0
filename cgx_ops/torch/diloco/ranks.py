"""Synchronize the ranks of an outer loop when they start or regroup.

1. compare settings and parameters across ranks; all ranks raise if they differ
2. compare how many averages each rank has applied; apply or discard one that only some have applied
3. copy the state of an up-to-date rank to the others: outer parameters, outer optimizer, counts

A rank applies an average after all ranks of its group have confirmed that they have it
(averaging/confirmation.py). And it has applied the previous one when it sends the next one. So
ranks of one group differ by at most one applied average, and those behind have its means.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from cgx_ops._core.consistency import require_same
from cgx_ops.errors import InvalidArgument, Unsupported
from cgx_ops.methods.outer_loop import Schedule
from cgx_ops.torch.averaging.arithmetic import full_precision
from cgx_ops.torch.averaging.exact import gather_over, values_on
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
    optimizer_arguments: str
    exchange: Exchange
    mean_over: str
    steps: int
    applied: int
    joined: bool

    def restart(self) -> None:
        """Set the parameters to the outer parameters."""


@dataclass(frozen=True)
class _Progress:
    """What a rank has done.

    Attributes:
        applied: number of applied averages; -1 for a new rank.
        has_means: whether it has the means of the next one.
        steps: number of inner steps.
        exchanges: number of exchanges, which determines their noise.
    """

    applied: int
    has_means: bool
    steps: int
    exchanges: int

    def reaches(self, applied: int) -> bool:
        """Return whether the rank has applied, or can apply, this many averages and not more."""
        return self.applied == applied or (self.has_means and self.applied + 1 == applied)


def synchronize(
    loop: OuterLoop, *, has_means: bool = False, settle: Callable[[bool], None] = lambda _: None
) -> None:
    """Make all ranks continue from the same state. Collective over the loop's group.

    A failed call leaves a state from which it can be repeated, over another group.

    Args:
        loop: this rank's. If it has not joined, it takes the state of the others. If none has, the
            first rank's parameters become the outer parameters.
        has_means: whether this rank has the means of an average that it has not applied.
        settle: settle(True) applies that average, settle(False) discards it.

    Raises:
        InvalidArgument: settings or parameters differ between ranks; every rank raises it.
    """
    group = loop.exchange.group
    remedy = "Use the same arguments on all ranks"
    require_same(CALLER, _shared(loop), gather_over(group), remedy, error=InvalidArgument)
    applied = loop.applied if loop.joined else -1
    mine = _Progress(applied, has_means, loop.steps, loop.exchange.steps)
    everyones: list[Any] = [None] * group.size()
    dist.all_gather_object(everyones, mine, group)
    applied = max(each.applied for each in everyones)
    if all(each.has_means for each in everyones if each.applied == applied):
        applied += 1
    settle(mine.has_means and mine.applied + 1 == applied)
    source = next(rank for rank, each in enumerate(everyones) if each.reaches(applied))
    _receive(loop, source, is_behind=not mine.reaches(applied))
    loop.applied, loop.joined = max(applied, 0), True
    loop.steps = max(each.steps for each in everyones if each.reaches(applied))
    loop.exchange.steps = max(each.exchanges for each in everyones)


@full_precision()
def _receive(loop: OuterLoop, source: int, *, is_behind: bool) -> None:
    """Copy the outer parameters and the outer optimizer of one rank to the others.

    A rank with other values than the source's, from a group that continued separately, is behind,
    too. Nothing changes before all of it has arrived.
    """
    group = loop.exchange.group
    state = [loop.outer_optimizer.state_dict()]
    received: dict[nn.Parameter, torch.Tensor] = {}
    with process_group.uncompressed():
        dist.broadcast_object_list(state, group=group, group_src=source)
    for parameter, outer in zip(loop.parameters, loop.outer_parameters, strict=True):
        values = values_on(group, source, outer.to(parameter.device))
        if is_behind or not _same_bits(values, outer):
            received[outer] = values
    if group.rank() != source:
        loop.outer_optimizer.load_state_dict(state[0])  # a schedule may have changed its settings
    if not is_behind and not received:
        return
    for outer, values in received.items():
        outer.copy_(values)
    loop.exchange.residuals.tensors.clear()  # they belong to averages of other ranks
    loop.restart()


def _same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.view(torch.int32), y.detach().to(x.device).view(torch.int32))


@contextlib.contextmanager
def failing(fragment: int) -> Iterator[None]:
    """Add to the error of a failed average what state it leaves, and the remedy."""
    try:
        yield
    except (InvalidArgument, Unsupported):  # errors of the call, not of the ranks
        raise
    except RuntimeError as error:
        raise RuntimeError(
            f"{CALLER}: fragment {fragment} was not applied. Parameters, outer parameters and "
            f"residuals are unchanged; continue with the other ranks by regroup(): {error}"
        ) from error


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
        "outer_optimizer": loop.optimizer_arguments,
        **{f"parameter {i}": each for i, each in enumerate(parameters)},
    }


def arguments_of(optimizer: Optimizer) -> str:
    """Return the type and the settings of a new optimizer, for comparison across ranks."""
    groups: Sequence[dict[str, Any]] = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__} {groups}"
