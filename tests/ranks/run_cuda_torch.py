"""Rank program: torch.ops.cgx and the backend "cgx" on CUDA tensors; all ranks share the first GPU.

    run_cuda_torch.py CASE ...

Results are compared bit for bit: with the CPU's for the same call, seeds and group, or with the
oracle's. Gradients come from models without sums, so that CPU and GPU compute the same bits.
"""

import contextlib
import datetime
import importlib.util
import itertools
import sys
import time
import types
import unittest
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import checks
import pytest
import torch
import torch.distributed
from cuda_methods import methods
from failing import fails
from support import through_host
from support import torch_cases as tc
from support.cuda_cases import (
    BITS,
    CAPTURING,
    CLOSED,
    DTYPES,
    NOT_ENDED,
    ROUNDINGS,
    SIZES,
)
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.fsdp import fully_shard
from torch.library import opcheck
from torch.nn.parallel import DistributedDataParallel

from cgx_ops import Config, InvalidArgument
from cgx_ops.torch import (
    BackendOptions,
    all_to_all,
    compressed,
    ddp,
    fsdp,
    reduce_scatter,
)
from cgx_ops.torch.averaging.exchange import Exchange
from cgx_ops.torch.backend import make
from cgx_ops.torch.backend.errors import PeerFailed

dist: Any = torch.distributed  # its annotations refer to torch internals
NEAREST = Config(bits=4, bucket_size=64, rounding="nearest", error_feedback=False)
NUMEL = 300_000
BUSY = 200_000_000  # cycles that keep the GPU busy: about a tenth of a second
WORLD = "0"  # the name of the default group


def allreduce(x: torch.Tensor, bits: int = 4, op: str = "sum", **options: Any) -> torch.Tensor:
    return tc.allreduce(x, bits, 64, op, options.pop("group_name", WORLD), **tc.keywords(**options))


def inputs_of_ranks(
    n: int, numel: int, dtype: torch.dtype = torch.float32, call: int = 0
) -> list[Any]:
    return [tc.values(rank, numel, dtype, call) for rank in range(n)]


def same(got: torch.Tensor, want: torch.Tensor, what: object = "") -> None:
    assert got.is_cuda, what
    assert tc.same_bits(got.cpu(), want.cpu()), what


def as_on_the_cpu(call: Callable[[torch.Tensor], Any], x: torch.Tensor, what: object = "") -> None:
    """Call with CPU and CUDA tensors alternately, with equal seeds, and compare the results."""
    torch.manual_seed(100 + dist.get_rank())
    want = call(x)
    torch.manual_seed(100 + dist.get_rank())
    got = call(x.cuda())
    if isinstance(want, torch.Tensor):
        want, got = [want], [got]
    for a, b in zip(got, want, strict=True):
        same(a, b, what)


def late(x: torch.Tensor) -> torch.Tensor:
    """Return a CUDA copy of a CPU tensor that is ready only after a delay on the current stream."""
    torch.cuda._sleep(BUSY)
    return x.pin_memory().to("cuda", non_blocking=True)


# ---- The operators -------------------------------------------------------------------------------


def values(r: int, n: int) -> None:
    for size, bits, name, rounding in itertools.product(SIZES, BITS, DTYPES, ROUNDINGS):
        for algorithm in ("auto", "one_shot", "sra") if size < 1000 else ("auto",):
            options: Any = {"rounding": rounding, "algorithm": algorithm}
            x = tc.values(r, size, getattr(torch, name))
            call = (size, bits, name, options)
            as_on_the_cpu(lambda x, b=bits, o=options: allreduce(x, b, **o), x, call)
    x = tc.values(r, 1000)
    for op in ("sum", "avg", "min", "max", "product"):
        as_on_the_cpu(lambda x, op=op: allreduce(x, 32, op), x, op)
    extras: list[dict[str, Any]] = [{"gather_bits": 8}, {"minimal_size": 1001}]
    for extra in [*extras, {"skip_incomplete_buckets": True}]:
        as_on_the_cpu(lambda x, o=extra: allreduce(x, **o), x, extra)


