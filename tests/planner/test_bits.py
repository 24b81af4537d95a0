"""Bits per tensor: predicted errors against measured ones, budgets against exact searches."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.encoding_errors import squared_error

from cgx_ops import Config, InvalidArgument
from cgx_ops.planner import allocate_bits, cluster_bits, predicted_error, statistic

_NUMEL = 512 * 100
_DRAWS = {
    "normal": lambda rng: rng.standard_normal(_NUMEL),
    "laplace": lambda rng: rng.laplace(size=_NUMEL),
    "t3": lambda rng: rng.standard_t(3, size=_NUMEL),
    "uniform": lambda rng: rng.random(_NUMEL),
}


@pytest.mark.parametrize("name", _DRAWS)
def test_predicted_error_equals_the_measured_one(name: str) -> None:
    values = _DRAWS[name](np.random.default_rng(0)).astype(np.float32)
    for rounding in ("nearest", "shift", "stochastic", None):
        for bits in range(2, 9):
            config = Config(bits=bits, rounding=rounding)
            predicted = predicted_error(statistic(values, config), bits, config)
            within = 0.1 if bits > 2 else 0.2
            assert squared_error(values, config) == pytest.approx(predicted, rel=within), (
                rounding, bits,
            )  # fmt: skip


def test_predicted_error_of_levels_is_for_normal_values() -> None:
    values = np.random.default_rng(0).standard_normal(_NUMEL).astype(np.float32)
    for bits in range(1, 5):
        config = Config(bits=bits, compressor="levels")
        predicted = predicted_error(statistic(values, config), bits, config)
        assert squared_error(values, config) == pytest.approx(predicted, rel=0.03)


def test_statistic_counts_the_last_bucket_as_it_is() -> None:
    values = np.array([0, 2, 1, 5, 5, 5, 7, 3], np.float32)
    assert statistic(values, Config(bucket_size=3)) == (3 * 2**2 + 0 + 2 * 4**2) / 12
    assert statistic(values.reshape(2, 4), Config(compressor="levels")) == (values**2).sum()
    assert statistic(np.zeros(0, np.float32)) == 0
    assert math.isnan(statistic(np.array([1, np.nan], np.float32)))


@st.composite
def tensors(draw: st.DrawFn) -> tuple[list[float], list[int]]:
    """Draw statistics and numels, with small and large ones."""
    exponents = draw(st.lists(st.floats(0, 2), min_size=1, max_size=40))
    numels = [int(10**e) for e in exponents]
    if draw(st.booleans()):
        numels[0] = 1 + sum(numels) // 2
    return [n * math.exp(draw(st.floats(-4, 4))) for n in numels], numels


def _fewest_bits(errors: list[dict[int, float]], numels: list[int], budget: float) -> int:
    """Search exhaustively: the least error for every sum of bits."""
    least = np.full(1 + max(errors[0]) * sum(numels), math.inf)
    least[0] = 0
    for error, numel in zip(errors, numels, strict=True):
        longer = np.full_like(least, math.inf)
        for bits, lost in error.items():
            step = numel * bits
            longer[step:] = np.minimum(longer[step:], least[: len(least) - step] + lost)
        least = longer
    return int(np.flatnonzero(least <= budget * (1 + 1e-12))[0])


@settings(max_examples=40)
@given(tensors(), st.sampled_from(["squared", "norm"]), st.sampled_from([0.5, 1.0, 2.0]))
def test_bits_are_the_fewest_within_a_hundredth(
    case: tuple[list[float], list[int]], budget: str, alpha: float
) -> None:
    statistics, numels = case
    config = Config(bits=4, rounding="nearest")
    power = 1 if budget == "squared" else 0.5
    errors = [{b: predicted_error(s, b, config) ** power for b in range(2, 9)} for s in statistics]
    most = alpha * sum(error[4] for error in errors)
    bits = allocate_bits(statistics, numels, budget, config=config, alpha=alpha)  # pyright: ignore
    assert sum(e[b] for e, b in zip(errors, bits, strict=True)) <= most * (1 + 1e-8)
    total = sum(n * b for n, b in zip(numels, bits, strict=True))
    assert total <= _fewest_bits(errors, numels, most) + 0.01 * sum(numels)
    assert alpha < 1 or total <= 4 * sum(numels)


def test_bits_are_the_fewest_among_sparse_choices() -> None:
    """Use a tensor with 0.0036 of the values, which may be off by a step of four bits."""
    statistics, numels = [0.0, 1.0, 0.001], [10_000, 36, 2]
    config = Config(bits=4, rounding="nearest")
    errors = [{b: predicted_error(s, b, config) for b in (2, 4, 8)} for s in statistics]
    bits = allocate_bits(statistics, numels, config=config, choices=(2, 8))
    total = sum(n * b for n, b in zip(numels, bits, strict=True))
    fewest = _fewest_bits(errors, numels, sum(error[4] for error in errors))
    assert total <= fewest + 0.01 * sum(numels)


def test_equal_tensors_stay_uniform_and_others_save_bits() -> None:
    numels = [10_000] * 50
    assert allocate_bits([7.0 * n for n in numels], numels) == [4] * 50
    spread = np.random.default_rng(0).normal(0, 1.5, 50)  # logarithm of the error per value
    bits = allocate_bits([n * math.exp(s) for n, s in zip(numels, spread, strict=True)], numels)
    assert 3.2 < np.mean(bits) < 3.8
    assert bits[int(spread.argmax())] > bits[int(spread.argmin())]


def test_fixed_bits_are_kept_and_excluded() -> None:
    statistics, numels = [1e9, 1e3, 1e3, 1e-3], [1000, 1000, 1000, 1000]
    free = allocate_bits(statistics[1:], numels[1:])
    for bits in (2, 32):
        assert allocate_bits(statistics, numels, fixed={0: bits}) == [bits, *free]
    assert allocate_bits(statistics, numels, fixed=dict.fromkeys(range(4), 8)) == [8] * 4
    assert allocate_bits([], []) == []


def test_choices_of_levels_and_of_the_user() -> None:
    config = Config(bits=2, compressor="levels")
    bits = allocate_bits([1.0, 1e6], [1000, 1000], config=config)
    assert bits[0] == 1
    assert set(bits) <= {1, 2, 3, 4}
    statistics = [10.0**i for i in range(6)]
    assert set(allocate_bits(statistics, [512] * 6, choices=(2, 8))) <= {2, 4, 8}
    assert allocate_bits(statistics, [512] * 6, alpha=1e-12) == [8] * 6  # no bits suffice


def test_clusters_give_large_tensors_few_bits() -> None:
    numels = [1_000_000, 1_100_000, 1000, 1200, 1000, 900_000]
    norms = [1.0, 1.1, 9.0, 9.1, 1.0, 1.0]
    bits = cluster_bits(norms, numels)
    assert bits == [2, 2, 4, 4, 3, 2]
    assert cluster_bits([1.0] * 4, [10] * 4) == [4] * 4  # all equal: one cluster
    assert cluster_bits([], []) == []


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: allocate_bits([1.0], [1, 2]), "1 statistics and 2 numels"),
        (lambda: allocate_bits([math.nan], [1]), r"statistics\[0\] is nan"),
        (lambda: allocate_bits([1.0], [1], "cubed"), "budget is 'cubed'"),  # pyright: ignore
        (
            lambda: allocate_bits([1.0], [1], fixed={1: 4}),
            "fixed has the index 1, but there are 1 tensors",
        ),
        (lambda: allocate_bits([1.0], [1], fixed={0: 9}), "bits"),
        (lambda: allocate_bits([1.0], [1], choices=(0,)), "bits"),
        (lambda: allocate_bits([1.0], [1], alpha=0), "alpha is 0"),
        (lambda: cluster_bits([1.0], []), "1 norms and 0 numels"),
        (lambda: cluster_bits([1.0], [1], ()), "choices is empty"),
    ],
)
def test_invalid_arguments_raise(call, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        call()
