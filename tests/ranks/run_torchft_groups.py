"""Rank program: checks of the torchft process group, without a Manager.

    run_torchft_groups.py STORE_PORT       # processes with RANK and WORLD_SIZE

The processes call configure() as the Manager does for each quorum.
"""

import os
import resource
import sys
import time
from datetime import timedelta
from typing import Any

import checks
import torch
import torch.distributed as dist
from chaos.resources import grown, used
from torch.distributed import ReduceOp

import cgx_ops
from cgx_ops import Config
from cgx_ops.torch import BackendOptions
from cgx_ops.torch.integrations.torchft import ProcessGroup

RANK, SIZE = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
PORT = int(sys.argv[1])
OPTIONS = BackendOptions(Config(bits=4), compress="all")
CONFIGURES, SETTLED = 200, 40  # reconfigurations, and those before the first measurement


def configure(
    group: ProcessGroup, prefix: str, ranks: tuple[int, ...] = tuple(range(SIZE))
) -> None:
    group.configure(f"localhost:{PORT}/{prefix}", "0", ranks.index(RANK), len(ranks))


def made(timeout: float = 30) -> ProcessGroup:
    return ProcessGroup(OPTIONS, timedelta(seconds=timeout))


def values(numel: int = 10_000) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(RANK))


def summed(group: ProcessGroup, calls: int = 3) -> torch.Tensor:
    """Return the sums of some calls, whose noise differs."""
    sums = []
    for _ in range(calls):
        x = values()
        group.allreduce([x], ReduceOp.SUM).wait()
        sums.append(x)
    return torch.stack(sums)


def new_quorum_equals_fresh_group() -> None:
    """Compare the bits of a reconfigured group with those of a new one of the same name."""
    group = made()
    configure(group, "a/torchft/1/0")
    first = summed(group)
    configure(group, "a/torchft/2/0")
    again = summed(group)
    assert not torch.equal(first, again), "each quorum has its own noise"
    group.abort()
    fresh = made()
    configure(fresh, "b/torchft/2/0")
    other = summed(fresh)
    fresh.abort()
    fresh = made()
    configure(fresh, "a/torchft/2/0")  # the store has keys of the earlier group
    assert torch.equal(again, summed(fresh))
    assert not torch.equal(again, other), "the name determines the noise"
    fresh.abort()


def smaller_and_larger() -> None:
    """Shrink the group to some of the ranks, and enlarge it again."""
    group = made()
    exact: Any = dist.AllreduceOptions()
    exact.reduceOp = ReduceOp.MAX
    for quorum, ranks in enumerate([(0, 1, 2), (0, 2), (2, 0), (2,), (0, 1, 2)]):
        if RANK in ranks:
            configure(group, f"sizes/torchft/{quorum}/0", ranks)
            assert (group.rank(), group.size()) == (ranks.index(RANK), len(ranks))
            x = torch.full((1000,), float(RANK))
            group.allreduce([x], exact).wait()
            assert x.tolist() == [float(max(ranks))] * 1000
            assert group.errored() is None
    group.abort()


def calls_in_flight_end() -> None:
    """Abort while the peers wait in a collective: it ends with an error on all of them."""
    group = made()
    configure(group, "flight/torchft/1/0")
    if RANK == 0:
        time.sleep(0.3)
        start = time.monotonic()
    else:
        work = group.allreduce([values(1_000_000)], ReduceOp.SUM)
        start = time.monotonic()
        try:
            work.wait()
        except RuntimeError as error:
            assert "gave up" in str(error) or "closed" in str(error), error
        else:
            raise AssertionError("the collective ended without rank 0")
    configure(group, "flight/torchft/2/0")
    assert time.monotonic() - start < 10
    summed(group)
    group.abort()


def silent_peer() -> None:
    """Wait for a rank that does not come: the collective ends at the group's timeout."""
    group = made(timeout=2)
    configure(group, "silent/torchft/1/0")
    start = time.monotonic()
    if RANK == 0:
        time.sleep(5)
    else:
        try:
            group.allreduce([values()], ReduceOp.SUM).wait()
        except RuntimeError:
            assert time.monotonic() - start < 5
        else:
            raise AssertionError("the collective ended without rank 0")
    group.abort()


def own_calls_in_flight_end() -> None:
    """Reconfigure on all ranks while a collective waits for rank 0."""
    group = made()
    configure(group, "own/torchft/1/0")
    work = None if RANK == 0 else group.allreduce([values(1_000_000)], ReduceOp.SUM)
    start = time.monotonic()
    configure(group, "own/torchft/2/0")
    if work is not None:
        try:
            work.wait()
        except RuntimeError:
            pass
        else:
            raise AssertionError("the collective ended without rank 0")
    summed(group)
    assert time.monotonic() - start < 10
    group.abort()


def nothing_leaks() -> None:
    """Reconfigure often; memory, descriptors and threads remain constant."""
    group = made()
    before: dict[str, int] = {}
    for quorum in range(CONFIGURES):
        configure(group, f"leaks/torchft/{quorum}/0")
        summed(group, 1)
        if quorum == SETTLED:
            before = used()
    after = used()
    print({name: (before[name], after[name]) for name in after}, flush=True)
    assert not grown(before, after), grown(before, after)
    assert len(cgx_ops.stats()) <= 2, cgx_ops.stats()
    group.abort()


if __name__ == "__main__":
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    checks.run(
        checks.named(
            new_quorum_equals_fresh_group, smaller_and_larger, calls_in_flight_end,
            own_calls_in_flight_end, silent_peer, nothing_leaks,
        ),
        sys.argv[2:],
    )  # fmt: skip