def lists(r: int, n: int) -> None:
    sizes = [513, 0, 17, 1, 5000, 512, 8]

    def call(flat: torch.Tensor) -> list[torch.Tensor]:
        return tc.coalesced(list(flat.split(sizes)), 4, 64, "avg", WORLD)

    as_on_the_cpu(call, tc.values(r, sum(sizes)))


def several_devices(r: int, n: int) -> None:
    with pytest.raises(ValueError, match="tensors on cuda:0 and cpu; all tensors must"):
        tc.coalesced([torch.ones(9).cuda(), torch.ones(9)], group_name=WORLD)
    if torch.cuda.device_count() > 1:
        with pytest.raises(ValueError, match="tensors on cuda:0 and cuda:1"):
            tc.coalesced([torch.ones(9).cuda(0), torch.ones(9).cuda(1)], group_name=WORLD)


def layouts(r: int, n: int) -> None:
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x.t(),
        lambda x: x[::2, 1:],
        lambda x: x[3, 4],
        lambda x: x.expand(2, 20, 30),
    ]
    for view in views:
        as_on_the_cpu(lambda x, view=view: allreduce(view(x)), tc.values(r, 600).reshape(20, 30))


def in_place(r: int, n: int) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        address, version = x.data_ptr(), x._version
        tc.allreduce_(x, 4, 64, "sum", WORLD)
        assert x.data_ptr() == address
        assert x._version > version
        return x

    x = tc.values(r, 600).reshape(20, 30)
    as_on_the_cpu(lambda x: call(x.clone()), x)
    as_on_the_cpu(lambda x: call(x.clone().t()), x)


def gradients(r: int, n: int) -> None:
    upstream = tc.values(r, 5000, call=1)

    def call(x: torch.Tensor) -> list[torch.Tensor]:
        x = x.clone().requires_grad_()
        y = allreduce(2 * x)
        y.backward(upstream.to(x.device))
        assert x.grad is not None
        return [y.detach(), x.grad]

    as_on_the_cpu(call, tc.values(r, 5000))


def operators(r: int, n: int) -> None:
    do_without_expecttest()
    for options in ({"rounding": "nearest"}, {"bits": 32, "op": "avg"}):
        for grad in (False, True):
            x = tc.values(r, 40).cuda().requires_grad_(grad)
            opcheck(tc.allreduce.default, (x,), {**options, "group_name": WORLD})
            inner = x * 2 if grad else x
            opcheck(tc.allreduce_.default, (inner,), {**options, "group_name": WORLD})


def do_without_expecttest() -> None:
    """Let opcheck() run without the package expecttest, of which it only needs a base class."""
    if importlib.util.find_spec("expecttest") is None:
        stub: Any = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub


# ---- Streams -------------------------------------------------------------------------------------


def exchanges(r: int, n: int) -> None:
    """all_to_all of equal and of other blocks, with gradients; a rank may have no rows at all."""
    rows = [[100 * ((to + 2 * of) % 3) * (of != 1) for to in range(n)] for of in range(n)]
    sent, came = rows[r], [each[r] for each in rows]
    for config in (NEAREST, Config(rounding="stochastic"), Config(bits=32)):
        for sizes in ((None, None), (came, sent)):

            def call(
                x: torch.Tensor, sizes: Any = sizes, config: Config = config
            ) -> list[torch.Tensor]:
                x = x.clone().requires_grad_()
                y = all_to_all(x, *sizes, config=config, grad_config=config, group=None)
                (3 * y).sum().backward()
                assert x.grad is not None
                return [y.detach(), x.grad]

            numel = 7 * (100 * n if sizes[0] is None else sum(sent))
            as_on_the_cpu(call, tc.values(r, numel).reshape(-1, 7), (config, sizes))


def refused_exchanges(r: int, n: int) -> None:
    """Check that sizes which are invalid on one rank are an error on all, and close nothing."""
    x, sizes = torch.ones(2 * n, device="cuda"), [2] * n
    if r == 0:
        fails(ValueError, "add up", lambda: all_to_all(x, sizes, [1] * n, config=NEAREST))
    else:
        fails(PeerFailed, "takes no part", lambda: all_to_all(x, sizes, config=NEAREST))
    exact = all_to_all(x, sizes, sizes, config=Config(bits=32))
    assert torch.equal(exact, x)


