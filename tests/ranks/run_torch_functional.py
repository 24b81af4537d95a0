"""Rank program: cgx_ops.torch.reduce_scatter, all_gather, all_reduce and compress_grads.

    torchrun --nproc-per-node 4 run_torch_functional.py

Compares results and gradients with the oracle, over groups of 1 to 4 ranks, and compiled
functions with eager ones.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import checks
import numpy as np
import reference
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from support import torch_cases as tc
from torch.distributed.device_mesh import init_device_mesh

from cgx_ops import Config, Rules
from cgx_ops.torch import all_gather, all_reduce, compress_grads, reduce_scatter
from cgx_ops.torch.backend import groups

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = (0, 1, 17, 513)
NEAREST = Config(4, 64, "nearest", "sra")


class Group:
    """The ranks 0 to size - 1, and their first seeds after manual_seed(rank)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.seeds = [tc.drawn_seeds(rank)[0] for rank in range(self.size)]

    def inputs(self, numel: int, dtype: torch.dtype = torch.float32, call: int = 0) -> list[Any]:
        return [tc.values(rank, numel, dtype, call) for rank in range(self.size)]


def scattered(xs: Sequence[torch.Tensor], config: Config, **options: Any) -> list[torch.Tensor]:
    """Return each rank's block, computed by the oracle."""
    segment = reference.Segment(0, len(xs[0]) // len(xs), config.bits, config.bucket_size)  # pyright: ignore[reportArgumentType]
    return list(
        map(
            tc.from_numpy,
            reference.reduce_scatter(list(map(tc.to_numpy, xs)), [segment], **options),
        )
    )


def gathered(xs: Sequence[torch.Tensor], config: Config, **options: Any) -> torch.Tensor:
    """Return the gathered values, computed by the oracle."""
    segment = reference.Segment(0, len(xs[0]), config.bits, config.bucket_size)  # pyright: ignore[reportArgumentType]
    return tc.from_numpy(
        np.asarray(reference.all_gather(list(map(tc.to_numpy, xs)), [segment], **options))
    )


# ---- values --------------------------------------------------------------------------------------


def values(group: Group) -> None:
    for numel in SIZES:
        for dtype in DTYPES:
            for config in (NEAREST, Config(3, 64, "stochastic"), Config(32)):
                rounding = config.rounding or "nearest"
                options: dict[str, Any] = {"rounding": rounding, "seeds": group.seeds}
                case = group.size, numel, dtype, config
                xs = group.inputs(numel * group.size, dtype)
                torch.manual_seed(group.rank)
                op = "avg" if config is NEAREST else "sum"
                y = reduce_scatter(xs[group.rank], op, config=config, group=group.group)
                want = scattered(xs, config, op=op, **options)[group.rank]
                assert tc.same_bits(y, want), case

                xs = group.inputs(numel, dtype, call=1)
                torch.manual_seed(group.rank)
                y = all_gather(xs[group.rank], config=config, group=group.group)
                assert tc.same_bits(y, gathered(xs, config, **options)), case


def shapes(group: Group) -> None:
    """Test strided tensors, a scalar, and keywords that override a config."""
    xs = [x.reshape(30, 40 * group.size).t() for x in group.inputs(1200 * group.size)]
    y = reduce_scatter(xs[group.rank], config=NEAREST, bits=8, group=group.group)
    assert y.shape == (40, 30) and y.is_contiguous()
    want = scattered([x.flatten() for x in xs], Config(8, 64))[group.rank]
    assert tc.same_bits(y.flatten(), want)
    y = all_gather(xs[group.rank], config=NEAREST, bits=8, group=group.group)
    assert y.shape == (40 * group.size**2, 30)
    assert tc.same_bits(y.flatten(), gathered([x.flatten() for x in xs], Config(8, 64)))
    number = torch.tensor(float(group.rank), requires_grad=True)
    y = all_gather(number, group=group.group)
    assert y.tolist() == list(range(group.size))
    y.sum().backward()
    assert number.grad is not None and number.grad.shape == ()


def residuals(group: Group) -> None:
    """Compare two steps with numpy."""
    comm = groups.communicator_of(group.group)
    for dtype in DTYPES:
        kept = tc.values(group.rank, 700 * group.size, dtype, call=9) / 8
        array = tc.to_numpy(kept).copy()
        for step in range(2):
            x = tc.values(group.rank, 700 * group.size, dtype, call=step)
            config = Config(2, 64, "nearest")
            y, kept = reduce_scatter(x, "avg", config=config, group=group.group, residual=kept)
            want = comm.reduce_scatter(tc.to_numpy(x), "avg", config, residual=array)
            assert tc.to_numpy(y).tobytes() == want.tobytes(), (group.size, dtype, step)
            assert tc.to_numpy(kept).tobytes() == array.tobytes(), (group.size, dtype, step)


# ---- gradients -----------------------------------------------------------------------------------


def gradients(group: Group) -> None:
    """Check that reduce_scatter and all_gather are each other's gradient, equally compressed."""
    upward = group.inputs(600 * group.size, call=1)
    blocks = group.inputs(600, call=2)
    for op in ("sum", "avg"):
        x = tc.values(group.rank, 600 * group.size).requires_grad_()
        reduce_scatter(x, op, config=NEAREST, group=group.group).backward(blocks[group.rank])
        divisor = group.size if op == "avg" else 1
        want = gathered([each / divisor for each in blocks], NEAREST)
        assert x.grad is not None and tc.same_bits(x.grad, want), (group.size, op)
    x = tc.values(group.rank, 600).requires_grad_()
    all_gather(x, config=NEAREST, group=group.group).backward(upward[group.rank])
    want = scattered(upward, NEAREST)[group.rank]
    assert x.grad is not None and tc.same_bits(x.grad, want), group.size


def gradients_match_torch(group: Group) -> None:
    """Compare 32-bit gradients with torch's: residuals, second derivatives.

    The gradient of the residual is that of x.
    """

    def through(function: Callable[[torch.Tensor], torch.Tensor], numel: int) -> list[torch.Tensor]:
        x = tc.values(group.rank, numel).requires_grad_()
        y = function(x)
        (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return [y.detach(), first.detach(), second]

    n, where = group.size, group.group
    pairs: list[tuple[Any, Any, int]] = [
        (
            lambda x: reduce_scatter(x, bits=32, group=where),
            lambda x: functional.reduce_scatter_tensor_autograd(x, "sum", 0, where),
            60 * n,
        ),
        (
            lambda x: reduce_scatter(x, "avg", bits=32, group=where),
            lambda x: functional.reduce_scatter_tensor_autograd(x, "sum", 0, where) / n,
            60 * n,
        ),
        (
            lambda x: all_gather(x, bits=32, group=where),
            lambda x: functional.all_gather_tensor_autograd(x, 0, where),
            60,
        ),
    ]
    for ours, torchs, numel in pairs:
        for got, want in zip(through(ours, numel), through(torchs, numel), strict=True):
            torch.testing.assert_close(got, want)
    x, e = (torch.ones(8 * n, requires_grad=True) for _ in range(2))
    y, new = reduce_scatter(x, config=Config(8, 8, "nearest"), group=where, residual=e)
    assert not new.requires_grad
    y.sum().backward()
    assert x.grad is not None and e.grad is not None and torch.equal(x.grad, e.grad)


# ---- compress_grads ------------------------------------------------------------------------------


def compressed_gradients(group: Group) -> None:
    """Check one message per dtype and config, exact vectors, names in dicts, lists and tensors."""
    shapes = {"head.weight": (30, 40), "weight": (20, 50), "bias": (50,), "half": (10, 20)}
    upward = {
        name: [tc.values(r, int(np.prod(shape)), call=i) for r in range(group.size)]
        for i, (name, shape) in enumerate(shapes.items())
    }
    params = {name: torch.zeros(shape, requires_grad=True) for name, shape in shapes.items()}
    params["half"] = torch.zeros(shapes["half"], dtype=torch.float16, requires_grad=True)
    params["fixed"] = torch.zeros(3, dtype=torch.int64)
    comm = groups.communicator_of(group.group)
    before = comm.collectives
    used = compress_grads(params, config=NEAREST, rules=Rules([("head", 8)]), group=group.group)
    assert list(used) == list(params) and used["fixed"] is params["fixed"]
    loss = sum(
        (used[name] * upward[name][group.rank].reshape(shape)).sum()
        for name, shape in shapes.items()
    )
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    assert comm.collectives == before + 4
    for name, bits in (("head.weight", 8), ("weight", 4), ("bias", 32)):
        got = params[name].grad
        want = tc.expected(upward[name], bits, 64, op="avg").reshape(shapes[name])
        assert got is not None and tc.same_bits(got, want), (group.size, name)
    assert params["half"].grad is not None and params["half"].grad.dtype == torch.float16

    tensor = torch.zeros(40, 30, requires_grad=True)
    unused = torch.zeros(9, requires_grad=True)
    for carrier in ("native", "c10d"):
        first, second = compress_grads(
            [tensor, unused], op="sum", config=NEAREST, group=group.group, carrier=carrier
        )
        alone = compress_grads(tensor, op="sum", config=NEAREST, group=group.group)
        assert second.shape == unused.shape
        for each in (first, alone):
            tensor.grad = None
            (each * upward["head.weight"][group.rank].reshape(40, 30)).sum().backward()
            want = tc.expected(upward["head.weight"], 4, 64).reshape(40, 30)
            assert tensor.grad is not None and tc.same_bits(tensor.grad, want), carrier
    with torch.no_grad():
        assert compress_grads(tensor, group=group.group) is tensor


# ---- compilers -----------------------------------------------------------------------------------

GLOBAL = Config(3, 64, "nearest")


def all_three(x: torch.Tensor, config: Config, group: str) -> torch.Tensor:
    """Call each verb, with each form of a config."""
    y = all_reduce(2 * x.relu(), "avg", config=config, group=group)
    y = reduce_scatter(2 * y, config=GLOBAL, group=group)
    y = all_gather(2 * y, config=Config(bits=8, rounding="nearest"), group=group)
    return 2 * reduce_scatter(y, config=config, bits=2, group=group)


def with_residuals(x: torch.Tensor, e: torch.Tensor, config: Config, group: str) -> Any:
    y, new = reduce_scatter(2 * x, "avg", config=config, group=group, residual=e)
    return 2 * y, 2 * new


def trained(params: dict[str, torch.Tensor], config: Config, group: str) -> torch.Tensor:
    used = compress_grads(params, config=config, rules=Rules([("b", 8)]), group=group)
    return (used["a"] * 2 + used["b"]).square().sum()


def compiled(group: Group) -> None:
    name = group.group.group_name
    for config in (NEAREST, Config(4, 64, "stochastic")):
        results = []
        for how in (all_three, torch.compile(all_three, fullgraph=True)):
            torch.manual_seed(group.rank)
            x = tc.values(group.rank, 512 * group.size).requires_grad_()
            y = how(x, config, name)
            y.backward(tc.values(group.rank, 512, call=1))
            results.append([y.detach(), x.grad])
        assert all(map(tc.same_bits, *results)), config
    x, e = tc.values(group.rank, 512 * group.size), tc.values(group.rank, 512 * group.size, call=2)
    want = with_residuals(x, e, NEAREST, name)
    got = torch.compile(with_residuals, fullgraph=True)(x, e, NEAREST, name)
    assert all(map(tc.same_bits, got, want))


def compiled_gradients(group: Group) -> None:
    results = []
    for how in (trained, torch.compile(trained, fullgraph=True)):
        params = {
            key: tc.values(group.rank, 600, call=i).reshape(20, 30).requires_grad_()
            for i, key in enumerate("ab")
        }
        how(params, NEAREST, group.group.group_name).backward()
        results.append([x.grad for x in params.values()])
    assert all(map(tc.same_bits, *results))


def compiled_with_group_argument(group: Group) -> None:
    """Compile with a process group argument, str(config) in the graph, and changing configs."""

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x: torch.Tensor, config: Config, where: Any) -> tuple[torch.Tensor, str]:
        return all_gather(x, config=config, group=where), str(config)

    x = tc.values(group.rank, 100)
    for config in (NEAREST, Config(2, 64, "nearest")):
        y, text = step(x, config, group.group)
        assert text == str(config)
        assert tc.same_bits(y, all_gather(x, config=config, group=group.group))


# ---- groups, bad calls ---------------------------------------------------------------------------


@contextmanager
def refused(kind: type[Exception], *words: str) -> Any:
    try:
        yield
    except kind as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(f"not refused: {words}")


def group_forms() -> None:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("data",))
    world = dist.group.WORLD
    assert world is not None
    for group in (None, world, world.group_name, mesh):
        assert all_gather(torch.ones(1), group=group).tolist() == [1.0] * size
        assert all_reduce(torch.ones(1), group=group).item() == size
    grid = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("a", "b"))
    assert all_gather(torch.ones(1), group=grid["b"]).shape == (size // 2,)
    with refused(ValueError, "DeviceMesh of 2 dimensions", "mesh['name']"):
        all_gather(torch.ones(1), group=grid)


def bad_calls() -> None:
    size, x = dist.get_world_size(), torch.ones(40)
    ops: Any = torch.ops.cgx
    with refused(ValueError, "x has shape [5]", f"by the group's {size} ranks", "pad"):
        reduce_scatter(x[:5])
    with refused(ValueError, "x has shape []"):
        reduce_scatter(x[0])
    with refused(ValueError, "op 'max' of compressed values", "use bits=32"):
        reduce_scatter(x, "max")
    with refused(ValueError, "quantized_reduce_scatter: op 'mean' is unknown"):
        reduce_scatter(x, "mean")  # type: ignore[call-overload]
    for exact in (Config(bits=32), Config(compressor="lossless")):
        assert reduce_scatter(x, "max", config=exact).tolist() == [1.0] * (40 // size)
    with refused(NotImplementedError, "'max' has no gradient"):
        reduce_scatter(x.clone().requires_grad_(), "max", bits=32)
    for function in (reduce_scatter, all_gather):
        with refused(TypeError, f"quantized_{function.__name__}: the tensor is Long"):
            function(x.long())
        with refused(ValueError, "'nobody'"):
            function(x, group="nobody")
        with refused(TypeError, "group is 3", "ProcessGroup"):
            function(x, group=3)  # type: ignore[call-overload]
        with refused(ValueError, "config is 4; it must be a cgx_ops.Config"):
            function(x, config=4)  # type: ignore[call-overload]
        with refused(ValueError, f"quantized_{function.__name__}: bits is 9"):
            function(x, bits=9)
        with refused(NotImplementedError, "carrier 'c10d' supports quantized_allreduce only"):
            getattr(ops, f"quantized_{function.__name__}")(x, carrier="c10d")
    nearest = Config(4, rounding="nearest")
    with refused(ValueError, "residual is Float of shape [39]", "torch.zeros_like(x)"):
        reduce_scatter(x, config=nearest, residual=x[:39])
    with refused(ValueError, "op 'max' does not support residuals"):
        reduce_scatter(x, "max", bits=32, residual=x)
    with refused(ValueError, "bits=32: there is no quantization error"):
        reduce_scatter(x, bits=32, residual=x)
    with refused(ValueError, "op is 'max'", "'sum' or 'avg'"):
        compress_grads(x, op="max")
    with refused(TypeError, "params is 3"):
        compress_grads(3)  # type: ignore[type-var]
    with refused(TypeError, "'1' is torch.float64"):
        compress_grads([x, torch.ones(3, dtype=torch.float64, requires_grad=True)])
    with refused(TypeError, "rules is [('a', 8)]", "Rules"):
        compress_grads(x, rules=[("a", 8)])  # type: ignore[arg-type]


def skipped() -> None:
    """Stand in for the checks on a rank outside of the group."""


CHECKS = [values, shapes, residuals, gradients, gradients_match_torch, compressed_gradients]
ON_TWO = [compiled, compiled_gradients, compiled_with_group_argument]


def main() -> None:
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
    checks.run(by_name | checks.named(group_forms, bad_calls), sys.argv[1:])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
