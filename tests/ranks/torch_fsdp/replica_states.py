"""Checkpoints of the averages over replicas, invalid calls, and failures."""

import contextlib
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from shared_folder import folder_of_all
from support import torch_cases as tc
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from cgx_ops import InvalidArgument, Rules
from cgx_ops.torch import fsdp
from cgx_ops.torch._compat import parallel
from cgx_ops.torch.averaging.power_sgd import exchange

from .common import FEW, Model, batch, same_on_all_ranks, sharded, weights
from .feedback import LEVELS, parts_of, resumes, train
from .refusals import refuses
from .replicas import TOPK, layouts, mesh_of, replicated

BOTH = fsdp.PowerSGD(rank=2, start=1, config=TOPK)


def compressed(mesh: DeviceMesh, settings: Any, **options: Any) -> tuple[Any, fsdp.State]:
    """Return a model whose gradients have residuals over shards and over replicas."""
    model = sharded(Model(), mesh=mesh["shards"])
    replicas = mesh["replicas"]
    options = {"replicas": replicas, "replica_gradients": settings, **options}
    return model, fsdp.compress(model, LEVELS, **options)


# ---- 1. checkpoints ------------------------------------------------------------------------------


def resumed_bits_are_equal() -> None:
    for mesh, settings in itertools.product(layouts(), (BOTH, FEW, LEVELS)):
        resumes(partial(compressed, mesh, settings))


def consolidated_residuals_fit_any_layout() -> None:
    """Load from each layout in each other one; a residual is the mean over the replicas."""
    for one in layouts():
        with folder_of_all() as folder:
            model, state = compressed(one, BOTH)
            train(model, range(3))
            assert state.replicas is not None
            shape = one["replicas"].size(), one["shards"].size()
            mine = {n: e.clone() for n, e in state.replicas.residuals.tensors.items()}
            places = one["replicas"].get_local_rank(), one["shards"].get_local_rank()
            everyones: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyones, (places, mine))
            state.consolidate()
            means = {n: e.clone() for n, e in state.replicas.residuals.tensors.items()}
            shapes = {n: p.shape for n, p in model.named_parameters() if p.dim() > 1}
            assert means.keys() == shapes.keys()
            for name, whole in means.items():
                for shard, part in enumerate(parts_of(whole.view(shapes[name]), shape[1])):
                    own = [each[name] for place, each in everyones if place[1] == shard]
                    want = torch.stack(own).double().mean(0)
                    bound = shape[0] * 2.0**-23 * torch.stack(own).abs().mean(0)
                    inside = part != 0  # FSDP ignores padding
                    assert ((part - want).abs() <= bound)[inside].all(), name
            save({"cgx": state}, checkpoint_id=folder)
            for other in layouts():
                model, again = compressed(other, BOTH)
                assert again.replicas is not None
                again.consolidate()
                load({"cgx": again}, checkpoint_id=folder)
                found = again.replicas.residuals.tensors
                assert all(tc.same_bits(found[name], means[name]) for name in means)
                assert not again.replicas.factors.q
                x, y = batch(3)
                model.requires_grad_(False)
                model.head.requires_grad_(True)
                nn.functional.cross_entropy(model(x), y).backward()
                rank, shards = other["shards"].get_local_rank(), other["shards"].size()
                for name in means:
                    part = parts_of(means[name].view(shapes[name]), shards)[rank]
                    left = again.replicas.residuals.tensors[name]
                    if name != "head.weight":
                        assert tc.same_bits(left, part), name
                    elif part.any():
                        assert not tc.same_bits(left, part)


def other_layouts_are_refused() -> None:
    """Without consolidate(), a state of other shards or settings raises."""
    half, whole = mesh_of(2), mesh_of(dist.get_world_size())
    model, state = compressed(half, BOTH)
    train(model, range(2))
    saved = state.state_dict()
    _, other = compressed(whole, BOTH)
    refuses(lambda: other.load_state_dict(saved), InvalidArgument, "consolidate() on all ranks")
    _, other = compressed(half, FEW)
    refuses(lambda: other.load_state_dict(saved), InvalidArgument, "use the same")
    other = fsdp.compress(sharded(Model(), mesh=half["shards"]), LEVELS)
    refuses(lambda: other.load_state_dict(saved), InvalidArgument, "made with replicas")
    _, other = compressed(half, BOTH)
    foreign = {"head.weight", "blocks.0.linear.weight"}
    other.parameters = other.parameters - foreign
    refuses(lambda: other.load_state_dict(saved), InvalidArgument, "does not have: 'blocks.0")


# ---- 2. invalid calls ----------------------------------------------------------------------------


