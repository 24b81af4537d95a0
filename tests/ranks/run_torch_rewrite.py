"""Rank program for torchrun: compress_collectives() on all kinds of all-reduce in a graph.

    run_torch_rewrite.py SALT CHECK...

There are two groups: "over gloo" has no communicator, "over cgx" has one.
SALT: a text that is new in each run; it keeps cached graphs of earlier runs out.
"""

import itertools
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import checks
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from support import torch_cases as tc
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.parallel import DistributedDataParallel

import cgx_ops
from cgx_ops import Config
from cgx_ops.errors import InvalidArgument
from cgx_ops.planner import Plan
from cgx_ops.torch.graph.rewrite import NothingRewritten, compress_collectives

NEAREST = Config(bits=3, bucket_size=64, rounding="nearest", algorithm="sra")
SALT = [sys.argv[1]]
COMMUNICATOR: list[str] = []  # the name of a communicator of all ranks

Group = dist.ProcessGroup
Step = Callable[[torch.Tensor], Any]


class Count(CustomGraphPass):
    """User-defined pass that counts the native all-reduces in its graph."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.seen += sum("all_reduce" in str(node.target) for node in graph.nodes)

    def uuid(self) -> object:
        return SALT


def inputs(numel: int = 2000, dtype: torch.dtype = torch.float32, call: int = 0) -> Any:
    """Return every rank's values, and this rank's."""
    everyone = [tc.values(r, numel, dtype, call) for r in range(dist.get_world_size())]
    return everyone, everyone[dist.get_rank()].clone()


def expected(everyone: list[torch.Tensor], op: str = "sum", bits: int = 3) -> torch.Tensor:
    return tc.expected(everyone, bits, 64, op=op)


def compiled(function: Step, **options: Any) -> Step:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, **options)


@contextmanager
def warns(*texts: str) -> Iterator[None]:
    """Check that the block warns once, with these texts."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages = [str(w.message) for w in caught if w.category is NothingRewritten]
    assert len(messages) == (1 if texts else 0), messages
    for text in texts:
        assert text in messages[0], messages[0]


# ---- forms of an all-reduce ----------------------------------------------------------------------


def functional_collectives(group: Group) -> None:
    everyone, x = inputs()
    for op in ("sum", "avg"):

        def step(x: torch.Tensor, op: str = op) -> tuple[torch.Tensor, ...]:
            y = functional.all_reduce(2 * x, op, group)
            a, b = functional.all_reduce_coalesced([x + 1, x[:1300]], op, group)
            return y + 1, a * 2, b * 2

        with compress_collectives(NEAREST) as rewrite:
            y, a, b = compiled(step)(x)
        assert rewrite.counts == {"graphs": 1, "rewritten": 2}, rewrite.counts
        assert tc.same_bits(y, expected([2 * x for x in everyone], op) + 1)
        assert tc.same_bits(a, expected([x + 1 for x in everyone], op) * 2)
        assert tc.same_bits(b, expected([x[:1300] for x in everyone], op) * 2)


def compressors(group: Group) -> None:
    """Check that each compressor gives cgx_ops' result with either carrier."""
    _, x = inputs()
    ours = cgx_ops.Communicator.find(COMMUNICATOR[0])
    for config in (
        Config(bits=2, compressor="levels", rotation=32, bucket_size=64, algorithm="sra"),
        Config(compressor="topk", density=0.1, bucket_size=64, algorithm="sra"),
    ):

        def step(x: torch.Tensor) -> torch.Tensor:
            return functional.all_reduce(2 * x, "sum", group) + 1

        with compress_collectives(config) as rewrite:
            y = compiled(step)(x)
        assert rewrite.rewritten == 1, rewrite.counts
        want = ours.allreduce((2 * x).numpy(), "sum", config)
        assert tc.same_bits(y, torch.from_numpy(want) + 1), config


