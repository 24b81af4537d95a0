"""Quantization errors of compressors on one rank: closed forms, and unbiasedness (numerics.md).

The relative squared error is |x - decoded|^2 / |x|^2. If it depends on the values (for example a
bucket's largest), the closed form is computed from the sample, in fp64, without encoding it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cgx_ops import Config, dequantize, quantize

Doubles = npt.NDArray[np.float64]
B = 512
N = B * 2048
DISTRIBUTIONS: dict[str, Callable[[np.random.Generator], Any]] = {
    "gauss": lambda random: random.standard_normal(N),
    "laplace": lambda random: random.laplace(size=N),
    "t3": lambda random: random.standard_t(3, N),
}
LEVELS = {  # Max, IRE Transactions 6 (1960), table I: the output levels for a Gaussian
    2: [0.4528, 1.510],
    3: [0.2451, 0.7560, 1.344, 2.152],
    4: [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733],
}
LLOYD_MAX = {2: 0.1175, 3: 0.03454, 4: 0.009497}  # and its mean squared errors


def sample(name: str) -> npt.NDArray[np.float32]:
    random = np.random.default_rng(list(DISTRIBUTIONS).index(name))
    return DISTRIBUTIONS[name](random).astype(np.float32)


def relative_error(x: npt.NDArray[np.float32], config: Config, seed: int = 0) -> float:
    back = dequantize(quantize(x, config, seed=seed), x.size, "float32", config, seed=seed)
    return float(np.square(x - back.astype(np.float64)).sum() / np.square(x, dtype=float).sum())


# ---- closed forms --------------------------------------------------------------------------------
#
# Functions of buckets, one per row. They return the squared error of each row, or of each value.


def nearest_level(x: Doubles, bits: int) -> Doubles:
    scaled = np.abs(x) / np.sqrt(np.square(x).mean(axis=1, keepdims=True))
    off = np.min([np.square(scaled - level) for level in LEVELS[bits]], axis=0)
    return off * np.square(x).mean(axis=1, keepdims=True)


def one_magnitude(x: Doubles) -> Doubles:
    """Return the error of EF-SignSGD: 1 - |x|_1^2 / (n |x|_2^2)."""
    return np.square(x).sum(axis=1) - np.square(np.abs(x).sum(axis=1)) / x.shape[1]


def two_means(x: Doubles) -> Doubles:
    """Return the variance within the negative and within the other values."""
    below = x < 0
    lost = np.square(x).sum(axis=1)
    for of in (below, ~below):
        count = of.sum(axis=1)
        lost -= np.square((x * of).sum(axis=1)) / np.maximum(count, 1)
    return lost


def ternary(x: Doubles, clip: float = math.inf) -> Doubles:
    """Return the error of TernGrad: max E|x| / E x^2 - 1, plus the error of clipping."""
    rms = np.sqrt(np.square(x).mean(axis=1, keepdims=True))
    scale = np.minimum(np.abs(x).max(axis=1, keepdims=True), clip * rms)
    kept = np.minimum(np.abs(x), scale)
    return kept * (scale - kept) + np.square(np.abs(x) - kept)


def qsgd(x: Doubles, bits: int) -> Doubles:
    """Return f (1 - f) times a squared step, between two levels; s steps are the 2-norm."""
    step = np.sqrt(np.square(x).sum(axis=1, keepdims=True)) / (2 ** (bits - 1) - 1)
    f = np.abs(x) / step % 1
    return f * (1 - f) * np.square(step)


def units(x: Doubles, fraction_bits: int) -> Doubles:
    """Return the square of a unit in the last place."""
    return np.square(2.0 ** (np.floor(np.log2(np.maximum(np.abs(x), 1e-30))) - fraction_bits))


def steps(x: Doubles, bits: int) -> Doubles:
    """Return n times the square of a step, which divides the range of the bucket."""
    step = np.ptp(x, axis=1) / (2**bits - 1)
    return np.square(step) * x.shape[1]


def not_chosen(x: Doubles, density: float) -> Doubles:
    k = max(1, math.ceil(density * x.shape[1]))
    energy = np.sort(np.square(x), axis=1)
    return energy[:, :-k] if k < x.shape[1] else energy[:, :0]


def rotated(x: Doubles, size: int) -> Doubles:
    """Multiply sixteen blocks of a bucket, with values sixteen apart, by Sylvester's matrix."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    places = np.arange(16 * size, dtype=np.uint64) * np.uint64(0x9E3779B1)
    signs = np.where(places & np.uint64(1 << 31), -1.0, 1.0)
    groups = (x.reshape(len(x), -1, 16 * size) * signs).reshape(len(x), -1, size, 16)
    return (np.einsum("ij,bgjw->bgiw", matrix, groups) / math.sqrt(size)).reshape(x.shape)


