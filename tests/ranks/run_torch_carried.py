"""Rank program for torchrun: carrier="c10d" over gloo against the oracle, bit for bit.

The ranks form groups of 1, 2, ... ranks, so that one launch covers every world size. Each rank runs
the oracle for its share of the cases. Every case checks that all ranks agree.
"""

import hashlib
import io
import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import checks
import numpy as np
import reference
import torch
import torch.distributed as dist
from support import torch_cases as tc
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cgx_ops import Config, InvalidArgument
from cgx_ops.stats import traffic
from cgx_ops.torch.averaging.exchange import Exchange

coalesced: Any = torch.ops.cgx.quantized_allreduce_coalesced

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROUNDINGS = ("nearest", "stochastic", "shift")
SIZES = (0, 1, 17, 511, 512, 513)
LIST = (513, 0, 17, 1, 5000, 512, 8)


class Group:
    """The ranks 0 to size - 1, and their first seeds after manual_seed(rank)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.name = group, group.group_name
        self.rank, self.size = group.rank(), group.size()
        self.seeds = [tc.drawn_seeds(rank)[0] for rank in range(self.size)]

    def options(self, **options: Any) -> dict[str, Any]:
        return tc.keywords(**{"carrier": "c10d", "group_name": self.name, **options})

    def check_equal(self, tensors: Sequence[torch.Tensor]) -> None:
        """Check that the tensors are bitwise equal on all ranks."""
        digest = hashlib.sha256()
        for x in tensors:
            digest.update(tc.to_numpy(x).tobytes())
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, digest.digest(), self.group)
        assert everyone == everyone[:1] * self.size


# ---- values --------------------------------------------------------------------------------------


def results(group: Group) -> None:
    cases = [
        (numel, dtype, rounding, bits, op)
        for numel, dtype, rounding, (bits, op) in itertools.product(
            SIZES, DTYPES, ROUNDINGS, zip((*range(1, 9), 32), ("sum", "avg") * 5, strict=False)
        )
        if (bits, rounding) != (1, "shift")
    ]
    cases += [(5000, dtype, "stochastic", 3, "sum") for dtype in DTYPES]
    cases += [(2**20 + 7, torch.float32, "nearest", 4, "avg")]
    cases += [(2**20 + 7, torch.bfloat16, "stochastic", 8, "sum")]
    seen = []
    for index, (numel, dtype, rounding, bits, op) in enumerate(cases):
        options: dict[str, Any] = {"op": op, "rounding": rounding}
        if index % 2 and numel < 2**20:
            options |= {"algorithm": "sra", "gather_bits": 8, "skip_incomplete_buckets": True}
        inputs = [tc.values(rank, numel, dtype) for rank in range(group.size)]
        torch.manual_seed(group.rank)
        y = tc.allreduce(inputs[group.rank], bits, 64, **group.options(**options))
        seen.append(y)
        if index % group.size == group.rank:
            options = {"algorithm": "auto", "seeds": group.seeds, **options}
            want = tc.expected(inputs, bits, 64, **options)
            assert tc.same_bits(y, want), (group.size, numel, dtype, bits, options)
    group.check_equal(seen)


def lists(group: Group) -> None:
    inputs = [[tc.values(r, n, call=i) for i, n in enumerate(LIST)] for r in range(group.size)]
    offsets = np.cumsum([0, *LIST[:-1]]).tolist()
    layout = [reference.Segment(o, n, 3, 64) for o, n in zip(offsets, LIST, strict=True)]
    for rounding in ROUNDINGS:
        torch.manual_seed(group.rank)
        got = coalesced(inputs[group.rank], 3, 64, **group.options(rounding=rounding))
        assert [y.shape for y in got] == [x.shape for x in inputs[0]]
        flat = [tc.to_numpy(torch.cat(xs)) for xs in inputs]
        want = reference.allreduce(
            flat, layout, op="sum", algorithm="auto", rounding=rounding, seeds=group.seeds
        )
        assert tc.same_bits(torch.cat(got), torch.from_numpy(want)), (group.size, rounding)
    assert coalesced([], **group.options()) == []


def residuals(group: Group) -> None:
    """Run two steps of a message small enough to follow the header, and of a sharded one."""
    for numel, dtype in itertools.product((600, 2**16), DTYPES):
        kept = [tc.values(rank, numel, dtype, call=9) / 8 for rank in range(group.size)]
        own, arrays = kept[group.rank], [tc.to_numpy(each).copy() for each in kept]
        for step in range(2):
            inputs = [tc.values(rank, numel, dtype, call=step) for rank in range(group.size)]
            options = group.options(op="avg", rounding="nearest")
            y, own = tc.feedback(inputs[group.rank], own, 2, 64, **options)
            want = reference.allreduce(
                [tc.to_numpy(x) for x in inputs], [reference.Segment(0, numel, 2, 64)],
                op="avg", residuals=arrays,
            )  # fmt: skip
            assert tc.to_numpy(y).tobytes() == want.tobytes(), (group.size, numel, dtype, step)
            assert tc.to_numpy(own).tobytes() == arrays[group.rank].tobytes(), (numel, dtype, step)


def layouts(group: Group) -> None:
    """Test strides, shapes and the in-place form."""
    inputs = [tc.values(rank, 600).reshape(20, 30) for rank in range(group.size)]
    want = tc.expected([x.t() for x in inputs], 4, 64, algorithm="auto")
    options = group.options(rounding="nearest")
    y = tc.allreduce(inputs[group.rank].t(), 4, 64, **options)
    assert tc.same_bits(y, want)
    x = inputs[group.rank].clone().t()
    tc.allreduce_(x, 4, 64, **options)
    assert tc.same_bits(x, want)
    scalar = tc.allreduce(torch.tensor(float(group.rank)), 4, 64, **options)
    assert scalar.shape == () and scalar.item() == sum(range(group.size))


# ---- gradients, compilers ------------------------------------------------------------------------


def step(x: torch.Tensor, group: Group, rounding: str) -> torch.Tensor:
    """Apply the operator between operations for which inductor matches eager bit for bit."""
    options = group.options(rounding=rounding, algorithm="sra")
    return 2 * tc.allreduce(2 * x.relu(), 3, 64, **options)


def both_steps(x: torch.Tensor, group: Group, rounding: str) -> torch.Tensor:
    options = group.options(rounding=rounding, algorithm="sra")
    a, b = coalesced([2 * x.relu(), x[:700] + 1], 3, 64, **options)
    return step(x, group, rounding) + 2 * a + torch.nn.functional.pad(b, (0, len(x) - 700))


def recomputed_step(x: torch.Tensor, group: Group, rounding: str) -> torch.Tensor:
    result = checkpoint(step, x, group, rounding, use_reentrant=False)
    assert isinstance(result, torch.Tensor)
    return result


def forward_and_backward(group: Group, function: Any, rounding: str) -> list[torch.Tensor]:
    torch.manual_seed(group.rank)
    x = tc.values(group.rank, 1000).requires_grad_()
    y = function(x, group, rounding)
    y.backward(tc.values(group.rank, 1000, call=1))
    assert x.grad is not None
    return [y.detach(), x.grad]


def gradients(group: Group) -> None:
    for rounding in ROUNDINGS:
        options: dict[str, Any] = {"rounding": rounding, "bits": 3, "bucket_size": 64}
        inputs = [tc.values(rank, 1000) for rank in range(group.size)]
        y = 2 * tc.expected([2 * x.relu() for x in inputs], seeds=group.seeds, **options)
        upstream = [2 * tc.values(rank, 1000, call=1) for rank in range(group.size)]
        seeds = [tc.gradient_seed(seed) for seed in group.seeds]
        gradient = 2 * tc.expected(upstream, seeds=seeds, **options)
        gradient = torch.where(inputs[group.rank] > 0, gradient, 0)
        got = forward_and_backward(group, step, rounding)
        assert tc.same_bits(got[0], y) and tc.same_bits(got[1], gradient), (group.size, rounding)


class Salt(CustomGraphPass):
    """A part of the cache keys that hides graphs cached by an earlier run of this program."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        pass

    def uuid(self) -> str:
        return sys.argv[1]


