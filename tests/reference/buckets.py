"""Records of buckets: a header, then codes. Each compressor's format has an encoder and decoder.

Rows are buckets of equal length. An encoder returns the headers' bytes and the codes of rows with
finite values; a decoder takes both. Other values are handled once, for all formats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from . import blocks
from .philox import noise
from .scales import (
    largest_magnitude,
    mean,
    nearest_scale,
    root_of_squares,
    scale_above,
)
from .settings import Settings
from .values import BFLOAT16, Float32s, Floats, from_order_key, order_key, round_to, widen

Bytes = npt.NDArray[np.uint8]
Codes = npt.NDArray[np.uint8]
ONE, HALF = np.float32(1), np.float32(0.5)
NAN = np.uint32(0x7FC00000).view(np.float32)


@dataclass(frozen=True)
class Format:
    """encode(rows, r, settings) -> (numbers of the headers, codes); decode is its inverse.

    numbers: shape (rows, count), of `width` bytes each. r: the noise of each value, or 0.5. blank:
    the code of rows that are not finite.
    """

    numbers: int
    width: int
    encode: Callable[[Float32s, Float32s, Settings], tuple[Float32s, Codes]]
    decode: Callable[[Float32s, Codes, Settings], Floats]
    blank: int = 0

    @property
    def header_bytes(self) -> int:
        return self.numbers * self.width


def _signed(x: Float32s, level: npt.NDArray[np.int64], bits: int) -> Codes:
    """Return codes with the sign above the level."""
    return (level | ((x < 0).astype(np.int64) << (bits - 1))).astype(np.uint8)


def _with_sign(magnitude: Floats, codes: Codes, bits: int) -> Float32s:
    sign = (codes.astype(np.uint32) >> (bits - 1)) << 31
    return (magnitude.astype(np.float32).view(np.uint32) | sign).view(np.float32)


def _truncated(x: Float32s, top: int) -> npt.NDArray[np.int64]:
    return np.minimum(x, np.float32(top)).astype(np.int64)


# ---- uniform -------------------------------------------------------------------------------------


def _encode_uniform(x: Float32s, r: Float32s, settings: Settings) -> tuple[Float32s, Codes]:
    top = np.float32((1 << settings.bits) - 1)
    key = order_key(x)
    lo = from_order_key(key.min(axis=1))
    hi = from_order_key(key.max(axis=1))
    extent = hi - lo
    step = extent / top
    inverse = ONE / step
    finite = np.isfinite(extent)
    flat = ~finite | (step == 0) | np.isinf(inverse)
    level = np.minimum(np.floor((x - lo[:, None]) * inverse[:, None] + r), top)
    if settings.mode == "shift":
        lo = np.where(flat, lo, lo + (HALF - r[:, 0]) * step)
        finite &= np.isfinite(lo)  # a grid shifted beyond the lowest number is invalid
        flat |= ~finite
    header = np.stack([lo, step], axis=1)
    header[~finite] = NAN
    return header, np.where(flat[:, None], np.float32(0), level).astype(np.uint8)


def _decode_uniform(header: Float32s, codes: Codes, settings: Settings) -> Floats:
    del settings
    return header[:, :1] + codes.astype(np.float32) * header[:, 1:]


# ---- levels, sign, onebit ------------------------------------------------------------------------

LEVELS = {
    1: [1.0],
    2: [0.4528, 1.5104],
    3: [0.2451, 0.7560, 1.3439, 2.1520],
    4: [0.1284, 0.3880, 0.6568, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326],
}


def _encode_levels(x: Float32s, r: Float32s, settings: Settings) -> tuple[Float32s, Codes]:
    del r
    bits = settings.code_bits
    scale = mean(np.abs, x, x.shape[1]) if bits == 1 else root_of_squares(x, float(x.shape[1]))
    scale = nearest_scale(scale)
    at = np.array(LEVELS[bits], np.float32)
    thresholds = (HALF * (at[:-1] + at[1:])) * scale[:, None]
    level = (np.abs(x)[:, :, None] >= thresholds[:, None, :]).sum(axis=2)
    codes = _signed(x, level, bits)
    return scale[:, None], np.where(scale[:, None] > 0, codes, np.uint8(0))


def _decode_levels(header: Float32s, codes: Codes, settings: Settings) -> Float32s:
    bits = settings.code_bits
    at = np.array(LEVELS[bits], np.float32)
    return _with_sign(at[codes & ((1 << (bits - 1)) - 1)] * header, codes, bits)


def _encode_sign(x: Float32s, r: Float32s, settings: Settings) -> tuple[Float32s, Codes]:
    del r, settings
    return np.ones((len(x), 1), np.float32), (x < 0).astype(np.uint8)


def _encode_onebit(x: Float32s, r: Float32s, settings: Settings) -> tuple[Float32s, Codes]:
    del r, settings
    below = x < 0
    count = below.sum(axis=1).astype(np.float64)
    header = [
        np.where(
            number > 0,
            nearest_scale(mean(lambda s, of=of: np.where(of, s, np.float32(0)), x, number)),
            np.float32(0),
        )
        for of, number in ((~below, x.shape[1] - count), (below, count))
    ]
    return np.stack(header, axis=1), below.astype(np.uint8)


def _decode_onebit(header: Float32s, codes: Codes, settings: Settings) -> Float32s:
    del settings
    return np.where(codes != 0, header[:, 1:], header[:, :1]) + np.float32(0)


# ---- ternary, qsgd -------------------------------------------------------------------------------


def _encode_ternary(x: Float32s, r: Float32s, settings: Settings) -> tuple[Float32s, Codes]:
    scale = largest_magnitude(x)
    if settings.clip:
        scale = np.minimum(scale, np.float32(2.5) * root_of_squares(x, float(x.shape[1])))
    scale = scale_above(scale)
    inverse = ONE / scale
    inverse = np.where(np.isfinite(inverse), inverse, np.float32(0))
    one = (np.abs(x) * inverse[:, None] + r >= ONE) & (inverse != 0)[:, None]
    return scale[:, None], (1 + np.where(x < 0, -1, 1) * one).astype(np.uint8)


def _decode_ternary(header: Float32s, codes: Codes, settings: Settings) -> Float32s:
    del settings
    return (codes.astype(np.float32) - ONE) * header


def _encode_qsgd(x: Float32s, r: Float32s, settings: Settings) -> tuple[Float32s, Codes]:
    most = (1 << (settings.bits - 1)) - 1
    norm = scale_above(np.maximum(root_of_squares(x, 1.0), largest_magnitude(x)))
    inverse = np.float32(most) / norm
    flat = ~np.isfinite(inverse)
    inverse[flat] = 0
    level = _truncated(np.abs(x) * inverse[:, None] + r, most)
    codes = _signed(x, level, settings.bits)
    return norm[:, None], np.where(flat[:, None], np.uint8(0), codes)


def _decode_qsgd(header: Float32s, codes: Codes, settings: Settings) -> Float32s:
    most = (1 << (settings.bits - 1)) - 1
    step = header / np.float32(most)
    return _with_sign((codes & most).astype(np.float32) * step, codes, settings.bits)


# ---- selected values -----------------------------------------------------------------------------


def _encode_magnitudes(x: Float32s, r: Float32s, settings: Settings) -> tuple[Float32s, Codes]:
    del r
    top = (1 << (settings.bits - 1)) - 1
    magnitude = np.abs(x)
    least, most = nearest_scale(magnitude.min(axis=1)), nearest_scale(magnitude.max(axis=1))
    inverse = np.float32(top) / (most - least)
    inverse = np.where(np.isfinite(inverse), inverse, np.float32(0))
    at = (magnitude - least[:, None]) * inverse[:, None] + HALF
    level = _truncated(np.maximum(at, np.float32(0)), top)
    return np.stack([least, most], axis=1), _signed(x, level, settings.bits)


def _decode_magnitudes(header: Float32s, codes: Codes, settings: Settings) -> Float32s:
    top = (1 << (settings.bits - 1)) - 1
    least, most = header[:, :1], header[:, 1:]
    step = (most - least) / np.float32(top)
    return _with_sign(least + (codes & top).astype(np.float32) * step, codes, settings.bits)


FORMATS = {
    "uniform": Format(2, 4, _encode_uniform, _decode_uniform),
    "levels": Format(1, 2, _encode_levels, _decode_levels),
    "sign": Format(1, 2, _encode_sign, _decode_levels),
    "onebit": Format(2, 2, _encode_onebit, _decode_onebit),
    "ternary": Format(1, 2, _encode_ternary, _decode_ternary, blank=1),
    "qsgd": Format(1, 2, _encode_qsgd, _decode_qsgd),
    "magnitudes": Format(2, 2, _encode_magnitudes, _decode_magnitudes),
}


# ---- records -------------------------------------------------------------------------------------


def field_bytes(n: int, bits: int) -> int:
    """Return the bytes of n codes; bits 0: trits."""
    return -(-n * bits // 8) if bits else -(-n // 5)


def _pack(codes: Codes, bits: int) -> Bytes:
    """Pack code j into bits [j*bits, (j+1)*bits) of a little-endian integer; trits differ."""
    if bits:
        spread = np.unpackbits(codes[:, :, None], axis=2, count=bits, bitorder="little")
        return np.packbits(spread.reshape(len(codes), -1), axis=1, bitorder="little")
    groups = [_pack_trits(codes[:, at : at + 80]) for at in range(0, codes.shape[1], 80)]
    return np.concatenate(groups, axis=1)


def _pack_trits(codes: Codes) -> Bytes:
    """Byte j of b has codes j, j + b, ... j + 4b, the first as its lowest digit; padding is 1."""
    rows, n = codes.shape
    b = -(-n // 5)
    full = np.ones((rows, 5 * b), np.uint8)
    full[:, :n] = codes
    weights = np.array([1, 3, 9, 27, 81])[:, None]
    return (full.reshape(rows, 5, b) * weights).sum(axis=1).astype(np.uint8)


def _unpack(field: Bytes, n: int, bits: int) -> Codes:
    if bits:
        spread = np.unpackbits(field, axis=1, count=n * bits, bitorder="little")
        return np.packbits(spread.reshape(len(field), n, bits), axis=2, bitorder="little")[:, :, 0]
    parts = []
    for at in range(0, n, 80):
        group = field[:, at // 5 : at // 5 + 16].astype(np.int64)
        digits = [group // 3**i % (3 if i < 4 else 256) for i in range(5)]
        parts.append(np.stack(digits, axis=1).reshape(len(field), -1)[:, : n - at])
    return np.concatenate(parts, axis=1).astype(np.uint8)


def record_bytes(n: int, settings: Settings) -> int:
    """Return the bytes of a bucket of n values."""
    if settings.compressor in blocks.ELEMENTS:
        return blocks.record_bytes(n, settings.compressor)
    return FORMATS[settings.compressor].header_bytes + field_bytes(n, settings.code_bits)


def encode_rows(
    x: Float32s, settings: Settings, first_index: int, noise_of: tuple[int, int, int], of: str = ""
) -> Bytes:
    """Encode buckets of equal length, one per row, as records, one per row.

    first_index: the index of x[0, 0] in its segment. noise_of: its seed, rank and phase. of: the
    format, if not the compressor's.
    """
    index = first_index + np.arange(x.size, dtype=np.int64).reshape(x.shape)
    if settings.mode == "stochastic":
        r = noise(index.ravel(), *noise_of).reshape(x.shape)
    elif settings.mode == "shift":
        r = noise(index[:, 0], *noise_of)[:, None]  # one for each bucket
    else:
        r = np.full((1, 1), HALF)
    if settings.compressor in blocks.ELEMENTS:
        noisy = settings.mode == "stochastic"
        return blocks.encode_rows(x, r if noisy else None, settings.compressor)
    form = FORMATS[of or settings.compressor]
    finite = np.isfinite(x).all(axis=1, keepdims=True)
    with np.errstate(all="ignore"):
        header, codes = form.encode(np.where(finite, x, np.float32(0)), r, settings)
    header = np.where(finite, header, NAN)
    codes = np.where(finite, codes, np.uint8(form.blank))
    wire = header if form.width == 4 else round_to(header, BFLOAT16)
    wire = np.ascontiguousarray(wire).view(np.uint8)
    return np.concatenate([wire, _pack(codes, settings.code_bits)], axis=1)


def decode_rows(records: Bytes, n: int, settings: Settings, of: str = "") -> Float32s:
    """Decode records of buckets of n elements: fp32, shape (rows, n)."""
    if settings.compressor in blocks.ELEMENTS:
        return blocks.decode_rows(records, n, settings.compressor)
    form = FORMATS[of or settings.compressor]
    wire = np.ascontiguousarray(records[:, : form.header_bytes])
    header = wire.view(np.float32) if form.width == 4 else widen(wire.view(BFLOAT16))
    header = np.where(np.isfinite(header).all(axis=1, keepdims=True), header, NAN)
    codes = _unpack(records[:, form.header_bytes :], n, settings.code_bits)
    with np.errstate(all="ignore"):
        return form.decode(header, codes, settings).astype(np.float32)
