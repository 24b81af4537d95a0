"""Allreduces without compression: values, layouts, dtypes and operations, averages, coalescing."""

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
import torch.distributed
from support import torch_cases as tc
from torch.distributed.distributed_c10d import _coalescing_manager

from cgx_ops import Communicator
from cgx_ops.torch import compressed

from .common import FLOATS, NEAREST, OPS, SIZES, Case, dist, inputs_of_ranks


def exact_allreduce(r: int, n: int) -> None:
    for dtype in FLOATS:
        for numel in SIZES:
            for op, torch_op in OPS.items():
                mine = inputs_of_ranks(n, numel, dtype)
                x = mine[r].clone()
                dist.all_reduce(x, torch_op)
                assert tc.same_bits(x, tc.expected(mine, 32, op=op)), (dtype, numel, op)


def layouts(r: int, n: int) -> None:
    """Check all layouts, also different ones on the ranks: elements are matched by their index."""
    mine = [x.reshape(6, 50, 4) for x in inputs_of_ranks(n, 1200)]
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
    dist.all_reduce(leaf[..., :2])  # not contiguous, and part of an autograd graph
    assert torch.equal(leaf[..., :2], want[..., :2])


def asynchronous(r: int, n: int) -> None:
    xs = [x.clone() for x in (inputs_of_ranks(n, 5000, call=call)[r] for call in range(40))]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    doubled = works[3].get_future().then(lambda future: future.value()[0] * 2)
    for work in reversed(works):
        work.wait()
        assert work.is_completed() and work.is_success()
    for call, x in enumerate(xs):
        assert tc.same_bits(x, tc.expected(inputs_of_ranks(n, 5000, call=call), 32)), call
    assert torch.equal(doubled.wait(), xs[3] * 2)
    assert tc.same_bits(works[4].result()[0], xs[4])


def delegated_to_gloo(r: int, n: int) -> None:
    """Check that reductions outside the core are delegated to gloo, with its results."""
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


def layouts_in_gloo(r: int, n: int) -> None:
    """Check gloo's collectives, which ignore strides: elements are matched by their index."""
    shape = (n, 3, 2)
    indices = torch.arange(6 * n).reshape(shape)

    def laid_out(values: torch.Tensor, layout: int) -> torch.Tensor:
        """Return a tensor of these values: contiguous, transposed or with gaps."""
        if layout == 2:
            base = torch.full((*shape[:-1], 2 * shape[-1]), -7, dtype=values.dtype)[: len(values)]
            return base[..., ::2].copy_(values)
        return values.clone() if layout == 0 else values.mT.contiguous().mT

    def gaps_are_unchanged(x: torch.Tensor) -> bool:
        base = x._base
        return base is None or x.stride(-1) != 2 or bool((base[..., 1::2] == -7).all())

    # The same layout on all ranks, then different ones.
    for dtype, layout in itertools.product((torch.int64, torch.float64), (0, 1, 2, r % 3)):
        mine = [((k + 1) * indices).to(dtype) for k in range(n)]
        total, own, one = torch.stack(mine).sum(0), mine[r], indices[:1].to(dtype)
        calls: dict[str, tuple[Callable[[Any], Any], Any]] = {
            "all_reduce": (lambda x: dist.all_reduce(x, async_op=True), total),
            "average": (lambda x: dist.all_reduce(x, dist.ReduceOp.AVG, async_op=True), None),
            "broadcast": (lambda x: dist.broadcast(x, n - 1, async_op=True), mine[n - 1]),
            "reduce": (lambda x: dist.reduce(x, 0, async_op=True), total if r == 0 else None),
        }
        for name, (call, want) in calls.items():
            x = laid_out(own, layout)
            work = call(x)
            work.wait()
            if name == "average":
                want = total.div(n, rounding_mode="trunc" if dtype == torch.int64 else None)
            assert want is None or torch.equal(x, want), (name, dtype, layout)
            assert gaps_are_unchanged(x), name
            if name != "reduce":
                assert torch.equal(work.result()[0], x), name
                assert torch.equal(work.get_future().wait()[0], x), name
        parts = [laid_out((k + 1) * one * (r + 1), layout) for k in range(n)]
        sums = sum(range(1, n + 1)) * (r + 1) * one
        other = (layout + 1) % 3
        outs = [laid_out(0 * one, other) for _ in range(n)]
        x, y = laid_out(0 * one, other), laid_out(0 * own, other)
        dist.scatter(x, parts if r == 0 else None, 0)
        assert torch.equal(x, (r + 1) * one) and gaps_are_unchanged(x), layout
        dist.gather(parts[0], outs if r == 0 else None, 0)
        assert r != 0 or all(torch.equal(o, (k + 1) * one) for k, o in enumerate(outs)), layout
        dist.all_gather(outs, parts[0])
        assert all(torch.equal(o, (k + 1) * one) for k, o in enumerate(outs)), layout
        dist.reduce_scatter(x, parts)
        assert torch.equal(x, sums) and gaps_are_unchanged(x), layout
        dist.reduce_scatter_tensor(x, laid_out(own, layout))
        assert torch.equal(x, total[r : r + 1]) and gaps_are_unchanged(x), layout
        dist.all_to_all_single(y, laid_out(own, layout))
        want = torch.cat([each[r : r + 1] for each in mine])
        assert torch.equal(y, want) and gaps_are_unchanged(y), layout
        if not torch.__version__.startswith("2.11."):  # its gloo lacks this call
            dist.all_to_all(outs, parts)
            wants = [(k + 1) * (r + 1) * one for k in range(n)]
            assert all(map(torch.equal, outs, wants)), layout
    leaf = torch.nn.Parameter(torch.ones(4, 3, dtype=torch.float64))
    dist.all_reduce(leaf.t())
    dist.broadcast(leaf.t(), 0)
    assert (leaf == n).all()
    with pytest.raises(RuntimeError, match="single memory location"):
        dist.broadcast(torch.ones(1).expand(3), 0)