def compiled(group: Group) -> None:
    """Compare with eager. Graphs are compiled, then loaded from the cache that ranks share."""
    counters.clear()
    want = forward_and_backward(group, both_steps, "stochastic")
    for run, backend in enumerate(("inductor", "inductor", "aot_eager")):
        torch._dynamo.reset()
        call = torch.compile(both_steps, fullgraph=True, backend=backend)
        with (
            inductor_config.patch(fx_graph_cache=True, post_grad_custom_post_pass=Salt()),
            functorch_config.patch(enable_autograd_cache=True),
        ):
            got = forward_and_backward(group, call, "stochastic")
        assert all(map(tc.same_bits, got, want)), (backend, run)
        dist.barrier(group.group)  # wait until all ranks have written to the cache
    found = counters["aot_autograd"]
    assert (found["autograd_cache_miss"], found["autograd_cache_hit"]) == (1, 1), found


def checkpointed(group: Group) -> None:
    """Check that recomputation draws the noise of the forward pass."""
    want = forward_and_backward(group, recomputed_step, "stochastic")
    torch._dynamo.reset()
    call = torch.compile(recomputed_step, fullgraph=True)
    got = forward_and_backward(group, call, "stochastic")
    assert all(map(tc.same_bits, got, want))


class Model(torch.nn.Module):
    def __init__(self, group: Group) -> None:
        super().__init__()
        self.options = group.options(rounding="nearest", algorithm="sra")

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        y = tc.allreduce(2 * x, 3, 64, **self.options)
        return [y, *coalesced([x, x[:300] + 1], 3, 64, **self.options)]


