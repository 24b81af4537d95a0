"""Rates of "entropy": predicted errors against measured ones, allocations against a search."""

import functools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.encoding_errors import squared_error

from cgx_ops import Config, InvalidArgument, Unsupported
from cgx_ops.planner import allocate_bits, allocate_rates, predicted_error, statistic

_NUMEL = 65_536


def _entropy(rate: float, rounding: Any = None) -> Config:
    return Config(compressor="entropy", rate=rate, rounding=rounding)


@pytest.mark.parametrize("rounding", ["nearest", "shift"])
def test_predicted_error_equals_the_measured_one(rounding: str) -> None:
    values = np.random.default_rng(0).standard_normal(_NUMEL).astype(np.float32)
    for rate in (0.25, 0.3, 0.5, 0.75, 1, 1.5, 2, 2.6, 3, 4, 6, 8):
        config = _entropy(rate, rounding)
        predicted = predicted_error(statistic(values, config), rate, config)
        within = 0.04 if rounding == "nearest" else 0.08 if rate >= 1 else 0.2
        assert squared_error(values, config) == pytest.approx(predicted, rel=within), rate
    assert predicted_error(7.0, 32, config) == 0


@pytest.mark.parametrize("name", ["laplace", "t3"])
def test_heavy_tails_have_less_error_than_predicted(name: str) -> None:
    rng = np.random.default_rng(0)
    drawn = rng.laplace(size=_NUMEL) if name == "laplace" else rng.standard_t(3, size=_NUMEL)
    values = drawn.astype(np.float32)
    for rate in (0.5, 1, 2, 3, 4):
        config = _entropy(rate)
        share = squared_error(values, config) / predicted_error(
            statistic(values, config), rate, config
        )
        assert 0.5 < share < 0.95, rate


@pytest.mark.parametrize("rounding", ["nearest", "shift"])
def test_errors_fall_and_are_convex(rounding: str) -> None:
    rates = np.arange(25, 801) / 100
    errors = np.array([predicted_error(1.0, rate, _entropy(2, rounding)) for rate in rates])
    slopes = np.diff(errors)
    assert (slopes < 0).all() and (np.diff(slopes) > 0).all()
    high = [math.pi * math.e / 6 / 4**rate for rate in rates if rate >= 3]
    assert errors[-len(high) :] == pytest.approx(high, rel=0.015)


def test_statistic_is_the_sum_of_squares() -> None:
    values = np.arange(1000, dtype=np.float32)
    every: list[dict[str, Any]] = [{}, {"skip_incomplete_buckets": True}, {"bucket_size": 64}]
    for own in every:
        config = Config(compressor="entropy", **own)
        assert statistic(values, config) == pytest.approx(np.square(values).sum(), rel=1e-6)
    assert statistic(np.zeros(10, np.float32), _entropy(1)) == 0
    assert math.isnan(statistic(np.array([1, np.nan], np.float32), _entropy(1)))


# ---- allocation ----------------------------------------------------------------------------------


def _error(statistics: list[float], rates: list[float], budget: str, config: Config) -> float:
    squared = [predicted_error(s, rate, config) for s, rate in zip(statistics, rates, strict=True)]
    return math.fsum(squared if budget == "squared" else map(math.sqrt, squared))


@functools.cache
def _shares(rounding: Any) -> np.ndarray:
    """Return the error of each rate from 0.25 to 8, as a share of the signal."""
    config = _entropy(2, rounding)
    return np.array([predicted_error(1.0, rate / 100, config) for rate in range(25, 801)])


def _least_error(
    statistics: list[float], numels: list[int], budget: str, config: Config
) -> tuple[float, float]:
    """Give hundredths of a bit one by one to the tensor that gains most per byte.

    Errors are convex, so this is the optimum of every total that it reaches.

    Returns:
        The error within the budget, and the error with one step more.
    """
    squared = np.array(statistics)[:, None] * _shares(config.rounding)
    table = squared if budget == "squared" else np.sqrt(squared)
    gains = -np.diff(table, axis=1) / np.array(numels)[:, None]
    assert config.rate is not None
    left = (config.rate - 0.25) * sum(numels) * (1 + 1e-12)
    order = np.argsort(-gains, axis=None, kind="stable") // gains.shape[1]
    count = int((np.array(numels)[order].cumsum() <= 100 * left).sum())

    def error(count: int) -> float:
        steps = np.bincount(order[:count], minlength=len(numels))
        return math.fsum(table[np.arange(len(numels)), steps])

    return error(count), error(count + 1)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[list[float], list[int]]:
    """Draw statistics and numels, with small and large ones."""
    numels = [int(10**e) for e in draw(st.lists(st.floats(0, 6), min_size=1, max_size=12))]
    spread = draw(st.sampled_from([1, 6, 40]))
    energies = [math.exp(spread * draw(st.floats(-1, 1))) for _ in numels]
    return [0.0 if draw(st.booleans()) and e < 0.5 else n * e
            for n, e in zip(numels, energies, strict=True)], numels  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    tensors(),
    st.sampled_from(["squared", "norm"]),
    st.sampled_from([0.25, 0.5, 1.0, 2.0, 2.345, 5.5, 8.0]),
    st.sampled_from(["nearest", "shift"]),
)
@example(([0.0, 0.0], [10, 10_000]), "squared", 2.0, "nearest")
@example(([0.0, 1.0], [10, 10]), "squared", 6.0, "nearest")  # the rest goes to the zeros
def test_error_is_the_least_at_the_mean_rate(
    case: tuple[list[float], list[int]], budget: Any, rate: float, rounding: str
) -> None:
    statistics, numels = case
    config = _entropy(rate, rounding)
    rates = allocate_rates(statistics, numels, budget, config=config)
    assert all(0.25 <= r <= 8 and (r == rate or round(100 * r) / 100 == r) for r in rates)
    total = sum(n * round(r * 1e9) for n, r in zip(numels, rates, strict=True))
    most = round(rate * 1e9) * sum(numels)
    assert most - 10_000_000 * sum(numels) < total <= most
    error = _error(statistics, rates, budget, config)
    within, beyond = _least_error(statistics, numels, budget, config)
    # Rounded down, each rate loses less than 0.01 bits: at most a factor of 4^0.02 at these slopes,
    # and the search's own last step.
    assert error <= within * (1.02 if rounding == "nearest" else 1.06) + 1e-300
    assert error >= beyond * (1 - 1e-9)
    assert error <= _error(statistics, [rate] * len(numels), budget, config) * (1 + 1e-9)