def scattered_feedback(r: int, n: int) -> None:
    def call(x: torch.Tensor) -> list[torch.Tensor]:
        residual, found = torch.zeros_like(x), []
        for op in ("sum", "avg", "sum"):
            y, residual = reduce_scatter(x, op, config=NEAREST, residual=residual)
            found += [y, residual]
        return found

    for dtype in DTYPES:
        as_on_the_cpu(call, tc.values(r, 5000 * n, getattr(torch, dtype)), dtype)


def streams(r: int, n: int) -> None:
    """Check that a call runs after earlier work of the current stream, and before later work."""
    given = tc.values(r, NUMEL)
    want = allreduce(2 * given, rounding="nearest")
    default = torch.cuda.default_stream()
    for i, stream in enumerate((default, default, torch.cuda.Stream(), torch.cuda.Stream())):
        with torch.cuda.stream(stream):
            x = late(given) * 2
            y = allreduce(x, rounding="nearest")
            x.fill_(torch.nan)
            z = y + 0
            # The host waits once, when kernels are loaded.
            assert i == 0 or not stream.query(), "the host waited"
        stream.synchronize()
        same(z, want, stream)


def waits(r: int, n: int) -> None:
    """Check that the host waits for an asynchronous call only if wait() gets a time."""
    dist.all_reduce(late(tc.values(r, NUMEL)))  # loads the kernels, for which the host waits
    x = late(tc.values(r, NUMEL))
    work = dist.all_reduce(x, async_op=True)
    assert not work.is_completed(), "the host waited"
    with pytest.raises(dist.DistBackendError, match=f"1{NOT_ENDED}"):
        work.wait(datetime.timedelta(milliseconds=1))
    work.wait()
    same(x + 0, tc.expected(inputs_of_ranks(n, NUMEL), 32, algorithm="auto"))
    assert work.is_completed()


def works(r: int, n: int) -> None:
    """Test asynchronous calls: streams wait, and memory is not reused too early."""
    given = tc.values(r, NUMEL)
    want = tc.expected(inputs_of_ranks(n, NUMEL), 32, algorithm="auto")

    x = late(given)
    future = dist.all_reduce(x, async_op=True).get_future().then(lambda f: f.value()[0] + 1)
    same(future.wait() + 0, want + 1)

    # Results without a wait: their memory is released immediately.
    for _ in range(5):
        dist.all_reduce(late(given), async_op=True)
    x = late(given)
    work = dist.all_reduce(x, async_op=True)
    alone = torch.cuda.Stream()
    with torch.cuda.stream(alone):
        work.wait()
        y = x + 0
    del work, x
    torch.full((NUMEL,), torch.nan, device="cuda")
    alone.synchronize()
    same(y, want)

    # Compiled code calls it this way, and waits on another stream.
    options = (None, tc.packed(Config(4, 64, "nearest")), WORLD)
    x = late(given)
    y = torch.ops.cgx.quantized_all_reduce_start(x, *options)
    x.fill_(torch.nan)
    with torch.cuda.stream(alone):
        z = torch.ops._c10d_functional.wait_tensor(y) + 0
    alone.synchronize()
    same(z, allreduce(given, rounding="nearest"))


def recorded(r: int, n: int) -> None:
    """Check that a replayed CUDA graph reduces the current contents of its memory."""
    x = torch.zeros(NUMEL, device="cuda")
    seed = torch.zeros((), dtype=torch.int64, device="cuda")
    options: Any = (tc.packed(Config(4, 64)), WORLD)
    allreduce(x, rounding="nearest")  # connects
    torch.cuda.synchronize()
    torch.manual_seed(r)  # not that of as_on_the_cpu()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        nearest = allreduce(x, rounding="nearest")
        in_turn = torch.ops.cgx.quantized_all_reduce_start(nearest, seed, *options)
        in_turn = torch.ops._c10d_functional.wait_tensor(in_turn)
        drawn = allreduce(x)
        summed = x.clone()
        dist.all_reduce(summed)
    noises = []
    for step in range(4):
        given = tc.values(r, NUMEL, call=step % 2)
        x.copy_(given)
        seed.fill_(step)
        graph.replay()
        want = allreduce(given, rounding="nearest")
        same(nearest, want, step)
        then = torch.ops.cgx.quantized_all_reduce(want, torch.tensor(step), *options)
        same(in_turn, then, step)
        same(
            summed,
            tc.expected(inputs_of_ranks(n, NUMEL, call=step % 2), 32, algorithm="auto"),
            step,
        )
        noises.append(drawn.clone())
        as_on_the_cpu(allreduce, given, "between replays")
    assert not tc.same_bits(noises[0], noises[2]), "each replay must draw new noise"


