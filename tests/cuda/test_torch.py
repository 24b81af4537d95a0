"""torch.ops.cgx and the backend "cgx" on CUDA tensors.

Without a GPU: which operators have kernels, and shapes, graphs and errors with fake CUDA tensors.
With a GPU, or a stand-in for it: the checks of the rank program.
"""

import ast
import datetime
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import torch_cases as tc
from support.cuda_cases import WIRES, needs_torch_gpu, on_one_gpu, without_gpu
from support.rank_checks import Launch, RankCheck, listed, rank_checks
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from cgx_ops import Communicator, Config, _torch_ops
from cgx_ops.errors import InvalidArgument, Unsupported
from cgx_ops.torch.ddp import bucket as ddp_bucket
from cgx_ops.torch.graph import rewrite, work

CUDA = torch.device("cuda:0")
REDUCTIONS = [
    "quantized_all_reduce",
    "quantized_all_reduce_start",
    "quantized_all_reduce_start.borrow",
    "quantized_all_reduce_coalesced",
    "quantized_all_reduce_coalesced_start",
]
STEPS = ["carried_encode", "carried_reduce", "carried_decode"]
CARRIED = ["carried", "carried_refusals", "carried_on_streams", "carried_hook"]

# ---- With a GPU ----------------------------------------------------------------------------------

PROGRAM = "run_cuda_torch.py"
NAMES = listed(PROGRAM)
CASES = ["values", "lists", "several_devices", "layouts", "in_place", "gradients", "streams"]
CASES += ["waits", "works", "backend_calls", "compressed_operations", "data_parallel", "sharded"]
CASES += ["operators", "feedback", "methods", "exchanges", "refused_exchanges"]
CASES += ["scattered_feedback", "compressed_exchanges", "memory_of_groups"]


def on(n: int, wire: str, *names: str, timeout: float = 120) -> Launch:
    return Launch(n, PROGRAM, *names, names=NAMES, by=on_one_gpu, wire=wire, timeout=timeout)


def test_all_checks_are_listed() -> None:
    program = ast.parse((Path(__file__).parents[1] / "ranks" / PROGRAM).read_text())
    functions = [each for each in program.body if isinstance(each, ast.FunctionDef)]
    checks = {f.name for f in functions if [a.arg for a in f.args.args] == ["r", "n"]}
    assert checks <= set(NAMES)


@needs_torch_gpu
@rank_checks(
    *(on(n, wire, *CASES) for n in (4, 2) for wire in WIRES),
    on(2, "SHM", "recorded"),
    on(2, "MPI", "recording_refused"),
    on(2, "SHM", "compiled", "compiled_and_recorded"),
    *(on(3, wire, "late_rank", "mismatch") for wire in WIRES),
    *(on(n, "SHM", *CARRIED) for n in (2, 3)),
    on(2, "SHM", "carried_and_compiled"),
)
def test_on_a_gpu(check: RankCheck) -> None:
    check.passes()


# ---- With a stand-in for a GPU: support/no_gpu.py ------------------------------------------------

# Checks that need a GPU, and why.
NEED_GPU = {
    "several_devices": "all tensors are on the CPU",
    "waits": "calls have ended when they return",
    "recording_refused": "graphs are always recorded",
    "carried_refusals": "the CPU supports all compressors",
    "memory_of_groups": "the CPU has no such memory",
    "late_rank": "operators raise at the call",
    "mismatch": "operators raise at the call",
}
ELSEWHERE = [name for name in NAMES if name not in NEED_GPU]


@rank_checks(Launch(2, PROGRAM, *ELSEWHERE, names=NAMES, by=without_gpu))
def test_with_a_stand_in(check: RankCheck) -> None:
    check.passes()


# ---- Without a GPU -------------------------------------------------------------------------------


@pytest.fixture
def fake() -> Iterator[Callable[..., torch.Tensor]]:
    """Return a function that creates fake CUDA tensors, which need no GPU."""
    with FakeTensorMode():
        yield lambda *size, **options: torch.empty(*size, **{"device": CUDA, **options})


