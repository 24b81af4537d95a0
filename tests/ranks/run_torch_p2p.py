"""Rank program: send, recv, isend, irecv and batch_isend_irecv over the backend "cgx".

    torchrun --nproc-per-node 4 run_torch_p2p.py

Compares compressed messages with the oracle, over groups of 2 to 4 ranks.
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
import reference
import torch
import torch.distributed
from support import torch_cases as tc
from support.torch_codecs import CONFIGS

from cgx_ops import Communicator, Config
from cgx_ops.torch import BackendOptions, compressed, uncompressed
from cgx_ops.torch.backend.errors import DeadlineExceeded, MismatchError, PeerFailed

dist: Any = torch.distributed  # its annotations refer to torch internals
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = (0, 1, 15, 16, 17, 511, 512, 513)
NEAREST = Config(4, 64, "nearest")
NOISY = Config(3, 64, "stochastic")
Scope = Callable[[], AbstractContextManager[None]]
SOON = 20.0  # seconds; far below the deadline of the groups, which is 60 s


def received(
    x: torch.Tensor, message: tuple[int, int], config: Config, size: int, seed: int = 0
) -> torch.Tensor:
    """Return what the oracle decodes from x, sent over message[0] -> message[1] in a group."""
    source, target = message
    splits = [[0] * size for _ in range(size)]
    splits[source][target] = x.numel()
    empty = torch.empty(0, dtype=x.dtype)
    xs = [tc.to_numpy(x if rank == source else empty) for rank in range(size)]
    segment = reference.Segment(0, 0, config.bits, config.bucket_size)  # pyright: ignore[reportArgumentType]
    rounding: Any = config.rounding or "nearest"
    ys = reference.all_to_all(xs, splits, segment, rounding=rounding, seeds=[seed] * size)
    return tc.from_numpy(ys[target]).reshape(x.shape)


def seed_of(group: Any, seed: int, message: tuple[int, int], tag: int, count: int) -> int:
    """Return the seed of the `count`-th compressed message of this direction and tag."""
    name = f" message from {message[0]} to {message[1]}, tag {tag}"
    named = tc.named_seed(tc.named_seed(seed, group.group_name), name)
    return tc.gradient_seed(named, count)


# ---- values --------------------------------------------------------------------------------------


def around(group: Any, x: torch.Tensor, y: torch.Tensor, tag: int = 0) -> None:
    """Send x to the right neighbor and receive y from the left one, at the same time."""
    rank, size = group.rank(), group.size()
    works = [
        dist.irecv(y, group=group, group_src=(rank - 1) % size, tag=tag),
        dist.isend(x, group=group, group_dst=(rank + 1) % size, tag=tag),
    ]
    for work in works:
        work.wait()


def values(group: Any) -> None:
    """Compare all sizes and dtypes with the oracle."""
    rank, size = group.rank(), group.size()
    left = (rank - 1) % size, rank
    count = 0
    for numel in (*SIZES, 2**20 + 7):
        for dtype in DTYPES if numel < 2**20 else DTYPES[:1]:
            sent = [tc.values(each, numel, dtype) for each in range(size)]
            count += 1
            for scope, config in (
                (compressed(), Config(8, 64, "nearest")),  # the group's
                (compressed(NEAREST), NEAREST),
                (compressed(NOISY, seed=7), NOISY),
                (compressed(Config(32)), Config(32)),
                (uncompressed(), Config(32)),
                (nullcontext(), Config(32)),
            ):
                y = torch.full_like(sent[left[0]], torch.nan)
                with scope:
                    around(group, sent[rank], y)
                seed = seed_of(group, 7, left, 0, count)
                want = received(sent[left[0]], left, config, size, seed)
                assert tc.same_bits(y, want), (numel, dtype, config)


def compressors(group: Any) -> None:
    """Compare every compressor with numpy's all_to_all of one block."""
    rank, size = group.rank(), group.size()
    comm = Communicator.find(group.group_name)
    message = 0, size - 1
    others = (Config(compressor=name, rounding="nearest") for name in ("entropy", "lossless"))
    for count, config in enumerate((*CONFIGS, *others), 1):
        tag = 100 + count
        x = tc.values(0, 5003)
        splits = [[x.numel() if (a, b) == message else 0 for b in range(size)] for a in range(size)]
        want = comm.all_to_all(
            tc.to_numpy(x if rank == 0 else x[:0]),
            config,
            output_split_sizes=[splits[a][rank] for a in range(size)],
            input_split_sizes=splits[rank],
            seed=seed_of(group, 0, message, tag, 1),
        )
        y = torch.empty_like(x)
        with compressed(config):
            if rank == 0:
                dist.send(x, group=group, group_dst=size - 1, tag=tag)
            elif rank == size - 1:
                dist.recv(y, group=group, group_src=0, tag=tag)
                assert tc.same_bits(y, tc.from_numpy(want)), config