def in_place_and_half(group: Group) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        everyone, x = inputs(dtype=dtype)

        def step(x: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(x, group=group)
            return x + 1

        with compress_collectives(NEAREST) as rewrite:
            y = compiled(step)(x)
        assert rewrite.rewritten == 1
        want = expected(everyone)
        assert tc.same_bits(x, want), dtype
        assert tc.same_bits(y, want + 1), dtype


def distributed_tensor(group: Group) -> None:
    mesh = DeviceMesh.from_group(group, "cpu")
    everyone, x = inputs()

    def step(x: torch.Tensor) -> torch.Tensor:
        partial = DTensor.from_local(x, mesh, [Partial()], run_check=False)
        return partial.redistribute(mesh, [Replicate()]).to_local() * 2

    with compress_collectives(NEAREST) as rewrite:
        y = compiled(step)(x)
    assert rewrite.rewritten == 1, rewrite.counts
    assert tc.same_bits(y, expected(everyone) * 2)


def data_parallel(group: Group) -> None:
    """Compile DDP's forward and backward with its reducer in the graph.

    Torch fuses gradients by concatenation, in its own order. Values are small integers, so that a
    product has the same bits in any order of summation.
    """
    everyone, _ = inputs(32 * 40)
    batches = [x.reshape(32, 40).round() for x in everyone]
    world = len(everyone)
    with torch._dynamo.config.patch(optimize_ddp="python_reducer", compiled_autograd=True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(40, 64), torch.nn.Linear(64, 64))
        parameters = list(module.parameters())
        for parameter in parameters:
            parameter.data.mul_(16).round_()
        local = [torch.autograd.grad(module(b).sum(), parameters) for b in batches]
        model = DistributedDataParallel(module, process_group=group)

        @torch.compile
        def step(batch: torch.Tensor) -> None:
            model(batch).sum().backward()

        with compress_collectives(NEAREST) as rewrite:
            step(batches[dist.get_rank()])
    assert rewrite.rewritten == 1, rewrite.counts
    grads = [p.grad for p in parameters if p.grad is not None]
    orders = list(itertools.permutations(range(len(parameters))))
    wants = [
        expected([torch.cat([own[i].flatten() for i in order]) / world for own in local])
        for order in orders
    ]
    got = [torch.cat([grads[i].flatten() for i in order]) for order in orders]
    assert any(map(tc.same_bits, got, wants))
    inductor_config._fuse_ddp_communication = False  # DDP has set it permanently


def planned(group: Group) -> None:
    """Check that all-reduces of a group share a message, except one that needs another's result."""
    everyone, x = inputs()
    plan = Plan(("a", "b", "c", "d"), (2000, 1300, 1500, 1700), (4,) * 4, ((3,), (2, 1, 0)))

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        a = functional.all_reduce(2 * x, "sum", group) + 1
        b = functional.all_reduce(x[:1300] * 3, "sum", group) + 1
        d = functional.all_reduce(x[:1700] * 5, "sum", group) + 1
        c = functional.all_reduce(a[:1500] * 1, "sum", group) + 1
        return [a, b, c, d]

    with compress_collectives(NEAREST, plan=plan) as rewrite:
        results, (code,) = run_and_get_code(compiled(step), x)
    assert rewrite.rewritten == 4, rewrite.counts
    a = expected([2 * x for x in everyone]) + 1
    wants = [
        a, expected([x[:1300] * 3 for x in everyone]) + 1, expected([a[:1500]] * len(everyone)) + 1,
        expected([x[:1700] * 5 for x in everyone]) + 1,
    ]  # fmt: skip
    for y, want in zip(results, wants, strict=True):
        assert tc.same_bits(y, want)
    assert "_c10d_functional.all_reduce" not in code
    if not has_communicator(group):
        assert code.count("all_to_all_single.default(") == 3


# ---- noise, selection, other passes, caches ------------------------------------------------------


def noise(group: Group) -> None:
    """Check that two calls draw different noise, manual_seed repeats it, and ranks agree."""

    def step(x: torch.Tensor) -> torch.Tensor:
        twins = [functional.all_reduce(x * 1, "sum", group) for _ in range(2)]
        return torch.stack(twins)

    everyone, x = inputs()
    config = Config(bits=3, bucket_size=64, algorithm="sra")
    for grad in (False, True):
        with compress_collectives(config) as rewrite:
            call = compiled(step)
            torch.manual_seed(dist.get_rank())
            first = call(x.requires_grad_(grad)).detach()
        torch.manual_seed(dist.get_rank())
        assert tc.same_bits(call(x).detach(), first)
        # Torch merges equal all-reduces of a training graph before our passes run.
        assert rewrite.rewritten == (1 if tc.same_bits(first[0], first[1]) else 2)
        seeds = [tc.drawn_seeds(r, 2) for r in range(len(everyone))]
        wants = [
            tc.expected(everyone, 3, 64, rounding="stochastic", seeds=[s[i] for s in seeds])
            for i in range(2)
        ]
        for y in first:
            assert any(tc.same_bits(y, want) for want in wants), "not the oracle's noise"


def selection(group: Group) -> None:
    """Check that skipped all-reduces stay exact and are counted; a warning if all are skipped."""

    def step(x: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return functional.all_reduce(x * 1, op, group) * 1

    _, x = inputs()
    name = group.group_name
    cases: list[tuple[dict[str, Any], Any, str]] = [
        ({"min_numel": 2001}, {}, "1 of fewer than min_numel=2001 elements"),
        ({"groups": ["7"]}, {}, f"1 of group '{name}' is not one of groups=['7']"),
        ({"dtypes": [torch.float16]}, {}, "1 of torch.float32 is not one of dtypes="),
        ({}, {"op": "max"}, "1 of op 'max'; only sum and avg can be compressed"),
    ]
    for options, arguments, text in cases:
        with (
            warns("no all-reduce of 1 compiled graphs matched", text),
            compress_collectives(NEAREST, **options) as rewrite,
        ):
            y = compiled(step)(x, **arguments)  # type: ignore[call-arg]
        assert rewrite.rewritten == 0
        assert torch.equal(y, tc.allreduce(x, 32, 512, arguments.get("op", "sum"), name,
                                           carrier="c10d"))  # fmt: skip
    with warns(), compress_collectives(NEAREST, groups=[group], min_numel=2000) as rewrite:
        compiled(step)(x)
    assert rewrite.rewritten == 1
    with warns("a dynamic size"), compress_collectives(NEAREST):
        torch._dynamo.reset()
        torch.compile(step, fullgraph=True, dynamic=True)(x)


def warns_with_reason(group: Group) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * 1, "sum", group) * 1

    _, x = inputs()
    call = compiled(step)
    call(x)
    with (
        warns("no graph was compiled in the block", "torch._dynamo.reset()", "python_reducer"),
        compress_collectives(NEAREST),
    ):
        call(x)
    model = DistributedDataParallel(torch.nn.Linear(64, 64), process_group=group)
    with (
        warns("none with an all-reduce", "optimize_ddp", "cgx_ops.torch.ddp"),
        compress_collectives(NEAREST),
    ):
        torch.compile(lambda x: model(x * 2).sum())(torch.ones(2, 64)).backward()
    with warns():
        try:
            with compress_collectives(NEAREST):
                raise KeyError
        except KeyError:
            pass
    bad_options: list[dict[str, Any]]
    bad_options = [{"dtypes": [torch.float64]}, {"min_numel": -1}, {"groups": []}]
    for bad in bad_options:
        try:
            compress_collectives(**bad)
        except InvalidArgument as error:
            assert next(iter(bad)) in str(error)
        else:
            raise AssertionError(f"{bad}: not refused")


def as_an_option_and_chained(group: Group) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * 1, "sum", group) * 1

    everyone, x = inputs()
    rewrite = compress_collectives(NEAREST)
    call = compiled(step, options={"post_grad_custom_post_pass": rewrite})
    assert tc.same_bits(call(x), expected(everyone))
    assert rewrite.rewritten == 1
    users = Count()
    takes_lists = hasattr(custom_graph_pass, "get_custom_graph_passes")  # torch 2.11 does not
    for before in (users, *([[users]] if takes_lists else [])):
        with inductor_config.patch(post_grad_custom_post_pass=before):
            with compress_collectives(NEAREST) as rewrite:
                assert tc.same_bits(compiled(step)(x), expected(everyone))
            assert inductor_config.post_grad_custom_post_pass == before
        assert rewrite.rewritten == 1
    assert users.seen == 1 + takes_lists, (
        "the user's pass must run first and see torch's all-reduce"
    )
    outer, inner = (compress_collectives(NEAREST, min_numel=n) for n in (5000, 0))
    with warns("none with an all-reduce"), outer, inner:
        compiled(step)(torch.cat([x] * 3))
    assert (outer.rewritten, inner.rewritten) == (1, 0), "the outer block must rewrite it"


