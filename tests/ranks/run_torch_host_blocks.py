"""Rank program: hierarchical reduce_scatter and all_gather in PyTorch, on simulated hosts.

mpirun -np 4 python run_torch_host_blocks.py CHECK ...     # with CGX_HOST_ID
"""

import itertools
from dataclasses import replace
from typing import Any

import checks
import reference
import torch
import torch.distributed as dist
from support import torch_cases as tc
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch_fsdp import differences as of_differences
from torch_fsdp import feedback
from torch_fsdp.common import (
    Model,
    batch,
    equals_the_oracle,
    recorded,
    same_on_all_ranks,
    sharded,
)

import cgx_ops
from cgx_ops import Config
from cgx_ops.torch import all_gather, fsdp, reduce_scatter

NESTED = Config(4, 64, "nearest", "hierarchical", intra_bits=8)
NUMEL = 1003


def hosts() -> list[int]:
    """Return the host of each rank."""
    world = cgx_ops.init()
    everyones = [0] * world.size
    dist.all_gather_object(everyones, world.host)
    assert 1 < len(set(everyones)) < len(everyones)
    return everyones


def scattered(config: Config, **options: Any) -> torch.Tensor:
    """Return this rank's block, computed by the oracle."""
    size = dist.get_world_size()
    xs = [tc.to_numpy(tc.values(rank, size * NUMEL)) for rank in range(size)]
    segment = reference.Segment(0, NUMEL, config.bits, config.bucket_size)
    blocks = reference.reduce_scatter(
        xs, [segment], algorithm=config.algorithm, intra_bits=config.intra_bits or 0, **options
    )
    return tc.from_numpy(blocks[dist.get_rank()])


def functions() -> None:
    """Compare all algorithms and intra_bits with the oracle, eagerly and compiled."""
    rank, size, of_ranks = dist.get_rank(), dist.get_world_size(), hosts()
    x = tc.values(rank, size * NUMEL)
    for algorithm, intra_bits in itertools.product(("hierarchical", "by_hosts", "sra"), (None, 8)):
        config = replace(NESTED, algorithm=algorithm, intra_bits=intra_bits)
        want = scattered(config, op="avg", hosts=of_ranks)

        def call(x: torch.Tensor, config: Config = config) -> torch.Tensor:
            return reduce_scatter(x, "avg", config=config)

        assert tc.same_bits(call(x), want), config
        if intra_bits:
            assert tc.same_bits(torch.compile(call, fullgraph=True)(x), want), config
    segment = reference.Segment(0, NUMEL, 4, 64)
    values = [tc.to_numpy(tc.values(each, NUMEL)) for each in range(size)]
    gathered = tc.from_numpy(reference.all_gather(values, [segment], rounding="nearest"))
    assert tc.same_bits(all_gather(tc.values(rank, NUMEL), config=NESTED), gathered)


def operators() -> None:
    """Pass the algorithm through torch.ops.cgx, and count the bytes."""
    world, of_ranks = cgx_ops.init(), hosts()
    x = tc.values(world.rank, world.size * NUMEL)
    sent = {}
    for algorithm in ("hierarchical", "sra"):
        config = replace(NESTED, algorithm=algorithm, intra_bits=None)
        before = world.stats().bytes_sent
        y = torch.ops.cgx.quantized_reduce_scatter(x, config=str(config))
        sent[algorithm] = world.stats().bytes_sent - before
        assert tc.same_bits(y, scattered(config, hosts=of_ranks)), algorithm
    assert sent["hierarchical"] != sent["sra"]


def fully_sharded() -> None:
    """Compare every message of FSDP2 with the oracle."""
    for algorithm in ("hierarchical", "auto"):
        gradients = replace(fsdp.GRADIENTS, algorithm=algorithm, intra_bits=8)
        step(sharded(Model()), gradients, replace(fsdp.WEIGHTS, algorithm=algorithm))


def with_feedback() -> None:
    """Compare every message and residual with numpy's reduce_scatter, which equals the oracle."""
    config = Config(2, 64, "nearest", "hierarchical", intra_bits=4, error_feedback=True)
    model = sharded(Model())
    fsdp.compress(model, config, fsdp.WEIGHTS)
    with feedback.checked() as seen:
        feedback.train(model, range(3))
    assert len(seen) == 4
    for messages in seen.values():
        assert len(messages) == 3
        assert messages[-1][1].any()


def differences() -> None:
    """Compare messages with the oracle, and the weights in use: all ranks have those of the owner.

    All ranks, including the owner of a shard, use the sums of its decoded messages.
    """
    config = Config(4, 64, "nearest", "hierarchical")
    model = sharded(Model())
    gradients = replace(config, rounding="stochastic", intra_bits=8)  # without residuals
    fsdp.compress(model, gradients, fsdp.Differences(config))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sums: dict[str, torch.Tensor] = {}
    for index in range(4):
        with recorded() as messages, of_differences.weights_used(model) as used:
            of_differences.run(model, index, optimizer)
        assert all(map(equals_the_oracle, messages)), index
        assert same_on_all_ranks({f"{i}": w for i, w in enumerate(used[0].values())}), index
        gathers = [m for m in messages if m.verb == "all_gather"][1:]  # without the root's
        for block, message in zip(model.blocks, gathers, strict=True):
            name = f"{id(block.linear)}"
            sent = of_differences.gathered_matrix(message)
            sums[name] = sums[name] + sent if index else sent
            assert tc.same_bits(sums[name], used[0][name]), index


def hybrid_sharded() -> None:
    """Shard over groups that span hosts, or lie within one, and replicate over the others."""
    for shape, names in (((2, 2), ("replicate", "shard")), ((1, 4), ("replicate", "shard"))):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        gradients = replace(fsdp.GRADIENTS, algorithm="by_hosts", intra_bits=8)
        step(sharded(Model(), mesh=mesh), gradients, fsdp.WEIGHTS)


def step(model: Any, gradients: Config, weights: Config) -> None:
    fsdp.compress(model, gradients, weights)
    with recorded() as messages:
        x, y = batch(0)
        nn.functional.cross_entropy(model(x), y).backward()
    assert {message.verb for message in messages} == {"all_gather", "reduce_scatter"}
    for message in messages:
        assert equals_the_oracle(message), (message.verb, message.config)


CHECKS = checks.named(
    functions, operators, fully_sharded, with_feedback, differences, hybrid_sharded
)


def main() -> None:
    tc.forget_compiled_graphs()
    dist.init_process_group("cgx")
    checks.run(CHECKS)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
