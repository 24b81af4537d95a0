"""Rank program: what the backend "cgx" does, case by case, in one launch of any launcher.

    run_torch_backend.py [case...]      all cases if none is named

Each case ends with a barrier and leaves no group behind but the default one.
"""

import datetime
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
import torch_cases as tc
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.nn.parallel import DistributedDataParallel

import cgx_ops
from cgx_ops import Communicator, Config
from cgx_ops.torch import BackendOptions, compressed, uncompressed

dist: Any = torch.distributed  # its annotations are those of its own internals
NEAREST = Config(bits=4, rounding="nearest")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
SIZES = (0, 1, 17, 511, 512, 513, 70_003)

Case = Callable[[int, int], None]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


class Decisions(logging.Handler):
    """What the backend's logger says, line by line."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")

    def taken(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines


DECISIONS = Decisions()
logging.getLogger("cgx_ops.torch.backend").addHandler(DECISIONS)
logging.getLogger("cgx_ops.torch.backend").setLevel(logging.DEBUG)


def everybodys(n: int, numel: int, dtype: torch.dtype = torch.float32, call: int = 0) -> list[Any]:
    return [tc.values(rank, numel, dtype, call) for rank in range(n)]


def equal_everywhere(x: torch.Tensor | None) -> bool:
    """Whether all ranks hold the same bits."""
    assert x is not None
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, x)
    return all(tc.same_bits(x, other) for other in every)


def bytes_sent(call: Callable[[], object], group: str = "0") -> int:
    before = Communicator.find(group).bytes_sent
    call()
    return Communicator.find(group).bytes_sent - before


@case
def exact_allreduce(r: int, n: int) -> None:
    for dtype in FLOATS:
        for numel in SIZES:
            for op, torch_op in OPS.items():
                mine = everybodys(n, numel, dtype)
                x = mine[r].clone()
                dist.all_reduce(x, torch_op)
                assert tc.same_bits(x, tc.expected(mine, 32, op=op)), (dtype, numel, op)


@case
def layouts(r: int, n: int) -> None:
    """Whatever the layout, also where it differs between ranks: elements meet by their index."""
    mine = [x.reshape(6, 50, 4) for x in everybodys(n, 1200)]
    want = tc.expected(mine, 32)
    base = torch.zeros(6, 50, 8)
    made = {
        "transposed": mine[r].permute(2, 1, 0).contiguous().permute(2, 1, 0),
        "strided": base[..., ::2].copy_(mine[r]),
        "of this rank": mine[r].clone()
        if r % 2
        else mine[r].transpose(0, 1).contiguous().transpose(0, 1),
    }
    for name, x in made.items():
        dist.all_reduce(x)
        assert torch.equal(x, want), name
    assert torch.equal(base[..., 1::2], torch.zeros(6, 50, 4))
    world = dist.group.WORLD
    assert world is not None
    negated = torch.complex(torch.zeros(6, 50, 4), -mine[r]).conj().imag  # a view with a sign bit
    world._get_backend(torch.device("cpu")).allreduce([negated]).wait()
    assert torch.equal(negated, want)
    leaf = torch.nn.Parameter(mine[r].clone())
    dist.all_reduce(leaf)
    assert torch.equal(leaf, want)
    with torch.no_grad():
        leaf.copy_(mine[r])
    dist.all_reduce(leaf[..., :2])  # not contiguous, and it has a history
    assert torch.equal(leaf[..., :2], want[..., :2])


@case
def asynchronous(r: int, n: int) -> None:
    xs = [x.clone() for x in (everybodys(n, 5000, call=call)[r] for call in range(40))]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    doubled = works[3].get_future().then(lambda future: future.value()[0] * 2)
    for work in reversed(works):
        work.wait()
        assert work.is_completed() and work.is_success()
    for call, x in enumerate(xs):
        assert tc.same_bits(x, tc.expected(everybodys(n, 5000, call=call), 32)), call
    assert torch.equal(doubled.wait(), xs[3] * 2)
    assert tc.same_bits(works[4].result()[0], xs[4])


@case
def other_kinds(r: int, n: int) -> None:
    """What the core does not reduce goes to gloo, with gloo's result."""
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.float64):
        x = torch.arange(20).to(dtype) * (r + 1)
        dist.all_reduce(x)
        assert torch.equal(x, (torch.arange(20) * (n * (n + 1) // 2)).to(dtype)), dtype
    x = torch.complex(torch.ones(5), torch.full((5,), float(r)))
    dist.all_reduce(x)
    assert torch.equal(
        x, torch.complex(torch.full((5,), float(n)), torch.full((5,), n * (n - 1) / 2))
    )
    x = torch.tensor([0b0110, 1 << r], dtype=torch.int32)
    dist.all_reduce(x, dist.ReduceOp.BOR)
    assert x.tolist() == [0b0110, 2**n - 1]
    flag = torch.tensor([r == 0, True])
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    assert flag.tolist() == [False, True]
    sparse = torch.sparse_coo_tensor(torch.tensor([[r, n]]), torch.ones(2, 3), (n + 1, 3))
    dist.all_reduce(sparse)
    want = torch.ones(n + 1, 3)
    want[n] = n
    assert torch.equal(sparse.to_dense(), want)


@case
def averages(r: int, n: int) -> None:
    """Of what the core does not reduce: the sum, divided. Integers towards zero, as NCCL does."""
    avg, start = dist.ReduceOp.AVG, torch.arange(-3 * n, 3 * n)

    def mine(dtype: torch.dtype, rank: int) -> torch.Tensor:
        return (start * (rank + 1)).to(dtype)

    def wanted(dtype: torch.dtype) -> torch.Tensor:
        total = torch.stack([mine(dtype, rank) for rank in range(n)]).sum(0, dtype=dtype)
        return total / n if dtype.is_floating_point else total.div(n, rounding_mode="trunc")

    for dtype in (torch.int64, torch.int32, torch.int8, torch.float64, torch.float32):
        want, part = wanted(dtype), slice(6 * r, 6 * r + 6)
        x = mine(dtype, r)
        dist.all_reduce(x, avg)
        assert torch.equal(x, want), dtype
        x = mine(dtype, r)
        work = dist.all_reduce(x, avg, async_op=True)
        doubled = work.get_future().then(lambda future: future.value()[0] * 2)
        assert torch.equal(doubled.wait(), want * 2), dtype
        assert work.wait() and work.is_completed() and work.is_success() and torch.equal(x, want)
        x = mine(dtype, r)
        dist.reduce(x, n - 1, avg)
        assert r != n - 1 or torch.equal(x, want), dtype
        out = torch.empty(6, dtype=dtype)
        dist.reduce_scatter_tensor(out, mine(dtype, r), avg)
        assert torch.equal(out, want[part]), dtype
        dist.reduce_scatter(out, list(mine(dtype, r).chunk(n)), avg)
        assert torch.equal(out, want[part]), dtype
    xs = [mine(torch.int64, r), mine(torch.int64, r)[1:]]
    with _coalescing_manager():
        for x in xs:
            dist.all_reduce(x, avg)
    assert all(map(torch.equal, xs, [wanted(torch.int64), wanted(torch.int64)[1:]]))
    leaf = torch.ones(3, dtype=torch.float64, requires_grad=True)
    dist.all_reduce(leaf.detach(), avg)
    assert leaf.tolist() == [1.0] * 3


@case
def collectives(r: int, n: int) -> None:
    x = torch.full((3,), float(r))
    dist.broadcast(x, n - 1)
    assert x.tolist() == [n - 1.0] * 3
    x = torch.full((3,), float(r + 1))
    dist.reduce(x, 0)
    assert r != 0 or x.tolist() == [n * (n + 1) / 2] * 3
    x = torch.full((2,), float(r))
    every = [torch.empty(2) for _ in range(n)]
    dist.all_gather(every, x)
    assert [each[0].item() for each in every] == list(range(n))
    flat = torch.empty(2 * n)
    dist.all_gather_into_tensor(flat, x)
    assert flat.tolist() == [float(i // 2) for i in range(2 * n)]
    dist.gather(x, every if r == 0 else None, 0)
    dist.scatter(x, every if r == 0 else None, 0)
    assert x.tolist() == [r, r]
    part = torch.empty(2)
    dist.reduce_scatter(part, [torch.full((2,), float(i)) for i in range(n)])
    assert part.tolist() == [r * n] * 2
    dist.reduce_scatter_tensor(part, torch.arange(2.0 * n))
    assert part.tolist() == [n * 2.0 * r, n * (2.0 * r + 1)]
    out = torch.empty(n)
    dist.all_to_all_single(out, torch.arange(float(n)) + 10 * r)
    assert out.tolist() == [10.0 * i + r for i in range(n)]
    outs = [torch.empty(1) for _ in range(n)]
    try:
        dist.all_to_all(outs, [torch.tensor([100.0 * r + i]) for i in range(n)])
    except RuntimeError as error:  # the inner gloo of torch 2.11 lacks it
        assert "Backend gloo does not support alltoall" in str(error)
    else:
        assert [each.item() for each in outs] == [100.0 * i + r for i in range(n)]
    dist.barrier()
    dist.barrier(async_op=True).wait()
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=30), wait_all_ranks=True)


@case
def objects(r: int, n: int) -> None:
    every: list[Any] = [None] * n
    dist.all_gather_object(every, {"rank": r})
    assert every == [{"rank": i} for i in range(n)]
    said = [f"from {r}"]
    dist.broadcast_object_list(said, src=1)
    assert said == ["from 1"]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"to {i}" for i in range(n)] if r == 0 else None)
    assert mine == [f"to {r}"]
    dist.gather_object(r, every if r == 0 else None)
    assert r != 0 or every == list(range(n))


@case
def point_to_point(r: int, n: int) -> None:
    right, left = (r + 1) % n, (r - 1) % n
    x, y = torch.full((4,), float(r)), torch.empty(4)
    sending = dist.isend(x, right)
    dist.recv(y, left)
    sending.wait()
    assert y.tolist() == [float(left)] * 4
    if r == 0:  # from anybody
        heard = {dist.recv(y): y[0].item() for _ in range(n - 1)}
        assert heard == {i: float(i) for i in range(1, n)}
    else:
        dist.send(x, 0)
    y.zero_()
    dist.barrier()
    requests = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, y, left)]
    )
    for request in requests:
        request.wait()
    assert y.tolist() == [float(left)] * 4