def recording_refused(r: int, n: int) -> None:
    x = torch.ones(NUMEL, device="cuda")
    allreduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.graph(torch.cuda.CUDAGraph())
    with pytest.raises(TypeError, match=CAPTURING), graph:
        allreduce(x, rounding="nearest")
    as_on_the_cpu(allreduce, tc.values(r, NUMEL))


# ---- torch.compile -------------------------------------------------------------------------------


def step(x: torch.Tensor, rounding: str = "nearest") -> torch.Tensor:
    return 2 * allreduce(2 * x.relu(), rounding=rounding)


def compiled(r: int, n: int) -> None:
    function = torch.compile(step, fullgraph=True)
    upstream = tc.values(r, 5000, call=1)

    def call(x: torch.Tensor) -> list[torch.Tensor]:
        x = x.clone().requires_grad_()
        y = (function if x.is_cuda else step)(x)
        y.backward(upstream.to(x.device))
        assert x.grad is not None
        return [y.detach(), x.grad]

    as_on_the_cpu(call, tc.values(r, 5000))
    x = tc.values(r, 5000).cuda()
    results = []
    for seed in (1, 1, 2):
        torch.cuda.manual_seed(seed + 10 * r)
        results.append(function(x, "stochastic"))
    assert tc.same_bits(results[0], results[1])
    assert not tc.same_bits(results[0], results[2])


def compiled_and_recorded(r: int, n: int) -> None:
    function = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    counters.clear()
    noises, varied = [], tc.values(r, 5000).cuda()  # a bucket of equal values has no noise
    for call in range(6):
        x = tc.values(r, 5000, call=call)
        torch.compiler.cudagraph_mark_step_begin()
        same(function(x.cuda()).clone(), step(x), call)
        torch.compiler.cudagraph_mark_step_begin()
        noises.append(function(varied, "stochastic").clone())
    assert counters["inductor"]["cudagraph_skips"] == 0, counters["inductor"]
    assert not tc.same_bits(noises[-1], noises[-2]), "each replay must draw new noise"


# ---- The backend ---------------------------------------------------------------------------------


def backend_calls(r: int, n: int) -> None:
    ops = ["SUM", "AVG", "MIN", "MAX", "PRODUCT"]
    for name, op, asynchronous in itertools.product(DTYPES, ops, (False, True)):
        for numel in (0, 1, 513, 70_003):
            mine = inputs_of_ranks(n, numel, getattr(torch, name))
            x = mine[r].cuda()
            work = dist.all_reduce(x, getattr(dist.ReduceOp, op), async_op=asynchronous)
            if asynchronous:
                work.wait()
            same(x, tc.expected(mine, 32, op=op.lower()), (name, op, numel))
    a, b = tc.values(r, 1000).cuda(), tc.values(r, 600).cuda().reshape(20, 30).t()
    dist.all_reduce_coalesced([a, b])
    with _coalescing_manager():
        dist.all_reduce(a)
        dist.all_reduce(b)
    want = n * tc.expected(inputs_of_ranks(n, 1000), 32, algorithm="auto")
    # n equal values are added one by one, so rounding errors occur
    torch.testing.assert_close(a.cpu(), want)
    pair = dist.new_group([0, 1])
    if r < 2:
        x, y = tc.values(r, 1000).cuda(), tc.values(r, 1000)
        dist.all_reduce(x, group=pair)
        dist.all_reduce(y, group=pair)
        same(x, y)
        dist.destroy_process_group(pair)