def invalid_replicas() -> None:
    mesh = mesh_of(2)
    native, flat = sharded(Model(), mesh=mesh), sharded(Model(), mesh=mesh["shards"])
    hooked: Any = sharded(Model(), mesh=mesh["shards"])
    hooked.head.bias.requires_grad_(False)
    hooked.set_all_reduce_hook(print)
    replicas: Any = mesh["replicas"]
    wrong: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (native, {"replicas": replicas}, InvalidArgument, 'fully_shard(module, mesh='),
        (flat, {"replicas": mesh}, InvalidArgument, "pass the one over which"),
        (flat, {"replicas": 2}, TypeError, "replicas is 2; it must be a ProcessGroup"),
        (flat, {"replicas": dist.group.WORLD}, InvalidArgument, "replicas are ranks [0, 1, 2, 3]"),
        (flat, {"replicas": mesh["shards"]}, InvalidArgument, "and the ranks with the same shard"),
        (hooked, {"replicas": replicas}, InvalidArgument, "has an all-reduce hook already"),
        (flat, {"replica_gradients": FEW}, InvalidArgument, "no effect without replicas"),
        (flat, {"replicas": replicas, "replica_gradients": 4}, TypeError, "must be a fsdp."),
        (
            flat, {"replicas": replicas, "seed": dist.get_rank() // 2}, InvalidArgument,
            f"rank {dist.get_rank() % 2} has seed 0, rank {dist.get_rank() % 2 + 2} has 1",
        ),
        (
            flat, {"replicas": replicas, "rules": Rules(exact_vectors=dist.get_rank() < 2)},
            InvalidArgument, "Call compress() with the same arguments",
        ),
    ]  # fmt: skip
    for model, options, kind, words in wrong:
        refuses(lambda m=model, o=options: fsdp.compress(m, None, **o), kind, words)
    with torch.device("meta"):
        empty = Model()
    for block in empty.blocks:
        block.requires_grad_(False)
    with mock.patch.object(nn.init, "normal_"):
        unready = sharded(empty, mesh=mesh["shards"])
    refuses(lambda: fsdp.compress(unready, None, replicas=replicas), TypeError, "on meta; replicas")
    settings: list[tuple[dict[str, Any], str]] = [
        ({"rank": 0}, "PowerSGD.rank is 0"),
        ({"start": -1}, "PowerSGD.start is -1"),
        ({"min_compression_rate": 0}, "min_compression_rate is 0"),
        ({"factor_bits": 4}, "factor_bits is 4"),
        ({"config": 4}, "PowerSGD.config is 4"),
    ]
    for options, words in settings:
        refuses(lambda o=options: fsdp.PowerSGD(**o), InvalidArgument, words)


def repeated_compress() -> None:
    """Check that the last call counts: without replicas, gradients are those of one replica."""
    mesh = mesh_of(2)
    model, _ = compressed(mesh, BOTH)
    fsdp.compress(model, None, replicas=mesh["replicas"], replica_gradients=FEW)
    train(model, range(1))
    fsdp.compress(model, None)
    x, y = batch(1)
    nn.functional.cross_entropy(model(x), y).backward()
    bias = model.head.bias.grad.full_tensor()
    everyones: list[Any] = [None] * 2
    dist.all_gather_object(everyones, bias, mesh.get_group("replicas"))
    assert not torch.equal(*everyones)


def failure_on_one_rank() -> None:
    """Fail on rank 1 while it prepares P; its replica raises the reason, and can continue."""
    mesh = mesh_of(dist.get_world_size())
    model, _ = compressed(mesh, fsdp.PowerSGD(rank=2))
    x, y = batch(0)
    loss = nn.functional.cross_entropy(model(x), y)
    failing = dist.get_rank() == 1
    with contextlib.ExitStack() as stack:
        if failing:
            accident = ValueError("an accident")
            stack.enter_context(mock.patch.object(exchange, "plan_of", side_effect=accident))
        kind = ValueError if failing else RuntimeError
        refuses(loss.backward, kind, "an accident")
    again, _ = compressed(mesh, fsdp.PowerSGD(rank=2))
    train(again, range(1))


def failed_average_keeps_earlier_batches() -> None:
    """Refuse an average on rank 1; when it is repeated, it has the values of an undisturbed one.

    The hook is called directly, because FSDP2 cannot use a model whose backward has failed.
    """
    mesh = mesh_of(dist.get_world_size())
    averages = []
    for fails in (False, True):
        torch.manual_seed(5)
        model: Any = fully_shard(nn.Linear(33, 10), mesh=mesh["shards"])
        fsdp.compress(model, None, replicas=mesh["replicas"], replica_gradients=FEW)
        (group,) = parallel.fsdp_groups(model)
        hook = parallel.fsdp_all_reduce_hook(group)
        assert hook is not None
        parts = [tc.values(dist.get_rank(), 340, torch.float32, step) for step in range(3)]
        for step, part in enumerate(parts):
            model.set_requires_all_reduce(step == 2)
            if fails and step == 2:
                with contextlib.ExitStack() as stack:
                    failing = dist.get_rank() == 1
                    if failing:
                        accident = ValueError("an accident")
                        patch = mock.patch.object(exchange, "plan_of", side_effect=accident)
                        stack.enter_context(patch)
                    kind = ValueError if failing else RuntimeError
                    refuses(partial(hook, part.clone()), kind, "an accident")
            hook(part)
        averages.append(parts[-1])
    assert tc.same_bits(*averages)


