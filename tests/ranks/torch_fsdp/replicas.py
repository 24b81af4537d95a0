"""Averages over the replicas of HSDP, on every layout of replicas and shards.

1. watched(): every average that FSDP asks for
2. values: exact, the reference of PowerSGD by shard, full rank, conservation
3. training modes: equal weights of all replicas
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from reference import PowerSGD, given_up, given_up_bound
from support import torch_cases as tc
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from cgx_ops import Config, Rules
from cgx_ops.methods import low_rank
from cgx_ops.torch import fsdp
from cgx_ops.torch._compat import parallel
from cgx_ops.torch.fsdp.replicas import Replicas

from .common import EXACT, FEW, Model, batch, full, same_on_all_ranks, sharded, weights
from .feedback import train
from .refusals import warned

TOPK = Config(compressor="topk", density=0.1, bucket_size=64)
FULL = fsdp.PowerSGD(rank=64, min_compression_rate=1e-3)


def layouts() -> Iterator[DeviceMesh]:
    """Yield a mesh of each number of replicas that divides the number of ranks."""
    ranks = dist.get_world_size()
    for replicas in range(1, ranks + 1):
        if ranks % replicas == 0:
            yield mesh_of(replicas)


def mesh_of(replicas: int) -> DeviceMesh:
    shards = dist.get_world_size() // replicas
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicas", "shards"))


def replicated(
    mesh: DeviceMesh, settings: Any, model: Model | None = None, **options: Any
) -> tuple[Any, Replicas]:
    """Return a model with exact gradients over shards, and its average over replicas."""
    module = sharded(model or Model(), mesh=mesh["shards"], **options)
    state = fsdp.compress(module, None, replicas=mesh["replicas"], replica_gradients=settings)
    assert state.replicas is not None
    return module, state.replicas


# ---- 1. averages ---------------------------------------------------------------------------------


@dataclass
class Average:
    """A parameter's average in one step, with the parts and residuals of all replicas."""

    name: str
    parts: list[Any]
    average: Any
    old: list[Any]
    new: list[Any]
    factored: bool


@contextmanager
def watched(state: Replicas) -> Iterator[list[Average]]:
    """Yield a list of the averages in the block."""
    found: list[Average] = []
    original = state.average_part

    def average_part(block: Any, part: torch.Tensor, earlier: torch.Tensor | None = None) -> None:
        def residuals() -> dict[str, Any]:
            zeros = torch.zeros(part.numel())
            return {p.name: state.residuals.tensors.get(p.name, zeros[: p.numel]).numpy().copy()
                    for p in block.parameters()}  # fmt: skip

        before, given = residuals(), tc.to_numpy(part).copy()
        original(block, part, earlier)
        mine = given, before, residuals()
        everyones: list[Any] = [None] * state.group.size()
        dist.all_gather_object(everyones, mine, state.group)
        for p in block.parameters():
            shape = p.part_shape(state.shards)
            shape = shape[0], int(np.prod(shape[1:]))
            place = slice(p.first, p.first + p.numel)
            old, new = ([each[i][p.name].reshape(shape) for each in everyones] for i in (1, 2))
            average = tc.to_numpy(part)[place].reshape(shape).copy()
            parts = [each[0][place].reshape(shape) for each in everyones]
            found.append(Average(p.name, parts, average, old, new, p.name in state.factors.q))

    state.average_part = average_part
    try:
        yield found
    finally:
        del state.average_part


# ---- 2. values -----------------------------------------------------------------------------------