def dropped_works(r: int, n: int) -> None:
    """Check that results arrive if the caller drops the work, also those of strided tensors."""
    for dtype in (torch.float32, torch.int64):
        x, y = (torch.full((5, 4), r, dtype=dtype).t() for _ in range(2))
        z, sent = torch.zeros(2, n, dtype=dtype).t()[:, 0], torch.full((n,), r, dtype=dtype)
        dist.all_reduce(x, async_op=True)
        dist.broadcast(y, n - 1, async_op=True)
        dist.all_to_all_single(z, sent, async_op=True)
        wants = torch.full((4, 5), n * (n - 1) // 2), torch.full((4, 5), n - 1), torch.arange(n)
        for got, want in zip((x, y, z), wants, strict=True):
            deadline = time.monotonic() + 20
            while not torch.equal(got, want.to(dtype)) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert torch.equal(got, want.to(dtype)), dtype
        dist.barrier()


def averages(r: int, n: int) -> None:
    """Check averages outside the core: sum, then divide; integers round towards zero, as NCCL."""
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
        for _ in range(2):
            work = dist.reduce_scatter_tensor(out, mine(dtype, r), avg, async_op=True)
            for _ in range(3):  # gloo writes the sum in each call of wait()
                assert work.wait() and torch.equal(out, want[part]), dtype
    xs = [mine(torch.int64, r), mine(torch.int64, r)[1:]]
    with _coalescing_manager():
        for x in xs:
            dist.all_reduce(x, avg)
    assert all(map(torch.equal, xs, [wanted(torch.int64), wanted(torch.int64)[1:]]))
    leaf = torch.ones(3, dtype=torch.float64, requires_grad=True)
    dist.all_reduce(leaf.detach(), avg)
    assert leaf.tolist() == [1.0] * 3
    flags = torch.tensor([r == 0, True])
    with pytest.raises(TypeError, match="does not average bool tensors"):
        dist.all_reduce(flags, avg)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    assert flags.tolist() == [True, True]
    flags = torch.tensor([r == 0, True])
    dist.all_reduce(flags, dist.ReduceOp.MIN)
    assert flags.tolist() == [n == 1, True]


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

    # With compression every tensor has its own buckets.
    xs = [tc.values(r, numel, call=numel) for numel in (1000, 700, 5)]
    with compressed(NEAREST), _coalescing_manager():
        for x in xs:
            dist.all_reduce(x)
    for x, numel in zip(xs, (1000, 700, 5), strict=True):
        want = tc.expected(inputs_of_ranks(n, numel, call=numel), algorithm=algorithm_of(1705))
        assert tc.same_bits(x, want), numel


def algorithm_of(numel: int) -> Any:
    """Return the algorithm that the oracle selects for `auto`."""
    return reference.pick([reference.Segment(0, numel, 4, 512)], reference.FLOAT32)


CHECKS: tuple[Case, ...] = (
    exact_allreduce,
    layouts,
    asynchronous,
    delegated_to_gloo,
    layouts_in_gloo,
    dropped_works,
    averages,
    coalescing,
)
