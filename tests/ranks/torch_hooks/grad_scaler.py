"""torch.amp.GradScaler: one rank alone may find an overflow, and skip the optimizer's step.

1. outer loops count iterations with step(), and with after() for any optimizer
2. averaging optimizers skip the step on all ranks, and failed steps can be repeated
3. PostLocalSGDOptimizer raises, because its average of weights would be skipped
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from failing import fails
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.optim import PostLocalSGDOptimizer
from torch_training import RANK, batch, identical_on_all_ranks, loss_of, network, weights_of

from cgx_ops import Config, InvalidArgument
from cgx_ops.torch.averaging import QuantizedModelAverager
from cgx_ops.torch.averaging.grad_scaler import after_every_step
from cgx_ops.torch.diloco import DiLoCo
from cgx_ops.torch.optim import CompressedAdamW, Signum

from .failing_rank import accident, fails_everywhere

STEPS = 12
OVERFLOWS = 5  # the iteration in which rank 1's gradients overflow


def scaler_of(scale: float = 2.0**8) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale)


def iterate(
    model: nn.Module, optimizer: Any, scaler: Any, step: int, *, unscales: bool = False
) -> None:
    """Run a training iteration with a GradScaler."""
    optimizer.zero_grad()
    loss = loss_of(model, batch(RANK, step))
    if RANK == 1 and step == OVERFLOWS:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    if unscales:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


# ---- 1. outer loops ------------------------------------------------------------------------------

Make = Callable[[Any], torch.optim.Optimizer]
INNER: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.AdamW(p, 0.01),
    "fused": lambda p: torch.optim.SGD(p, 0.05, fused=True),
}


def looped(make: Make, *, after: bool, unscales: bool) -> torch.Tensor:
    """Return the weights of a loop that counts its steps by after(), or by step()."""
    model = network()
    optimizer, scaler = make(model.parameters()), scaler_of()
    loop = DiLoCo(model, sync_every=4, config=Config(bits=4))
    if after:
        with loop.after(optimizer):
            for step in range(STEPS):
                iterate(model, optimizer, scaler, step, unscales=unscales)
        assert loop.steps == STEPS
        iterate(model, optimizer, scaler, STEPS)  # outside of the block
        assert loop.steps == STEPS
        return loop.outer_parameters[0].detach().clone()
    for step in range(STEPS):
        iterate(model, optimizer, scaler, step, unscales=unscales)
        loop.step()
    return loop.outer_parameters[0].detach().clone()


def loops_count_iterations() -> None:
    """Compare with step() in every iteration, bit for bit; a skipped step changes no weights."""
    for name, make in INNER.items():
        for unscales in (False, True):
            got, want = (looped(make, after=after, unscales=unscales) for after in (True, False))
            identical_on_all_ranks(got)
            assert torch.equal(got, want), (name, unscales)


def steps_without_a_scaler() -> None:
    """Check that a block counts steps of an optimizer without a GradScaler, too."""
    for scaler in (None, torch.amp.GradScaler("cpu", enabled=False)):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        loop = DiLoCo(model, sync_every=2, config=Config(bits=4))
        with loop.after(optimizer):
            for step in range(4):
                optimizer.zero_grad()
                loss_of(model, batch(RANK, step)).backward()
                optimizer.step() if scaler is None else scaler.step(optimizer)
        optimizer.step()
        assert (loop.steps, loop.applied) == (4, 2)


def failed_average_leaves_no_scale() -> None:
    """Check that a GradScaler can step again after the function that follows a step has failed."""
    for name, make in INNER.items():
        model = network()
        optimizer, scaler = make(model.parameters()), scaler_of()
        average = mock.Mock(side_effect=[ValueError("a rank is lost"), None])
        with after_every_step(optimizer, average):
            fails(ValueError, "is lost", lambda: iterate(model, optimizer, scaler, 0))  # noqa: B023
            iterate(model, optimizer, scaler, 1)
        assert average.call_count == 2, name
        iterate(model, optimizer, scaler, 2)


# ---- 2. averaging optimizers ---------------------------------------------------------------------

AVERAGING: dict[str, Make] = {
    "compressed_adamw": lambda p: CompressedAdamW(p, 0.01, warmup_steps=7),
    "in the warm-up": lambda p: CompressedAdamW(p, 0.01, warmup_steps=2),
    "signum": lambda p: Signum(p, 0.002),
}


def all_ranks_skip() -> None:
    """Compare with training without the overflowing iteration, bit for bit."""
    for name, make in AVERAGING.items():
        for unscales in (False, True):
            weights = []
            for skipped in (None, OVERFLOWS):
                model = network()
                optimizer, scaler = make(model.parameters()), scaler_of()
                for step in range(STEPS):
                    before = weights_of(model)
                    if step != skipped:
                        iterate(model, optimizer, scaler, step, unscales=unscales)
                    assert torch.equal(weights_of(model), before) == (step == OVERFLOWS), step
                identical_on_all_ranks(weights_of(model))
                weights.append(weights_of(model))
            assert torch.equal(*weights), (name, unscales)


def failed_steps_can_be_repeated() -> None:
    """Compare with training in which no step fails, bit for bit."""
    for name, make in AVERAGING.items():
        weights = []
        for failing in (None, 1):
            model = network()
            optimizer, scaler = make(model.parameters()), scaler_of()
            for step in range(4):
                optimizer.zero_grad()
                scaler.scale(loss_of(model, batch(RANK, step))).backward()
                if step == failing:
                    with accident(type(optimizer), "_gradient_of"):
                        fails_everywhere(lambda: scaler.step(optimizer))  # noqa: B023
                scaler.step(optimizer)
                scaler.update()
            identical_on_all_ranks(weights_of(model))
            weights.append(weights_of(model))
        assert torch.equal(*weights), name


def scaler_on_one_rank_only() -> None:
    model = network()
    optimizer, scaler = CompressedAdamW(model.parameters(), warmup_steps=2), scaler_of()
    scaler.scale(loss_of(model, batch(RANK, 0))).backward()
    step = optimizer.step if RANK == 1 else lambda: scaler.step(optimizer)
    fails(InvalidArgument, "rank 1", step)


# ---- 3. averages of weights ----------------------------------------------------------------------


def skippable_averages_raise() -> None:
    """Check that every rank raises in its first step, and the error's remedy works."""
    model = network()
    inner = torch.optim.SGD(model.parameters(), 0.05)
    averager = QuantizedModelAverager(period=4, config=Config(bits=4))
    optimizer, scaler = PostLocalSGDOptimizer(inner, averager), scaler_of()
    fails(InvalidArgument, "torch.amp.GradScaler", lambda: iterate(model, optimizer, scaler, 0))

    scaler = scaler_of()
    for step in range(STEPS + 1):
        iterate(model, inner, scaler, step)
        averager.average_parameters(model.parameters())
    identical_on_all_ranks(weights_of(model))

    # All ranks skip the same steps, or no rank skips any.
    for scaler in (ShardedGradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)):
        iterate(model, optimizer, scaler, 0)


CHECKS = [
    loops_count_iterations,
    steps_without_a_scaler,
    failed_average_leaves_no_scale,
    all_ranks_skip,
    failed_steps_can_be_repeated,
    scaler_on_one_rank_only,
    skippable_averages_raise,
]