@case
def coalescing(r: int, n: int) -> None:
    shapes = [(3,), (40, 5), (0,), (1,), (2, 2, 2)]
    mine = [[tc.values(i, torch.Size(s).numel(), call=k).reshape(s) for k, s in enumerate(shapes)]
            for i in range(n)]  # fmt: skip
    wants = [tc.expected([mine[i][k] for i in range(n)], 32) for k in range(len(shapes))]

    xs = [x.clone() for x in mine[r]]
    with pytest.warns(FutureWarning):
        dist.all_reduce_coalesced(xs)
    assert all(map(torch.equal, xs, wants))

    xs = [x.clone() for x in mine[r]]
    before = Communicator.find("0").collectives
    with _coalescing_manager(async_ops=True) as manager:
        for x in xs:
            dist.all_reduce(x)
    manager.wait()
    assert all(map(torch.equal, xs, wants))
    assert Communicator.find("0").collectives - before == 1, "one message"

    xs = [x.clone().t() if x.dim() == 2 else x.clone() for x in mine[r]]
    group = dist.group.WORLD
    assert group is not None
    with _coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        for x in xs:
            group.allreduce([x])
        group.broadcast([count := torch.tensor([float(r)])], dist.BroadcastOptions())
    held = manager.works[0].get_future().wait()
    assert len(held) == len(xs) + 1 and all(map(torch.equal, held, [*xs, count]))
    manager.wait()
    assert all(torch.equal(x.t() if x.dim() == 2 else x, w) for x, w in zip(xs, wants, strict=True))
    assert count.item() == 0

    ints = [torch.ones(3, dtype=torch.int64), torch.ones(2, dtype=torch.int64)]
    with _coalescing_manager():
        for x in ints:
            dist.all_reduce(x)
    assert [x.tolist() for x in ints] == [[n] * 3, [n] * 2]

    # Compressed: every tensor with buckets of its own.
    xs = [tc.values(r, numel, call=numel) for numel in (1000, 700, 5)]
    with compressed(NEAREST), _coalescing_manager():
        for x in xs:
            dist.all_reduce(x)
    for x, numel in zip(xs, (1000, 700, 5), strict=True):
        want = tc.expected(everybodys(n, numel, call=numel), algorithm=algorithm_of(1705))
        assert tc.same_bits(x, want), numel