def test_rates_differ_by_half_the_logarithm_of_the_energy() -> None:
    numels = [1000, 2000, 3000, 4000]
    energies = [1, 4, 16, 1 / 16]
    statistics = [n * e for n, e in zip(numels, energies, strict=True)]
    rates = allocate_rates(statistics, numels, config=_entropy(4))
    mean = sum(n * math.log2(e) / 2 for n, e in zip(numels, energies, strict=True)) / sum(numels)
    assert rates == pytest.approx([4 + math.log2(e) / 2 - mean for e in energies], abs=0.0101)


def test_rates_are_clamped_and_the_rest_is_shared() -> None:
    rates = allocate_rates([1.0, 1.0, 1e30], [100, 100, 100], config=_entropy(4))
    assert rates == [2.0, 2.0, 8.0]
    rates = allocate_rates([1e-30, 1.0, 1.0], [100, 100, 100], config=_entropy(2))
    assert rates == [0.25, 2.88, 2.87]
    assert allocate_rates([5.0, 1e-9], [10, 10], config=_entropy(8)) == [8.0, 8.0]
    assert allocate_rates([5.0, 1e-9], [10, 10], config=_entropy(0.25)) == [0.25, 0.25]


def test_equal_tensors_have_the_rate_of_the_config() -> None:
    numels = [10, 77, 4096, 1_000_000]
    for rate in (0.251, 2, 2.3456):
        assert (
            allocate_rates([3.0 * n for n in numels], numels, config=_entropy(rate)) == [rate] * 4
        )
    assert allocate_rates([0.0] * 4, numels, config=Config(compressor="entropy")) == [2.0] * 4
    assert allocate_rates([], [], config=_entropy(2)) == []
    assert allocate_rates([0.0, 1.0], [0, 10], config=_entropy(3)) == [3.0, 3.0]


def test_small_tensors_get_more_with_the_norm() -> None:
    statistics, numels = [100.0, 100.0 * 256], [100, 100 * 256]
    squared = allocate_rates(statistics, numels, config=_entropy(4))
    norm = allocate_rates(statistics, numels, "norm", config=_entropy(4))
    assert squared == [4.0, 4.0]
    assert norm[0] == pytest.approx(norm[1] + 4, abs=0.02)  # log2 of the root of 256


def test_fixed_rates_are_kept_and_excluded() -> None:
    statistics, numels = [1e9, 1e3, 1e4, 1e-3], [1000] * 4
    free = allocate_rates(statistics[1:], numels[1:], config=_entropy(2))
    found = allocate_rates(statistics, numels, config=_entropy(2), fixed={0: 7})
    assert found == [7.0, *free]
    assert all(type(rate) is float for rate in found)


def test_statistics_of_any_size_are_accepted() -> None:
    for scale in (1e-300, 1.0, 1e300):
        found = allocate_rates([scale, 4 * scale], [10, 10], config=_entropy(4))
        assert found == [3.5, 4.5]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda c: allocate_rates([1.0], [1, 2], config=c), "1 statistics and 2 numels"),
        (lambda c: allocate_rates([math.nan], [1], config=c), r"statistics\[0\] is nan"),
        (lambda c: allocate_rates([math.inf], [1], config=c), r"statistics\[0\] is inf"),
        (lambda c: allocate_rates([1.0], [-1], config=c), r"numels\[0\] is -1"),
        (lambda c: allocate_rates([1.0], [1], "cubed", config=c), "'cubed'"),  # pyright: ignore
        (lambda c: allocate_rates([1.0], [1], config=c, fixed={1: 4}), "fixed has the index 1"),
        (lambda c: allocate_rates([1.0], [1], config=c, fixed={0: 9}), "rate is 9"),
        (lambda c: predicted_error(1.0, 0.1, c), "rate is 0.1"),
        (lambda c: predicted_error(1.0, 2.5, Config()), "bits is 2.5"),
    ],
)
def test_invalid_arguments_raise(call: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        call(_entropy(2))


def test_other_compressors_raise() -> None:
    with pytest.raises(Unsupported, match=r"call allocate_rates\(\)"):
        allocate_bits([1.0], [1], config=_entropy(2))
    for config in (Config(), Config(compressor="topk"), Config(compressor="entropy", bits=32)):
        with pytest.raises(Unsupported, match=r"allocate_rates\(\) is for compressor 'entropy'"):
            allocate_rates([1.0], [1], config=config)
