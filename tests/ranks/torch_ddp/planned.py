"""Groups of a plan: buckets joined by the hook, changes of the plan, mismatched ranks."""

import inspect
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from failing import fails
from support import torch_cases as tc
from torch.nn.parallel import DistributedDataParallel
from torch_training import refused_start

import cgx_ops
from cgx_ops import Config, MismatchError
from cgx_ops.planner import Costs, Plan, tune
from cgx_ops.torch import ddp
from cgx_ops.torch.ddp import planned_hook

from .common import (
    RANK,
    SIZE,
    gradients_of,
    hooked,
    identical_on_all_ranks,
    images,
    local_gradients,
    network,
    same,
)
from .feedback import ENTROPY, bucket_average, listing, zeros_for

CONFIG = Config(bits=4, bucket_size=64, error_feedback=True)  # noise and residuals
_NUMELS = {name: p.numel() for name, p in network().named_parameters()}
_LAST_FIRST = range(len(_NUMELS) - 1, -1, -1)


def _plan(*sizes: int) -> Plan:
    """Return a plan whose groups have these numbers of tensors, the last tensors first."""
    order = iter(_LAST_FIRST)
    groups = tuple(tuple(next(order) for _ in range(size)) for size in sizes)
    return Plan(tuple(_NUMELS), tuple(_NUMELS.values()), (4,) * len(_NUMELS), groups)


WHOLE, THREE, EACH = _plan(8), _plan(3, 1, 4), _plan(*[1] * 8)


def _model(
    plan: Plan, bucket_cap_mb: float = 1e-5, group: Any = None
) -> tuple[DistributedDataParallel, ddp.PlannedAllreduceState]:
    options: Any = {"bucket_cap_mb": bucket_cap_mb, "process_group": group}
    model = DistributedDataParallel(network(), **options)
    state = ddp.PlannedAllreduceState(plan, group, CONFIG)
    model.register_comm_hook(state, ddp.planned_allreduce_hook)
    return model, state


def _step(model: torch.nn.Module, step: int) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(images(RANK, step), spare=True).square().sum().backward()
    return gradients_of(model)


def _collectives(state: ddp.PlannedAllreduceState) -> int:
    return state.communicator().collectives


def groups_are_messages_with_equal_bits() -> None:
    """Check buckets that do not end where groups do, and a change of the plan."""
    reference, _ = hooked(network(), CONFIG)
    wanted = [_step(reference, step) for step in range(6)]
    for plan, messages, cap in (
        (WHOLE, 1, 1e-5),
        (THREE, 3, 1e-5),
        (EACH, 8, 1e-5),
        (EACH, 2, 5e-3),
    ):
        model, state = _model(plan, cap)
        for step in range(3):
            before = _collectives(state)
            same(_step(model, step), wanted[step], (plan.groups, step))
            assert step == 0 or _collectives(state) - before == messages, (plan.groups, cap)
    model, state = _model(THREE)
    counts = []
    for step in range(6):
        if step == 2:
            assert state.replan(EACH) == 4
        before = _collectives(state)
        same(_step(model, step), wanted[step], step)
        counts.append(_collectives(state) - before)
    assert counts[1:] == [3, 3, 3, 8, 8], counts
    assert state.plan == EACH
    state.replan(THREE)
    state.load_state_dict(state.state_dict())
    for step in range(3):
        _step(model, step)
    assert state.plan == EACH, "the plan was announced in the previous run"


def messages_of(plan: Plan, buckets: Sequence[list[str]]) -> list[list[str]]:
    """Return the names in each message: buckets are joined until they complete a group."""
    missing = [{plan.names[i] for i in group} for group in plan.groups]
    messages: list[list[str]] = [[]]
    for names in buckets:
        messages[-1] += names
        left = [group - set(names) for group in missing]
        if any(before and not after for before, after in zip(missing, left, strict=True)):
            messages.append([])
        missing = left
    return messages[:-1]


def entropy_by_group() -> None:
    """Compare with the oracle, which packs the small layers of a group as the core does."""
    for plan in (WHOLE, THREE):
        module = network()
        hook, buckets = listing(module, ddp.planned_allreduce_hook)
        model = DistributedDataParallel(module, bucket_cap_mb=1e-5)
        state = ddp.PlannedAllreduceState(plan, None, ENTROPY)
        model.register_comm_hook(state, hook)
        alone = [local_gradients(rank, spare=True) for rank in range(SIZE)]
        lost = [{n: tc.to_numpy(x) for n, x in zeros_for(each).items()} for each in alone]
        for step in range(3):
            buckets.clear()
            found = _step(model, step)
            alone = [local_gradients(rank, (step,), spare=True) for rank in range(SIZE)]
            want: dict[str, torch.Tensor] = {}
            for names in messages_of(plan, buckets):
                want |= bucket_average(names, alone, lost)
            same(found, want, (plan.groups, step))
            for name, e in state.residuals.tensors.items():
                assert np.array_equal(tc.to_numpy(e), lost[RANK][name]), (plan.groups, step, name)