def compressed_operations(r: int, n: int) -> None:
    mine = inputs_of_ranks(n, 5000)
    for asynchronous in (False, True):
        x = mine[r].cuda()
        with compressed(NEAREST):
            work = dist.all_reduce(x, async_op=asynchronous)
        if asynchronous:
            work.wait()
        same(x, tc.expected(mine, 4, 64, algorithm="auto"))
    x = mine[r].cuda()
    dist.all_reduce(x)
    same(x, tc.expected(mine, 32, algorithm="auto"))


def compressed_exchanges(r: int, n: int) -> None:
    sent = [30 * (r + 1)] * n
    came = [30 * (rank + 1) for rank in range(n)]

    def call(x: torch.Tensor) -> torch.Tensor:
        y = x.new_empty(sum(came))
        with compressed(NEAREST):
            dist.all_to_all_single(y, x, came, sent)
        return y

    as_on_the_cpu(call, tc.values(r, sum(sent)))


class Scale(nn.Module):
    """Module whose gradients are its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(64, 30))
        self.vector = nn.Parameter(torch.ones(513))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.matrix * x, self.vector * y


def inputs(rank: int, call: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return tc.values(rank, 64 * 30, call=call).reshape(64, 30), tc.values(rank, 513, call=call)


def train(model: nn.Module, rank: int, device: str, call: int = 0) -> list[torch.Tensor]:
    a, b = model(*(x.to(device) for x in inputs(rank, call)))
    (a.sum() + b.sum()).backward()
    return [a.detach(), b.detach()]


def data_parallel(r: int, n: int) -> None:
    compressing = dist.new_group(backend="cgx", pg_options=BackendOptions(NEAREST))

    def hooked(model: DistributedDataParallel) -> None:
        state = ddp.QuantizedAllreduceState(config=NEAREST)
        model.register_comm_hook(state, ddp.quantized_allreduce_hook)

    for what, group, prepare, bits in (
        ("the hook", None, hooked, 4),
        ("the backend's own hook", compressing, lambda _: None, 4),
        ("exact", None, lambda _: None, 32),
    ):
        # DDP's checks and broadcasts at start-up do not use the core, and gloo lacks these calls on
        # CUDA.
        model = DistributedDataParallel(Scale().cuda(), process_group=group, init_sync=False)
        prepare(model)
        for call in range(3):
            model.zero_grad()
            train(model, r, "cuda", call)
            matrices, vectors = zip(*(inputs(rank, call) for rank in range(n)), strict=True)
            same(model.module.matrix.grad, tc.expected(matrices, bits, 64, op="avg"), what)
            same(model.module.vector.grad, tc.expected(vectors, 32, op="avg"), what)


def sharded(r: int, n: int) -> None:
    """Check that FSDP2 on the GPU gives the CPU's results."""
    for options in ({}, {"feedback": fsdp.Feedback()}, {"feedback": fsdp.LOCO}):
        sharded_equals_the_cpus(r, n, options)


