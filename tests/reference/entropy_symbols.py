"""Levels of `entropy`: docs/reference/entropy_blocks.md, sections 2 and 3.

Grid    quantizes values to levels, and restores values from them
Parts   symbols, low bits and extra bits of levels
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from . import rans
from .values import Float32s

Ints: TypeAlias = npt.NDArray[np.int64]

EXACT = 102  # the symbol of a value that is sent exactly
_DIRECT = 64
_MOST_LEVEL = np.float32(2**23)
_LARGEST = np.float32(np.finfo(np.float32).max)


def step_of(key: int) -> np.float32:
    """Return the step of a key: its upper 24 bits."""
    return np.uint32(key << 8).view(np.float32)


def key_of(x: np.float32) -> int:
    return int(x.view(np.uint32)) >> 8


@dataclass(frozen=True)
class Grid:
    """A step, given by its key, and the position of the grid.

    Args:
        key: the upper 24 bits of the step.
        offset: nearest rounding: what is added to a magnitude before it is truncated, times 256.
        shift: nearest rounding: what decoding subtracts from a level, times 256.
        dither: shift rounding: the 16 bits of noise; None for nearest rounding.
    """

    key: int
    offset: int = 128
    shift: int = 0
    dither: int | None = None

    def noise(self, at: Ints) -> Float32s:
        """Return r for the values with these positions in the block."""
        assert self.dither is not None
        u = (self.dither + 0x9E37 * at) % 65536
        return ((u + 0.5) / 65536).astype(np.float32)

    def scaled(self, x: Float32s, at: Ints) -> Float32s:
        """Return the values in units of the step, before they are truncated."""
        with np.errstate(all="ignore"):
            inverse = np.float32(1) / step_of(self.key)
            if self.dither is not None:
                return x * inverse + self.noise(at)
            return np.abs(x) * inverse + np.float32(self.offset / 256)

    def levels(self, x: Float32s, at: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Return the levels, and which values are sent exactly instead."""
        v = self.scaled(x, at)
        exact = ~(np.abs(v) < _MOST_LEVEL)
        level = np.floor(np.where(exact, 0, v)).astype(np.int64)
        if self.dither is None:
            level = np.where(np.signbit(x), -level, level)
        return level, exact

    def values(self, levels: Ints, at: Ints) -> Float32s:
        """Restore values."""
        q, step = levels.astype(np.float32), step_of(self.key)
        with np.errstate(all="ignore"):
            if self.dither is not None:
                x = (q + (np.float32(0.5) - self.noise(at))) * step
                return np.clip(x, -_LARGEST, _LARGEST).astype(np.float32)
            x = np.minimum((np.abs(q) - np.float32(self.shift / 256)) * step, _LARGEST)
        return np.where(levels == 0, 0, np.copysign(x, q)).astype(np.float32)


@dataclass(frozen=True)
class Parts:
    """Levels as symbols, low bits, and extra bits. width: of the low bits."""

    width: int
    symbols: npt.NDArray[np.uint8]
    low: Ints
    extra: Ints
    extra_width: Ints

    @property
    def counts(self) -> Ints:
        return np.bincount(self.symbols, minlength=rans.SYMBOLS)

    @property
    def extra_bits(self) -> int:
        return int(self.extra_width.sum())


def parts_of(x: Float32s, at: Ints, grid: Grid, width: int) -> Parts:
    level, exact = grid.levels(x, at)
    high, low = level >> width, level & ((1 << width) - 1)
    z = np.where(high >= 0, 2 * high, -2 * high - 1)
    octave = np.frexp(np.maximum(z, _DIRECT).astype(np.float64))[1] - 1
    more = octave - 1  # the highest two bits belong to the symbol
    symbol = np.where(z < _DIRECT, z, _DIRECT + 2 * (octave - 6) + (z >> more & 1))
    extra = np.where(z < _DIRECT, 0, z & ((1 << more) - 1))
    extra_width = np.where(z < _DIRECT, 0, more)
    return Parts(
        width,
        np.where(exact, EXACT, symbol).astype(np.uint8),
        low,
        np.where(exact, x.view(np.uint32).astype(np.int64), extra),
        np.where(exact, 32, extra_width),
    )


def extra_widths(symbols: npt.NDArray[np.uint8]) -> Ints:
    """Return the number of extra bits of each symbol."""
    s = symbols.astype(np.int64)
    return np.where(s < _DIRECT, 0, np.where(s == EXACT, 32, (s - _DIRECT) // 2 + 5))


def levels_of(parts: Parts) -> Ints:
    """Return the levels; 0 for values that are sent exactly."""
    s = parts.symbols.astype(np.int64)
    coded = (2 + (s - _DIRECT) % 2 << parts.extra_width) + parts.extra
    z = np.where(s < _DIRECT, s, np.where(s == EXACT, 0, coded))
    high = np.where(z % 2 == 0, z // 2, -(z + 1) // 2)
    return (high << parts.width) + parts.low


def pack(values: Ints, widths: Ints) -> bytes:
    """Return bit fields as one little-endian integer."""
    bits = (values[:, None] >> np.arange(32) & 1).astype(np.uint8)
    used = np.arange(32) < widths[:, None]
    return np.packbits(bits[used], bitorder="little").tobytes()


def unpack(data: bytes, widths: Ints) -> Ints:
    """Invert pack()."""
    used = np.arange(32) < widths[:, None]
    bits = np.zeros(used.shape, np.int64)
    bits[used] = np.unpackbits(
        np.frombuffer(data, np.uint8), count=int(widths.sum()), bitorder="little"
    )
    return (bits << np.arange(32)).sum(axis=1)
