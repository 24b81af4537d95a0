"""The planner's model and its groups: finish() by hand, partition() against brute force."""

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import astuple, fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgx_ops import InvalidArgument
from cgx_ops.planner import Costs, finish, partition
from cgx_ops.planner.baselines import ddp_buckets, per_tensor, two_groups, whole
from cgx_ops.planner.partition import ROUNDS, by_readiness

Case = tuple[list[int], list[float], list[int], Costs]

_FIXED = st.sampled_from([0.0]) | st.floats(1e-6, 5e-3)
_EACH = st.sampled_from([0.0]) | st.floats(1e-11, 1e-8)


@st.composite
def cases(draw: st.DrawFn, most: int) -> Case:
    """Draw numels, ready times, bytes and costs of up to `most` tensors."""
    count = draw(st.integers(1, most))

    def of_each(one: st.SearchStrategy) -> list:
        return draw(st.lists(one, min_size=count, max_size=count))

    numels = of_each(st.integers(0, 2_000_000))
    ready = of_each(st.sampled_from([0.0, 1e-3, 5e-3]) | st.floats(0, 0.02))
    sizes = [draw(st.integers(0, 4)) + n // 2 for n in numels]
    fixed_or_each = (_FIXED, _EACH, _FIXED, _EACH, _FIXED, _EACH, _FIXED, _FIXED, _EACH)
    return numels, ready, sizes, Costs(*(draw(one) for one in fixed_or_each))


def _contiguous(order: Sequence[int]) -> Iterator[list[list[int]]]:
    for cuts in itertools.product((False, True), repeat=len(order) - 1):
        groups = [[order[0]]]
        for i, cut in zip(order[1:], cuts, strict=True):
            if cut:
                groups.append([])
            groups[-1].append(i)
        yield groups


def _check_optimal(case: Case) -> None:
    numels, ready, sizes, costs = case
    groups = partition(*case)
    order = by_readiness(ready)
    assert [i for group in groups for i in group] == order
    ends = [(finish(all_, *case), len(all_)) for all_ in _contiguous(order)]
    assert (finish(groups, numels, ready, sizes, costs), len(groups)) == min(ends)


@settings(max_examples=60)
@given(cases(most=7))
def test_partition_is_optimal(case: Case) -> None:
    _check_optimal(case)


@pytest.mark.exhaustive
@settings(max_examples=1000)
@given(cases(most=12))
def test_partition_is_optimal_in_many_cases(case: Case) -> None:
    _check_optimal(case)


def test_finish_by_hand() -> None:
    costs = Costs(
        encode_fixed=1, encode_per_value=0.5, link_fixed=2, link_per_byte=0.25, decode_fixed=3,
        decode_per_value=0.125, latency=10,
    )  # fmt: skip
    numels, ready, sizes = [8, 16, 4], [5.0, 6.0, 7.0], [8, 16, 4]
    # Alone: encoded at 5 + 1 + 4, sent after 2 + 2, received 10 later, decoded after 3 + 1.
    assert finish([[0]], numels[:1], ready[:1], sizes[:1], costs) == 5 + 5 + 4 + 10 + 4
    # Tensor 1 is encoded from 10 to 19 and sent from 19 to 25, tensor 2 from 19 to 22 and from 25
    # to 28; received data is decoded from 35 to 40, and from 40 to 43.5.
    assert finish([[0], [1], [2]], numels, ready, sizes, costs) == 43.5
    # Together: from 7 for 15, from 22 for 9, 10 in transit, 6.5 to decode.
    assert finish([[2, 0, 1]], numels, ready, sizes, costs) == 22 + 9 + 10 + 6.5


def test_messages_delay_the_backward_pass() -> None:
    costs = Costs(processor_fixed=1, processor_per_value=0.5, link_per_byte=1)
    numels, ready, sizes = [4, 8, 2], [5.0, 6.0, 7.0], [1, 1, 1]
    # Without earlier messages nothing is delayed: as one group, the step ends when all tensors are
    # ready and sent.
    assert finish([[0, 1, 2]], numels, ready, sizes, costs) == 7 + 3
    # The first message takes 1 + 2 of processor time, the second 1 + 4.
    assert finish([[0], [1], [2]], numels, ready, sizes, costs) == 7 + 3 + 5 + 1


def test_latency_counts_once() -> None:
    numels, ready, sizes = [1000] * 5, [0.0, 0.1, 0.2, 0.3, 0.4], [500] * 5
    costs = Costs(link_fixed=0.05, link_per_byte=1e-6, latency=3.0)
    for groups in (per_tensor(ready), whole(ready)):
        without = finish(groups, numels, ready, sizes, replace(costs, latency=0))
        assert finish(groups, numels, ready, sizes, costs) == pytest.approx(without + 3.0)


@settings(max_examples=50)
@given(cases(most=40), st.data())
def test_plan_beats_other_groupings_and_costs_are_monotonic(
    case: Case, data: st.DataObject
) -> None:
    numels, ready, _, costs = case
    planned = finish(partition(*case), *case)
    for groups in (
        whole(ready), per_tensor(ready), two_groups(*case), ddp_buckets(numels, ready, first_mib=1),
    ):  # fmt: skip
        assert planned <= finish(groups, *case)
    name = data.draw(st.sampled_from([field.name for field in fields(Costs)]))
    dearer = replace(costs, **{name: 2 * getattr(costs, name) + 1e-12})
    assert finish(partition(*case[:3], dearer), *case[:3], dearer) >= planned


def test_grouping_depends_on_message_costs() -> None:
    numels, ready, sizes = [1000] * 30, [i / 1000 for i in range(30)], [500] * 30
    free = Costs(link_per_byte=1e-8, encode_per_value=1e-9)
    alone = finish(per_tensor(ready), numels, ready, sizes, free)
    assert finish(partition(numels, ready, sizes, free), numels, ready, sizes, free) == alone
    assert partition(numels, ready, sizes, Costs(link_fixed=1.0)) == [list(range(30))]
    # All are ready at the same time and a message costs only its bytes: one message ties, and is
    # selected.
    assert len(partition(numels, [0.0] * 30, sizes, Costs(link_per_byte=1e-8))) == 1


def test_order_follows_ready_times_then_the_list() -> None:
    ready = [0.3, 0.1, 0.2, 0.1]
    groups = partition([10] * 4, ready, [5] * 4, Costs(link_per_byte=1e-3))
    assert [i for group in groups for i in group] == [1, 3, 2, 0]
    assert partition([], [], [], Costs()) == []
    assert two_groups([], [], [], Costs()) == whole([]) == per_tensor([]) == []


def test_many_tensors_are_merged_with_little_loss() -> None:
    count = 3 * ROUNDS[-1]
    numels = [1 + (i * 7919) % 50_000 for i in range(count)]
    ready = [i * 0.2 / count for i in range(count)]
    sizes = [n // 2 + 8 for n in numels]
    costs = Costs(3e-5, 1e-10, 1e-3, 2e-8, 3e-5, 1e-10, 1e-3)
    groups = partition(numels, ready, sizes, costs)
    assert [i for group in groups for i in group] == list(range(count))
    assert len(groups) < ROUNDS[-1]
    # No grouping ends before all bytes are sent, from the time the first one is ready.
    link = sum(sizes) * costs.link_per_byte
    assert finish(groups, numels, ready, sizes, costs) < 1.1 * max(link, ready[-1])


def transformer(layers: int, width: int) -> list[int]:
    """Return the sizes of GPT-2's tensors: few large ones, and many tiny ones."""
    block = [width, width, 3 * width**2, 3 * width, width**2, width, width, width]
    return [50257 * width, 1024 * width, *layers * (block + [4 * width**2, 4 * width] * 2), width]


@pytest.mark.parametrize(("layers", "backward"), [(10, 0.1), (10, 0.3), (24, 0.1), (32, 0.3)])
def test_groups_of_many_tensors_end_within_a_thousandth_of_the_best(
    layers: int, backward: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 24 layers on, an exhaustive search takes minutes, so other groupings are compared."""
    numels = transformer(layers, 32 * layers)
    ready = [backward * (1 - i / len(numels)) for i in range(len(numels))]
    sizes = [n // 2 + 8 for n in numels]
    costs = Costs(2e-5, 4e-10, 8e-4, 1.2e-8, 2e-5, 2e-10, 1e-4)
    case = (numels, ready, sizes, costs)
    assert len(numels) > ROUNDS[0]
    found = finish(partition(*case), *case)
    peers = [two_groups(*case), per_tensor(ready), whole(ready)]
    if layers == 10:
        monkeypatch.setattr(sys.modules["cgx_ops.planner.partition"], "ROUNDS", ROUNDS[-1:])
        peers.append(partition(*case))
    assert all(found * 0.999 <= finish(groups, *case) for groups in peers)


def test_buckets_close_when_they_reach_their_limit() -> None:
    numels, ready = [200_000] * 40, [float(i) for i in range(40)]
    first, *others = ddp_buckets(numels, ready)
    assert first == [0, 1]  # 1.5 MiB: one tensor is less than 1 MiB
    assert [len(group) for group in others] == [33, 5]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Costs(encode_fixed=-1), r"Costs.encode_fixed is -1; it must be a finite number"),
        (lambda: partition([1], [1e300], [1], Costs()), "would take .* s or more; a step must"),
        (lambda: partition([1], [0], [1], Costs(latency=1e300)), "would take .* s or more"),
        (lambda: partition([2**62] * 3, [0, 1, 2], [1] * 3, Costs()), "numels add up to 13835058"),
        (lambda: Costs(latency=math.nan), "Costs.latency is nan"),
        (lambda: partition([1], [0.0, 1.0], [1], Costs()), "1 numels, 2 ready times and 1 bytes"),
        (lambda: partition([1, -2], [0, 0], [1, 1], Costs()), r"numels\[1\] is -2"),
        (lambda: partition([1], [math.inf], [1], Costs()), r"ready\[0\] is inf"),
        (lambda: finish([[0], [0]], [1], [0], [1], Costs()), "each of the 1 tensors"),
        (lambda: finish([[0], []], [1], [0], [1], Costs()), "a group is empty"),
        (lambda: partition([1], [5000.0], [1], Costs()), "costs and ready times are in seconds"),
    ],
)
def test_invalid_arguments_raise(call, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        call()


def test_costs_are_rounded_to_femtoseconds_only() -> None:
    third = 1 / 3e9
    costs = Costs(*[third] * len(astuple(Costs())))
    assert finish([[0]], [3], [third], [3], costs) == pytest.approx(14 * third, rel=1e-5)
