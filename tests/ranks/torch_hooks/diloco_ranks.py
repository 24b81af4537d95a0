"""Changing members of an outer loop: their common state after regroup()."""

from typing import Any

import torch
import torch.distributed as dist
from failing import fails
from torch import nn
from torch_training import RANK, SIZE, identical_on_all_ranks, network, weights_of

from cgx_ops import Config, InvalidArgument
from cgx_ops.torch.diloco import DiLoCo

from .diloco import LEVELS, move


def run(model: nn.Module, loop: DiLoCo, steps: range) -> None:
    for step in steps:
        move(model, step)
        loop.step()


def saved_once_regrouped() -> None:
    """Save before the next average: residuals are this rank's, whatever its previous number."""
    model = network()
    loop = DiLoCo(model, sync_every=2, config=LEVELS)
    run(model, loop, range(4))
    for _ in range(2):  # the second time, the residuals come from a checkpoint
        loop.regroup()
        again = network()
        restored = DiLoCo(again, sync_every=2, config=LEVELS)
        restored.load_state_dict(loop.state_dict())
        again.load_state_dict(model.state_dict())
        run(model, loop, range(4, 8))
        run(again, restored, range(4, 8))
        assert torch.equal(weights_of(again), weights_of(model))
        model, loop = again, restored
    loop.consolidate()
    loop.regroup()
    assert f"rank {RANK} of {SIZE}" in loop.state_dict()["exchange"]["residuals"]


def new_members_select_same_values() -> None:
    """Check that "randk" selects values by the number of exchanges of the existing members."""
    config = Config(compressor="randk", density=0.2)
    alone: Any = dist.new_group([0], backend="cgx")
    model = network()
    if RANK == 0:
        loop = DiLoCo(model, sync_every=2, fragments=2, config=config, process_group=alone)
        run(model, loop, range(5))
        loop.regroup()
    else:
        loop = DiLoCo(model, sync_every=2, fragments=2, config=config)
    assert (loop.steps, loop.applied, loop.exchange.steps) == (5, 5, 5)
    run(model, loop, range(5, 9))
    loop.restart()
    identical_on_all_ranks(weights_of(model))


def memory_formats_may_differ() -> None:
    """Check that the first rank's values reach all ranks in any memory format."""
    torch.manual_seed(3)
    model: Any = nn.Conv2d(3, 4, 2)
    want = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.mul_(RANK + 1)
    if RANK == SIZE - 1:
        model = model.to(memory_format=torch.channels_last)
    loop = DiLoCo(model, sync_every=1, config=Config(bits=32))
    assert torch.equal(loop.outer_parameters[0], want) and torch.equal(model.weight, want)
    loop.regroup()
    assert torch.equal(loop.outer_parameters[0], want) and torch.equal(model.weight, want)


def merged_groups() -> None:
    """Check that groups that continued separately end with the state of the first rank's."""
    alone: Any = [dist.new_group([rank], backend="cgx") for rank in range(SIZE)]
    for counts in ([4] * SIZE, [4 - rank % 2 for rank in range(SIZE)]):
        model = network()
        loop = DiLoCo(model, sync_every=1, config=LEVELS, process_group=alone[RANK])
        run(model, loop, range(counts[RANK]))
        first: Any = [weights_of(model), loop.outer_optimizer.state_dict(), loop.state_dict()]
        dist.broadcast_object_list(first, 0)
        loop.regroup()
        assert (loop.steps, loop.applied) == (4, 4)
        assert torch.equal(weights_of(model), first[0])
        momenta = [of["momentum_buffer"] for of in loop.outer_optimizer.state.values()]
        wanted = [of["momentum_buffer"] for of in first[1]["state"].values()]
        assert all(map(torch.equal, momenta, wanted))
        assert bool(loop.exchange.residuals.tensors) == (RANK == 0)
        run(model, loop, range(4, 6))
        identical_on_all_ranks(weights_of(model))


def settings_of_the_outer_optimizer_may_change() -> None:
    """Check that members regroup after a schedule has changed the rate on some of them."""
    for steps in (1, 2):  # before and after the first average
        model = network()
        loop = DiLoCo(model, sync_every=2, config=LEVELS)
        run(model, loop, range(steps))
        for group in loop.outer_optimizer.param_groups:
            group["lr"] /= 2 + RANK
        changed: Any = [loop.outer_optimizer.param_groups[0]["lr"]]
        dist.broadcast_object_list(changed, 0)
        loop.regroup()
        assert [group["lr"] for group in loop.outer_optimizer.param_groups] == changed
        run(model, loop, range(steps, 6))
        identical_on_all_ranks(weights_of(model))
    rates: Any = {"outer_optimizer": lambda p: torch.optim.SGD(p, lr=0.5 + RANK / 8)}
    fails(
        InvalidArgument,
        "outer_optimizer",
        lambda: DiLoCo(model, sync_every=2, config=LEVELS, **rates),
    )


def connected_later() -> None:
    """Check that connect=False does not communicate, and that regroup() then synchronizes."""
    model = network()
    with torch.no_grad():
        next(model.parameters()).add_(RANK)
    if RANK:  # rank 0 does not wait for the others
        dist.barrier()
    loop = DiLoCo(model, sync_every=2, config=LEVELS, connect=False)
    fails(InvalidArgument, "call regroup() on all ranks first", loop.step)
    if RANK == 0:
        dist.barrier()
    loop.regroup()
    assert torch.equal(weights_of(model), weights_of(network()))
    run(model, loop, range(4))
    identical_on_all_ranks(weights_of(model))
    saved = loop.state_dict()
    restored = DiLoCo(network(), sync_every=2, config=LEVELS, connect=False)
    restored.load_state_dict(saved)
    restored.regroup()
    assert (restored.steps, restored.applied) == (4, 2)
    residuals = restored.exchange.residuals.tensors
    assert all(torch.equal(residuals[n], e) for n, e in loop.exchange.residuals.tensors.items())


CHECKS = [saved_once_regrouped, new_members_select_same_values, memory_formats_may_differ]
CHECKS += [merged_groups, settings_of_the_outer_optimizer_may_change, connected_later]
