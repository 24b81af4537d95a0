"""Shift rounding on one rank: bound, mean and distribution of its error (numerics.md)."""

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from cgx_ops import Config
from cgx_ops._core import codec

U = 2.0**-24  # unit roundoff of fp32


def decoded(x: npt.NDArray[Any], bits: int, bucket_size: int, seed: int) -> npt.NDArray[Any]:
    """Return x after encoding with shift rounding and decoding."""
    config = Config(bits=bits, bucket_size=bucket_size, rounding="shift")
    wide = codec.dequantize(codec.quantize(x, config, seed=seed), x.size, "float32", config)
    return wide.astype(np.float64)


def steps(x: npt.NDArray[np.float64], bits: int, bucket_size: int) -> npt.NDArray[np.float64]:
    """Return the exact step of each element's bucket, for a multiple of the bucket size."""
    rows = x.reshape(-1, bucket_size)
    return np.repeat(np.ptp(rows, axis=1) / ((1 << bits) - 1), bucket_size)


def test_error_is_at_most_half_a_step() -> None:
    """Check |error| <= step/2 + 24 u M for any data, and that the largest come near the bound."""
    random = np.random.default_rng(0)
    normal = random.standard_normal(64 * 40).astype(np.float32)
    kinds = {
        "normal": normal,
        "far from zero": normal + np.float32(1000),
        "nearly constant": np.float32(1) + normal * np.float32(1e-6),
        "denormal": normal * np.float32(1e-39),
        "large": normal * np.float32(1e37),
        "many sizes": np.ldexp(normal, random.integers(-100, 100, normal.size)).astype(np.float32),
        "at the ends": np.where(normal < 0, np.float32(-0.1), np.float32(0.7)),
        "float16": normal.astype(np.float16),
        "bfloat16": normal.astype(ml_dtypes.bfloat16),
    }
    for name, x in kinds.items():
        exact = x.astype(np.float64)
        largest = np.repeat(np.abs(exact).reshape(-1, 64).max(axis=1), 64)
        for bits in range(1, 9):
            step = steps(exact, bits, 64)
            bound = step / 2 * (1 + 4 * U) + 24 * U * largest + ((1 << bits) - 1) * 2.0**-127
            worst = 0.0
            for seed in range(20):
                error = np.abs(decoded(x, bits, 64, seed) - exact)
                assert (error <= bound).all(), (name, bits, seed)
                worst = max(worst, (error / bound).max())
            assert worst > 0.99 or name != "normal", (bits, worst)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_error_is_uniform_and_has_mean_zero_at_every_value(bits: int) -> None:
    """Check mean 0 and variance step^2/12 for any value: nearest rounding has neither.

    Over R seeds the mean has the standard deviation step / sqrt(12 R), and the variance the
    relative one sqrt(0.8 / R), because a uniform variable's fourth moment is 1.8 variances squared.
    One of 26 million means exceeds 5.5 of them. Noise has 16 bits: off by at most step / 2^17.
    """
    repeats, bucket_size = 2000, 64
    random = np.random.default_rng(bits)
    x = random.standard_normal(bucket_size * 8).astype(np.float32)
    # Values on the unshifted grid, and halfway between its points.
    lo, hi = np.float32(-4), np.float32(4)
    grid = np.linspace(lo, hi, 2 * ((1 << bits) - 1) + 1)[:bucket_size]
    x[: len(grid)], x[bucket_size - 1] = grid, hi
    step = steps(x.astype(np.float64), bits, bucket_size)
    errors = np.array([decoded(x, bits, bucket_size, seed) - x for seed in range(repeats)])
    mean_bound = 5.5 * step / np.sqrt(12 * repeats) + step * 2.0**-17 + 24 * U * 4
    assert (np.abs(errors.mean(axis=0)) <= mean_bound).all()
    variance = errors.var(axis=0) * 12 / step**2
    assert (np.abs(variance - 1) <= 5.5 * np.sqrt(0.8 / repeats) + 0.001).all()
    # Elements of a bucket share their shift; buckets do not.
    ends = errors[:, bucket_size - 1 :: bucket_size] / step[::bucket_size]
    correlation = np.corrcoef(ends.T) - np.eye(ends.shape[1])
    assert np.abs(correlation).max() <= 5.5 / np.sqrt(repeats)


def test_a_constant_bucket_is_exact() -> None:
    for value in (0.0, 3.3, -1e38, 1e-44):
        x = np.full(100, value, np.float32)
        for bits in (1, 4):
            assert np.array_equal(decoded(x, bits, 30, 5), x), value