def caches(group: Group) -> None:
    """Check that only equal settings find a cached graph, and that it counts as rewritten."""

    def step(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * 1, "sum", group) * 1

    everyone, x = inputs()
    with (
        inductor_config.patch(fx_graph_cache=True, post_grad_custom_post_pass=Count()),
        functorch_config.patch(enable_autograd_cache=True),
    ):
        for bits in (3, 5, 3, 32, 5):
            config = Config(bits=bits, bucket_size=64, rounding="nearest", algorithm="sra")
            with compress_collectives(config) as rewrite:
                y = compiled(step)(x)
            assert rewrite.rewritten == 1, (bits, rewrite.counts)
            assert tc.same_bits(y, expected(everyone, bits=bits)), bits
            dist.barrier(group)
        y = compiled(step)(x)
        assert torch.equal(y, expected(everyone, bits=32)), "must be torch's exact all-reduce"


def generated_code(group: Group) -> None:
    """Check the generated code: one inductor collective if native, two exchanges if carried."""

    def step(x: torch.Tensor) -> torch.Tensor:
        y = functional.all_reduce(x * 2, "sum", group)
        return (x @ x.t()).sum() + y

    x = inputs()[1].reshape(40, 50)
    with compress_collectives(NEAREST):
        _, (code,) = run_and_get_code(compiled(step), x)
    if has_communicator(group):
        assert code.count("all_reduce_start.borrow(") == 1
        assert code.count("wait_tensor.default(") == 1
    else:
        steps = ("encode", "all_to_all_single", "reduce", "all_gather_into_tensor", "decode")
        places = [code.index(f"{what}.default(") for what in steps]
        assert places == sorted(places)
        assert code.count("wait_tensor.default(") == 2
    assert "_c10d_functional.all_reduce" not in code


