"""The search for the step of `entropy`: docs/reference/entropy_blocks.md, section 5."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from . import rans
from .entropy_symbols import Grid, Ints, Parts, key_of, parts_of, step_of
from .values import Float32s

OCTAVE = 1 << 15  # of keys
LOWEST, HIGHEST = 0x8000, 0x7F7FFF  # keys
_BIT = 24  # log2 of a bit, in units of costs
_SAMPLE = 4096  # values at most
_BILLION = 10**9


def sample_positions(numel: int) -> Ints:
    stride = 16 * (-(-numel // _SAMPLE) | 1)
    if stride == 16:
        return np.arange(numel)
    first = np.arange(0, numel - 15, stride)
    return (first[:, None] + np.arange(16)).ravel()


def entropy(counts: Ints) -> int:
    """Return the cost of at most 4096 symbols with their own frequencies, in 2^-24 bits."""
    used = counts[counts > 0]
    table = rans.costs()
    return int((used * (table[used] - table[used.sum()])).sum())


def sample_cost(parts: Parts) -> int:
    other = len(parts.symbols) * parts.width + parts.extra_bits
    return entropy(parts.counts) + (other << _BIT)


def low_bits_loss(parts: Parts) -> int:
    """Return the cost of uncoded low bits, in the two cells next to 0."""
    loss = 0
    for cell in (0, 1):
        low = parts.low[parts.symbols == cell]
        if len(low):
            loss += (len(low) * parts.width << _BIT) - entropy(np.bincount(low))
    return loss


@dataclass
class Bracket:
    """The keys between the finest and the coarsest that are possible or were tried."""

    lowest: int
    highest: int
    fine: bool = False  # the lowest was tried
    coarse: bool = False  # the highest was tried

    def next(self, key: int, above: int, move: int) -> int:
        """Return the key to try after `key`, whose size is above the desired one by `above`."""
        if above > 0:
            self.lowest, self.fine = key, True
        else:
            self.highest, self.coarse = key, True
        moved = key + min(max(move, -4 * OCTAVE), 4 * OCTAVE)
        if moved <= self.lowest:
            return (self.lowest + self.highest) // 2 if self.fine else self.lowest
        if moved >= self.highest:
            return (self.lowest + self.highest) // 2 if self.coarse else self.highest
        return moved

    def ended(self, key: int) -> bool:
        """Return whether `key` is the last one to try."""
        return key in (self.lowest, self.highest)


def offset_of(rate: int) -> int:
    """Return 256 (1 - t) for the dead zone t."""
    return 128 - min(64, 25_600_000_000 // rate)


class Search:
    """The search in one block.

    Args:
        x: the values, which are finite and not all equal.
        rate: in billionths.
        wanted: the desired size of the block, in bits.
        overhead: about the part of it that is not the cost of values.
    """

    def __init__(
        self, x: Float32s, rate: int, wanted: int, overhead: int, *, dithered: bool
    ) -> None:
        self.x, self.wanted, self.at = x, wanted, np.arange(len(x))
        self.sample = sample_positions(len(x))
        self.grid = Grid(0, offset=offset_of(rate), dither=0 if dithered else None)
        keys = np.abs(x).view(np.uint32).astype(np.int64) >> 8
        coarsest = 7 if dithered else 1
        self.highest = max(LOWEST, min(int(keys.max()) + coarsest * OCTAVE + 1, HIGHEST))
        keys = keys[self.sample]
        keys = keys[keys >= LOWEST]
        n = len(self.sample)
        self.nonzero = max(len(keys), n // 64, 1)
        mean = int(keys.sum()) // len(keys) if len(keys) else self.highest
        self.lowest = max(LOWEST, mean - 30 * OCTAVE)
        each = min(20 * _BILLION, rate * n // self.nonzero)
        self.first = mean + 3 * OCTAVE - each * OCTAVE // _BILLION
        self.first = min(max(self.first, self.lowest), self.highest)
        self.width = max(0, rate // _BILLION - 4)
        self.sample_wanted = (max(wanted - overhead, wanted // 4) * n << _BIT) // len(x)

    def in_sample(self, key: int) -> Parts:
        grid = replace(self.grid, key=key)
        return parts_of(self.x[self.sample], self.sample, grid, self.width)

    def search_sample(self, key: int) -> int:
        """Return a key with which the sample has about the desired cost."""
        bracket, n = Bracket(self.lowest, self.highest), len(self.sample)
        for _ in range(8):
            above = sample_cost(self.in_sample(key)) - self.sample_wanted
            if abs(above) <= n << (_BIT - 7):
                break
            key = bracket.next(key, above, (above >> 9) // self.nonzero)
            if bracket.ended(key):
                break
        return key

    def choose_width(self, key: int) -> int:
        """Reduce the width until uncoded low bits cost little; return the key."""
        key = self.search_sample(key)
        while self.width > 0:
            allowed = (len(self.sample) << (_BIT - 8)) + (3 << (self.width - 1 + _BIT))
            if low_bits_loss(self.in_sample(key)) <= allowed:
                break
            self.width -= 1
            key = self.search_sample(key)
        return key

    def slope(self, key: int) -> int:
        """Return how much more the sample costs if the step is an eighth smaller."""
        finer = key_of(step_of(key) * np.float32(0.875))
        cost = sample_cost(self.in_sample(max(LOWEST, finer)))
        return max(cost - sample_cost(self.in_sample(key)), self.nonzero << (_BIT - 6))

    def run(self, size: Callable[[Parts], int]) -> int:
        """Return the key. size: the size of a block in bits."""
        key, n = self.choose_width(self.first), len(self.x)
        slope = self.slope(key)
        bracket = Bracket(self.lowest, self.highest)
        near = max(16, n >> 8)
        for turn in range(8):
            grid = replace(self.grid, key=key)
            above = size(parts_of(self.x, self.at, grid, self.width)) - self.wanted
            if -near * (1 if turn == 0 else 2) <= above <= near:
                return key
            mantissa = OCTAVE + key % OCTAVE
            move = (above * mantissa << 11) // (slope * n // len(self.sample) >> 10)
            key = bracket.next(key, above, move)
            if bracket.ended(key):
                break
        return bracket.highest if bracket.coarse else key

    def shift(self, key: int) -> int:
        """Return 256 times the mean distance of the sample's magnitudes from their levels."""
        v = replace(self.grid, key=key).scaled(self.x[self.sample], self.sample)
        v = v[(v >= 1) & (v < 2**15)]
        if len(v) < 16:
            return 0
        fractions = ((v - np.floor(v)) * np.float32(256)).astype(np.int64).sum()
        mean = (len(v) * self.grid.offset - int(fractions)) // len(v)
        return min(max(mean, -128), 127)