def error_on_one_rank() -> None:
    """Check that all ranks raise what is wrong on the last one, and that all can continue.

    It has an all-reduce hook, then invalid settings, then another seed.
    """
    mesh, last = mesh_of(2), dist.get_world_size() - 1
    failing = dist.get_rank() == last
    model = sharded(Model(), mesh=mesh["shards"])
    hook: Any = print if failing else None
    model.set_all_reduce_hook(hook)
    compress = partial(fsdp.compress, model, None, replicas=mesh["replicas"])
    where = "" if failing else f"rank {last} failed: InvalidArgument: "
    refuses(compress, InvalidArgument, f"{where}the root module has an all-reduce hook already")
    none: Any = None
    model.set_all_reduce_hook(none)
    wrong: Any = 4 if failing else FEW
    kind = TypeError if failing else InvalidArgument
    refuses(partial(compress, replica_gradients=wrong), kind, "replica_gradients is 4; it must")
    peer = last // 2
    words = f"rank {peer} has seed 0, rank {last} has 1"
    refuses(partial(compress, seed=int(failing)), InvalidArgument, words)
    compress()
    train(model, range(1))
    assert same_on_all_ranks(weights(model))


def invalid_call_keeps_the_average() -> None:
    """Check that replicas still train together after a compress() that raised."""
    mesh = mesh_of(2)
    model, state = compressed(mesh, BOTH)
    replica = mesh["replicas"].get_local_rank()
    again = partial(fsdp.compress, model, LEVELS, replicas=mesh["replicas"], seed=replica)
    refuses(again, InvalidArgument, "has seed 0")
    train(model, range(2))
    assert same_on_all_ranks(weights(model))
    assert state.replicas is not None and set(state.replicas.counts.values()) == {2}


def different_residuals_are_refused() -> None:
    """Remove a residual on one rank; consolidate() raises on all ranks."""
    model, state = compressed(mesh_of(2), BOTH)
    train(model, range(2))
    assert state.replicas is not None
    last = dist.get_world_size() - 1
    if dist.get_rank() == last:
        del state.replicas.residuals.tensors["head.weight"]
    words = f"rank {last} has nothing"
    refuses(state.consolidate, InvalidArgument, words)


def different_parameters() -> None:
    """Use a parameter on the second replica only: all ranks raise the remedy, which works."""
    mesh = mesh_of(2)

    class Extra(Model):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Linear(33, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits = super().forward(x)
            return logits + self.extra(x) if mesh["replicas"].get_local_rank() else logits

    for settings in (None, FEW, BOTH):
        for remedied in (False, True):
            model, _ = replicated(mesh, settings, Extra())
            model.set_reduce_scatter_unused_params(remedied)
            if remedied:
                train(model, range(2))
                assert same_on_all_ranks(weights(model))
                continue
            x, y = batch(0)
            loss = nn.functional.cross_entropy(model(x), y)
            try:
                loss.backward()
            except RuntimeError as error:
                assert "disagree" in str(error), error
                assert "set_reduce_scatter_unused_params(True)" in error.__notes__[-1]
            else:
                raise AssertionError("nothing was raised")


def logged() -> None:
    """Check that a state is small and by name, and that the rate is that of the formula."""
    mesh = mesh_of(dist.get_world_size())
    model, state = compressed(mesh, fsdp.PowerSGD(rank=1))
    train(model, range(2))
    assert state.replicas is not None
    rows = [tuple(p.shape) for p in model.parameters()]
    sent = [sum(s) if len(s) == 2 else s[0] for s in rows]
    before = sum(p.numel() for p in model.parameters())
    assert state.replicas.compression_stats() == (before / sum(sent), 2 * before, 2 * sum(sent))
    names = {n for n, p in model.named_parameters() if p.dim() == 2}
    assert state.replicas.factors.q.keys() == state.replicas.residuals.tensors.keys() == names


CHECKS: list[Callable[[], None]] = [resumed_bits_are_equal, consolidated_residuals_fit_any_layout]
CHECKS += [other_layouts_are_refused, invalid_replicas, repeated_compress, failure_on_one_rank]
CHECKS += [failed_average_keeps_earlier_batches, error_on_one_rank]
CHECKS += [invalid_call_keeps_the_average, different_residuals_are_refused, different_parameters]
CHECKS += [logged]
