"""Rank program: rank 1 is killed while the others call torch's own collectives over "cgx".

Started without mpirun, on 3 ranks. gloo reports an address, but the error must begin with the rank.
Each case uses its own group, on which all ranks make one call before the loss.
"""

import datetime
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cgx_ops.torch.backend import errors

dist: Any = torch.distributed  # its annotations refer to torch internals


def buffers_of_batch_norm(group: Any) -> Callable[[], object]:
    """Broadcast buffers from rank 0 in forward; backward's allreduce fails if this did not."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    wrapper = DistributedDataParallel(model, process_group=group)
    return lambda: wrapper(torch.randn(4, 8)).sum().backward()


def all_gather(group: Any) -> Callable[[], object]:
    parts = [torch.zeros(9, dtype=torch.int64) for _ in range(group.size())]
    return lambda: dist.all_gather(parts, parts[0], group=group)


def averages_of_integers(group: Any) -> Callable[[], object]:
    x = torch.ones(9, dtype=torch.int64)
    return lambda: dist.all_reduce(x, op=dist.ReduceOp.AVG, group=group)


def barriers(group: Any) -> Callable[[], object]:
    return lambda: dist.barrier(group=group)


def futures(group: Any) -> Callable[[], object]:
    x = torch.ones(9, dtype=torch.float64)
    return lambda: dist.all_reduce(x, group=group, async_op=True).get_future().wait()


def sends(group: Any) -> Callable[[], object]:
    def to_rank_1() -> None:
        if group.rank() == 1:
            for rank in (0, 2):
                dist.recv(torch.zeros(9), rank, group=group)
        else:
            dist.send(torch.ones(9), 1, group=group)

    return to_rank_1


def until_it_fails(call: Callable[[], object]) -> None:
    deadline = time.monotonic() + 40  # earlier than the group's deadline
    while time.monotonic() < deadline:
        call()


def main() -> None:
    dist.init_process_group("cgx", timeout=datetime.timedelta(seconds=60))
    calls = {}
    for case in (buffers_of_batch_norm, all_gather, averages_of_integers, barriers, futures, sends):
        calls[case.__name__] = case(dist.new_group())
        calls[case.__name__]()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for name, call in calls.items():
        with pytest.raises(errors.PeerFailed, match="rank 1 is lost"):
            until_it_fails(call)
        print(f"{name}: named", flush=True)
    os._exit(0)  # the groups are lost


if __name__ == "__main__":
    main()
