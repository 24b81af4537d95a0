"""Every message, bit for bit: bytes sent, weights in forward, meshes of one and two dimensions."""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from support import torch_cases as tc
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from cgx_ops import Communicator
from cgx_ops.torch import compressed, fsdp

from .common import (
    BATCH,
    EXACT,
    FEW,
    Model,
    batch,
    bits_of,
    equals_the_oracle,
    expected_segments,
    full,
    recorded,
    same_on_all_ranks,
    sharded,
    weights,
)

# Without reduce_dtype, torch reduces in the parameters' dtype from 2.15 on, before in param_dtype.
REDUCES_IN_FULL = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)


def messages_equal_the_oracle() -> None:
    """Compare values, segments and the number of messages, for all roundings and dtypes."""
    size = dist.get_world_size()
    policies = [
        MixedPrecisionPolicy(),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        MixedPrecisionPolicy(param_dtype=torch.float16),
    ]
    configs = [(fsdp.GRADIENTS, fsdp.WEIGHTS), (FEW, replace(FEW, rounding="shift"))]
    configs.append((replace(FEW, rounding="nearest", minimal_size=600), FEW))
    for policy, (gradients, gathered) in zip(policies, itertools.cycle(configs), strict=False):
        model = sharded(Model(), mp_policy=policy)
        fsdp.compress(model, gradients, gathered)
        with recorded() as messages:
            for step in range(2):
                x, y = batch(step)
                nn.functional.cross_entropy(model(x).float(), y).backward()
        gathers = [m for m in messages if m.verb == "all_gather"]
        reductions = [m for m in messages if m.verb == "reduce_scatter"]
        # The root keeps its weights between forward and backward.
        assert (len(gathers), len(reductions)) == (2 * (2 * 3 + 1), 2 * 4)
        for message in messages:
            bits = message.config.bits
            layouts = [expected_segments(module, size, bits) for module in (*model.blocks, model)]
            assert bits_of(message) in layouts, message.segments
            dtype = policy.param_dtype or torch.float32
            if message.verb == "reduce_scatter":
                dtype = policy.reduce_dtype or (torch.float32 if REDUCES_IN_FULL else dtype)
            assert message.input.dtype == dtype
            assert equals_the_oracle(message), (policy, message.verb, message.config)
        seeds = [m.seed for m in reductions]
        assert len(set(seeds)) == len(seeds)
        # Backward gathers the weights of forward; the next step draws different noise.
        assert len({m.seed for m in gathers}) == 2 * 4


def weights_in_forward() -> None:
    """Check that weights are quantized and equal on all ranks, biases, norms and shards exact."""
    model = sharded(Model())
    before = weights(model)
    fsdp.compress(model, FEW, fsdp.WEIGHTS)
    model.unshard()
    for block in model.blocks:
        block.unshard(async_op=True).wait()
    seen = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert same_on_all_ranks(seen)
    for name, value in seen.items():
        error = (value - before[name]).abs().max().item()
        extent = (before[name].max() - before[name].min()).item()
        if value.ndim == 1:
            assert error == 0, name
        else:
            assert 0 < error <= 0.51 * extent / 255, (name, error)
    model.reshard()
    for block in model.blocks:
        block.reshard()
    after = weights(model)
    assert all(tc.same_bits(before[name], after[name]) for name in before)

    x, y = batch(0)
    nn.functional.cross_entropy(model(x), y).backward()
    compressed = {name: full(p.grad) for name, p in model.named_parameters()}
    plain = sharded(Model())
    fsdp.compress(plain, EXACT, fsdp.WEIGHTS)
    nn.functional.cross_entropy(plain(x), y).backward()
    for name, p in plain.named_parameters():
        equal = tc.same_bits(compressed[name], full(p.grad))
        assert equal == (p.ndim == 1), name


def settings_apply_to_gathered_weights() -> None:
    """Check weights that an evaluation left gathered, before another call of compress()."""
    x, y = batch(0)
    for setting in (fsdp.WEIGHTS, fsdp.Differences(replace(FEW, rounding="nearest"))):
        model = sharded(Model(), reshard_after_forward=False)
        fsdp.compress(model, FEW, setting)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        used = []
        for weights_now in (setting, None):
            if weights_now is None:
                fsdp.compress(model, None, None)
            with torch.no_grad():
                model(x)
            used.append({name: p.detach().clone() for name, p in model.named_parameters()})
        for module in (model, *model.blocks):
            module.reshard()
        for name, exact in weights(model).items():
            assert tc.same_bits(used[1][name], exact), (name, setting)
            assert tc.same_bits(used[0][name], exact) == (exact.ndim == 1), (name, setting)


