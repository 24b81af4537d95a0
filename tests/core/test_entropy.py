"""The compressor entropy: its bytes against the oracle, lengths, errors, and malformed blocks.

core/test_compressors.py runs it on all CPU targets, and the tests of collectives on several ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import reference
from reference import entropy
from support import launch
from support.compressor_cases import DTYPES, KINDS, values

from cgx_ops import Communicator, Config, InvalidArgument, dequantize, quantize

BLOCK = 65536
SIZES = (0, 1, 17, 127, 128, 511, 512, 513, 4095, 4096, 4097, 65535, 65536, 65537)
RATES = (0.25, 0.5, 1.0, 2.0, 3.4, 4.0, 5.5, 8.0)
FRAME = 4  # the bytes of a block's length
Rounding = Literal["nearest", "shift"]
ROUNDINGS: tuple[Rounding, ...] = ("nearest", "shift")
Float32s = npt.NDArray[np.float32]


def config(rate: float, rounding: Rounding = "nearest") -> Config:
    return Config(compressor="entropy", rate=rate, rounding=rounding)


def round_trip(
    x: npt.NDArray[Any], rate: float, rounding: Rounding = "nearest", seed: int = -5
) -> tuple[Float32s, int]:
    """Check bytes and values against the oracle; return the values, and the bytes of blocks."""
    data = quantize(x, config(rate, rounding), rank=2, phase=1, seed=seed)
    draw: dict[str, Any] = {"rank": 2, "phase": 1, "seed": seed}
    knobs: dict[str, Any] = {"compressor": "entropy", "rate": rate, "rounding": rounding}
    assert data == reference.quantize(x, 4, 512, **draw, **knobs)
    decoded = reference.dequantize(data, x.size, 4, 512, dtype=x.dtype, **knobs)
    assert (
        reference.round_to(decoded, x.dtype).tobytes()
        == dequantize(data, x.size, x.dtype, config(rate, rounding)).tobytes()
    )
    length = len(data) - FRAME * -(-x.size // BLOCK)
    assert length <= entropy.most_bytes(x.size, rate)
    return decoded, length


def library(x: Float32s, rate: float, rounding: Rounding = "nearest") -> tuple[Float32s, float]:
    """Return decoded values, and the bits per value of one block."""
    data = quantize(x, config(rate, rounding))
    decoded = dequantize(data, x.size, x.dtype, config(rate, rounding))
    return decoded, 8 * (len(data) - FRAME) / x.size


# ---- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("numel", SIZES)
def test_sizes(numel: int, rounding: Rounding) -> None:
    for number, rate in enumerate(RATES if numel < 1000 else (0.5, 3.4)):
        dtype = list(DTYPES)[(number + numel) % len(DTYPES)]
        round_trip(values("heavy" if number % 2 else "normal", numel, dtype), rate, rounding)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind: str, rounding: Rounding) -> None:
    for rate, dtype in zip((0.25, 2.0, 6.0), DTYPES, strict=True):
        round_trip(values(kind, 5000, dtype), rate, rounding)


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_million_values(rounding: Rounding) -> None:
    round_trip(values("heavy", 2**20 + 7, "float32"), 2.0, rounding)


def sparse(numel: int) -> Float32s:
    random = np.random.default_rng(numel)
    chosen = random.random(numel) < 0.01
    return np.where(chosen, random.standard_normal(numel), 0).astype(np.float32)


@pytest.mark.parametrize("numel", [17, 5000, 65536])
def test_values_without_entropy(numel: int) -> None:
    """Check zeros and constants."""
    for value, length in ((0.0, 1), (-0.0, 1), (-3.25, 5), (1e-42, 5)):
        decoded, found = round_trip(np.full(numel, value, np.float32), 2.0)
        assert (decoded == np.float32(value)).all()
        assert found == length


def test_values_with_little_entropy() -> None:
    """Check values of which few are not 0, and of which all are 1 or -1."""
    _, found = round_trip(sparse(65536), 2.0)
    assert 8 * found / 65536 < 0.5
    signs = np.random.default_rng(0).choice(np.array([-1, 1], np.float32), 5000)
    for rate in RATES:
        round_trip(signs, rate)
        round_trip(sparse(5000), rate)
        round_trip(sparse(5000), rate, "shift")


@pytest.mark.parametrize("rate", [0.25, 2.0, 8.0])
def test_outliers_cost_bits_only(rate: float) -> None:
    """Check that one value of 1e30 among 1e-30 is exact, and the others as good as without it."""
    x = (np.random.default_rng(1).standard_normal(BLOCK) * 1e-30).astype(np.float32)
    alone = np.square(library(x, rate)[0] / 1e-30 - x / 1e-30, dtype=np.float64).sum()
    x[12345] = 1e30
    decoded, length = round_trip(x, rate)
    assert decoded[12345] == x[12345]
    x[12345] = decoded[12345] = 0
    error = np.square(decoded / 1e-30 - x / 1e-30, dtype=np.float64).sum()
    assert error < 1.02 * alone
    assert rate - 0.01 <= 8 * length / BLOCK <= 1.02 * rate


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(("numel", "rate"), [(17, 2.0), (17, 8.0), (100, 8.0), (24, 0.25)])
def test_outliers_and_codes_of_fixed_length(numel: int, rate: float, rounding: Rounding) -> None:
    """Check the bound of a step that follows from the largest magnitude."""
    x = (np.random.default_rng(3).standard_normal(numel) * 1e-30).astype(np.float32)
    x[numel // 2] = 1e30
    decoded, _ = round_trip(x, rate, rounding)
    width = min(8, 8 * (max(12, int(numel * rate / 8)) - 6) // numel)
    steps = 2**width - 1 if rounding == "nearest" else 2**width - 2
    assert np.abs(decoded - np.float64(x)).max() <= 1e30 / steps * (1 + 2**-13)
    x[numel // 2] = decoded[numel // 2] = 0
    assert rounding == "shift" or not decoded.any()


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(("numel", "rate"), [(100, 2.0), (128, 2.0), (128, 0.5), (4096, 0.25)])
def test_outliers_of_short_blocks(numel: int, rate: float, rounding: Rounding) -> None:
    x = (np.random.default_rng(4).standard_normal(numel) * 1e-30).astype(np.float32)
    x[numel // 2] = 1e30
    assert round_trip(x, rate, rounding)[0][numel // 2] == x[numel // 2]


@pytest.mark.parametrize("outliers", [1, 2, 3])
@pytest.mark.parametrize("numel", [100, 128, 200])
def test_outliers_without_room(numel: int, outliers: int) -> None:
    """Check that outliers that cannot be sent exactly are rounded, and do not become 0."""
    x = (np.random.default_rng(5).standard_normal(numel) * 1e-30).astype(np.float32)
    x[7 : 7 + outliers] = [1e30, -3e29, 7e29][:outliers]
    decoded, _ = round_trip(x, 0.25)
    found = decoded[7 : 7 + outliers] / x[7 : 7 + outliers]
    assert (np.abs(found - 1) < 0.5).all()


def test_denormal_values() -> None:
    """Check that values far below the smallest step become 0, and are kept by feedback."""
    x = (np.random.default_rng(2).standard_normal(4096) * 1e-40).astype(np.float32)
    assert x.all()
    assert not round_trip(x, 8.0)[0].any()

    def rank_of(_rank: int, comm: Communicator) -> tuple[Float32s, Float32s]:
        residual = np.zeros_like(x)
        return comm.allreduce(x, config=config(8.0), residual=residual), residual

    for sums, residual in launch.threads(2, rank_of):
        assert not sums.any()
        assert residual.tobytes() == x.tobytes()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("numel", [17, 5000])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_non_finite_blocks(rounding: Rounding, numel: int, wrong: float) -> None:
    x = values("normal", numel, "float32")
    x[numel // 2] = wrong
    decoded, _ = round_trip(x, 2.0, rounding)
    assert (decoded.view(np.uint32) == 0x7FC00000).all()


# ---- lengths and errors --------------------------------------------------------------------------

DRAWS: dict[str, tuple[Callable[[np.random.Generator], npt.NDArray[np.float64]], float]] = {
    "Gauss": (lambda random: random.standard_normal(BLOCK), 1.0),
    "Laplace": (lambda random: random.laplace(size=BLOCK), 2.0),
    "t3": (lambda random: random.standard_t(3, BLOCK), 3.0),
}
# Squared error over signal of ideal codes, with the best dead zone and one shift.
IDEAL = {
    0.5: (0.617, 0.487, 0.373),
    1.0: (0.349, 0.262, 0.209),
    2.0: (0.090, 0.073, 0.060),
    3.0: (0.0224, 0.0190, 0.0152),
    4.0: (0.0056, 0.0048, 0.0038),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("rate", IDEAL)
def test_errors(rate: float, name: str) -> None:
    """Compare four blocks with the ideal error.

    Errors are at most about a step, so the mean of 2^18 squares is off by less than 1 %.
    """
    draw, variance = DRAWS[name]
    total = 0.0
    for seed in range(4):
        x = draw(np.random.default_rng(seed)).astype(np.float32)
        decoded, bits = library(x, rate)
        assert rate - 0.01 <= bits <= 1.02 * rate
        total += np.square(decoded - x, dtype=np.float64).mean() / variance / 4
    allowed = 1.05 if rate < 1 else 1.03
    assert total <= allowed * IDEAL[rate][list(DRAWS).index(name)]


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_lengths(rate: float, rounding: Rounding) -> None:
    for draw, _ in DRAWS.values():
        x = draw(np.random.default_rng(9)).astype(np.float32)
        bits = library(x, rate, rounding)[1]
        # With shift rounding the length depends on the noise, but the step does not.
        noise = 0.015 if rounding == "shift" else 0.0
        assert rate - 0.01 - noise <= bits <= 1.02 * rate + noise


@pytest.mark.parametrize("rate", [1.0, 3.0])
def test_shift_is_unbiased(rate: float) -> None:
    """Compare the mean error of each value over many seeds with that of independent errors.

    Their mean squares have the expected ratio 1 if the errors are unbiased, and the number of seeds
    if they do not depend on the seed. The noise of all values follows from one number per seed.
    So the ratio varies like its first harmonic, and exceeds 4 with a probability of about e^-4.
    """
    x, seeds = values("heavy", 2048, "float32"), 400
    errors = np.empty((seeds, x.size))
    for seed in range(seeds):
        data = quantize(x, config(rate, "shift"), seed=seed)
        errors[seed] = dequantize(data, x.size, x.dtype, config(rate, "shift")) - x
    ratio = np.square(errors.mean(axis=0)).mean() / (np.square(errors).mean() / seeds)
    assert ratio < 4


# ---- malformed blocks ----------------------------------------------------------------------------


def rejected(block: bytes, numel: int) -> None:
    with pytest.raises(InvalidArgument):
        dequantize(len(block).to_bytes(4, "little") + block, numel, "float32", config(2.0))


@pytest.mark.parametrize(("numel", "rate"), [(17, 2.0), (4096, 2.0), (4096, 7.0)])
def test_rejects_malformed_blocks(numel: int, rate: float) -> None:
    x = values("heavy", numel, "float32")
    block = bytes(quantize(x, config(rate)))[FRAME:]
    for at in range(len(block)):
        rejected(block[:at], numel)
    rejected(block + b"\0", numel)
    rejected(block, 10 * numel)
    for kind in (3, 0x08, 0x7F, 0xFF):
        rejected(bytes([kind]) + block[1:], numel)
    for key in (0, 0x7FFF, 0x7F8000, 0xFFFFFF):  # steps that are denormal, not finite, negative
        rejected(block[:1] + key.to_bytes(3, "little") + block[4:], numel)


def test_rejects_malformed_constants() -> None:
    for block in (b"", b"\0\0", b"\4", b"\4\0\0\0", b"\4\0\0\0\0\0", b"\x80"):
        rejected(block, 100)
    infinite = b"\4" + np.float32(np.inf).tobytes()
    data = len(infinite).to_bytes(4, "little") + infinite
    assert np.isnan(dequantize(data, 3, "float32", config(2.0))).all()