def exported(group: Group) -> None:
    """Export public operators that run on any rank, or decompose them into this rank's messages."""
    inputs = [tc.values(rank, 1000) for rank in range(group.size)]
    wants = [tc.expected([2 * x for x in inputs], 3, 64), tc.expected(inputs, 3, 64)]
    wants.append(tc.expected([x[:300] + 1 for x in inputs], 3, 64))
    program = torch.export.export(Model(group), (inputs[group.rank],))
    names = ["quantized_allreduce", "carried_encode"]
    for name, each in zip(names, (program, program.run_decompositions()), strict=True):
        assert any(name in str(node.target) for node in each.graph.nodes), each
        file = io.BytesIO()
        torch.export.save(each, file)
        file.seek(0)
        results = torch.export.load(file).module()(inputs[group.rank])
        assert all(map(tc.same_bits, results, wants)), name


def checked_operator(group: Group) -> None:
    # The other two tests object to torch's own wait_tensor, which hides an alias.
    checks = ["test_autograd_registration", "test_aot_dispatch_dynamic"]
    for grad in (False, True):
        x = tc.values(group.rank, 200).requires_grad_(grad)
        for operator, y in ((tc.allreduce, x), (tc.allreduce_, x.detach()), (coalesced, [x, x])):
            options = group.options(rounding="nearest")
            opcheck(operator.default, (y,), options, test_utils=checks)


def dynamic(group: Group) -> None:
    """Check that each size gets its own graph despite dynamic=True: message lengths are static."""
    torch._dynamo.reset()
    call = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for numel in (1000, 5000, 17):
        inputs = [tc.values(rank, numel) for rank in range(group.size)]
        y = 2 * tc.expected([2 * x.relu() for x in inputs], 3, 64)
        assert tc.same_bits(call(inputs[group.rank], group, "nearest"), y), numel


def divergence(group: Group) -> None:
    """Check unused results, equal calls, other orders of use and a rank in eager mode.

    All ranks must make the same exchanges.
    """
    options = group.options(rounding="nearest")
    last = group.rank == group.size - 1

    def differs(x: torch.Tensor) -> torch.Tensor:
        parts = [tc.allreduce(x[: 200 + i], 32, **options) for i in range(3)]
        parts += coalesced([x[:300], x[:301]], 32, **options)
        total = sum(((p * 2).relu().sum() for p in (parts[::-1] if last else parts)), x.sum())
        y = tc.allreduce(x * 2, **options)
        z = coalesced([x + 1, x * 3], **options)
        return total + (x * 3 if last else x * 3 + y + z[1])

    def equal_calls(x: torch.Tensor) -> torch.Tensor:
        first = tc.allreduce(x + 1, **options)
        return first * tc.allreduce(x + 1, **options)

    for function, grad in ((differs, False), (differs, True), (equal_calls, True)):
        torch._dynamo.reset()
        x = tc.values(group.rank, 1000)
        want = function(x)
        compiled = torch.compile(function, fullgraph=True)
        # A compiler may merge two equal calls, on all ranks; eager mode does not.
        call = function if last and grad and function is differs else compiled
        torch.testing.assert_close(call(x.requires_grad_(grad)).detach(), want)


# ---- bytes on the wire ---------------------------------------------------------------------------


