"""Records of block formats: mxfp8, mxfp8_e5m2, mxfp4, nvfp4.

It follows docs/reference/block_formats.md. Elements are found in a table of all their magnitudes,
in float64, which is exact. Rows are buckets of equal length.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .values import Float32s

Bytes = npt.NDArray[np.uint8]
Float64s = npt.NDArray[np.float64]
NAN = np.uint32(0x7FC00000).view(np.float32)
MOST = np.float32(float.fromhex("0x1.fffp127"))  # of a bucket, for the scale of nvfp4


@dataclass(frozen=True)
class Element:
    """A float with a sign, `exponent` bits with this bias, and `mantissa` bits.

    largest: the code of the largest finite magnitude.
    """

    exponent: int
    mantissa: int
    bias: int
    largest: int
    magnitudes: Float64s = field(init=False, repr=False, compare=False)  # by code

    def __post_init__(self) -> None:
        codes = np.arange(self.largest + 1)
        power, fraction = codes >> self.mantissa, codes & ((1 << self.mantissa) - 1)
        normal = np.ldexp(fraction + (1 << self.mantissa), power - self.bias - self.mantissa)
        subnormal = np.ldexp(fraction, 1 - self.bias - self.mantissa)
        object.__setattr__(self, "magnitudes", np.where(power > 0, normal, subnormal))

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def highest_exponent(self) -> int:
        return int(np.frexp(self.magnitudes[-1])[1]) - 1

    def nearest(self, magnitude: Float32s) -> npt.NDArray[np.int64]:
        """Return codes, rounded to nearest; ties to the even code."""
        x = magnitude.astype(np.float64)
        above = np.clip(np.searchsorted(self.magnitudes, x), 1, self.largest)
        up, down = self.magnitudes[above] - x, x - self.magnitudes[above - 1]
        return np.where((up < down) | ((up == down) & (above % 2 == 0)), above, above - 1)

    def drawn(self, magnitude: Float32s, r: Float32s) -> npt.NDArray[np.int64]:
        """Return codes, rounded down after r units of the element's spacing are added."""
        power = np.frexp(magnitude)[1] - 1
        spacing = np.maximum(power, 1 - self.bias) - self.mantissa
        units = np.floor(np.ldexp(magnitude, -spacing).astype(np.float32) + r)
        value = np.ldexp(units.astype(np.float64), spacing)
        return np.minimum(np.searchsorted(self.magnitudes, value), self.largest)

    def values(self, codes: Bytes) -> Float32s:
        """Return magnitudes of codes; those above the largest are NaN."""
        code = codes & ((1 << (self.bits - 1)) - 1)
        found = self.magnitudes[np.minimum(code, self.largest)].astype(np.float32)
        return np.where(code > self.largest, NAN, found)


E4M3, E5M2, E2M1 = Element(4, 3, 7, 0x7E), Element(5, 2, 15, 0x7B), Element(2, 1, 1, 0x7)
ELEMENTS = {"mxfp8": E4M3, "mxfp8_e5m2": E5M2, "mxfp4": E2M1, "nvfp4": E2M1}


def _block(compressor: str) -> int:
    return 16 if compressor == "nvfp4" else 32