def algorithm_of(numel: int) -> Any:
    """What auto picks, as the oracle has it."""
    import reference

    return reference.pick([reference.Segment(0, numel, 4, 512)], reference.FLOAT32)


@case
def compression(r: int, n: int) -> None:
    for dtype in FLOATS:
        for numel in SIZES:
            for op in ("sum", "avg"):
                mine = everybodys(n, numel, dtype)
                x = mine[r].clone()
                with compressed(NEAREST):
                    dist.all_reduce(x, OPS[op])
                want = tc.expected(mine, 4, 512, "auto", op=op)
                assert tc.same_bits(x, want), (dtype, numel, op)
    x = tc.values(r, 1000)
    with compressed(Config(bits=2, bucket_size=64, gather_bits=8, rounding="nearest")):
        dist.all_reduce(x)
    assert tc.same_bits(x, tc.expected(everybodys(n, 1000), 2, 64, "auto", gather_bits=8))
    # Of sums only.
    x = tc.values(r, 1000)
    with compressed(NEAREST):
        dist.all_reduce(x, dist.ReduceOp.MAX)
    assert tc.same_bits(x, tc.expected(everybodys(n, 1000), 32, op="max"))
    # Not contiguous.
    x = tc.values(r, 1200).reshape(30, 40).t()
    with compressed(NEAREST):
        dist.all_reduce(x)
    assert equal_everywhere(x)
    mine = [each.reshape(30, 40).t() for each in everybodys(n, 1200)]
    assert tc.same_bits(x.contiguous(), tc.expected(mine, 4, 512, "auto"))


