"""Blocks of `entropy`: docs/reference/entropy_blocks.md."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from . import rans
from .entropy_step import HIGHEST, LOWEST, OCTAVE, Search
from .entropy_symbols import (
    EXACT,
    Grid,
    Parts,
    extra_widths,
    levels_of,
    pack,
    parts_of,
    unpack,
)
from .philox import noise
from .settings import ENTROPY_BLOCK
from .values import Float32s

_CONSTANT, _FIXED, _CODED = 0, 1, 2
_VALUE, _EXTRA, _DITHERED = 0x04, 0x40, 0x80  # flags of the first byte
_SMALLEST_CODED = 128  # values
_LEAST_BYTES = 12


def _billionths(rate: float) -> int:
    return round(rate * 10**9)


def most_block_bytes(numel: int, rate: int) -> int:
    """Return the largest size of a block. rate: in billionths."""
    return numel * rate * 102 // (8 * 10**11) + 16


def _wanted_bytes(numel: int, rate: int) -> int:
    return max(numel * rate // (8 * 10**9), _LEAST_BYTES)


def _lanes(numel: int) -> int:
    return 1 << min(max(numel // 4096, 1).bit_length() - 1, 4)


def _size(parts: Parts, *, dithered: bool) -> int:
    """Return about the size of a coded block, in bits."""
    n, frequencies = len(parts.symbols), rans.frequencies_of(parts.counts)
    head = 4 + (2 if dithered else 1) + len(rans.write_frequencies(frequencies))
    if parts.extra_bits:
        head += 3 + (parts.extra_bits + 7) // 8
    head += (n * parts.width + 7) // 8
    # A lane takes 32 bits, and its last state holds about 8 bits of the symbols.
    return 8 * head + 24 * _lanes(n) + (rans.cost(parts.counts, frequencies) >> 24)


def _step_bytes(grid: Grid) -> bytes:
    position = grid.shift & 0xFF if grid.dither is None else grid.dither
    return grid.key.to_bytes(3, "little") + position.to_bytes(
        1 if grid.dither is None else 2, "little"
    )


def _coded(parts: Parts, grid: Grid) -> bytes:
    n, frequencies = len(parts.symbols), rans.frequencies_of(parts.counts)
    extra = pack(parts.extra, parts.extra_width)
    flags = (_EXTRA if extra else 0) | (_DITHERED if grid.dither is not None else 0)
    head = bytes([_CODED | parts.width << 2 | flags]) + _step_bytes(grid)
    head += rans.write_frequencies(frequencies)
    if extra:
        head += len(extra).to_bytes(3, "little") + extra
    head += pack(parts.low, np.full(n, parts.width))
    return head + rans.encode(parts.symbols, _lanes(n), frequencies)


def _fixed_width(numel: int, rate: int) -> int:
    """Return the width of codes of a fixed length; 0: there are none."""
    if numel >= _SMALLEST_CODED:
        return 0
    width = min(8, 8 * (_wanted_bytes(numel, rate) - 6) // numel)
    return width if width >= 2 else 0


def _fixed(x: Float32s, width: int, dither: int | None) -> bytes:
    most = np.float32(2 ** (width - 1) - (1 if dither is not None else 0.5))
    largest = np.abs(x).max()
    key = (int((largest / most).view(np.uint32)) >> 8) + 2
    grid = Grid(min(max(LOWEST, key), HIGHEST), dither=dither)
    levels, _ = grid.levels(x, np.arange(len(x)))
    levels = np.clip(levels, 1 - 2 ** (width - 1), 2 ** (width - 1) - 1)
    flags = _DITHERED if dither is not None else 0
    head = bytes([_FIXED | (width - 1) << 2 | flags]) + _step_bytes(grid)
    return head + pack(levels & ((1 << width) - 1), np.full(len(x), width))


def encode_block(
    x: Float32s, rate: int, rounding: str, first_index: int, noise_of: tuple[int, int, int]
) -> bytes:
    """Encode the values of a block. rate: in billionths."""
    numel = len(x)
    if numel == 0:
        return b""
    if not np.isfinite(x).all():
        return bytes([_CONSTANT | _VALUE]) + (0x7FC00000).to_bytes(4, "little")
    if (x == 0).all():
        return bytes([_CONSTANT])
    if (x.view(np.uint32) == x.view(np.uint32)[0]).all():
        return bytes([_CONSTANT | _VALUE]) + x[:1].tobytes()
    dithered = rounding == "shift"
    dither = None
    if dithered:
        r = noise(np.array([first_index]), *noise_of)[0]
        dither = int(r * np.float32(65536) - np.float32(0.5))
    if width := _fixed_width(numel, rate):
        return _fixed(x, width, dither)
    overhead = 8 * (24 + 3 * _lanes(numel))
    wanted = 8 * _wanted_bytes(numel, rate)
    search = Search(x, rate, wanted, overhead, dithered=dithered)
    key = search.run(lambda parts: _size(parts, dithered=dithered))
    move = OCTAVE // 64
    while True:
        shift = 0 if dithered else search.shift(key)
        grid = replace(search.grid, key=key, shift=shift, dither=dither)
        block = _coded(parts_of(x, search.at, grid, search.width), grid)
        if len(block) <= most_block_bytes(numel, rate):
            return block
        if key >= search.highest:
            return bytes([_CONSTANT])
        key, move = min(key + move, search.highest), min(2 * move, OCTAVE)


def decode_block(block: bytes, numel: int) -> Float32s:
    """Decode a block to fp32."""
    if numel == 0:
        return np.empty(0, np.float32)
    kind, flags = block[0] & 3, block[0]
    if kind == _CONSTANT:
        value = np.frombuffer(block[1:5], np.float32)[0] if flags & _VALUE else np.float32(0)
        return np.full(numel, value)
    at, width = np.arange(numel), flags >> 2 & 0xF
    end = 6 if flags & _DITHERED else 5
    position = int.from_bytes(block[4:end], "little")
    grid = Grid(int.from_bytes(block[1:4], "little"))
    if flags & _DITHERED:
        grid = replace(grid, dither=position)
    else:
        grid = replace(grid, shift=(position ^ 0x80) - 0x80)
    if kind == _FIXED:
        width = (flags >> 2 & 7) + 1
        levels = unpack(block[end:], np.full(numel, width))
        levels = (levels ^ (1 << (width - 1))) - (1 << (width - 1))
        return grid.values(levels, at)
    frequencies, used = rans.read_frequencies(block[end:])
    end += used
    extra = b""
    if flags & _EXTRA:
        length = int.from_bytes(block[end : end + 3], "little")
        extra = block[end + 3 : end + 3 + length]
        end += 3 + length
    low_bytes = (numel * width + 7) // 8
    low = unpack(block[end : end + low_bytes], np.full(numel, width))
    symbols = rans.decode(block[end + low_bytes :], numel, _lanes(numel), frequencies)
    assert symbols is not None
    widths = extra_widths(symbols)
    parts = Parts(width, symbols, low, unpack(extra, widths), widths)
    exact = parts.extra.astype(np.uint32).view(np.float32)
    return np.where(symbols == EXACT, exact, grid.values(levels_of(parts), at))


# ---- messages ------------------------------------------------------------------------------------


def most_bytes(numel: int, rate: float) -> int:
    """Return the largest size of encoded values, without the lengths of blocks."""
    sizes = [min(ENTROPY_BLOCK, numel - at) for at in range(0, numel, ENTROPY_BLOCK)]
    return sum(most_block_bytes(size, _billionths(rate)) for size in sizes)


def encode(
    x: Float32s, rate: float, rounding: str, first_index: int, noise_of: tuple[int, int, int]
) -> bytes:
    """Encode any number of values: each block after its length."""
    parts = []
    for at in range(0, len(x), ENTROPY_BLOCK):
        values = x[at : at + ENTROPY_BLOCK]
        block = encode_block(values, _billionths(rate), rounding, first_index + at, noise_of)
        parts.append(len(block).to_bytes(4, "little") + block)
    return b"".join(parts)


def decode(message: bytes, numel: int) -> Float32s:
    """Invert encode()."""
    parts, at = [np.empty(0, np.float32)], 0
    for first in range(0, numel, ENTROPY_BLOCK):
        length = int.from_bytes(message[at : at + 4], "little")
        block = message[at + 4 : at + 4 + length]
        parts.append(decode_block(block, min(ENTROPY_BLOCK, numel - first)))
        at += 4 + length
    assert at == len(message)
    return np.concatenate(parts)
