"""Exact collectives of a process group, even inside a compressed() block."""

import contextlib
import pickle
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from cgx_ops._core.consistency import Gather
from cgx_ops._core.refusal import reason_of
from cgx_ops.errors import InvalidArgument
from cgx_ops.torch.backend import process_group


def gather_over(group: dist.ProcessGroup) -> Gather:
    """Return an allgather of bytes over the ranks of a group, for require_same()."""

    def gather(mine: bytes) -> list[bytes]:
        everyones: list[Any] = [None] * group.size()
        with process_group.uncompressed():
            dist.all_gather_object(everyones, mine, group)
        return everyones

    return gather


@contextlib.contextmanager
def raised_on_all(caller: str, *groups: dist.ProcessGroup) -> Iterator[None]:
    """Raise an error of the block on all ranks, so that none waits for a failed one. Collective.

    Args:
        caller: start of the error text on the other ranks.
        groups: the first one exchanges the errors of its ranks, the next one what these found, and
            so on: shards and replicas of a mesh together reach all its ranks.

    Raises:
        InvalidArgument: the block failed on another rank only.
    """
    own, reason = None, ""
    try:
        yield
    except Exception as error:
        own, reason = error, f"rank {dist.get_rank()} failed: {reason_of(error)}"
    for group in groups:
        found = gather_over(group)(reason.encode())
        reason = reason or next(filter(None, found), b"").decode()
    if own is not None:
        raise own
    if reason:
        raise InvalidArgument(f"{caller}: {reason}")


def all_gather_over(group: dist.ProcessGroup, x: torch.Tensor) -> torch.Tensor:
    """Return the tensors of all ranks of a group, (ranks, elements of one). Collective."""
    everyones = x.new_empty(group.size(), x.numel())
    with process_group.uncompressed():
        dist.all_gather_into_tensor(everyones, x.contiguous().view(1, -1), group)
    return everyones


def state_ahead(group: dist.ProcessGroup, steps: int, state: Any) -> tuple[int, int, Any]:
    """Return the rank that has done the most steps, its steps and its state. Collective.

    Args:
        group: the ranks.
        steps: of this rank; of equal ones, the lowest rank is ahead.
        state: of this rank; any object that can be pickled.
    """
    everyones = [pickle.loads(each) for each in gather_over(group)(pickle.dumps((steps, state)))]
    rank = max(range(len(everyones)), key=lambda rank: everyones[rank][0])
    return rank, *everyones[rank]


def values_on(group: dist.ProcessGroup, rank: int, x: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor on one rank of a group. Collective."""
    # A broadcast follows the memory order, which may differ between ranks.
    values = x.detach().to(copy=True, memory_format=torch.contiguous_format)
    with process_group.uncompressed():
        dist.broadcast(values, group=group, group_src=rank)
    return values


def mean_over(group: dist.ProcessGroup, x: torch.Tensor) -> torch.Tensor:
    """Return the mean of a tensor over the ranks of a group, in float32. Collective."""
    total = x.to(torch.float32, copy=True).contiguous()
    with process_group.uncompressed():
        dist.all_reduce(total, group=group)
    return total / group.size()