def sharded_equals_the_cpus(r: int, n: int, options: dict[str, Any]) -> None:
    found: dict[str, list[torch.Tensor]] = {}
    for device in ("cpu", "cuda"):
        model: Any = Scale().to(device)
        fully_shard(model, mesh=init_device_mesh(device, (n,)))
        fsdp.compress(model, weights=fsdp.WEIGHTS, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        found[device] = []
        for call in range(3):
            optimizer.zero_grad()
            found[device] += train(model, r, device, call)
            found[device] += [p.grad.to_local().clone() for p in model.parameters()]
            optimizer.step()
    for i, (got, want) in enumerate(zip(found["cuda"], found["cpu"], strict=True)):
        same(got, want, (options, i))


# ---- Residuals of the hook -----------------------------------------------------------------------


def hook_equals_the_cpus(r: int, config: Config, **options: Any) -> None:
    """Compare gradients and residuals of the DDP hook with those on the CPU."""
    found: dict[str, list[torch.Tensor]] = {}
    for device in ("cpu", "cuda"):
        module = Scale().to(device)
        model = DistributedDataParallel(module, init_sync=False)
        state = ddp.QuantizedAllreduceState(config=config, **options)
        model.register_comm_hook(state, ddp.quantized_allreduce_hook)
        found[device] = []
        for call in range(4):
            model.zero_grad()
            train(model, r, device, call)
            for parameter in (module.matrix, module.vector):
                assert parameter.grad is not None
                found[device].append(parameter.grad.clone())
        kept = state.residuals.tensors
        found[device] += [kept[name] for name in sorted(kept)]
    for i, (got, want) in enumerate(zip(found["cuda"], found["cpu"], strict=True)):
        same(got, want, (config, i))


def feedback(r: int, n: int) -> None:
    hook_equals_the_cpus(r, Config(bits=2, compressor="levels", error_feedback=True))


# ---- carrier="c10d" ------------------------------------------------------------------------------


def carried(r: int, n: int) -> None:
    """Compare operators whose messages a process group sends with those on the CPU."""
    own: Any = {"carrier": "c10d", "group_name": WORLD}
    for size, bits, name in itertools.product(SIZES, (2, 4, 8, 32), DTYPES):
        for algorithm in ("one_shot", "sra"):
            x = tc.values(r, size, getattr(torch, name))
            options: Any = {**own, "algorithm": algorithm, "op": "avg" if bits == 4 else "sum"}
            as_on_the_cpu(lambda x, b=bits, o=options: allreduce(x, b, **o), x, (size, options))
    codecs: list[dict[str, Any]] = [
        {"compressor": "levels", "bits": 2},
        {"compressor": "onebit"},
        {"compressor": "sign"},
        {"compressor": "topk", "density": 0.05},
        {"gather_bits": 8, "skip_incomplete_buckets": True},
    ]
    for codec in codecs:
        as_on_the_cpu(lambda x, o=codec: allreduce(x, **own, **o), tc.values(r, 5000), codec)

    def on_list(flat: torch.Tensor) -> list[torch.Tensor]:
        parts = list(flat.split([513, 0, 17, 1, 5000, 512, 8]))
        return tc.coalesced(parts, 4, 64, "avg", **own)

    def with_feedback(x: torch.Tensor) -> list[torch.Tensor]:
        first, residual = tc.feedback(x, torch.zeros_like(x), 2, 64, "avg", **own)
        return [first, *tc.feedback(x, residual, 2, 64, "avg", **own)]

    def with_gradient(x: torch.Tensor) -> list[torch.Tensor]:
        x = x.clone().requires_grad_()
        y = allreduce(2 * x, **own)
        y.backward(tc.values(r, 5000, call=1).to(x.device))
        assert x.grad is not None
        return [y.detach(), x.grad]

    as_on_the_cpu(on_list, tc.values(r, 6051))
    as_on_the_cpu(with_feedback, tc.values(r, 5000))
    as_on_the_cpu(with_gradient, tc.values(r, 5000))


def carried_refusals(r: int, n: int) -> None:
    own: Any = {"carrier": "c10d", "group_name": WORLD}
    x = torch.ones(100, device="cuda")
    gloo = dist.new_group(backend="gloo")
    with pytest.raises(ValueError, match="gloo, which cannot gather CUDA tensors"):
        allreduce(x, carrier="c10d", group_name=gloo.group_name)
    with pytest.raises(InvalidArgument, match="gloo, which cannot gather CUDA tensors"):
        Exchange("caller", gloo, NEAREST, "c10d").mean(["x"], [x])
    with pytest.raises(TypeError, match="is not supported on GPUs"):
        allreduce(x, compressor="randk", density=0.05, **own)
    with pytest.raises(ValueError, match="tensors on cuda:0 and cpu"):
        tc.feedback(x, torch.zeros(100), 2, 64, **own)


def carried_on_streams(r: int, n: int) -> None:
    """Check that the steps follow earlier work of the current stream, and precede later work."""
    own: Any = {"carrier": "c10d", "group_name": WORLD}
    given = tc.values(r, NUMEL)
    want = allreduce(2 * given, rounding="nearest", **own)
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            x = late(given) * 2
            y = allreduce(x, rounding="nearest", **own)
            x.fill_(torch.nan)
            z = y + 0
        stream.synchronize()
        same(z, want, stream)


def carried_hook(r: int, n: int) -> None:
    # With the stand-in for a GPU both are results of CpuCarrier, because tensors stay on the CPU.
    # torch_ddp/carried_on_cuda.py tests CudaCarrier without a GPU.
    for config in (NEAREST, Config(bits=2, compressor="levels"), Config(bits=4)):
        hook_equals_the_cpus(r, config, carrier="c10d")


def carried_and_compiled(r: int, n: int) -> None:
    own: Any = {"carrier": "c10d", "group_name": WORLD}

    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * allreduce(2 * x.relu(), rounding="nearest", algorithm="sra", **own)

    function = torch.compile(twice, fullgraph=True)
    as_on_the_cpu(lambda x: (function if x.is_cuda else twice)(x), tc.values(r, 5000))


# ---- Ranks that fail, and groups that end --------------------------------------------------------


def memory_of_groups(r: int, n: int) -> None:
    """Check that GPU memory does not grow with the number of groups that have ended."""
    free = []
    for _ in range(5):
        group = dist.new_group()
        dist.all_reduce(torch.ones(9, device="cuda"), group=group)
        torch.cuda.synchronize()
        dist.destroy_process_group(group)
        dist.barrier()
        free.append(torch.cuda.mem_get_info()[0])  # of all ranks that share the GPU
        dist.barrier()
    # The memory of a group is freed when the next one connects. A rank's is at least 16 MiB.
    assert free[-1] > free[1] - (16 << 20), free


def fails_on_all(group: Any, numel: int) -> str:
    """Call on a group that is about to fail; check for NaN and return the next call's error."""
    x = torch.ones(numel, device="cuda")
    with contextlib.suppress(dist.DistBackendError):  # the last rank may notice it in the call
        dist.all_reduce(x, group=group)
    torch.cuda.synchronize()
    assert torch.isnan(x).all()
    with pytest.raises(dist.DistBackendError, match=CLOSED) as raised:
        dist.all_reduce(x, group=group)
    work = dist.all_reduce(torch.ones(9, device="cuda"), async_op=True)  # on another group
    work.wait()
    return str(raised.value)


def late_rank(r: int, n: int) -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=3))
    dist.all_reduce(torch.ones(9, device="cuda"), group=group)
    if r == 1:
        time.sleep(6)
        dist.all_reduce(torch.ones(9, device="cuda"))
    else:
        assert "rank 1" in fails_on_all(group, 5000)
    dist.barrier()