def exact_equals_native() -> None:
    """Without compression, compare gradients and norms with native HSDP's.

    Each gradient is a sum over the replicas and a quotient: it rounds once for each replica, in
    each of the two programs.
    """
    for mesh in layouts():
        native = sharded(Model(), mesh=mesh)
        ours, state = replicated(mesh, None)
        x, y = batch(0)
        norms = []
        with watched(state) as averages:
            for model in (native, ours):
                nn.functional.cross_entropy(model(x), y).backward()
                norms.append(full(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        assert len(averages) == len(list(ours.parameters()))
        for each in averages:
            want = np.mean(each.parts, 0, np.float64)
            bound = len(each.parts) * 2.0**-24 * np.mean(np.abs(each.parts), 0)
            assert (abs(each.average - want) <= bound).all(), each.name
        sizes = sum(p.numel() for p in ours.parameters()) + 2 * dist.get_world_size()
        torch.testing.assert_close(norms[0], norms[1], rtol=sizes * 2.0**-24, atol=0.0)
        assert state.compression_stats() == (0, 0, 0)


def matches_reference() -> None:
    """Compare each step with the reference of PowerSGD on the parts of the replicas.

    Each of a few products rounds by 2^-24 of at most 33 terms; singular values of P differ by a
    factor below 100.
    """
    for mesh, rank in itertools.product(layouts(), (1, 3)):
        model, state = replicated(mesh, fsdp.PowerSGD(rank=rank, start=2))
        references: dict[str, PowerSGD] = {}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(8):
            x, y = batch(step)
            with watched(state) as averages:
                nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert any(each.factored for each in averages) == (step >= 2)
            for each in averages:
                ranks = len(each.parts)
                if not each.factored:
                    want = np.mean(each.parts, 0, np.float64)
                    bound = ranks * 2.0**-24 * np.mean(np.abs(each.parts), 0)
                    assert (abs(each.average - want) <= bound).all(), each.name
                    continue
                rows, columns = each.average.shape
                if each.name not in references:
                    first = low_rank.first_q(0, each.name, 0, columns, rank)
                    references[each.name] = PowerSGD(ranks, rows, first, "local")
                reference = references[each.name]
                want = reference.step(each.parts)
                size = abs(want).max() + max(abs(r).max() for r in reference.residuals)
                close = 100 * 33 * 2.0**-24 * size
                assert abs(each.average - want).max() <= close, (step, each.name)
                for got, residual in zip(each.new, reference.residuals, strict=True):
                    assert abs(got - residual).max() <= close, (step, each.name)
        rate, before, after = state.compression_stats()
        assert rate == before / after > 1


def full_rank_is_exact() -> None:
    """Check that factors of full rank give the average.

    P is an orthonormal basis of the columns of mean(M) Q, and Q of all columns. Householder's QR of
    an n x r matrix has an error of n r roundings of its norm, whatever its condition; each of the
    four products adds n + m. All are relative to the norms of the replicas' matrices.
    """
    for mesh in layouts():
        model, state = replicated(mesh, FULL)
        with watched(state) as averages:
            train(model, range(3))
        assert all(each.factored for each in averages)
        for each in averages:
            rows, columns = each.average.shape
            values = [p.astype(np.float64) + r for p, r in zip(each.parts, each.old, strict=True)]
            size = max(np.linalg.norm(value) for value in values)
            bound = 4 * (rows * columns + rows + columns) * 2.0**-24 * size
            assert np.linalg.norm(each.average - np.mean(values, 0)) <= bound, each.name


def conservation() -> None:
    """Check 50 steps: parts plus old residuals = averages (as sums) plus new residuals.

    In few bits, each rank encodes its values, and one rank the sums. A decoded value is subtracted
    from the encoded one: 4 roundings relative to the largest value of the bucket. Sums add one for
    each rank.
    """
    ranks = dist.get_world_size()
    mesh = mesh_of(2 if ranks % 2 == 0 else ranks)
    for settings in (
        fsdp.PowerSGD(rank=2),
        fsdp.PowerSGD(rank=2, factor_bits=8, config=TOPK),
        fsdp.PowerSGD(rank=1, factor_bits=16, warm_start=False),
        Config(bits=2, bucket_size=64, error_feedback=True),
    ):
        model, state = replicated(mesh, settings)
        with watched(state) as averages:
            train(model, range(50))
        ends: dict[str, list[Any]] = {}
        for each in averages:
            lost = given_up(each.parts, each.old, each.average, each.new)
            bound = given_up_bound(each.parts, each.old, 2)
            if not each.factored:
                pairs = zip(each.parts, each.old, strict=True)
                largest = sum(float(abs(part + old).max()) for part, old in pairs)
                bound = (len(each.parts) + 8) * 2.0**-24 * largest
            assert (abs(lost) <= bound).all(), (settings, each.name)
            for old, end in zip(each.old, ends.get(each.name, each.old), strict=True):
                assert old.tobytes() == end.tobytes(), "a residual changed between steps"
            ends[each.name] = each.new
        lossy = {each.name for each in averages if any(e.any() for e in each.new)}
        assert "blocks.0.linear.weight" in lossy, settings
        assert "blocks.0.linear.bias" not in lossy, settings


def few_bits_by_rule() -> None:
    """Check that rules choose what is factored, compressed and exact."""
    mesh = mesh_of(dist.get_world_size())
    rules = Rules([("head", {"bits": 32}), (r"blocks\.1", {"bits": 2})])
    model = sharded(Model(), mesh=mesh["shards"])
    settings = fsdp.PowerSGD(rank=2, config=Config(bits=8, bucket_size=64))
    found = fsdp.compress(
        model, None, replicas=mesh["replicas"], replica_gradients=settings, rules=rules
    ).replicas
    assert found is not None
    train(model, range(1))
    assert found.factors.q.keys() == {"blocks.0.linear.weight", "blocks.2.linear.weight"}
    plan = found.plans["blocks.1"]
    bits = [(s.config or plan.config).bits for s, _ in plan.first]
    assert bits == [2] * 4, bits


# ---- 3. training modes ---------------------------------------------------------------------------


class Odd(Model):
    """A model with a frozen layer, a layer with fewer rows than ranks, and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(self.head.out_features, 1)
        self.get_parameter("blocks.0.linear.weight").requires_grad_(False)
        self.unused = nn.Linear(40, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = super().forward(x)
        return logits + self.narrow(logits)


def replicas_stay_equal() -> None:
    """Train in several modes; compare the weights of the replicas to the bit.

    `compress` makes them equal at first.
    """
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    low = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
    columns: Callable[[nn.Parameter], Shard] = lambda p: Shard(p.ndim - 1)  # noqa: E731
    settings = fsdp.PowerSGD(rank=2, start=1), FEW, TOPK
    for mesh, each in itertools.product(layouts(), settings):
        for policy in (MixedPrecisionPolicy(), half, mixed, low):
            trained, _ = replicated(mesh, each, mp_policy=policy)
            train(trained, range(3))
            assert same_on_all_ranks(weights(trained)), (mesh, each, policy)
        torch.manual_seed(dist.get_rank())
        shards = mesh["shards"].size()
        layer = nn.Sequential(nn.Linear(24 * shards, 20 * shards, bias=False))
        model: Any = fully_shard(layer, mesh=mesh["shards"], shard_placement_fn=columns)
        fsdp.compress(
            model, Config(bits=4), fsdp.WEIGHTS,
            replicas=mesh.get_group("replicas"), replica_gradients=each,
        )  # fmt: skip
        assert same_on_all_ranks(weights(model))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(3):
            x = tc.values(dist.get_rank(), 8 * 24 * shards, torch.float32, step).view(8, -1)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert same_on_all_ranks(weights(model)), (mesh, each)


def gathered_weights_are_replaced() -> None:
    """Check the root's weights, which an evaluation before compress() gathered."""
    x, _ = batch(0)
    for mesh in layouts():
        model = sharded(Model(), mesh=mesh["shards"])
        with torch.no_grad():
            model.head.bias.add_(mesh["replicas"].get_local_rank())
            model(x)
        assert not isinstance(model.head.bias, DTensor)
        fsdp.compress(model, None, replicas=mesh["replicas"])
        with torch.no_grad():
            model(x)
        assert same_on_all_ranks({"head.bias": model.head.bias.detach()}), mesh


def odd_layers() -> None:
    """Test frozen layers, empty shards, and parameters without gradients."""
    for mesh in layouts():
        settings = fsdp.PowerSGD(rank=1, min_compression_rate=0.1)
        model, state = replicated(mesh, settings, Odd())
        said = warned(partial(train, model, range(3)))
        assert len(said) == 1 and "averaged exact over the replicas" in said[0], said
        assert "set_reduce_scatter_unused_params" in said[0]
        assert same_on_all_ranks(weights(model))
        assert not {"head.weight", "blocks.0.linear.weight"} & state.factors.q.keys()
        model.set_reduce_scatter_unused_params(True)
        model.blocks[0].linear.weight.requires_grad_(True)
        with watched(state) as averages:
            assert not warned(partial(train, model, range(3, 6)))
        assert same_on_all_ranks(weights(model))
        assert {"narrow.weight", "head.weight", "blocks.0.linear.weight"} <= state.factors.q.keys()
        unused = [each for each in averages if each.name == "unused.weight"]
        assert len(unused) == 3 and not any(each.average.any() for each in unused)


def accumulates() -> None:
    """Accumulate two batches before a reduction, and two reductions before an average."""
    for mesh in layouts():
        for settings in (None, FULL):
            native = sharded(Model(), mesh=mesh)
            ours, state = replicated(mesh, settings)
            for accumulate in ("set_requires_gradient_sync", "set_requires_all_reduce"):
                gradients = []
                for model in (native, ours):
                    model.zero_grad()
                    for step in range(3):
                        getattr(model, accumulate)(step == 2)
                        model.set_is_last_backward(step == 2)
                        x, y = batch(step)
                        nn.functional.cross_entropy(model(x), y).backward()
                    gradients.append([p.grad.full_tensor() for p in model.parameters()])
                # Both sum in float32 in another order; with factors, as in full_rank_is_exact().
                for want, got in zip(*gradients, strict=True):
                    rows, columns = len(want), want[0].numel()
                    roundings = 8 * (rows * columns + rows + columns)
                    limit = roundings * 2.0**-24 * dist.get_world_size() * float(want.norm())
                    assert float((got - want).norm()) <= limit, (mesh, settings, accumulate)
            assert set(state.counts.values()) == {2}, "each way averages once"


def reset_discards_accumulated() -> None:
    """Check that reset_iter_state() discards gradients that wait for the average over replicas."""

    def backward(model: Any, step: int, *, averages: bool) -> None:
        model.set_requires_all_reduce(averages)
        model.set_is_last_backward(averages)
        x, y = batch(step)
        nn.functional.cross_entropy(model(x), y).backward()

    for mesh in layouts():
        model, _ = replicated(mesh, None)
        if not hasattr(model, "reset_iter_state"):  # in earlier releases of torch
            return
        gradients = []
        for accumulates in (False, True):
            if accumulates:
                backward(model, 5, averages=False)
                model.reset_iter_state()
            model.zero_grad()
            backward(model, 0, averages=True)
            gradients.append([full(p.grad).clone() for p in model.parameters()])
        assert all(map(torch.equal, *gradients)), mesh
        fsdp.compress(model)
        assert not any("_reset_iter_state" in vars(each) for each in parallel.fsdp_groups(model))


def divide_factors_equal_native() -> None:
    """Compare gradients with native HSDP's to the bit, with factors and with forced sums.

    With a factor, native HSDP sums over the replicas. An average over 2 or 4 of them, multiplied by
    their number, has the same bits. EXACT on both sides, because gloo has no PREMUL_SUM.
    """
    half = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    meshes = [mesh for mesh in layouts() if mesh["replicas"].size() in (1, 2, 4)]
    for mesh, policy in itertools.product(meshes, (MixedPrecisionPolicy(), half)):
        size = float(mesh["shards"].size())
        for factor, sums in itertools.product((None, 1.0, 3.0, size), (False, True)):
            native = sharded(Model(), mesh=mesh, mp_policy=policy)
            ours = sharded(Model(), mesh=mesh["shards"], mp_policy=policy)
            fsdp.compress(native, EXACT)
            fsdp.compress(ours, EXACT, replicas=mesh["replicas"], replica_gradients=None)
            x, y = batch(0)
            gradients = []
            for model in (native, ours):
                for module in (model, *model.blocks):
                    if factor is not None:
                        module.set_gradient_divide_factor(factor)
                    module.set_force_sum_reduction_for_comms(sums)
                nn.functional.cross_entropy(model(x), y).backward()
                gradients.append([p.grad.full_tensor() for p in model.parameters()])
            same = [tc.same_bits(want, got) for want, got in zip(*gradients, strict=True)]
            assert all(same), (mesh, policy, factor, sums)


CHECKS = [exact_equals_native, matches_reference, full_rank_is_exact, conservation]
CHECKS += [few_bits_by_rule, replicas_stay_equal, gathered_weights_are_replaced, odd_layers]
CHECKS += [accumulates, reset_discards_accumulated, divide_factors_equal_native]