def record_bytes(n: int, compressor: str) -> int:
    """Return the bytes of a bucket of n values."""
    header = 4 if compressor == "nvfp4" else 0
    return header - (-n // _block(compressor)) - (-n * ELEMENTS[compressor].bits // 8)


# ---- scales --------------------------------------------------------------------------------------


def _mx_value(byte: npt.NDArray[np.int64]) -> Float32s:
    return np.where(byte == 255, NAN, np.ldexp(np.float32(1), byte - 127))


def _mx_scales(
    largest: Float32s, element: Element
) -> tuple[npt.NDArray[np.int64], Float32s, Float32s]:
    """Return the bytes of blocks' scales, the scales, and their inverses."""
    finite = np.isfinite(largest)
    power = np.frexp(np.where(finite & (largest > 0), largest, np.float32(2.0**-149)))[1] - 1
    byte = np.maximum(power - element.highest_exponent, -127) + 127
    inverse = np.ldexp(np.float32(1), 127 - byte)
    byte = np.where(finite, byte, 255)
    return byte, _mx_value(byte), inverse


def _nvfp4_value(byte: npt.NDArray[np.int64], scale: Float32s) -> Float32s:
    return scale * E4M3.values(byte.astype(np.uint8))


def _nvfp4_scales(
    largest: Float32s, scale: Float32s, inverse: Float32s
) -> tuple[npt.NDArray[np.int64], Float32s, Float32s]:
    finite = np.isfinite(scale)
    share = np.float32(448) * (np.where(finite, largest, np.float32(0)) * inverse)
    byte = E4M3.nearest(share)
    value = _nvfp4_value(byte, scale)
    inverse = np.float32(1) / value
    return byte, value, np.where(np.isfinite(inverse), inverse, np.float32(0))


# ---- records -------------------------------------------------------------------------------------


def _pack(codes: Bytes, bits: int) -> Bytes:
    if bits == 8:
        return codes
    even = np.zeros((len(codes), codes.shape[1] + codes.shape[1] % 2), np.uint8)
    even[:, : codes.shape[1]] = codes
    return (even[:, ::2] | even[:, 1::2] << 4).astype(np.uint8)


def _unpack(field: Bytes, n: int, bits: int) -> Bytes:
    if bits == 8:
        return field
    both = np.stack([field & 15, field >> 4], axis=2).astype(np.uint8)
    return both.reshape(len(field), -1)[:, :n]


def encode_rows(x: Float32s, r: Float32s | None, compressor: str) -> Bytes:
    """Encode buckets, one per row, as records. r: the noise of each value; None: nearest."""
    element, block, parts = ELEMENTS[compressor], _block(compressor), []
    with np.errstate(all="ignore"):
        scale = inverse = np.empty(0, np.float32)
        if compressor == "nvfp4":
            largest = np.where(np.isfinite(x), np.abs(x), np.float32(np.inf)).max(axis=1)
            most = np.minimum(largest, MOST)
            finite = np.isfinite(largest)
            scale = np.where(finite, most / np.float32(2688), NAN)
            inverse = np.float32(1) / most
            inverse = np.where(finite & np.isfinite(inverse), inverse, np.float32(0))
            parts.append(np.ascontiguousarray(scale[:, None]).view(np.uint8))
        for at in range(0, x.shape[1], block):
            values = x[:, at : at + block]
            largest = np.where(np.isfinite(values), np.abs(values), np.float32(np.inf)).max(axis=1)
            if compressor == "nvfp4":
                byte, value, down = _nvfp4_scales(largest, scale, inverse)
            else:
                byte, value, down = _mx_scales(largest, element)
            finite = np.isfinite(value)[:, None]
            magnitude = np.where(finite, np.abs(values) * down[:, None], np.float32(0))
            if r is None:
                codes = element.nearest(magnitude)
            else:
                codes = element.drawn(magnitude, r[:, at : at + block])
            codes = np.where(finite, codes | np.signbit(values) << (element.bits - 1), 0)
            parts.append(byte[:, None].astype(np.uint8))
            parts.append(_pack(codes.astype(np.uint8), element.bits))
    return np.concatenate(parts, axis=1)


def decode_rows(records: Bytes, n: int, compressor: str) -> Float32s:
    """Decode records of buckets of n elements: fp32, shape (rows, n)."""
    element, block, parts = ELEMENTS[compressor], _block(compressor), []
    with np.errstate(all="ignore"):
        at, scale = 0, np.empty(0, np.float32)
        if compressor == "nvfp4":
            at = 4
            scale = np.ascontiguousarray(records[:, :4]).view(np.float32)[:, 0]
            scale = np.where(np.isfinite(scale), scale, NAN)
        for first in range(0, n, block):
            count = min(block, n - first)
            end = at + 1 - (-count * element.bits // 8)
            byte = records[:, at].astype(np.int64)
            value = _nvfp4_value(byte, scale) if compressor == "nvfp4" else _mx_value(byte)
            codes = _unpack(records[:, at + 1 : end], count, element.bits)
            magnitude = (element.values(codes) * value[:, None]).view(np.uint32)
            sign = (codes.astype(np.uint32) >> (element.bits - 1)) << 31
            parts.append((magnitude | sign).view(np.float32))
            at = end
    return np.concatenate(parts, axis=1)
