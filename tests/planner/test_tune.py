"""Tuned plans: costs fitted to measured steps, and the fastest plan, the same on all ranks."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.launch import threads

from cgx_ops import Communicator, Config, InvalidArgument
from cgx_ops._core.codec import encoded_bytes
from cgx_ops.planner import Costs, Plan, Tuned, finish, tune
from cgx_ops.planner.baselines import ddp_buckets, per_tensor, whole
from cgx_ops.planner.model import Tensors
from cgx_ops.planner.tune import explained

_CONFIG = Config(bits=4)
_COSTS = Costs(7e-6, 4e-10, 0.0, 8.9e-9, 7e-6, 8e-10, 1.6e-4, 6e-5, 2.3e-9)  # at 1 Gbit/s
_NUMELS = {f"layer{i}": 512 * 512 * (1 + 3 * i % 5) for i in range(24)}
_COUNTS = list(_NUMELS.values())
_READY = [0.08 * (24 - i) / 24 for i in range(24)]
_BYTES = [encoded_bytes(n, _CONFIG) for n in _COUNTS]
_FORWARD = 0.04
_PLAN = Plan.of(_NUMELS, _READY, _COSTS, config=_CONFIG)


def ends(groups: Sequence[Sequence[int]], costs: Costs) -> float:
    return finish(groups, _COUNTS, _READY, _BYTES, costs)


def scaled(codec: float, link: float, message: float, value: float) -> Costs:
    return Costs(
        encode_fixed=codec * _COSTS.encode_fixed,
        encode_per_value=codec * _COSTS.encode_per_value,
        link_fixed=link * _COSTS.link_fixed,
        link_per_byte=link * _COSTS.link_per_byte,
        decode_fixed=codec * _COSTS.decode_fixed,
        decode_per_value=codec * _COSTS.decode_per_value,
        latency=link * _COSTS.latency,
        processor_fixed=message * _COSTS.processor_fixed,
        processor_per_value=value * _COSTS.processor_per_value,
    )


# ---- costs fitted to steps -----------------------------------------------------------------------


@settings(max_examples=40)
@given(st.tuples(*(st.integers(-1, 3) for _ in range(4))))
def test_costs_explain_the_steps(powers: tuple[int, ...]) -> None:
    """Check that fitted costs explain the steps as well as the true ones.

    The true factors have the error 0.02^2 times the squares of their powers, and no error of steps.
    The fitted costs therefore predict each step to within 0.02 times the powers' norm, however far
    they are from the true ones. Costs that affect no step are unchanged.
    """
    true = scaled(*(2.0**p for p in powers))
    grouped = [per_tensor(_READY), whole(_READY), _PLAN.groups]
    tensors = Tensors.checked(_COUNTS, _READY, _BYTES, _COSTS)
    found = explained([(groups, ends(groups, true)) for groups in grouped], tensors, _COSTS)
    bound = 0.02 * float(np.linalg.norm(powers))
    for groups in grouped:
        assert ends(groups, found) == pytest.approx(ends(groups, true), rel=bound + 1e-9)


def test_costs_that_predict_every_step_are_unchanged() -> None:
    tensors = Tensors.checked(_COUNTS, _READY, _BYTES, _COSTS)
    steps = [(groups, ends(groups, _COSTS)) for groups in (per_tensor(_READY), whole(_READY))]
    assert explained(steps, tensors, _COSTS) == _COSTS


# ---- the fastest plan ----------------------------------------------------------------------------


def test_ranks_select_the_fastest_tried_plan() -> None:
    """Let messages take far more processor time than measured: the second plan has fewer."""
    true = scaled(1, 1, 8, 1)

    def run(rank: int, communicator: Communicator) -> tuple[Tuned, list[Plan]]:
        tried: list[Plan] = []

        def seconds_of(plan: Plan) -> float:
            tried.append(plan)
            return (0.7 + 0.1 * rank) * (_FORWARD + ends(plan.groups, true))

        found = tune(
            communicator, _NUMELS, _READY, _COSTS, seconds_of, before=_FORWARD, config=_CONFIG
        )
        return found, tried

    found = threads(4, run, timeout=60)
    tuned, plans = found[0]
    assert all(each == (tuned, plans) for each in found)
    assert len(plans) == 3 * 4 + 3 * 5
    first, second = plans[0], plans[-1]
    assert first == _PLAN
    assert second == tuned.plan
    assert len(second.groups) < len(first.groups)
    seconds = dict(tuned.tried)
    assert seconds[tuned.plan] == min(seconds.values())
    for plan in plans:  # the slowest rank's time, in float32
        assert seconds[plan] == pytest.approx(_FORWARD + ends(plan.groups, true), rel=1e-6)
    assert tuned.costs.processor_fixed > 2 * _COSTS.processor_fixed


@pytest.mark.parametrize(
    "usual", [per_tensor(_READY), whole(_READY), ddp_buckets(_COUNTS, _READY)], ids=len
)
def test_faster_default_plan_is_selected(
    usual: list[list[int]],
) -> None:
    """Check a plan whose steps are fastest for a reason that the costs do not model."""
    communicator = Communicator.local(1)[0]

    def seconds_of(plan: Plan) -> float:
        return 0.1 if [*map(list, plan.groups)] == usual else 0.2

    tuned = tune(communicator, _NUMELS, _READY, _COSTS, seconds_of, config=_CONFIG)
    assert [*map(list, tuned.plan.groups)] == usual
    assert tuned.plan.bits == (4,) * len(_NUMELS)


def test_bits_of_tensors_are_the_plans() -> None:
    bits = [2, 4, 8, 32] * 6
    communicator = Communicator.local(1)[0]
    tuned = tune(communicator, _NUMELS, _READY, _COSTS, lambda _plan: 1.0, bits=bits)
    assert {plan.bits for plan, _ in tuned.tried} == {tuple(bits)}


@pytest.mark.parametrize("numels", [{}, {"only": 17}])
def test_a_step_of_no_tensor_or_of_one_has_one_plan(numels: dict[str, int]) -> None:
    ready = [0.01] * len(numels)
    tuned = tune(Communicator.local(1)[0], numels, ready, _COSTS, lambda _plan: 0.1)
    assert tuned.tried == ((tuned.plan, pytest.approx(0.1)),)


def test_steps_shorter_than_backward_raise() -> None:
    def run(rank: int, communicator: Communicator) -> None:
        seconds = 0.03 - 0.01 * rank
        with pytest.raises(
            InvalidArgument, match=r"a step took 0[.]03 s, but `before` is 0[.]04 s"
        ):
            tune(communicator, _NUMELS, _READY, _COSTS, lambda _plan: seconds, before=_FORWARD)

    threads(2, run, timeout=20)
