"""AdaptiveBits: when it decides, which samples count, and what keeps bits stable."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from support.launch import threads

from cgx_ops import Communicator, Config, InvalidArgument, MismatchError, Unsupported
from cgx_ops.planner import AdaptiveBits, allocate_bits, allocate_rates, statistic
from cgx_ops.planner.adaptive import LAG, Sample

NAMES, NUMELS = ("a", "b", "c"), (1000, 50_000, 2000)
CONFIG = Config(bits=4, rounding="nearest")
SPREAD = (9.0, 0.1, 400.0)  # losses per value


def _fed(
    bits: AdaptiveBits,
    losses: list[tuple[float, ...]],
    first: int = 0,
    config: Config = CONFIG,
) -> list[dict[str, float]]:
    """Return the bits of each step; every step gives a sample."""
    found = []
    for step, each in enumerate(losses, first):
        bits.advance(step, config)
        found.append(dict(bits.bits))
        if bits.measures(step):
            bits.arrive(Sample(step, NAMES, NUMELS, each))
    return found


RATE = Config(compressor="entropy", rate=2)


def _rates(losses: tuple[float, ...], config: Config = RATE) -> dict[str, float]:
    statistics = [n * x for n, x in zip(NUMELS, losses, strict=True)]
    return dict(zip(NAMES, allocate_rates(statistics, NUMELS, config=config), strict=True))


def _allocated(losses: tuple[float, ...]) -> dict[str, int]:
    statistics = [n * x for n, x in zip(NUMELS, losses, strict=True)]
    return dict(zip(NAMES, allocate_bits(statistics, NUMELS, config=CONFIG), strict=True))


def test_decides_by_the_mean_after_a_lag() -> None:
    twice = tuple(2 * x for x in SPREAD)
    nothing = (0.0,) * 3
    found = _fed(AdaptiveBits(every=4, samples=4), [SPREAD, twice, SPREAD, twice, nothing, nothing])
    assert found[: 3 + LAG] == [{}] * (3 + LAG)
    assert found[3 + LAG] == _allocated(SPREAD)


def test_samples_are_spread_over_the_period() -> None:
    bits = AdaptiveBits(every=100, samples=10)
    assert [step for step in range(100) if bits.measures(step)] == list(range(0, 100, 10))


def test_nonfinite_and_zero_samples_are_ignored() -> None:
    nan, zero = (float("nan"), 1.0, 1.0), (0.0, 0.0, 0.0)
    bits = AdaptiveBits(every=3, samples=3)
    _fed(bits, [nan, SPREAD, zero, nan, nan])
    assert bits.bits == _allocated(SPREAD)
    only = AdaptiveBits(every=2, samples=2)
    _fed(only, [nan, zero, nan, zero, nan])
    assert only.bits == {} and only.changes == 0


def test_bits_are_stable_for_small_gains() -> None:
    bits = AdaptiveBits(every=1, samples=1)
    _fed(bits, [SPREAD, SPREAD, SPREAD])
    assert bits.changes == 1
    before = dict(bits.bits)
    _fed(bits, [tuple(1.02 * x for x in SPREAD)] * 3, first=3)
    assert bits.bits == before and bits.changes == 1
    _fed(bits, [SPREAD[::-1]] * 4, first=6)  # the current bits now have too large an error
    assert bits.bits == _allocated(SPREAD[::-1]) and bits.changes == 2


def test_changes_can_be_limited() -> None:
    bits = AdaptiveBits(every=1, samples=1, most_changes=1)
    _fed(bits, [SPREAD] * 3 + [SPREAD[::-1]] * 4)
    assert bits.bits == _allocated(SPREAD)


def test_other_tensors_reset_the_statistics() -> None:
    bits = AdaptiveBits(every=2, samples=2)
    bits.arrive(Sample(0, ("x",), (100,), (5.0,)))
    _fed(bits, [SPREAD, SPREAD, SPREAD, SPREAD], first=1)
    bits.advance(9, CONFIG)
    assert bits.bits == _allocated(SPREAD)


def test_pickled_object_resumes() -> None:
    straight, saved = (AdaptiveBits(every=3, samples=3) for _ in range(2))
    _fed(straight, [SPREAD] * 5)
    _fed(saved, [SPREAD] * 2)
    restored = pickle.loads(pickle.dumps(saved))
    _fed(restored, [SPREAD] * 3, first=2)
    assert restored.bits == straight.bits != {}


def test_plan_has_the_current_bits() -> None:
    bits = AdaptiveBits(every=1, samples=1)
    _fed(bits, [SPREAD] * 3)
    plan = bits.plan()
    assert dict(zip(plan.names, plan.bits, strict=True)) == bits.bits
    assert plan.numels == NUMELS and plan.rules.of("a", 2, Config()).bits == bits.bits["a"]
    total = sum(NUMELS)
    assert (
        bits.mean_bits == sum(bits.bits[n] * c for n, c in zip(NAMES, NUMELS, strict=True)) / total
    )


def test_entropy_gets_rates_with_the_mean_of_the_config() -> None:
    bits = AdaptiveBits(every=2, samples=2)
    found = _fed(bits, [SPREAD] * 4, config=RATE)
    assert found[3] == _rates(SPREAD) and {type(rate) for rate in found[3].values()} == {float}
    assert 1.99 < bits.mean_bits <= 2
    assert found[3]["b"] < 2 < found[3]["a"] < found[3]["c"]
    assert bits.plan().rules.of("a", 1, RATE).rate == found[3]["a"]


def test_rates_are_stable_for_small_gains() -> None:
    bits = AdaptiveBits(every=1, samples=1)
    _fed(bits, [SPREAD] * 3, config=RATE)
    before = dict(bits.bits)
    _fed(bits, [(9.5, 0.1, 390.0)] * 3, first=3, config=RATE)
    assert bits.bits == before and bits.changes == 1
    _fed(bits, [SPREAD[::-1]] * 3, first=6, config=RATE)
    assert bits.bits == _rates(SPREAD[::-1]) and bits.changes == 2
    equal = AdaptiveBits(every=1, samples=1)
    _fed(equal, [(1.0, 1.0, 1.0)] * 3, config=RATE)
    assert equal.bits == {}  # the rate of the config is the best


def test_rates_follow_the_mean_of_the_config() -> None:
    bits = AdaptiveBits(every=1, samples=1)
    _fed(bits, [SPREAD] * 3, config=RATE)
    for first, rate in ((3, 1.9), (6, 2.5)):  # fewer bytes, then less error
        config = replace(RATE, rate=rate)
        _fed(bits, [SPREAD] * 3, first=first, config=config)
        assert bits.bits == _rates(SPREAD, config)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"choices": (2, 4)}, r"choices is \(2, 4\), but .*'entropy' has rates"),
        ({"alpha": 2.0}, "alpha is 2.0, but .*'entropy' has rates"),
        ({"budget": "clusters"}, "budget is 'clusters', which chooses bits"),
    ],
)
def test_settings_of_bits_are_refused_for_rates(settings: dict, says: str) -> None:
    bits = AdaptiveBits(every=1, samples=1, **settings)
    with pytest.raises(InvalidArgument, match=says):
        bits.check(RATE)
    with pytest.raises(InvalidArgument, match=says):
        _fed(bits, [SPREAD] * 3, config=RATE)
    bits.check(replace(CONFIG, error_feedback=False))


def test_exact_values_have_no_rate() -> None:
    bits, exact = AdaptiveBits(every=1, samples=1), replace(RATE, bits=32)
    with pytest.raises(InvalidArgument, match="bits is 32, which sends exact values"):
        bits.check(exact)
    with pytest.raises(InvalidArgument, match="bits is 32, which sends exact values"):
        _fed(bits, [SPREAD] * 3, config=exact)


def test_rates_of_two_ranks_are_equal() -> None:
    """The ranks have different values; only the averages of their statistics count."""

    def run(rank: int, comm: Communicator) -> tuple[dict[str, float], list[list[float]]]:
        bits, averages = AdaptiveBits(every=2, samples=2), []
        for step in range(4):
            bits.advance(step, RATE)
            bits.agree(comm)
            random = np.random.default_rng(10 * step + rank)
            own = [
                scale * random.standard_normal(n).astype(np.float32)
                for scale, n in zip((3, 0.3, 20), NUMELS, strict=True)
            ]
            losses = np.array([statistic(x, RATE) / x.size for x in own], np.float32)
            averages.append(comm.allreduce(losses, "avg", bits=32).tolist())
            numels = dict(zip(NAMES, NUMELS, strict=True))
            bits.observe(step, numels, dict(zip(NAMES, averages[-1], strict=True)))
        return bits.bits, averages

    (first, averages), second = threads(2, run)
    assert (first, averages) == second
    losses = tuple(np.mean(averages[:2], axis=0).tolist())
    assert first == _rates(losses)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"choices": [9]}, "bits is 9"),
        ({"choices": [77], "budget": "clusters"}, "bits is 77"),
        ({"choices": []}, "choices is empty"),
        ({"most_changes": -1}, "most_changes is -1"),
        ({"most_changes": 1.5}, "most_changes is 1.5"),
        ({"alpha": 0}, "alpha"),
        ({"budget": "clusters", "alpha": -3}, "alpha is -3"),
        ({"every": 7, "samples": 2}, "every is 7"),
        ({"budget": "cubed"}, "budget is 'cubed'"),
    ],
)
def test_settings_are_validated_immediately(settings: dict, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        AdaptiveBits(**settings)


def test_choices_are_checked_with_the_config() -> None:
    levels = Config(bits=3, compressor="levels")
    AdaptiveBits(choices=(1, 4, 32)).check(levels)
    AdaptiveBits(budget="clusters").check(levels)
    with pytest.raises(InvalidArgument, match=r"choices is \(2, 6\): bits is 6; .*'levels'"):
        AdaptiveBits(budget="clusters", choices=(2, 6)).check(levels)
    with pytest.raises(InvalidArgument, match=r"choices is \(1, 8\): .*error feedback"):
        AdaptiveBits(choices=(1, 8)).check(Config(bits=3, error_feedback=True))
    with pytest.raises(Unsupported, match="leave rotation out"):
        AdaptiveBits().check(replace(levels, rotation=64))


def test_mismatch_raises_on_all_ranks() -> None:
    def run(rank: int, comm: Communicator) -> None:
        bits = AdaptiveBits(every=1, samples=1)
        bits.agree(comm)
        _fed(bits, [SPREAD] * 3)
        bits.agree(comm)
        bits.bits["b"] += rank
        with pytest.raises(MismatchError, match=r"'b' \(50000 values"):
            bits.agree(comm)
        with pytest.raises(MismatchError, match="rank 0 has every 10, rank 1 has 20"):
            AdaptiveBits(every=10 * (1 + rank)).agree(comm)

    threads(2, run)


def test_most_bits_that_are_not_enough_change_once() -> None:
    bits = AdaptiveBits(every=1, samples=1, alpha=0.5)
    eight = Config(bits=8, rounding="nearest")  # half its error needs 9 bits
    found = _fed(bits, [SPREAD] * (LAG + 6), config=eight)
    assert found[-1] in ({}, dict.fromkeys(NAMES, 8))
    assert bits.changes == 0