FORMS: dict[str, tuple[dict[str, Any], Callable[[Doubles], Doubles]]] = {
    **{
        f"levels {b}": ({"compressor": "levels", "bits": b}, lambda x, b=b: nearest_level(x, b))
        for b in (2, 3, 4)
    },
    "levels 1": ({"compressor": "levels", "bits": 1}, one_magnitude),
    "onebit": ({"compressor": "onebit"}, two_means),
    "ternary": ({"compressor": "ternary"}, ternary),
    "ternary clipped": ({"compressor": "ternary", "clip": True}, lambda x: ternary(x, 2.5)),
    **{
        f"qsgd {bits}": ({"compressor": "qsgd", "bits": bits}, lambda x, b=bits: qsgd(x, b))
        for bits in (2, 4, 6, 8)
    },
    "half": ({"compressor": "half"}, lambda x: units(x, 7) / 12),
    "half stochastic": (
        {"compressor": "half", "rounding": "stochastic"},
        lambda x: units(x, 7) / 6,
    ),
    "uniform nearest": ({"bits": 8, "rounding": "nearest"}, lambda x: steps(x, 8) / 12),
    "uniform stochastic": ({"bits": 8}, lambda x: steps(x, 8) / 6),
    "uniform shift": ({"bits": 8, "rounding": "shift"}, lambda x: steps(x, 8) / 12),
    "topk": ({"compressor": "topk", "density": 0.05}, lambda x: not_chosen(x, 0.05)),
    "topk of the whole": (
        {"compressor": "topk", "density": 0.001, "bucket_size": N},
        lambda x: not_chosen(x.reshape(1, -1), 0.001),
    ),
    "randk": ({"compressor": "randk", "density": 0.25}, lambda x: np.square(x) * (1 - 128 / B)),
    **{
        f"levels rotated by {size}": (
            {"compressor": "levels", "bits": 2, "rotation": size},
            lambda x, size=size: nearest_level(rotated(x, size), 2),
        )
        for size in (8, 32)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_error_equals_the_closed_form(distribution: str, name: str) -> None:
    x = sample(distribution)
    knobs, form = FORMS[name]
    rows = x.astype(np.float64).reshape(-1, B)
    want = form(rows).sum() / np.square(rows).sum()
    config = Config(**{"bucket_size": B, **knobs})
    # Few values of t3 have most of the energy, so one draw of their noise differs by 2 %.
    draws = 16 if config.is_random and config.compressor != "randk" else 1
    found = np.mean([relative_error(x, config, seed) for seed in range(draws)])
    assert abs(found / want - 1) < 0.02, (found, want)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_error_is_below_the_proven_bound(distribution: str) -> None:
    x = sample(distribution)
    for bits in range(2, 9):
        levels = 2 ** (bits - 1) - 1
        bound = min(B / levels**2, math.sqrt(B) / levels)
        assert relative_error(x, Config(compressor="qsgd", bits=bits)) < bound
    for density in (0.01, 0.3):
        config = Config(compressor="topk", density=density)
        assert relative_error(x, config) < 1 - density


def test_known_numbers_of_the_gaussian() -> None:
    """Compare with Lloyd and Max, 1 - 2/pi, and a Gaussian without its largest hundredth."""
    x = sample("gauss")
    for bits, want in LLOYD_MAX.items():
        assert abs(relative_error(x, Config(compressor="levels", bits=bits)) / want - 1) < 0.02
    one_bit = Config(1, compressor="levels"), Config(compressor="onebit")
    for config in one_bit:
        assert abs(relative_error(x, config) / (1 - 2 / math.pi) - 1) < 0.02
    z, density = 2.575829, math.exp(-(2.575829**2) / 2) / math.sqrt(2 * math.pi)
    left = 1 - 2 * (z * density + 0.005)
    assert abs(left - 0.9155) < 1e-4
    config = Config(compressor="topk", bucket_size=N)
    assert abs(relative_error(x, config) / left - 1) < 0.02


# ---- unbiasedness --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "knobs",
    [
        {"bits": 2},
        {"bits": 2, "rounding": "shift"},
        {"compressor": "ternary"},
        {"compressor": "qsgd", "bits": 2},
        {"compressor": "qsgd", "bits": 5},
        {"compressor": "half", "rounding": "stochastic"},
        {"compressor": "ternary", "rotation": 32},
        {"compressor": "qsgd", "bits": 5, "rotation": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_unbiased(distribution: str, knobs: dict[str, Any]) -> None:
    """Check the mean of 10^4 encodings of a bucket, by z-scores of a normal distribution.

    Equal buckets draw different noise. One z in 26 million exceeds 5.5; as rarely, the mean square
    of 64 * 4 of them differs from 1 by 5.5 sqrt(2 / 256) (shift has one noise value per bucket, so
    all its z may be equal). Noise has 16 bits: a probability is off by at most 2^-17, a 650th of
    the standard error.
    """
    repeats, size = 10_000, 64
    config = Config(bucket_size=size, **knobs)
    squares = []
    for bucket in sample(distribution)[: 4 * size].reshape(4, size):
        x = np.tile(bucket, repeats)
        back = dequantize(quantize(x, config, seed=3), x.size, "float32", config, seed=3)
        errors = back.reshape(repeats, size).astype(np.float64) - bucket
        deviation = errors.std(axis=0)
        drawn = deviation > 1e-6 * np.abs(bucket).max()
        assert drawn.mean() > 0.9
        # A value never rounded the other way has a probability below 1e-3, or is exact.
        assert np.abs(errors[:, ~drawn]).max(initial=0) <= 1e-3 * np.abs(bucket).max()
        z = errors.mean(axis=0)[drawn] / deviation[drawn] * math.sqrt(repeats)
        assert np.abs(z).max() < 5.5, z
        squares.extend(np.square(z))
    if knobs.get("rounding") != "shift":
        assert abs(np.mean(squares) - 1) < 5.5 * math.sqrt(2 / len(squares))


@pytest.mark.parametrize(
    "knobs",
    [
        {"compressor": "levels", "bits": 2},
        {"compressor": "onebit"},
        {"compressor": "topk"},
        {"bits": 2, "rounding": "nearest"},
    ],
    ids=str,
)
def test_biased_compressors_repeat_their_error(knobs: dict[str, Any]) -> None:
    """Check that the error depends on the values alone, so that it does not average out."""
    x = np.tile(sample("gauss")[:64], 100)
    config = Config(bucket_size=64, **knobs)
    back = dequantize(quantize(x, config), x.size, "float32", config).reshape(100, 64)
    assert (back == back[0]).all() and (back[0] != x[:64]).any()