def overlap(group: Group) -> None:
    """Check that inductor's passes put independent products between start and wait."""

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        y = functional.all_reduce(x * 2, "sum", group)
        return [y + 1, *(torch.mm(x + i, x.t()) for i in range(6))]

    with (
        inductor_config.patch(
            reorder_for_compute_comm_overlap=True,
            reorder_for_compute_comm_overlap_passes=["raise_comms", "sink_waits"],
        ),
        compress_collectives(NEAREST),
    ):
        _, (code,) = run_and_get_code(compiled(step), inputs(256 * 256)[1].reshape(256, 256))
    start = "all_reduce_start.borrow(" if has_communicator(group) else "all_to_all_single.default("
    places = [code.index(start)]
    places += [match.start() for match in re.finditer(r"extern_kernels\.mm\(", code)]
    places += [code.index("wait_tensor.default(")]
    assert len(places) == 8
    assert places == sorted(places), (group.group_name, places)


def has_communicator(group: Group) -> bool:
    return group.group_name != dist.group.WORLD.group_name  # type: ignore[union-attr]


CHECKS = [functional_collectives, in_place_and_half, distributed_tensor, noise, selection]
CHECKS += [
    as_an_option_and_chained,
    caches,
    warns_with_reason,
    generated_code,
    overlap,
    data_parallel,
]
CHECKS += [compressors, planned]


def main() -> None:
    dist.init_process_group("gloo")
    tc.forget_compiled_graphs()
    world = dist.group.WORLD
    other = dist.new_group()
    assert isinstance(other, Group) and world is not None

    def allgather(mine: bytes) -> list[bytes]:
        everyone: list[Any] = [None] * other.size()
        dist.all_gather_object(everyone, mine, other)
        return everyone

    name = other.group_name
    cgx_ops.Communicator.create(other.rank(), other.size(), allgather, name, timeout=90)
    COMMUNICATOR.append(name)
    checks.run(
        {
            f"{check.__name__} over {carrier}": partial(check, group)
            for check in CHECKS
            for carrier, group in (("gloo", world), ("cgx", other))
        },
        sys.argv[2:],
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