def noise(group: Any) -> None:
    """Check that messages differ in their noise: of one direction, of both, and of two tags."""
    rank, size, x = group.rank(), group.size(), tc.values(0, 999)
    found = []
    for tag in (0, 0, 1):
        y = torch.empty_like(x)
        with compressed(Config(2, 64, "stochastic"), seed=tag + 10):
            around(group, x, y, tag)
        found.append(y)
    every: list[Any] = [None] * size
    dist.all_gather_object(every, (rank, found), group=group)
    all_found = [y for _, ys in every for y in ys]
    assert not any(tc.same_bits(a, b) for i, a in enumerate(all_found) for b in all_found[:i])


# ---- calls ---------------------------------------------------------------------------------------


def in_flight(group: Any) -> None:
    """Start many messages in both directions, whose tags are received in another order."""
    rank, size = group.rank(), group.size()
    peers = [peer for peer in range(size) if peer != rank]
    tags = range(3)

    def sent(source: int, target: int, tag: int, call: int) -> torch.Tensor:
        return tc.values(source, 300 + 10 * target + tag, call=call)

    expected, works = [], []
    with compressed(NEAREST):
        for peer in peers:
            for call in range(2):
                for tag in tags:
                    x = sent(rank, peer, tag, call)
                    works.append(dist.isend(x, group=group, group_dst=peer, tag=tag))
        for tag in reversed(tags):
            for call in range(2):
                for peer in peers:
                    x = sent(peer, rank, tag, call)
                    y = torch.empty_like(x)
                    works.append(dist.irecv(y, group=group, group_src=peer, tag=tag))
                    expected.append((y, received(x, (peer, rank), NEAREST, size)))
    for work in reversed(works):
        work.wait()
        assert work.is_completed()
        assert work.is_success()
    assert all(tc.same_bits(y, want) for y, want in expected)


