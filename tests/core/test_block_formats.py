"""mxfp8, mxfp8_e5m2, mxfp4 and nvfp4 on one rank, beyond the comparison with the oracle.

1. elements and scales equal ml_dtypes, for all inputs and codes
2. what affects the values: not the bits or bucket_size of mx, not the number of values
3. special values (docs/reference/block_formats.md)
4. stochastic rounding is unbiased within the range
5. errors against uniform at equal bytes
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from cgx_ops import Config, InvalidArgument, dequantize, quantize

ELEMENTS: dict[str, Any] = {
    "mxfp8": ml_dtypes.float8_e4m3fn,
    "mxfp8_e5m2": ml_dtypes.float8_e5m2,
    "mxfp4": ml_dtypes.float4_e2m1fn,
    "nvfp4": ml_dtypes.float4_e2m1fn,
}
HIGHEST = {"mxfp8": 8, "mxfp8_e5m2": 15, "mxfp4": 2}  # exponents of the largest element
MX = tuple(HIGHEST)
SCALE = ml_dtypes.float8_e8m0fnu
LARGEST = np.finfo(np.float32).max
Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def config_of(compressor: str, **knobs: Any) -> Config:
    return Config(**{"compressor": compressor, **knobs})


def decoded(x: Floats, compressor: str, seed: int = 0, **knobs: Any) -> Floats:
    config = config_of(compressor, **knobs)
    return dequantize(quantize(x, config, seed=seed), x.size, "float32", config, seed=seed)


def bits_of(compressor: str) -> int:
    return 8 if compressor.startswith("mxfp8") else 4


def blocks_of(data: bytes, compressor: str) -> tuple[Bytes, Bytes]:
    """Return the scales, and the codes by block, of whole blocks without a header."""
    block = 16 if compressor == "nvfp4" else 32
    rows = np.frombuffer(data, np.uint8).reshape(-1, 1 + block * bits_of(compressor) // 8)
    codes = rows[:, 1:]
    if bits_of(compressor) == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=2).astype(np.uint8).reshape(len(rows), -1)
    return rows[:, 0], codes


def clipped(y: npt.NDArray[Any], compressor: str) -> Bytes:
    """Return the codes of ml_dtypes, for values that are clipped to the range."""
    element = ELEMENTS[compressor]
    most = float(ml_dtypes.finfo(element).max)
    with np.errstate(under="ignore"):
        return np.clip(y, -most, most).astype(np.float32).astype(element).view(np.uint8)


def all_bfloat16() -> Floats:
    x = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    return x[np.isfinite(x)]


# ---- 1. ml_dtypes --------------------------------------------------------------------------------


@pytest.mark.parametrize("compressor", MX)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_all_bfloat16_as_elements(compressor: str, dtype: Any) -> None:
    """Encode each finite bf16 beside a value that makes the scale 1, and beside its neighbors."""
    x, highest = all_bfloat16(), HIGHEST[compressor]
    inside = x[np.abs(x) < 2.0 ** (highest + 1)]
    rows = np.full((-(-inside.size // 31), 32), 2.0**highest, np.float32)
    rows[:, 1:].flat[: inside.size] = inside
    assert x.size == 2**16 - 2**8
    scales, codes = blocks_of(
        quantize(rows.ravel().astype(dtype), config_of(compressor)), compressor
    )
    assert (scales == 127).all()
    assert np.array_equal(codes, clipped(rows, compressor))

    rows = x.reshape(-1, 32)
    scales, codes = blocks_of(quantize(x.astype(dtype), config_of(compressor)), compressor)
    exponent = np.frexp(np.abs(rows).max(axis=1).astype(np.float64))[1] - 1 - highest
    assert np.array_equal(
        scales, np.ldexp(1.0, np.maximum(exponent, -127)).astype(SCALE).view("u1")
    )
    y = np.ldexp(rows.astype(np.float64), 127 - scales.astype(int)[:, None])
    assert np.array_equal(codes, clipped(y, compressor))


def test_all_bfloat16_in_nvfp4() -> None:
    """Encode each bf16 below 6 in a bucket whose scale is 1 / 448, in blocks with the scale 448."""
    x = all_bfloat16()
    inside = x[np.abs(x) <= 6]
    rows = np.full((-(-inside.size // 15), 16), 6, np.float32)
    rows[:, 1:].flat[: inside.size] = inside
    data = quantize(rows.ravel(), config_of("nvfp4", bucket_size=rows.size))
    scales, codes = blocks_of(data[4:], "nvfp4")
    scale = np.frombuffer(data[:4], np.float32)[0]
    assert scale == np.float32(6) / np.float32(2688)
    assert (scales == np.float32(448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)).all()
    inverse = np.float32(1) / (scale * np.float32(448))
    with np.errstate(under="ignore"):
        assert np.array_equal(codes, clipped(rows * inverse, "nvfp4"))


def test_all_scales_of_nvfp4() -> None:
    """Encode blocks of every magnitude in bf16 beside one of 448, whose scale is exact."""
    x = np.abs(all_bfloat16())
    x = x[x <= 448]
    rows = np.zeros((x.size + 1, 16), np.float32)
    rows[0, 0], rows[1:, 3] = 448, x
    data = quantize(rows.ravel(), config_of("nvfp4", bucket_size=rows.size))
    scales, _ = blocks_of(data[4:], "nvfp4")
    inverse = np.float32(1) / np.float32(448)
    with np.errstate(under="ignore"):
        want = (np.float32(448) * (x * inverse)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(scales[1:], want)


@pytest.mark.parametrize("compressor", ELEMENTS)
def test_all_scales_and_codes(compressor: str) -> None:
    """Decode all codes with each of the 256 bytes of a scale."""
    bits, block = bits_of(compressor), 16 if compressor == "nvfp4" else 32
    codes = np.arange(1 << bits, dtype=np.uint8)
    packed = codes if bits == 8 else codes[::2] | codes[1::2] << 4
    packed = np.resize(packed, max(packed.size, block * bits // 8)).reshape(-1, block * bits // 8)
    codes = np.resize(codes, max(codes.size, block))
    head = np.float32(1 / 32).tobytes() if compressor == "nvfp4" else b""
    data = b"".join(
        bytes([scale]) + row.tobytes() for scale, row in itertools.product(range(256), packed)
    )
    numel = 256 * codes.size
    config = config_of(compressor, bucket_size=numel)
    found = dequantize(head + data, numel, "float32", config).reshape(256, -1)
    byte = np.arange(256, dtype=np.uint8)
    if compressor == "nvfp4":
        scales = (byte & 0x7F).view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(1 / 32)
    else:
        scales = byte.view(SCALE).astype(np.float32)
    values = codes.view(ELEMENTS[compressor]).astype(np.float32)
    values[np.isinf(values)] = np.nan  # e5m2's codes of infinity, which no encoder writes
    with np.errstate(all="ignore"):
        want = values * scales[:, None]
    assert np.array_equal(found, want, equal_nan=True)
    numbers = ~np.isnan(want)
    assert np.array_equal(np.signbit(found)[numbers], np.signbit(want)[numbers])


# ---- 2. what affects the values ------------------------------------------------------------------


@pytest.mark.parametrize("compressor", MX)
def test_bucket_size_does_not_affect_mx(compressor: str) -> None:
    x = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    for rounding, rotation in itertools.product(("nearest", "stochastic"), (None, 32)):
        knobs = {"rounding": rounding, "rotation": rotation}
        want = quantize(x, config_of(compressor, **knobs), seed=3)
        for bucket_size in (1, 77, 100_000):
            config = config_of(compressor, bucket_size=bucket_size, **knobs)
            assert quantize(x, config, seed=3) == want
    with pytest.raises(InvalidArgument, match=r"first_index is 32; accepted: a multiple of .*512"):
        quantize(x, config_of(compressor, bucket_size=32), first_index=32)


@pytest.mark.parametrize("compressor", ELEMENTS)
def test_blocks_do_not_depend_on_others(compressor: str) -> None:
    """Encode any number of values: whole blocks (of nvfp4: buckets) are the same in each."""
    x = np.random.default_rng(1).standard_t(3, 200).astype(np.float32)
    grain = 32  # for nvfp4 also the bucket
    whole = decoded(x, compressor, bucket_size=grain)
    for numel in range(1, 200):
        end = numel // grain * grain
        found = decoded(x[:numel], compressor, bucket_size=grain)
        assert np.array_equal(found[:end], whole[:end])
        rest = decoded(np.append(x[end:numel], np.zeros(7, np.float32)), compressor)
        assert np.array_equal(found[end:], rest[: numel - end])


@pytest.mark.parametrize("compressor", ELEMENTS)
def test_encoding_decoded_values_again_changes_nothing(compressor: str) -> None:
    x = np.random.default_rng(2).laplace(size=4096).astype(np.float32)
    if compressor == "nvfp4":  # exact if the scales are powers of two
        x = np.sign(x) * np.exp2(np.round(np.log2(np.abs(x)) + 1))
        x[::16], x[::512] = 6 * np.float32(2.0**-3), 2688
    once = decoded(x.astype(np.float32), compressor)
    assert np.array_equal(decoded(once, compressor), once)


# ---- 3. special values ---------------------------------------------------------------------------


@pytest.mark.parametrize("compressor", ELEMENTS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
class TestSpecialValues:
    def test_zeros_keep_their_sign(self, compressor: str, rounding: str) -> None:
        x = np.array([0.0, -0.0] * 40, np.float32)
        assert decoded(x, compressor, rounding=rounding).tobytes() == x.tobytes()
        x[0] = 1
        found = decoded(x, compressor, rounding=rounding)
        assert np.array_equal(np.signbit(found), np.signbit(x))
        assert (found[1:] == 0).all()

    def test_constants(self, compressor: str, rounding: str) -> None:
        for value in (1.0, -0.25, 1.5, -96.0, 2.0**-100, 2.0**100):
            x = np.full(100, value, np.float32)
            found = decoded(x, compressor, rounding=rounding)
            off = 0 if compressor != "nvfp4" else 2.0**-22
            assert np.abs(found / x - 1).max() <= off

    def test_a_large_value_among_small_ones(self, compressor: str, rounding: str) -> None:
        x = np.full(1024, 1e-30, np.float32)
        x[40] = -1e30
        found = decoded(x, compressor, rounding=rounding)
        assert abs(found[40] / x[40] - 1) < 0.25
        group = slice(0, 512) if compressor == "nvfp4" else slice(32, 64)
        near = np.zeros(1024, bool)
        near[group] = True
        near[40] = False
        assert (found[near] == 0).all()
        near[40] = True
        assert (found[~near] > 0.5e-30).all()

    def test_largest_numbers_stay_finite(self, compressor: str, rounding: str) -> None:
        values = LARGEST * np.array([1, 1 - 2.0**-20, 0.75, 0.5, 0.1], np.float32)
        for value, numel in itertools.product(values, (1, 16, 700)):
            x = np.full(numel, value, np.float32)
            x[::3] *= -1
            found = decoded(x, compressor, rounding=rounding)
            assert np.isfinite(found).all()
            off = {"mxfp4": 0.26, "nvfp4": 2.0**-11}.get(compressor, 0.13)
            assert np.abs(found / x - 1).max() <= off

    def test_non_finite_values_spread_to_their_block(self, compressor: str, rounding: str) -> None:
        for bad, at in itertools.product((np.nan, np.inf, -np.inf), (0, 600, 1299)):
            x = np.linspace(-1, 1, 1300, dtype=np.float32)
            x[at] = bad
            found = decoded(x, compressor, rounding=rounding)
            size = 512 if compressor == "nvfp4" else 32
            affected = np.arange(1300) // size == at // size
            assert (found[affected].view(np.uint32) == 0x7FC00000).all()
            assert np.isfinite(found[~affected]).all()


def test_denormals() -> None:
    spacings = {"mxfp8": 2.0**-136, "mxfp8_e5m2": 2.0**-143, "mxfp4": 2.0**-128}
    random = np.random.default_rng(4)
    x = (random.uniform(-1, 1, 4096) * 2.0**-126).astype(np.float32)
    x[0] = 2.0**-149
    for compressor, spacing in spacings.items():
        found = decoded(x, compressor).astype(np.float64)
        assert (found % spacing == 0).all()
        allowed = np.maximum(spacing / 2, np.abs(x) / (16 if compressor == "mxfp8" else 4))
        assert (np.abs(found - x) <= allowed).all()
    assert (decoded(x, "nvfp4") == 0).all()


def test_scales_of_nvfp4_at_their_ends() -> None:
    """Check blocks whose scale underflows, is subnormal, or is the largest."""
    ratios = np.array([1, 1 / 2, 2.0**-6 / 448, 2.0**-9 / 448, 0.6 * 2.0**-9 / 448], np.float32)
    ratios = np.append(ratios, np.array([0.99 * 2.0**-10 / 448, 0.4 * 2.0**-9 / 448]))
    x = np.zeros((len(ratios), 16), np.float32)
    x[:, 5] = 3 * ratios
    data = quantize(x.ravel(), config_of("nvfp4"))
    scales, _ = blocks_of(data[4:], "nvfp4")
    assert scales.tolist() == [0x7E, 0x76, 0x08, 0x01, 0x01, 0x00, 0x00]
    found = decoded(x.ravel(), "nvfp4").reshape(x.shape)
    assert (found[5:] == 0).all()
    assert np.abs(found[:4, 5] / x[:4, 5] - 1).max() < 1e-6
    assert 0.8 < found[4, 5] / x[4, 5] < 1.2  # 3.6 scales, between 3 and 4


# ---- 4. stochastic rounding ----------------------------------------------------------------------


@pytest.mark.parametrize("compressor", ELEMENTS)
def test_stochastic_rounding_is_unbiased_within_the_range(compressor: str) -> None:
    """Check the mean of 10^4 encodings by z-scores, as test_compressor_errors.test_unbiased does.

    The first value of a block, which is exact, keeps the others within the range.
    """
    repeats, block = 10_000, 32
    x = np.random.default_rng(5).uniform(-1, 1, block).astype(np.float32)
    x[1::2] *= np.exp2(-np.arange(block // 2, dtype=np.float32) / 2)
    x[::16] = 1.5 if compressor == "nvfp4" else 1
    tiled = np.tile(x, repeats)
    found = decoded(tiled, compressor, 3, rounding="stochastic", bucket_size=tiled.size)
    errors = found.reshape(repeats, block).astype(np.float64) - x
    deviation = errors.std(axis=0)
    moving = deviation > 1e-3 * np.abs(x)
    assert moving.sum() >= 24
    z = errors.mean(axis=0)[moving] / deviation[moving] * math.sqrt(repeats)
    assert np.abs(z).max() < 5.5
    assert np.abs(errors[:, ~moving]).max() <= 1e-3


def test_noise_differs_between_steps_and_ranks() -> None:
    x = np.random.default_rng(6).standard_normal(1000).astype(np.float32)
    config = config_of("mxfp4", rounding="stochastic")
    assert len({quantize(x, config, seed=s, rank=r) for s in range(3) for r in range(3)}) == 9


# ---- 5. errors -----------------------------------------------------------------------------------


def relative_error(x: Floats, config: Config) -> float:
    back = dequantize(quantize(x, config), x.size, "float32", config).astype(np.float64)
    return float(np.square(x - back).sum() / np.square(x.astype(np.float64)).sum())


@pytest.mark.parametrize("distribution", ["standard_normal", "laplace"])
def test_errors_against_uniform_at_equal_bytes(distribution: str) -> None:
    """Check that nvfp4 is better at 4.5 bits, and uniform at 8.25 bits."""
    x = getattr(np.random.default_rng(7), distribution)(size=2**18).astype(np.float32)

    def uniform(bits: int, bucket_size: int) -> float:
        return relative_error(x, Config(bits, bucket_size=bucket_size, rounding="nearest"))

    assert relative_error(x, config_of("nvfp4", bucket_size=2**16)) < 0.99 * uniform(4, 128)
    assert uniform(8, 256) < 0.5 * relative_error(x, config_of("mxfp8"))
    assert relative_error(x, config_of("mxfp8")) < relative_error(x, config_of("mxfp8_e5m2"))