def test_which_operators_have_kernels() -> None:
    def has_kernel(name: str) -> bool:
        return torch._C._dispatch_has_kernel_for_dispatch_key(f"cgx::{name}", "CUDA")

    assert all(map(has_kernel, [*REDUCTIONS, *STEPS, "draw_seed"]))


def test_operators_are_allowed_in_cuda_graphs() -> None:
    for name in REDUCTIONS:
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.cgx, packet), overload or "default")
        assert torch.Tag.cudagraph_unsafe not in operator.tags


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_results_are_on_the_device_of_the_input(
    fake: Callable[..., torch.Tensor], dtype: Any
) -> None:
    x = fake(20, 30, dtype=dtype).t()
    y = tc.allreduce(x, 4)
    assert (y.device, y.dtype, y.shape) == (CUDA, dtype, x.shape) and y.is_contiguous()
    a, b = tc.coalesced([x, fake(3, dtype=dtype)], 4)
    assert (a.device, b.device) == (CUDA, CUDA)
    assert (a.shape, b.shape) == ((30, 20), (3,))
    tc.allreduce_(x)
    assert torch.ops.cgx.draw_seed(fake(0)).device == CUDA


def test_cpu_tensors_stay_on_the_cpu(fake: Callable[..., torch.Tensor]) -> None:
    assert tc.allreduce(fake(20, device="cpu")).device.type == "cpu"


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda make: tc.allreduce(make(9), 9), ValueError, "bits is 9"),
        (lambda make: tc.allreduce(make(9, dtype=torch.float64)), TypeError, "Double"),
        (
            lambda make: tc.coalesced([make(9), make(9, device="cpu")]),
            ValueError,
            "tensors on cuda:0 and cpu; all tensors must be on one device",
        ),
        (
            lambda make: tc.coalesced([make(9), make(9, device="cuda:1")]),
            ValueError,
            "tensors on cuda:0 and cuda:1",
        ),
        (lambda make: tc.allreduce(make(9, device="xpu")), TypeError, "CPU and CUDA tensors are"),
    ],
)
def test_invalid_calls(
    fake: Callable[..., torch.Tensor],
    call: Callable[[Callable[..., torch.Tensor]], object],
    error: type[Exception],
    words: str,
) -> None:
    with pytest.raises(error, match=words):
        call(fake)


def test_seed_must_be_on_a_readable_device() -> None:
    options = (tc.packed(Config()), "")
    seed = torch.empty((), dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match=r"seed is on meta, x on cpu; use seed.cpu\(\)"):
        torch.ops.cgx.quantized_all_reduce(torch.ones(20), seed, *options)


