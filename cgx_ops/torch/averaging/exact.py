"""Exact collectives of a process group, even inside a compressed() block."""

from typing import Any

import torch
import torch.distributed as dist

from cgx_ops._core.consistency import Gather
from cgx_ops.torch.backend import process_group


def gather_over(group: dist.ProcessGroup) -> Gather:
    """Return an allgather of bytes over the ranks of a group, for require_same()."""

    def gather(mine: bytes) -> list[bytes]:
        everyones: list[Any] = [None] * group.size()
        with process_group.uncompressed():
            dist.all_gather_object(everyones, mine, group)
        return everyones

    return gather


def all_gather_over(group: dist.ProcessGroup, x: torch.Tensor) -> torch.Tensor:
    """Return the tensors of all ranks of a group, (ranks, elements of one). Collective."""
    everyones = x.new_empty(group.size(), x.numel())
    with process_group.uncompressed():
        dist.all_gather_into_tensor(everyones, x.contiguous().view(1, -1), group)
    return everyones


def mean_over(group: dist.ProcessGroup, x: torch.Tensor) -> torch.Tensor:
    """Return the mean of a tensor over the ranks of a group, in float32. Collective."""
    total = x.to(torch.float32, copy=True).contiguous()
    with process_group.uncompressed():
        dist.all_reduce(total, group=group)
    return total / group.size()
