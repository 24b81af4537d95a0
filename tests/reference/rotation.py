"""Rotation: blocks of values are multiplied by a Hadamard matrix with random signs."""

from __future__ import annotations

import numpy as np

from .values import Float32s

_WIDTH = 16  # blocks side by side


def _flip_signs(x: Float32s) -> Float32s:
    """Change the signs of values by their index: the top bit of index * 0x9e3779b1.

    NaN is unchanged.
    """
    place = np.arange(x.shape[1], dtype=np.uint64)
    flips = (place * np.uint64(0x9E3779B1)).astype(np.uint32) & np.uint32(0x80000000)
    flipped = (x.view(np.uint32) ^ flips).view(np.float32)
    return np.where(np.isnan(x), np.float32(np.nan), flipped)


def _hadamard(x: Float32s, size: int, scale: np.float32) -> Float32s:
    """Transform rows of `size` * w values: w blocks, whose values are w apart."""
    shape = x.shape
    half = 1
    while half < size:
        pairs = x.reshape(len(x), size // (2 * half), 2, -1)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        x = np.stack([a + b, a - b], axis=2).reshape(shape)
        half *= 2
    return x * scale


def rotate(rows: Float32s, size: int, *, back: bool = False) -> Float32s:
    """Rotate buckets, one per row: sixteen blocks at a time, then the remaining ones."""
    out, n = rows.copy(), rows.shape[1]
    log = size.bit_length() - 1
    scale = np.float32(2.0 ** -(log - log // 2 if back else log // 2))
    at = 0
    with np.errstate(all="ignore"):
        while (width := min(_WIDTH, (n - at) // size)) > 0:
            group = np.ascontiguousarray(out[:, at : at + size * width])
            if back:
                group = _flip_signs(_hadamard(group, size, scale))
            else:
                group = _hadamard(_flip_signs(group), size, scale)
            out[:, at : at + size * width] = group
            at += size * width
    return out