def batches(group: Any) -> None:
    """Check batch_isend_irecv, and that the core counts the bytes of both directions."""
    rank, size = group.rank(), group.size()
    right, left = (rank + 1) % size, (rank - 1) % size
    x, y = tc.values(rank, 10_000).reshape(100, 100), torch.empty(100, 100)
    comm = Communicator.find(group.group_name)
    before = comm.stats()
    with compressed(NEAREST):
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, group=group, group_peer=right),
                dist.P2POp(dist.irecv, y, group=group, group_peer=left),
            ]
        )
    for work in works:
        work.wait()
    assert tc.same_bits(
        y, received(tc.values(left, 10_000), (left, rank), NEAREST, size).view_as(y)
    )
    after = comm.stats()
    assert after.collectives - before.collectives == 2
    assert after.bytes_in - before.bytes_in == 40_000
    encoded = 5_000 + 8 * -(-10_000 // 64)
    assert encoded <= after.bytes_sent - before.bytes_sent < encoded + 2_000


def exact(group: Any) -> None:
    """Check dtypes and calls that stay exact, inside compressed() and outside."""
    rank, size = group.rank(), group.size()
    left = (rank - 1) % size
    comm = Communicator.find(group.group_name)
    counted = comm.stats().collectives
    for dtype in (torch.int64, torch.uint8, torch.float64, torch.complex128, torch.bool):
        for scope in (compressed(NEAREST), nullcontext()):
            y = torch.zeros(99, dtype=dtype)
            with scope:
                around(group, torch.full((99,), rank + 1).to(dtype), y)
            assert torch.equal(y, torch.full((99,), left + 1).to(dtype))
    assert comm.stats().collectives == counted, "exact messages are gloo's"
    # Strided tensors inside compressed(): the values between them stay.
    whole = torch.zeros(300, 2)
    with compressed(NEAREST):
        around(group, tc.values(rank, 600).reshape(300, 2)[:, 1], whole[:, 0])
    x = tc.values(left, 600).reshape(300, 2)[:, 1].contiguous()
    assert tc.same_bits(whole[:, 0].contiguous(), received(x, (left, rank), NEAREST, size))
    assert not whole[:, 1].any()
    objects: list[Any] = [None]
    with compressed(NEAREST):
        if rank == 0:
            dist.send_object_list([{"a": 1}], group=group, group_dst=1)
        elif rank == 1:
            dist.recv_object_list(objects, group=group, group_src=0)
            assert objects == [{"a": 1}]


def any_source(group: Any) -> None:
    """Receive exact messages from any rank, then compressed messages with the same tag."""
    rank, size = group.rank(), group.size()
    for tag, scope in enumerate((nullcontext(), uncompressed())):
        with scope:
            if rank == 0:
                y, heard = torch.empty(100), set()
                for _ in range(size - 1):
                    source = dist.get_group_rank(group, dist.recv(y, group=group, tag=tag))
                    assert tc.same_bits(y, tc.values(source, 100))
                    heard.add(source)
                assert heard == set(range(1, size))
            else:
                dist.send(tc.values(rank, 100), group=group, group_dst=0, tag=tag)
    with compressed(NEAREST):
        y = torch.empty(100)
        if rank == 0:
            with pytest.raises(ValueError, match="recv needs its source: pass src="):
                dist.recv(y, group=group)
        around(group, tc.values(rank, 100), y)
    left = (rank - 1) % size
    assert tc.same_bits(y, received(tc.values(left, 100), (left, rank), NEAREST, size))


# ---- errors --------------------------------------------------------------------------------------


@contextmanager
def raises_soon(kind: type[Exception], text: str) -> Iterator[None]:
    begun = time.monotonic()
    with pytest.raises(kind, match=text):
        yield
    assert time.monotonic() - begun < SOON


def new_group(ranks: Sequence[int] = (0, 1), timeout: float = 60) -> Any:
    options = BackendOptions(Config(8, 64, rounding="nearest"))
    limit = datetime.timedelta(seconds=timeout)
    return dist.new_group(list(ranks), timeout=limit, backend="cgx", pg_options=options)


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


# ---- pipelines -----------------------------------------------------------------------------------


def pipelines(group: Any) -> None:
    """Train with both schedules, exact and in 8 bits, and compare every message's bits."""
    from torch.distributed import pipelining

    rank, size, width, micro = group.rank(), group.size(), 40, 4
    for schedule_type in (pipelining.ScheduleGPipe, pipelining.Schedule1F1B):
        losses = {}
        for bits in (32, 8):
            config = Config(bits, 64, "nearest")
            torch.manual_seed(0)
            layers = [
                torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh())
                for _ in range(size)
            ]
            module = layers[rank]
            entered: list[torch.Tensor] = []
            left: list[torch.Tensor] = []
            module.register_forward_pre_hook(
                lambda _, xs, to=entered: to.append(xs[0].detach().clone())
            )
            module.register_forward_hook(lambda *call, to=left: to.append(call[2].detach().clone()))
            stage = pipelining.PipelineStage(module, rank, size, torch.device("cpu"), group=group)
            schedule: Any = schedule_type(stage, micro, loss_fn=torch.nn.functional.mse_loss)
            optimizer = torch.optim.SGD(module.parameters(), 2.0)
            xs, targets = tc.values(50, 16 * width).reshape(16, -1), torch.zeros(16, width)
            curve = []
            for _ in range(10):
                entered.clear()
                left.clear()
                found: list[torch.Tensor] = []
                with compressed(config):
                    if rank == 0:
                        schedule.step(xs)
                    elif rank == size - 1:
                        schedule.step(target=targets, losses=found)
                    else:
                        schedule.step()
                optimizer.step()
                optimizer.zero_grad()
                curve += [torch.stack(found).mean().item()] if found else []
                every: list[Any] = [None] * size
                dist.all_gather_object(every, (entered[-micro:], left[-micro:]), group=group)
                for source in range(size - 1):
                    for x, y in zip(every[source][1], every[source + 1][0], strict=True):
                        want = received(x.contiguous(), (source, source + 1), config, size)
                        assert tc.same_bits(y, want), (schedule_type, bits, source)
            losses[bits] = curve
        if rank == size - 1:
            assert losses[32][-1] < losses[32][0] / 2
            assert losses[8] != losses[32]
            # The bits of messages are compared above. This only bounds their effect on training:
            # the curves differ by less than 1 % of the first loss.
            for few, exact in zip(losses[8], losses[32], strict=True):
                assert abs(few - exact) < 0.01 * losses[32][0]


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


def skipped() -> None:
    """Stand in for the checks on a rank outside of the group."""


CHECKS = [values, compressors, noise, in_flight, batches, exact, any_source, pipelines]
OF_WORLD = [mismatches, bad_tensors, late]


def main() -> None:
    dist.init_process_group("cgx", timeout=datetime.timedelta(seconds=60))
    made = {size: new_group(range(size)) for size in range(2, dist.get_world_size() + 1)}
    by_name: dict[str, checks.Check] = {}
    for size, group in made.items():
        for check in CHECKS:
            on_group = partial(check, group) if dist.get_rank() < size else skipped
            by_name[f"{check.__name__} on {size}"] = on_group
    checks.run(by_name | checks.named(*OF_WORLD), sys.argv[1:], after=dist.barrier)
    dist.destroy_process_group()


if __name__ == "__main__":
    loss() if sys.argv[1:] == ["loss"] else main()