def mismatch(r: int, n: int) -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=20))
    dist.all_reduce(torch.ones(9, device="cuda"), group=group)
    fails_on_all(group, 5000 + min(r, 1))
    dist.barrier()


# --------------------------------------------------------------------------------------------------


def share_the_gpu() -> None:
    """Use gloo for everything outside the core: NCCL rejects ranks that share a GPU."""
    through_host.install()
    dist.is_nccl_available = lambda: False
    original = make._inner

    def inner(*arguments: Any) -> dict[str, Any]:
        made = original(*arguments)
        return {**made, "cuda": made["cpu"]}

    make._inner = inner


CHECKS: list[Callable[[int, int], None]] = [
    values,
    lists,
    several_devices,
    layouts,
    in_place,
    gradients,
    operators,
    exchanges,
    refused_exchanges,
    scattered_feedback,
    streams,
    waits,
    works,
    recorded,
    recording_refused,
    compiled,
    compiled_and_recorded,
    backend_calls,
    compressed_operations,
    compressed_exchanges,
    data_parallel,
    sharded,
    feedback,
    methods,
    carried,
    carried_refusals,
    carried_on_streams,
    carried_hook,
    carried_and_compiled,
    memory_of_groups,
    late_rank,
    mismatch,
]


def main() -> None:
    torch.cuda.set_device(0)
    tc.forget_compiled_graphs()
    share_the_gpu()
    dist.init_process_group("cgx", timeout=datetime.timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()

    def at_rest() -> None:
        torch.cuda.synchronize()
        dist.barrier()

    of_rank = {check.__name__: partial(check, rank, size) for check in CHECKS}
    checks.run(of_rank, after=at_rest)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
