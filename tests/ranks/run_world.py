"""Make every public call of numpy and PyTorch that communicates, without passing a group.

    run_world.py none|cgx|gloo|cpu:gloo

The argument is the backend of the default process group; "none": torch.distributed is not
initialized. Each call must give the right result over all ranks.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import cgx_ops
import cgx_ops.torch
from cgx_ops import Config
from cgx_ops._core import launchers
from cgx_ops.torch import ddp, fsdp
from cgx_ops.torch.averaging import QuantizedModelAverager
from cgx_ops.torch.diloco import DiLoCo, sparse_loco
from cgx_ops.torch.optim import CompressedAdamW, Signum

BACKEND = sys.argv[1]
PLACE = launchers.place()
RANK, SIZE = PLACE.rank, PLACE.size
MEAN = (SIZE - 1) / 2
CGX = torch.ops.cgx


def mine(numel: int = 600) -> torch.Tensor:
    """Return a constant tensor, which a few bits represent exactly."""
    return torch.full((numel,), float(RANK))


def is_all(values: Any, value: float) -> None:
    assert bool((values == value).all()), (values, value)


# ---- numpy ---------------------------------------------------------------------------------------


def numpy_calls() -> None:
    x = np.full(600, float(RANK), np.float32)
    assert (cgx_ops.rank(), cgx_ops.size()) == (RANK, SIZE)
    world = cgx_ops.init()
    assert world is cgx_ops.init()
    assert (world.rank, world.size) == (RANK, SIZE)
    is_all(cgx_ops.allreduce(x, "avg"), MEAN)
    is_all(cgx_ops.allreduce(x, "avg", Config(bits=4)), MEAN)
    is_all(world.allreduce_async(x, "avg").wait(), MEAN)
    whole = np.tile(x[:, None], (1, SIZE)).reshape(SIZE, 600)
    is_all(world.reduce_scatter(whole, "avg"), MEAN)
    assert [row[0] for row in world.all_gather(x[None])] == list(range(SIZE))
    assert cgx_ops.bits_for(world, 600) in (2, 4, 8, 32)


# ---- operators -----------------------------------------------------------------------------------


def operators(**options: Any) -> None:
    x, zeros = mine(), torch.zeros(600)
    is_all(CGX.quantized_allreduce(x, op="avg", **options), MEAN)
    is_all(CGX.quantized_allreduce_coalesced([x, x[:17]], op="avg", **options)[1], MEAN)
    both = CGX.quantized_allreduce_with_feedback(x, zeros, op="avg", rounding="nearest", **options)
    is_all(both[0], MEAN)
    several = CGX.quantized_allreduce_coalesced_with_feedback(
        [x], [zeros], op="avg", rounding="nearest", **options
    )
    is_all(several[0][0], MEAN)
    CGX.quantized_allreduce_(x, op="avg", **options)
    is_all(x, MEAN)


def compiled() -> None:
    @torch.compile(fullgraph=True)
    def average(x: torch.Tensor) -> torch.Tensor:
        return CGX.quantized_allreduce(x * 2, op="avg") / 2

    is_all(average(mine()), MEAN)


# ---- training ------------------------------------------------------------------------------------


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 8))


def equal_on_all_ranks(model: nn.Module) -> None:
    """Check that weights trained on different data are equal on all ranks."""
    shards = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    weights = torch.cat([p.detach().flatten() for p in shards])
    everyones = [torch.empty_like(weights) for _ in range(SIZE)]
    dist.all_gather(everyones, weights)
    assert all(torch.equal(each, weights) for each in everyones)


def steps(model: nn.Module, optimizer: Any, each: Callable[[], object] = lambda: None) -> None:
    for i in range(4):
        x = torch.randn(16, 40, generator=torch.Generator().manual_seed(10 * i + RANK))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        each()
    equal_on_all_ranks(model)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05)


def hook(kind: ddp.CommHookType) -> None:
    model = DistributedDataParallel(network())
    options = {"config": Config(bits=4)} if kind is kind.QUANTIZED_ALLREDUCE else {}
    kind.register(model, **options)
    steps(model, sgd(model))


def sharded() -> None:
    model = network()
    fully_shard(model)
    fsdp.compress(model, Config(bits=4))
    steps(model, sgd(model))


def optimizers() -> None:
    model = network()
    steps(model, CompressedAdamW(model.parameters(), lr=1e-3, warmup_steps=2))
    model = network()
    steps(model, Signum(model.parameters(), lr=1e-3))


def outer_loops() -> None:
    model = network()
    averager = QuantizedModelAverager(period=1)
    steps(model, sgd(model), lambda: averager.average_parameters(model.parameters()))
    for loop in (DiLoCo, sparse_loco):
        model = network()
        outer = loop(model, sync_every=2)
        steps(model, sgd(model), outer.step)


def main() -> None:
    if BACKEND == "none":
        numpy_calls()
        operators()
        return
    if PLACE.host:  # a world used before the group exists is not used after it
        assert cgx_ops.init().name == "world"
    dist.init_process_group(BACKEND)
    assert cgx_ops.init().name != "world"
    numpy_calls()
    operators()
    operators(carrier="c10d")
    operators(group_name=dist.group.WORLD.group_name)  # type: ignore[union-attr]
    pair: Any = dist.new_group([0, SIZE - 1])
    if RANK in (0, SIZE - 1):
        is_all(CGX.quantized_allreduce(mine(), op="avg", group_name=pair.group_name), MEAN)
    compiled()
    for kind in ddp.CommHookType:
        if kind is not ddp.CommHookType.NOOP:
            hook(kind)
    sharded()
    optimizers()
    outer_loops()
    dist.destroy_process_group()
    if not {"TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_SIZE"} & set(os.environ):
        return  # a rank could connect to the old group's store at the same port
    dist.init_process_group(BACKEND)  # a group of the same name gets a new communicator
    numpy_calls()
    dist.destroy_process_group()


main()
print("right")
