"""Rank program: errors of send and recv over the backend "cgx".

torchrun --nproc-per-node 2 run_torch_p2p_errors.py
torchrun --nproc-per-node 3 run_torch_p2p_errors.py loss
"""

import datetime
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import checks
import pytest
import torch
from p2p_cases import NEAREST, dist, new_group, received
from support import torch_cases as tc

from cgx_ops import Config
from cgx_ops.torch import compressed, uncompressed
from cgx_ops.torch.backend.errors import DeadlineExceeded, MismatchError, PeerFailed

Scope = Callable[[], AbstractContextManager[None]]
SOON = 20.0  # seconds; far below the deadline of the groups, which is 60 s


@contextmanager
def raises_soon(kind: type[Exception], text: str) -> Iterator[None]:
    begun = time.monotonic()
    with pytest.raises(kind, match=text):
        yield
    assert time.monotonic() - begun < SOON


def between(
    group: Any, ours: Sequence[tuple[Scope, torch.Tensor]], *, asynchronous: bool = False
) -> None:
    """Send from rank 0 to rank 1, each with its own scope and tensor."""
    rank = group.rank()
    scope, tensor = ours[rank]
    with scope():
        if rank == 0:
            work = dist.isend(tensor, group=group, group_dst=1)
        else:
            work = dist.irecv(tensor, group=group, group_src=0)
    if asynchronous:
        time.sleep(0.5)
    work.wait()


def mismatches() -> None:
    """Check that both sides raise immediately, and name the two ranks and the difference."""
    few, other = partial(compressed, NEAREST), partial(compressed, Config(8, 64, "nearest"))
    x, half = torch.ones(1000), torch.ones(1000, dtype=torch.float16)
    names = "'c10d message from 0 to 1, tag 0'.*"
    remedy = r".*both inside cgx_ops.torch.compressed\(\) with equal configs or both outside"
    usable: list[tuple[tuple[Scope, torch.Tensor], tuple[Scope, torch.Tensor], str]] = [
        ((few, x), (other, x), "bits 4 against 8"),
        ((few, x), (few, x[1:]), "rank 0 sends 1000 elements to rank 1, which expects 999"),
        ((few, x), (few, x[:3]), "rank 0 sends 1000 elements to rank 1, which expects 3"),
        ((few, half), (few, x), "dtype float16 against float32"),
        ((few, x[:3]), (few, x), "rank 0 sends 3 elements to rank 1, which expects 1000"),
    ]
    # The inner backend's half of these messages stays, so each has its own group.
    lost: list[tuple[tuple[Scope, torch.Tensor], tuple[Scope, torch.Tensor], str]] = [
        ((few, x), (nullcontext, x), "bits 4 against 32"),
        ((nullcontext, x), (few, x), "bits 32 against 4"),
        ((few, x), (uncompressed, x), "bits 4 against 32"),
        ((few, x), (few, torch.ones(1000, dtype=torch.int64)), "bits 4 against 32"),
        ((nullcontext, torch.ones(1)), (few, x), "bits 32 against 4"),
    ]
    group = new_group()
    for sender, receiver, text in usable:
        if dist.get_rank() < 2:
            with raises_soon(MismatchError, f"(?s){names}{text}{remedy}"):
                between(group, (sender, receiver))
            y = torch.empty(100)
            between(group, ((few, tc.values(0, 100)), (few, y)))
            if group.rank() == 1:
                assert tc.same_bits(y, received(tc.values(0, 100), (0, 1), NEAREST, 2))
    for sender, receiver, text in lost:
        for asynchronous in (False, True):
            group = new_group()
            if dist.get_rank() < 2:
                with raises_soon(MismatchError, f"(?s)ranks 0 and 1 .*{names}{text}{remedy}"):
                    between(group, (sender, receiver), asynchronous=asynchronous)
                dist.destroy_process_group(group)


def bad_tensors() -> None:
    """Check that a receiver that refuses its tensor lets the sender go on."""
    group = new_group()
    if dist.get_rank() < 2:
        expanded = torch.ones(1).expand(1000)
        with compressed(NEAREST):
            if group.rank() == 0:
                with raises_soon(PeerFailed, r"rank 1 takes no part.*single memory location"):
                    dist.send(expanded, group=group, group_dst=1)
            else:
                with raises_soon(RuntimeError, "single memory location"):
                    dist.recv(expanded, group=group, group_src=0)
            y = torch.empty(100)
            between(group, ((nullcontext, tc.values(0, 100)), (nullcontext, y)))
        dist.destroy_process_group(group)


def late() -> None:
    """Check that a message without its other half ends at the group's deadline."""
    for scope, mine in ((partial(compressed, NEAREST), 1), (partial(compressed, NEAREST), 0)):
        group = new_group(timeout=2)
        if dist.get_rank() == mine:
            x = torch.ones(1000)
            text = f"message from 0 to 1, tag 0' did not end within 2 s; rank {1 - mine} has not"
            with raises_soon(DeadlineExceeded, text), scope():
                if mine == 0:
                    dist.send(x, group=group, group_dst=1)
                else:
                    dist.recv(x, group=group, group_src=0)
        dist.barrier()
        if dist.get_rank() < 2:
            dist.destroy_process_group(group)


# ---- loss of a rank ------------------------------------------------------------------------------


def loss() -> None:
    """Lose rank 1 while rank 0 receives from it, and rank 2 sends to it."""
    dist.init_process_group("cgx", timeout=datetime.timedelta(seconds=60))
    rank, x = dist.get_rank(), torch.ones(1000)
    groups = [dist.new_group(backend="cgx") for _ in range(2)]
    calls: dict[int, Callable[..., None]] = {0: dist.recv, 2: dist.send}
    dist.barrier()
    if rank == 1:
        time.sleep(1)
        os._exit(0)
    for group, scope in zip(groups, (compressed(NEAREST), nullcontext()), strict=True):
        with raises_soon(PeerFailed, "rank 1"), scope:
            calls[rank](x, 1, group=group)
        print(f"rank {rank}: named", flush=True)
    os._exit(0)  # the groups are lost


def main() -> None:
    dist.init_process_group("cgx", timeout=datetime.timedelta(seconds=60))
    checks.run(checks.named(mismatches, bad_tensors, late), after=dist.barrier)
    dist.destroy_process_group()


if __name__ == "__main__":
    loss() if sys.argv[1:] == ["loss"] else main()
