"""The entropy coder: docs/reference/entropy_coding.md.

1. costs, and frequencies from counts
2. frequencies as bytes
3. streams
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Symbols = npt.NDArray[np.uint8]

SYMBOLS, SUM = 256, 4096
_LOWEST_STATE = 1 << 15

# ---- 1. frequencies ------------------------------------------------------------------------------


@functools.cache
def costs() -> Ints:
    """Return -log2(f / 4096) in units of 2^-24 bits, for f from 1 to 4096; element 0 is unused."""
    f = np.arange(SUM + 1, dtype=np.uint64)
    f[0] = 1
    whole = np.array([int(each).bit_length() - 1 for each in f], np.uint64)
    logarithm, power = whole.copy(), f << (np.uint64(31) - whole)
    for _ in range(24):
        power = power * power >> np.uint64(31)
        carry = power >> np.uint64(32)
        logarithm = logarithm << np.uint64(1) | carry
        power >>= carry
    return (12 << 24) - logarithm.astype(np.int64)


def cost(counts: Ints, frequencies: Ints) -> int:
    """Return the cost of coding the counted symbols, in units of 2^-24 bits."""
    present = counts > 0
    return int((counts[present].astype(object) * costs()[frequencies[present]]).sum())


def frequencies_of(counts: Ints) -> Ints:
    """Return 256 frequencies whose sum is 4096."""
    present = counts > 0
    frequencies = np.where(present, np.maximum(counts * SUM // counts.sum(), 1), 0)
    missing = SUM - int(frequencies.sum())
    step = 1 if missing > 0 else -1
    never = np.iinfo(np.int64).max
    for _ in range(abs(missing)):
        possible = present & (frequencies + step > 0)
        changed = costs()[np.clip(frequencies + step, 1, SUM)] - costs()[frequencies]
        change = np.where(possible, changed * counts, never)
        frequencies[np.argmin(change)] += step  # of equal ones, the first
    return frequencies


# ---- 2. frequencies as bytes ---------------------------------------------------------------------


def _offset_bits(width: int, remaining: int) -> int:
    lowest = 1 << (width - 1)
    return min(lowest - 1, remaining - lowest).bit_length()


def write_frequencies(frequencies: Ints) -> bytes:
    """Return the frequencies as bytes."""
    number = filled = 0

    def put(value: int, bits: int) -> None:
        nonlocal number, filled
        number, filled = number | value << filled, filled + bits

    def put_gamma(value: int) -> None:
        zeros = value.bit_length() - 1
        put(1 << zeros, zeros + 1)
        put(value - (1 << zeros), zeros)

    present = [int(symbol) for symbol in np.flatnonzero(frequencies)]
    put(present[0], 8)
    expected, remaining, last = 8, SUM, present[0] - 1
    for symbol in present:
        if symbol > last + 1:
            put_gamma(4)
            put_gamma(symbol - last - 1)
        frequency = int(frequencies[symbol])
        width = frequency.bit_length()
        difference = width - expected
        code = -2 * difference if difference < 0 else 2 * difference + 1
        put_gamma(code if code < 4 else code + 1)
        put(frequency - (1 << (width - 1)), _offset_bits(width, remaining))
        expected, remaining, last = width, remaining - frequency, symbol
    return number.to_bytes((filled + 7) // 8, "little")


def read_frequencies(data: bytes) -> tuple[Ints, int]:
    """Return the frequencies at the beginning of valid bytes, and the number of their bytes."""
    number, at = int.from_bytes(data, "little"), 0

    def take(bits: int) -> int:
        nonlocal at
        at += bits
        return number >> (at - bits) & ((1 << bits) - 1)

    def take_gamma() -> int:
        zeros = 0
        while not take(1):
            zeros += 1
        return 1 << zeros | take(zeros)

    frequencies = np.zeros(SYMBOLS, np.int64)
    symbol, width, remaining = take(8), 8, SUM
    while remaining:
        code = take_gamma()
        if code == 4:
            symbol += take_gamma()
            code = take_gamma()
        code -= code > 4
        width += code // 2 if code % 2 else -code // 2
        lowest = 1 << (width - 1)
        frequency = lowest + take(min(lowest - 1, remaining - lowest).bit_length())
        frequencies[symbol] = frequency
        symbol, remaining = symbol + 1, remaining - frequency
    return frequencies, (at + 7) // 8


# ---- 3. streams ----------------------------------------------------------------------------------


def lanes_of(numel: int) -> int:
    """Return the number of lanes of a stream."""
    return 1 << min(max(numel // 2048, 1).bit_length() - 1, 5)


def _groups(numel: int, lanes: int) -> Iterator[tuple[int, int]]:
    return ((first, min(lanes, numel - first)) for first in range(0, numel, lanes))


def encode(symbols: Symbols, lanes: int, frequencies: Ints) -> bytes:
    """Return the stream of the symbols."""
    frequency = frequencies.astype(np.uint64)[symbols]
    start = (np.cumsum(frequencies) - frequencies).astype(np.uint64)[symbols]
    states = np.full(lanes, _LOWEST_STATE, np.uint64)
    groups = []
    for first, count in reversed(list(_groups(len(symbols), lanes))):
        f, state = frequency[first : first + count], states[:count]
        full = state >= f << np.uint64(19)
        groups.append(state[full].astype("<u2"))
        state = np.where(full, state >> np.uint64(16), state)
        states[:count] = (state // f << np.uint64(12)) + start[first : first + count] + state % f
    words = np.concatenate([np.empty(0, "<u2"), *reversed(groups)])
    return states.astype("<u4").tobytes() + words.tobytes()


def decode(stream: bytes, numel: int, lanes: int, frequencies: Ints) -> Symbols | None:
    """Return the symbols, or None if the stream is not valid."""
    if len(stream) < 4 * lanes or len(stream) % 2:
        return None
    states = np.frombuffer(stream, "<u4", lanes).astype(np.uint64)
    if (states < _LOWEST_STATE).any() or (states >= 1 << 31).any():
        return None
    words = np.frombuffer(stream, "<u2", offset=4 * lanes).astype(np.uint64)
    symbol_of = np.repeat(np.arange(SYMBOLS, dtype=np.uint8), frequencies)
    f, starts = frequencies.astype(np.uint64), np.cumsum(frequencies) - frequencies
    symbols, used = np.empty(numel, np.uint8), 0
    for first, count in _groups(numel, lanes):
        slot = (states[:count] % np.uint64(SUM)).astype(np.int64)
        symbol = symbols[first : first + count] = symbol_of[slot]
        state = f[symbol] * (states[:count] >> np.uint64(12)) + (slot - starts[symbol]).astype(
            np.uint64
        )
        low = np.flatnonzero(state < _LOWEST_STATE)
        if used + len(low) > len(words):
            return None
        state[low] = state[low] << np.uint64(16) | words[used : used + len(low)]
        states[:count], used = state, used + len(low)
    complete = used == len(words) and (states == _LOWEST_STATE).all()
    return symbols if complete else None