def other_layouts() -> None:
    """Weights cut by columns, and two modules that communicate as one."""
    x = tc.values(dist.get_rank(), BATCH * 6).view(BATCH, 6)

    def build(together: bool) -> Any:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 20), nn.Linear(20, 16))
        if together:
            fully_shard(list(model))
            return fully_shard(model)
        return fully_shard(model, shard_placement_fn=lambda p: Shard(p.ndim - 1))

    for together in (False, True):
        plain, exact, few = (build(together) for _ in range(3))
        fsdp.compress(exact, EXACT, EXACT)
        fsdp.compress(few, FEW, fsdp.WEIGHTS)
        plain(x).square().sum().backward()
        exact(x).square().sum().backward()
        with recorded() as messages:
            few(x).square().sum().backward()
        # The first all-gather uses the group's layout; backward gathers again if it reshards.
        assert len(messages) == (3 if together else 2)
        for message in messages:
            bits = message.config.bits
            assert bits_of(message) == [(60, bits), (10, 32), (160, bits), (8, 32)], message
            assert equals_the_oracle(message)
        for one, other in zip(plain.parameters(), exact.parameters(), strict=True):
            torch.testing.assert_close(full(one.grad), full(other.grad))


def hybrid() -> None:
    """Test two replicas of two shards: both reductions are compressed, and replicas are equal."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replicas = mesh.get_group("replicate")
    communicator = Communicator.find(replicas.group_name)
    losses = {}
    for few in (False, True):
        model = sharded(Model(), mesh=mesh)
        if few:
            fsdp.compress(model, FEW, fsdp.WEIGHTS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = torch.zeros(())
        for step in range(3):
            x, y = batch(step)
            last = step != 1  # one step has two batches; only their sum is reduced over replicas
            model.set_requires_all_reduce(last)
            sent = communicator.bytes_sent
            with recorded() as messages, compressed(FEW) if few else nullcontext():
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
            sent = communicator.bytes_sent - sent
            if not last:
                assert sent == 0
                continue
            local = torch.cat([p.grad.to_local().flatten() for p in model.parameters()])
            assert equal_in(replicas, local)
            if few:
                assert all(equals_the_oracle(m) for m in messages)
                gathers = [m for m in messages if m.verb == "all_gather"]
                seen = torch.cat([m.output for m in gathers])
                assert equal_in(replicas, seen), "replicas compute with different weights"
                reductions = [m.seed for m in messages if m.verb == "reduce_scatter"]
                pair: list[Any] = [None, None]
                dist.all_gather_object(pair, reductions, replicas)
                assert not set(pair[0]) & set(pair[1]), "replicas must use different noise"
                assert sent < 4 * local.numel() / 3, (sent, local.numel())
            else:
                assert not messages
                assert sent >= 4 * local.numel()
            optimizer.step()
            optimizer.zero_grad()
        assert same_on_all_ranks(weights(model))
        losses[few] = loss.item()
    assert losses[True] != losses[False]
    assert abs(losses[True] - losses[False]) < 0.05 * losses[False], losses


def equal_in(group: dist.ProcessGroup, x: torch.Tensor) -> bool:
    pair: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(pair, x, group)
    return all(tc.same_bits(x, other) for other in pair)


def smaller_mesh_after_forward() -> None:
    """Check that backward gathers forward's weights exactly with reshard_after_forward=2 of 4."""
    for setting in (replace(FEW, rounding="shift"), fsdp.Differences()):
        train_on_smaller_mesh(setting)


def train_on_smaller_mesh(setting: Any) -> None:
    """Compare the weights of forward and backward passes, between each other and all ranks."""
    model = sharded(Model(), reshard_after_forward=2)
    fsdp.compress(model, FEW, setting)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: dict[nn.Module, list[torch.Tensor]] = {}

    def look(module: Any, *_: Any) -> None:
        seen.setdefault(module, []).append(module.weight.detach().clone())

    for block in model.blocks:
        block.linear.register_forward_hook(look)
        block.linear.register_full_backward_pre_hook(look)
    for step in range(3):
        seen.clear()
        x, y = batch(step)
        with recorded() as messages:
            nn.functional.cross_entropy(model(x), y).backward()
        assert sum(m.verb == "all_gather" for m in messages) == 4
        assert all(equals_the_oracle(m) for m in messages)
        assert len(seen) == 3
        for index, (forward, backward) in enumerate(seen.values()):
            assert tc.same_bits(forward, backward), (setting, step)
            assert same_on_all_ranks({f"{index}": forward}), (setting, step)
        optimizer.step()
        optimizer.zero_grad()


CHECKS = [messages_equal_the_oracle, weights_in_forward, other_layouts]
CHECKS += [settings_apply_to_gathered_weights, hybrid, smaller_mesh_after_forward]