class Sent(TorchDispatchMode):
    """Count the bytes that a rank sends to others."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.size, self.bytes = group.size, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            assert args[2][dist.get_rank()] == 0
            self.bytes += args[0].nbytes
        elif func is torch.ops._c10d_functional.all_gather_into_tensor.default:
            self.bytes += args[0].nbytes * (self.size - 1)
        else:
            assert func.namespace != "_c10d_functional" or "wait" in func.name(), func
        return func(*args, **(kwargs or {}))


def payload(group: Group, numel: int, bits: int) -> int:
    """Return the payload bytes that a rank of scatter-reduce-allgather sends."""
    segment = reference.Segment(0, numel, bits, 64)
    exact = reference.is_exact(segment, 0)
    bits = 32 if exact else bits
    sizes = [
        reference.encoded_bytes(shard.stop - shard.start, bits, 64)
        for shard in reference.shards(segment, group.size, exact)
    ]
    return sum(sizes) + (group.size - 2) * sizes[group.rank]


def wire(group: Group) -> None:
    for numel, bits in itertools.product((0, 17, 513, 5000, 2**20 + 7), (1, 4, 8, 32)):
        before = traffic("cgx_carried_traffic").bytes_sent
        with Sent(group) as sent:
            options = group.options(algorithm="sra", rounding="nearest")
            tc.allreduce(tc.values(group.rank, numel), bits, 64, **options)
        assert traffic("cgx_carried_traffic").bytes_sent - before == sent.bytes, (numel, bits)
        if group.size == 1:
            assert sent.bytes == 0
            continue
        # Each rank's part of the all-gather is padded to the largest: by at most one bucket.
        padding = sent.bytes - payload(group, numel, bits)
        bucket = 4 if bits == 32 or numel < 16 else reference.encoded_bytes(64, bits, 64)
        assert 0 <= padding <= (group.size - 1) * bucket, (numel, bits, padding)


# ---- bad calls -----------------------------------------------------------------------------------


@contextmanager
def refused(kind: type[Exception], text: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        assert text in str(error), str(error)
    else:
        raise AssertionError(f"not refused: {text}")


def bad_calls(group: Group) -> None:
    x = torch.ones(100)
    for algorithm in ("ring", "hierarchical"):
        with refused(ValueError, f"carrier 'c10d' has no algorithm '{algorithm}'"):
            tc.allreduce(x, **group.options(algorithm=algorithm))
    with refused(ValueError, "carrier 'mpi' is unknown; use one of 'native', 'c10d'"):
        tc.allreduce(x, **group.options(carrier="mpi"))
    with refused((ValueError, RuntimeError), "nobody"):  # type: ignore[arg-type]
        tc.allreduce(x, **group.options(group_name="nobody"))
    with refused(ValueError, "only sum and avg can be quantized"):
        tc.allreduce(x, **group.options(op="max"))
    assert tc.allreduce(x, 32, **group.options(op="max")).tolist() == [1.0] * 100
    with refused(TypeError, "float32, float16 and bfloat16 are supported"):
        tc.allreduce(x.long(), **group.options())
    if group.size > 1:
        gloo = "uses gloo, which cannot gather CUDA tensors: pass a group with NCCL"
        with FakeTensorMode():
            on_gpu = torch.empty(100, device="cuda")
            with refused(ValueError, gloo):
                tc.allreduce(on_gpu, **group.options())
            with refused(InvalidArgument, gloo):
                Exchange("caller", group.group, Config(), "c10d").mean(["x"], [on_gpu])


def the_default_group() -> None:
    """Check that the default group may be given by an empty name."""
    y = tc.allreduce(torch.ones(20), 32, carrier="c10d")
    assert y.tolist() == [dist.get_world_size()] * 20


def skipped() -> None:
    """Stand in for the checks on a rank outside of the group."""


CHECKS = [results, lists, residuals, layouts, gradients, wire, bad_calls]
ON_TWO = [exported, checked_operator, compiled, checkpointed, dynamic, divergence]


def main() -> None:
    with refused((ValueError, RuntimeError), "0"):  # type: ignore[arg-type]
        tc.allreduce(torch.ones(100), carrier="c10d")
    dist.init_process_group("gloo")
    tc.forget_compiled_graphs()
    world = dist.get_world_size()
    groups = [dist.new_group(list(range(size))) for size in range(1, world + 1)]
    by_name: dict[str, checks.Check] = {}
    for size, members in enumerate(groups, 1):
        mine = Group(members) if isinstance(members, dist.ProcessGroup) else None
        for check in CHECKS + (ON_TWO if size == 2 else []):
            on_group = partial(check, mine) if mine and dist.get_rank() < size else skipped
            by_name[f"{check.__name__} on {size}"] = on_group
    checks.run(by_name | checks.named(the_default_group), sys.argv[2:])
    dist.destroy_process_group()
    assert "mpi4py" not in sys.modules


if __name__ == "__main__":
    main()
