"""Rank program: send, recv, isend, irecv and batch_isend_irecv over the backend "cgx".

    torchrun --nproc-per-node 4 run_torch_p2p.py

Compares compressed messages with the oracle, over groups of 2 to 4 ranks.
"""

import datetime
import sys
from contextlib import nullcontext
from functools import partial
from typing import Any

import checks
import pytest
import torch
from p2p_cases import NEAREST, dist, new_group, received, seed_of
from support import torch_cases as tc
from support.torch_codecs import CONFIGS

from cgx_ops import Communicator, Config
from cgx_ops.torch import compressed, uncompressed

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = (0, 1, 15, 16, 17, 511, 512, 513)
NOISY = Config(3, 64, "stochastic")


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


def counts(group: Any) -> None:
    """Check that the seeds count messages whose tags are equal modulo 1024."""
    rank, size = group.rank(), group.size()
    left = (rank - 1) % size, rank
    for count, tag in enumerate((904, 904 + 1024, 904), 1):
        y = torch.empty(999)
        with compressed(NOISY, seed=7):
            around(group, tc.values(rank, 999), y, tag)
        seed = seed_of(group, 7, left, tag, count)
        assert tc.same_bits(y, received(tc.values(left[0], 999), left, NOISY, size, seed))


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
    # Strided tensors inside compressed(), also of a parameter: the values between them stay.
    for whole in (torch.zeros(300, 2), torch.nn.Parameter(torch.zeros(300, 2))):
        with compressed(NEAREST):
            around(group, tc.values(rank, 600).reshape(300, 2)[:, 1], whole[:, 0])
        x = tc.values(left, 600).reshape(300, 2)[:, 1].contiguous()
        got = whole.detach()
        assert tc.same_bits(got[:, 0].contiguous(), received(x, (left, rank), NEAREST, size))
        assert not got[:, 1].any()
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


# ---- pipelines -----------------------------------------------------------------------------------


def layer(width: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh())


def note(module: torch.nn.Module, entered: list[Any], left: list[Any]) -> None:
    """Note a layer's inputs and outputs in the lists."""

    def hook(_: object, xs: Any, y: torch.Tensor) -> None:
        entered.append(xs[0].detach().clone())
        left.append(y.detach().clone())

    module.register_forward_hook(hook)


def pipelines(group: Any) -> None:
    """Train with each schedule, exact and in 8 bits, and compare every message's bits.

    Every rank has one layer, or with interleaved stages two: those of its rank and rank + size.
    """
    from torch.distributed import pipelining

    rank, size, width, micro = group.rank(), group.size(), 40, 4
    for schedule_type, of_each in (
        (pipelining.ScheduleGPipe, 1),
        (pipelining.Schedule1F1B, 1),
        (pipelining.ScheduleInterleaved1F1B, 2),
    ):
        losses, total = {}, of_each * size
        for bits in (32, 8):
            config = Config(bits, 64, "nearest")
            torch.manual_seed(0)
            layers = [layer(width) for _ in range(total)]
            own = {index: layers[index] for index in range(rank, total, size)}
            # By layer: the inputs and outputs of a step's microbatches.
            seen: dict[int, tuple[list[Any], list[Any]]] = {index: ([], []) for index in own}
            for index, module in own.items():
                note(module, *seen[index])
            stages = [
                pipelining.PipelineStage(module, index, total, torch.device("cpu"), group=group)
                for index, module in own.items()
            ]
            schedule: Any = schedule_type(
                stages[0] if of_each == 1 else stages,  # pyright: ignore[reportArgumentType]
                micro,
                loss_fn=torch.nn.functional.mse_loss,
            )
            parameters = [p for module in own.values() for p in module.parameters()]
            optimizer = torch.optim.SGD(parameters, 2.0)
            xs, targets = tc.values(50, 16 * width).reshape(16, -1), torch.zeros(16, width)
            curve = []
            for _ in range(10):
                for lists in seen.values():
                    for each in lists:
                        each.clear()
                found: list[torch.Tensor] = []
                inputs = [xs] if rank == 0 else []
                with compressed(config):
                    if rank == size - 1:
                        schedule.step(*inputs, target=targets, losses=found)
                    else:
                        schedule.step(*inputs)
                optimizer.step()
                optimizer.zero_grad()
                curve += [torch.stack(found).mean().item()] if found else []
                gathered: list[Any] = [None] * size
                last = {at: tuple(each[-micro:] for each in lists) for at, lists in seen.items()}
                dist.all_gather_object(gathered, last, group=group)
                every = {at: lists for of_rank in gathered for at, lists in of_rank.items()}
                for source in range(total - 1):
                    ends = source % size, (source + 1) % size
                    for x, y in zip(every[source][1], every[source + 1][0], strict=True):
                        want = received(x.contiguous(), ends, config, size)
                        assert tc.same_bits(y, want), (schedule_type, bits, source)
            losses[bits] = curve
        if rank == size - 1:
            assert losses[32][-1] < losses[32][0] / 2
            assert losses[8] != losses[32]
            # The bits of messages are compared above. This only bounds their effect on training:
            # the curves differ by less than 1 % of the first loss.
            for few, exact in zip(losses[8], losses[32], strict=True):
                assert abs(few - exact) < 0.01 * losses[32][0]


def skipped() -> None:
    """Stand in for the checks on a rank outside of the group."""


CHECKS = [values, compressors, noise, counts, in_flight, batches, exact, any_source, pipelines]


def main() -> None:
    dist.init_process_group("cgx", timeout=datetime.timedelta(seconds=60))
    made = {size: new_group(range(size)) for size in range(2, dist.get_world_size() + 1)}
    by_name: dict[str, checks.Check] = {}
    for size, group in made.items():
        for check in CHECKS:
            on_group = partial(check, group) if dist.get_rank() < size else skipped
            by_name[f"{check.__name__} on {size}"] = on_group
    checks.run(by_name, sys.argv[1:], after=dist.barrier)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