def targets(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def test_seeds_are_drawn_on_the_gpu_in_graphs(fake: Callable[..., torch.Tensor]) -> None:
    """A constant seed would repeat at every replay of a recorded graph."""
    graph = make_fx(lambda x: 2 * tc.allreduce(x), tracing_mode="fake")(fake(20)).graph
    found = targets(graph)
    wanted = ["draw_seed.default", "quantized_all_reduce_start.default", "wait_tensor.default"]
    assert [name.split(".", 1)[1] for name in found if name.startswith(("cgx", "_c10d"))] == wanted
    seeds = [node for node in graph.nodes if "draw_seed" in str(node.target)]
    assert seeds[0].meta["val"].device == CUDA
    graph = make_fx(lambda x: 2 * tc.allreduce(x), tracing_mode="fake")(fake(20, device="cpu"))
    seeds = [node for node in graph.graph.nodes if "draw_seed" in str(node.target)]
    assert seeds[0].meta["val"].device.type == "cpu"


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return tc.allreduce(2 * x, 4, rounding="nearest") + 1


def test_export_keeps_the_operator(fake: Callable[..., torch.Tensor]) -> None:
    exported = torch.export.export(Model(), (fake(20),))
    assert "cgx.quantized_allreduce.default" in targets(exported.graph)
    lowered = exported.run_decompositions()
    assert "cgx.quantized_all_reduce_start.default" in targets(lowered.graph)
    results = [node for node in lowered.graph.nodes if node.op == "call_function"]
    assert all(node.meta["val"].device == CUDA for node in results)


# ---- carrier="c10d" ------------------------------------------------------------------------------


@pytest.fixture
def three_ranks() -> Iterator[None]:
    """Make a default group of three ranks, of which this is rank 1. It sends nothing."""
    dist.init_process_group("fake", rank=1, world_size=3, store=FakeStore())
    yield
    dist.destroy_process_group()


def carried_graph(x: torch.Tensor, **options: Any) -> dict[str, torch.fx.Node]:
    """Return the calls of a carried allreduce of fake tensors, by the operator's name."""

    def reduce(x: torch.Tensor) -> torch.Tensor:
        return tc.allreduce(x, **tc.keywords(carrier="c10d", bits=4, bucket_size=64, **options))

    nodes = make_fx(reduce)(x).graph.nodes
    return {str(node.target).split(".")[1]: node for node in nodes if "." in str(node.target)}


@pytest.mark.usefixtures("three_ranks")
def test_steps_of_a_carried_allreduce(fake: Callable[..., torch.Tensor]) -> None:
    """All steps are on the GPU. Only GPUs send a message to themselves (cgx.h, section 5)."""
    graphs = [carried_graph(fake(5000, device=at), algorithm="sra") for at in (CUDA, "cpu")]
    calls = [*STEPS[:2], "all_to_all_single", "all_gather_into_tensor", STEPS[2], "draw_seed"]
    for graph, device in zip(graphs, (CUDA, torch.device("cpu")), strict=True):
        for name in calls:
            value = graph[name].meta["val"]
            values = value if isinstance(value, list) else [value]
            assert {each.device for each in values} == {device}, name
    to, to_on_cpu = (list(graph["all_to_all_single"].args[2]) for graph in graphs)  # type: ignore
    came, came_on_cpu = (list(graph["all_to_all_single"].args[1]) for graph in graphs)  # type: ignore
    assert to[1] == came[1] == came[0] == came[2] > 0
    to[1] = came[1] = 0
    assert (to, came) == (to_on_cpu, came_on_cpu)


@pytest.mark.usefixtures("three_ranks")
@pytest.mark.parametrize("compressor", ["randk"])
def test_compressors_without_carried_steps(
    fake: Callable[..., torch.Tensor], compressor: str
) -> None:
    with pytest.raises(TypeError, match=f"compressor='{compressor}' is not supported on GPUs"):
        carried_graph(fake(5000), compressor=compressor, density=0.01)


# ---- Builds with and without CUDA ----------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["without CUDA", "with CUDA"])
def built(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Simulate a libcgx built with or without CUDA."""
    for module in (work, ddp_bucket, rewrite):
        monkeypatch.setattr(
            module, "devices", lambda: ("cpu", "cuda") if request.param else ("cpu",)
        )
    return request.param


@pytest.fixture
def comm() -> Iterator[Communicator]:
    (made,) = Communicator.local(1)
    yield made
    made.close()


def test_tensors_that_the_backend_passes_to_the_core(
    fake: Callable[..., torch.Tensor], comm: Communicator, built: bool
) -> None:
    """The error shows the path: fake tensors have no stream, and there is no inner backend."""
    if built and torch.version.cuda:
        pytest.skip("tested with a GPU above")
    how = _torch_ops.Compression(str(Config(rounding="nearest")), 0)
    options = _torch_ops.Options(how, _torch_ops.Automatic.GRADIENTS, datetime.timedelta(seconds=5))
    backend: Any = _torch_ops.Backend(0, 1, comm.id, {}, built, options, lambda *_: backend)
    to_core, to_inner = "not linked with support for cuda", "cannot move tensors on cuda:0"
    x, reductions = fake(600), dist.ReduceOp
    for tensor, op, words in (
        (x, reductions.SUM, to_core if built else to_inner),
        (x.t(), reductions.AVG, to_core if built else to_inner),
        (x.double(), reductions.SUM, to_inner),
        (x, reductions.BAND, to_inner),
    ):
        call: Any = dist.AllreduceOptions()
        call.reduceOp = op
        with pytest.raises(RuntimeError, match=words):
            backend.allreduce([tensor], call)
    if built:
        with pytest.raises(ValueError, match="tensors on cuda:0 and cuda:1; all tensors must"):
            backend.allreduce_coalesced([x, fake(600, device="cuda:1")])


def test_messages_of_a_batch_are_one_group(
    fake: Callable[..., torch.Tensor], comm: Communicator
) -> None:
    """Another backend "cgx" is in place of NCCL: it shows whether a group was started and ended."""

    def made(comm: Communicator, inner: dict[str, Any]) -> Any:
        how = _torch_ops.Compression(str(Config()), 0)
        timeout = datetime.timedelta(seconds=5)
        options = _torch_ops.Options(how, _torch_ops.Automatic.GRADIENTS, timeout)
        backend: Any = _torch_ops.Backend(0, 2, comm.id, inner, False, options, lambda *_: backend)
        return backend

    (other,) = Communicator.local(1)
    nothing = FakeProcessGroup._create_internal(0, 2)
    nccl = made(other, {"cuda": nothing})
    backend, x = made(comm, {"cpu": nothing, "cuda": nccl}), fake(600)
    assert backend.supports_coalescing
    assert not made(Communicator.local(1)[0], {"cpu": nothing}).supports_coalescing
    outside = pytest.raises(ValueError, match="call startCoalescing first")

    def exchange() -> None:
        backend.send([x], 1, 0)
        backend.recv([x], 1, 0)

    exchange()
    with outside:
        nccl._end_coalescing()
    backend._start_coalescing()
    backend._end_coalescing().wait()
    with outside:
        nccl._end_coalescing()
    backend._start_coalescing()
    exchange()
    backend._end_coalescing().wait()
    with outside:
        nccl._end_coalescing()
    backend._start_coalescing()
    exchange()
    nccl._end_coalescing()  # the group was open
    nccl._start_coalescing()
    backend._start_coalescing()  # as after an exception
    with outside:
        nccl._end_coalescing()
    assert backend._end_coalescing() is not None


def test_start_without_cuda_in_the_build(
    fake: Callable[..., torch.Tensor], comm: Communicator, built: bool
) -> None:
    x = fake(600)
    if not built:
        with pytest.raises(Unsupported, match="on cuda:0; it must be a dense tensor on the CPU"):
            work.start(comm, "allreduce", x, x, Config())
    else:
        with pytest.raises(InvalidArgument, match="input is on cuda:0, output on cpu"):
            work.start(comm, "allreduce", x, fake(600, device="cpu"), Config())


def test_hook_error_without_cuda_in_the_build(
    fake: Callable[..., torch.Tensor], built: bool
) -> None:
    problem = ddp_bucket.unsupported(fake(600), [])
    assert problem == "" if built else "build cgx_ops with CUDA" in problem
    assert ddp_bucket.unsupported(fake(600, device="cpu"), []) == ""


def test_rewritten_tensors(
    fake: Callable[..., torch.Tensor], comm: Communicator, built: bool
) -> None:
    choice = rewrite.Choice(None, (torch.float32,), 0)
    words = "tensors on cuda, which this build of cgx_ops does not support"
    for group in (comm.name, "some group"):
        assert choice.refusal([fake(600)], "sum", group) == (None if built else words)
    several = [fake(600), fake(600, device="cuda:1")]
    assert choice.refusal(several, "sum", comm.name) == "tensors on several devices in one call"


def test_all_reduces_over_gloo_are_not_rewritten(
    fake: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = rewrite.Choice(None, (torch.float32,), 1)
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        group: Any = dist.group.WORLD
        on_gpu, on_cpu = [fake(5000)], [fake(5000, device="cpu")]
        assert choice.refusal(on_gpu, "sum", group.group_name) is None  # nothing is gathered
        monkeypatch.setattr(type(group), "size", lambda _: 2)
        refusal = choice.refusal(on_gpu, "sum", group.group_name)
        assert refusal == "tensors on cuda:0, which gloo cannot gather"
        assert choice.refusal(on_cpu, "sum", group.group_name) is None
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()
