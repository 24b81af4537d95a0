"""Magnitudes and scales of buckets: sums in a fixed order, scales of 16 bits.

Everything works on buckets of equal length, one per row, with finite values.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from .values import BFLOAT16, Float32s, Floats, round_to, widen

Float64s = npt.NDArray[np.float64]
LARGEST_BFLOAT16 = np.uint32(0x7F7F0000).view(np.float32)
_SUM_BLOCK = 512
_LANES = 16


def largest_magnitude(x: Float32s) -> Float32s:
    return np.abs(x).max(axis=1)


def prescale(largest: Float32s) -> tuple[Float32s, Float32s]:
    """Return the power of two by which values are scaled before squaring or adding.

    Also returns its inverse. Both are 1 if the largest magnitude is between 2^-32 and 2^32.
    """
    exponent = np.clip(largest.view(np.uint32) >> 23, 1, 253).astype(np.uint32)
    exponent[(exponent >= 127 - 32) & (exponent < 127 + 32)] = 127
    return ((254 - exponent) << 23).view(np.float32), (exponent << 23).view(np.float32)


def sums(terms: Floats) -> Float64s:
    """Add each row: sixteen lanes of fp32 in blocks of 512, folded by halves; blocks in fp64."""
    rows, n = terms.shape
    blocks = -(-n // _SUM_BLOCK)
    padded = np.zeros((rows, blocks * _SUM_BLOCK), np.float32)
    padded[:, :n] = terms
    steps = padded.reshape(rows, blocks, _SUM_BLOCK // _LANES, _LANES)
    lanes = np.zeros((rows, blocks, _LANES), np.float32)
    for step in range(steps.shape[2]):
        lanes += steps[:, :, step]
    while lanes.shape[2] > 1:
        half = lanes.shape[2] // 2
        lanes = lanes[:, :, :half] + lanes[:, :, half:]
    return lanes[:, :, 0].astype(np.float64).cumsum(axis=1)[:, -1]


def mean(terms: Callable[[Float32s], Float32s], x: Float32s, count: Float64s | float) -> Float32s:
    """Return sum(terms(x)) / count of each row, computed on scaled values."""
    down, up = prescale(largest_magnitude(x))
    total = sums(terms(x * down[:, None]))
    return (total / count).astype(np.float32) * up


def root_of_squares(x: Float32s, divisor: float) -> Float32s:
    """Return sqrt(sum of squares / divisor) of each row."""
    down, up = prescale(largest_magnitude(x))
    scaled = x * down[:, None]
    return np.sqrt((sums(scaled * scaled) / divisor).astype(np.float32)) * up


def nearest_scale(x: Float32s) -> Float32s:
    """Round to bf16; an overflow becomes its largest number."""
    rounded = widen(round_to(x, BFLOAT16))
    return np.where(np.isfinite(rounded), rounded, np.copysign(LARGEST_BFLOAT16, x))


def scale_above(x: Float32s) -> Float32s:
    """Round x >= 0 up to bf16; an overflow becomes its largest number."""
    bits = (x.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
    return np.minimum(bits.view(np.float32), LARGEST_BFLOAT16)