@case
def noise(r: int, n: int) -> None:
    """The n-th seed comes from Config.seed and the group; torch's generator is left alone."""
    config = Config(bits=4, seed=11)
    mine = everybodys(n, 3000)
    for _ in range(2):
        group = dist.new_group(pg_options=BackendOptions(config))
        state = torch.get_rng_state()
        for draw in range(2):
            x = mine[r].clone()
            with compressed():
                dist.all_reduce(x, group=group)
            seeds = [tc.gradient_seed(tc.named_seed(11, group.group_name), draw + 1)] * n
            want = tc.expected(mine, algorithm="auto", rounding="stochastic", seeds=seeds)
            assert tc.same_bits(x, want), draw
        assert torch.equal(state, torch.get_rng_state())
        dist.destroy_process_group(group)


@case
def what_is_compressed(r: int, n: int) -> None:
    """The rule, by the log, the bytes and the values."""
    group = dist.new_group(pg_options=BackendOptions(NEAREST))
    name = group.group_name
    numel = 66_000
    mine = everybodys(n, numel)
    exact, quantized = tc.expected(mine, 32), tc.expected(mine, algorithm="auto")
    plain = 4 * numel * 2 * (n - 1) // n  # bytes of an exact sra

    warnings = 0

    def reduced(*around: AbstractContextManager[None]) -> tuple[torch.Tensor, str]:
        nonlocal warnings
        x = mine[r].clone()
        DECISIONS.taken()
        for scope in around:
            scope.__enter__()
        sent = bytes_sent(lambda: dist.all_reduce(x, group=group), name)
        for scope in reversed(around):
            scope.__exit__(None, None, None)
        line, *more = DECISIONS.taken()
        warnings += len(more)
        assert all("compressed()" in warning for warning in more)
        assert ("4 bits" in line) == (sent < plain / 6), (line, sent, plain)
        assert ("exact" in line) == (sent >= plain), (line, sent, plain)
        return x, line

    x, line = reduced()
    assert tc.same_bits(x, exact) and "outside gradient synchronisation" in line
    assert warnings == 1
    reduced()
    x, line = reduced(compressed())
    assert tc.same_bits(x, quantized) and "inside compressed()" in line
    x, line = reduced(compressed(), uncompressed())
    assert tc.same_bits(x, exact) and "inside uncompressed()" in line
    x, line = reduced(uncompressed(), compressed())
    assert tc.same_bits(x, quantized)
    x, line = reduced(compressed(Config(bits=32)))
    assert tc.same_bits(x, exact) and "bits are 32" in line
    assert warnings == 1, "said once"

    # Gradients of parameters: hooks on them. Other nodes of backward: statistics, exact.
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=group)
        return gradient

    class Statistics(torch.autograd.Function):
        """What SyncBatchNorm does: an allreduce in forward and one in backward."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return hook(x)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return hook(gradients[0])

    def backward(arrange: Callable[[torch.nn.Parameter], torch.Tensor]) -> list[str]:
        parameter = torch.nn.Parameter(torch.ones(numel))
        output = arrange(parameter)
        DECISIONS.taken()
        (output * mine[r]).sum().backward()
        return [line.split(": ")[-1] for line in DECISIONS.taken()]

    completing, outside = "4 bits, autograd is completing gradients", "exact, outside gradient"

    def on_leaf(parameter: torch.nn.Parameter) -> torch.Tensor:
        parameter.register_hook(hook)
        return parameter * 2

    def after_accumulation(parameter: torch.nn.Parameter) -> torch.Tensor:
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, group=group))
        return parameter * 2

    def on_activation(parameter: torch.nn.Parameter) -> torch.Tensor:
        activation = parameter * 2
        activation.register_hook(hook)
        return activation

    assert backward(on_leaf) == [completing]
    assert backward(after_accumulation) == [completing]
    assert [line.startswith(outside) for line in backward(on_activation)] == [True]
    assert [line.startswith(outside) for line in backward(Statistics.apply)] == [True]
    with uncompressed():
        assert backward(on_leaf) == ["exact, inside uncompressed()"]
    dist.destroy_process_group(group)

    group = dist.new_group(pg_options=BackendOptions(NEAREST, compress="all"))
    name = group.group_name
    x, line = reduced()
    assert tc.same_bits(x, quantized) and "compresses all" in line
    x, line = reduced(uncompressed())
    assert tc.same_bits(x, exact)
    small = torch.ones(15)
    dist.all_reduce(small, group=group)
    assert "fewer elements" in DECISIONS.taken()[0]
    dist.destroy_process_group(group)


@case
def data_parallel(r: int, n: int) -> None:
    """What DDP's reducer starts is compressed where asked, and only that, however it is set up.

    With a hook of torch's own, since over this backend it would get the one of cgx_ops.torch.ddp:
    what such a hook starts is exact unless asked.
    """
    group = dist.new_group(pg_options=BackendOptions(NEAREST))
    choices: tuple[dict[str, Any], ...] = (
        {},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 0.01},
    )
    for options in choices:
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            torch.nn.Linear(50, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 40)
        )
        ddp = DistributedDataParallel(model, process_group=group, **options)
        ddp.register_comm_hook(group, allreduce_hook)
        DECISIONS.taken()
        for step in range(3):
            if step > 0:  # static_graph wants the first backward to be a whole one
                with ddp.no_sync():
                    ddp(tc.values(r, 400, call=step).reshape(8, 50)).sum().backward()
                assert not DECISIONS.taken(), "no_sync"
            with compressed():
                ddp(tc.values(r, 400, call=step).reshape(8, 50)).sum().backward()
            lines = DECISIONS.taken()
            assert lines and all("4 bits, inside" in line for line in lines), (options, lines)
            for parameter in model.parameters():
                assert equal_everywhere(parameter.grad), options
            ddp.zero_grad()
        ddp(tc.values(r, 400).reshape(8, 50)).sum().backward()
        lines = DECISIONS.taken()
        assert lines and all("exact, a communication hook" in line for line in lines), lines
    # The gradient of one bucket, to the bit: the hook divides by n first.
    layer = torch.nn.Linear(100, 70, bias=False)
    ddp = DistributedDataParallel(layer, process_group=group)
    ddp.register_comm_hook(group, allreduce_hook)
    with compressed():
        ddp(tc.values(r, 100).reshape(1, 100)).sum().backward()
    mine = [x.repeat(70) / n for x in everybodys(n, 100)]
    want = tc.expected(mine, algorithm="auto").reshape(70, 100)
    gradient = layer.weight.grad
    assert gradient is not None and tc.same_bits(gradient, want)
    dist.destroy_process_group(group)
    # Without any hook: the default group is exact, so DDP has none.
    layer = torch.nn.Linear(100, 70, bias=False)
    ddp = DistributedDataParallel(layer)
    with compressed(NEAREST):
        ddp(tc.values(r, 100).reshape(1, 100)).sum().backward()
    mine = [x.repeat(70) * (1.0 / n) for x in everybodys(n, 100)]  # the reducer multiplies
    want = tc.expected(mine, algorithm="auto").reshape(70, 100)
    gradient = layer.weight.grad
    assert gradient is not None and tc.same_bits(gradient, want)


@case
def groups(r: int, n: int) -> None:
    known = Communicator.find("0")
    assert (known.rank, known.size) == (r, n)
    members = list(range(n - 1))
    group = dist.new_group(members)
    if r in members:
        x = torch.ones(100)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [n - 1] * 100
        assert Communicator.find(group.group_name).size == n - 1
    alone = [dist.new_group([i]) for i in range(n)]
    for dtype in (torch.float32, torch.int64):
        x = torch.full((20,), r + 1, dtype=dtype)
        dist.all_reduce(x, group=alone[r])
        assert x.tolist() == [r + 1] * 20
    swapped, _ = dist.new_subgroups_by_enumeration([list(range(n))])
    x = torch.ones(3)
    dist.all_reduce(x, group=swapped)
    assert x.tolist() == [n] * 3

    if n == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for axis, stride in (("replicate", 2), ("shard", 1)):
            mesh_group = mesh.get_group(axis)
            x = torch.tensor([float(r)])
            dist.all_reduce(x, group=mesh_group)
            assert x.item() == 2 * r + (stride if not (r // stride) % 2 else -stride)
            assert Communicator.find(mesh_group.group_name).size == 2

    world = dist.group.WORLD
    assert world is not None
    halves = [list(range(n // 2)), list(range(n // 2, n))]
    own = next(half for half in halves if r in half)
    part = world.split_group(own, group_name=f"part {own[0]}")
    x = torch.ones(40)
    part.allreduce([x]).wait()
    assert x.tolist() == [len(own)] * 40
    y = torch.ones(4, dtype=torch.int64)
    part.allreduce([y]).wait()
    assert y.tolist() == [len(own)] * 4
    part.shutdown()
    with pytest.raises(cgx_ops.NotFound):
        Communicator.find(f"part {own[0]}")
    for each in (group, alone[r], swapped):
        if each is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(each)


@case
def sequence_numbers(r: int, n: int) -> None:
    world = dist.group.WORLD
    assert world is not None
    backend = world._get_backend(torch.device("cpu"))
    before = backend._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(3, dtype=torch.int64))
    dist.broadcast(torch.ones(3), 0)
    assert backend._get_sequence_number_for_group() - before == 3
    every: list[Any] = [None] * n
    dist.all_gather_object(every, before)
    assert every == [before] * n


@case
def profiler(r: int, n: int) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        with compressed(NEAREST):
            dist.all_reduce(torch.ones(10, 100))
        dist.broadcast(torch.ones(5), 0)
        dist.barrier()
    names = [event.name for event in seen.events() or []]
    assert any(name.startswith("cgx:all_reduce 4 bits, 4000 -> ") for name in names), names
    assert "cgx:broadcast" in names and "cgx:barrier" in names, names


@case
def bad_input(r: int, n: int) -> None:
    with pytest.raises(ValueError, match="share memory"):
        dist.all_reduce(torch.ones(1).expand(20))
    with pytest.raises(TypeError, match=r"a\s*cgx_ops\.torch\.BackendOptions"):
        dist.new_group(pg_options=Config())
    with pytest.raises(ValueError, match="'gradients' or 'all'"):
        BackendOptions(compress="everything")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="give a Config"):
        BackendOptions(4)  # pyright: ignore[reportArgumentType]
    world = dist.group.WORLD
    assert world is not None
    for wrong in ([], [torch.ones(2), torch.ones(2).half()]):
        with pytest.raises((ValueError, RuntimeError)):
            world.allreduce_coalesced(wrong).wait()
    with pytest.raises(ValueError, match="startCoalescing"):
        world._end_coalescing(torch.device("cpu"))
    # DistBackendError; with TORCH_DISTRIBUTED_DEBUG=DETAIL torch itself sees it first.
    with pytest.raises(RuntimeError, match=r"100(.|\n)*101|101(.|\n)*100"):
        dist.all_reduce(torch.ones(100 + min(r, 1)))
    dist.barrier()
    x = torch.ones(20)
    dist.all_reduce(x)  # all is whole
    assert x.tolist() == [n] * 20


@case
def begin_again(r: int, n: int) -> None:
    """Destroyed and made anew: over the launcher's own store, over one store, and over files."""
    x = torch.ones(30)

    def check() -> None:
        y = x.clone()
        dist.all_reduce(y)
        assert y.tolist() == [n] * 30
        z = torch.ones(3, dtype=torch.int64)
        dist.all_reduce(z)
        assert z.tolist() == [n] * 3

    folder: list[Any] = [tempfile.mkdtemp() if r == 0 else None]
    dist.broadcast_object_list(folder)
    dist.destroy_process_group()
    for attempt in range(2):
        store = dist.FileStore(str(Path(folder[0], f"store{attempt}")), n)
        for again in range(2):
            one = dist.PrefixStore(str(again), store)
            dist.init_process_group("cgx", store=one, rank=r, world_size=n)
            check()
            dist.destroy_process_group()
            with pytest.raises(cgx_ops.NotFound):
                Communicator.find("0")
    options = BackendOptions(Config(bits=8, rounding="nearest"))
    method = f"file://{folder[0]}/last"
    dist.init_process_group("cgx", init_method=method, rank=r, world_size=n, pg_options=options)
    group = dist.new_group()  # has the options of the default group
    y = tc.values(r, 2000)
    with compressed():
        dist.all_reduce(y, group=group)
    assert tc.same_bits(y, tc.expected(everybodys(n, 2000), 8, algorithm="auto"))
    check()