def plan_tuned_during_training() -> None:
    """Check that gradients are the same as without a plan, and that ranks select the same plan."""
    reference, _ = hooked(network(), CONFIG)
    model, state = _model(THREE)
    steps = itertools.count()

    def train(count: int) -> float:
        """Return the seconds of the last of `count` steps."""
        seconds = 0.0
        for _ in range(count):
            step, begin = next(steps), time.perf_counter()
            gradients, seconds = _step(model, step), time.perf_counter() - begin
            same(gradients, _step(reference, step), step)
        return seconds

    def seconds_of(plan: Plan) -> float:
        state.replan(plan)
        return train(3)  # the third step uses the new plan

    train(1)
    costs = Costs(link_fixed=1e-4, link_per_byte=1e-8, processor_fixed=1e-4)
    ready = [1e-3 * (1 + i) for i in _LAST_FIRST]
    tuned = tune(cgx_ops.init(), _NUMELS, ready, costs, seconds_of, config=CONFIG)
    tuned.plan.agree(cgx_ops.init())
    assert len(tuned.tried) >= 2
    state.replan(tuned.plan)
    train(3)
    assert state.plan == tuned.plan


def mismatched_plans_name_the_tensor() -> None:
    """Check that all ranks get the error immediately.

    Covers plans whose first messages are equal, and a rank that replans alone.
    """
    last = SIZE - 1
    for other, place, name, groups in (
        (EACH, 1, "last.weight", (0, 1)),
        (_plan(3, 2, 3), 4, "bn.bias", (2, 1)),
    ):
        # Use a separate group: with different numbers of messages, some are never matched.
        group = dist.new_group(backend="cgx")
        model, state = _model(other if last == RANK else THREE, group=group)
        _step(model, 0)  # uses one bucket, before DistributedDataParallel rebuilds its buckets
        begin = time.monotonic()
        words = (
            f"different plans: rank 0 has tensor {place} '{name}' "
            f"({_NUMELS[name]} values, 4 bits, group {groups[0]}), rank {last} has '{name}' "
            f"({_NUMELS[name]} values, 4 bits, group {groups[1]})"
        )
        fails(RuntimeError, words, lambda model=model: _step(model, 1))
        assert time.monotonic() - begin < 20
        dist.barrier()  # all ranks have ended; the first to leave closes the group
        assert not state.communicator().closed
    model, state = _model(THREE, group=dist.new_group(backend="cgx"))
    _step(model, 0)
    if RANK == 0:
        state.plan = EACH
    fails(RuntimeError, "ranks have different plans", lambda: _step(model, 1))
    dist.barrier()


def error_on_one_rank() -> None:
    """Check that a message that cannot start fails on all ranks; a local error stays local."""
    model, state = _model(THREE)
    _step(model, 0)
    start = refused_start if RANK == SIZE - 1 else planned_hook.start_apart
    with mock.patch.object(planned_hook, "start_apart", start):
        fails(RuntimeError, "no thread", lambda: _step(model, 1))
    if RANK == 0:
        alone = RuntimeError("out of memory")
        assert state.explained(alone, THREE) is alone
    identical_on_all_ranks(_step(model, 1))


def mismatched_plan_buckets_raise() -> None:
    """Check that ranks compare a plan before DistributedDataParallel makes its buckets."""
    module = network()
    plan = EACH if RANK == 0 else THREE
    if "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel).parameters:
        words = "ranks have different plans: rank 0 has tensor 1 'last.weight'"
        fails(MismatchError, words, lambda: ddp.planned_buckets(plan, module))


def plan_of_other_model_raises() -> None:
    wider = replace(THREE, numels=(*THREE.numels[:-1], 6))
    longer = Plan((*THREE.names, "x"), (*THREE.numels, 1), (4,) * 9, (*THREE.groups, (8,)))
    for plan, says in (
        (wider, "no parameter 'last.bias' of 5"),
        (longer, "this model has no parameter 'x'"),
    ):
        model, _ = _model(plan)
        fails(ValueError, says, lambda model=model: _step(model, 0))
    _, state = _model(THREE)
    fails(ValueError, "'last.bias' has 5 values in the old plan and 6", lambda: state.replan(wider))


CHECKS: Sequence = (
    groups_are_messages_with_equal_bits,
    entropy_by_group,
    plan_tuned_during_training,
    mismatched_plans_name_the_tensor,
    error_on_one_rank,
    mismatched_plan_buckets_raise,
    plan_of_other_model_raises,
)