@case
def deadlines(r: int, n: int) -> None:
    """A rank that does not call: the others get an error that says who and what, in time."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=1.5))
    x = torch.ones(1000)
    dist.all_reduce(x, group=group)
    begun = time.monotonic()
    if r != 1:
        with pytest.raises(dist.DistBackendError, match=r"rank 1(.|\n)*c10d|c10d(.|\n)*rank 1"):
            dist.all_reduce(x, group=group)
        assert 1 < time.monotonic() - begun < 15
    else:
        time.sleep(4)
    # An operation's own deadline, and wait's.
    world = dist.group.WORLD
    assert world is not None
    dist.barrier()
    work: Any = None
    if r != 1:
        work = dist.all_reduce(x, async_op=True)
        with pytest.raises(dist.DistBackendError, match="100 ms given to wait"):
            work.wait(datetime.timedelta(milliseconds=100))
    dist.barrier()
    if r == 1:
        work = dist.all_reduce(x, async_op=True)
    work.wait()
    lasting = dist.new_group()
    options = dist.AllreduceOptions()
    options.timeout = datetime.timedelta(seconds=1)
    if r != 1:
        with pytest.raises(dist.DistBackendError):
            lasting.allreduce([x], options).wait()
    dist.barrier()
    dist.destroy_process_group(lasting)
    dist.destroy_process_group(group)


def main() -> None:
    dist.init_process_group("cgx", timeout=datetime.timedelta(seconds=60))
    for name in sys.argv[1:] or CASES:
        begun = time.monotonic()
        CASES[name](dist.get_rank(), dist.get_world_size())
        dist.barrier()
        print(f"{name}: {time.monotonic() - begun:.2f} s", flush=True)
    rank, transport = dist.get_rank(), Communicator.find("0").transport
    dist.destroy_process_group()
    print(f"rank {rank}: all cases over {transport}", flush=True)


if __name__ == "__main__":
    main()
