"""Blocks of the compressor lossless: docs/reference/entropy_coding.md, section 4."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import rans
from .settings import LOSSLESS_BLOCK
from .values import Values


def _lanes(numel: int) -> int:
    return rans.lanes_of(4 * numel)


def _counts(plane: rans.Symbols) -> rans.Ints:
    return np.bincount(plane, minlength=rans.SYMBOLS)


def _promising(plane: rans.Symbols) -> bool:
    sample = plane[:: max(1, len(plane) // 1024)]
    counts = _counts(sample)
    return 2 * rans.cost(counts, rans.frequencies_of(counts)) < 15 * len(sample) << 24


def _coded(plane: rans.Symbols) -> bytes | None:
    """Return a coded plane and its length, or None if the plane is sent as it is."""
    counts = _counts(plane)
    frequencies = rans.frequencies_of(counts)
    if rans.cost(counts, frequencies) >= 8 * len(plane) << 24:
        return None
    stream = rans.encode(plane, _lanes(len(plane)), frequencies)
    part = rans.write_frequencies(frequencies) + stream
    whole = len(part).to_bytes(4, "little") + part
    return whole if len(whole) < len(plane) else None


def planes_of(values: Values) -> list[rans.Symbols]:
    """Return the planes of bytes, from the highest on."""
    width = 8 * values.dtype.itemsize
    bits = values.view(f"u{width // 8}")
    rotated = (bits << 1 | bits >> (width - 1)).astype(bits.dtype)
    return [(rotated >> shift).astype(np.uint8) for shift in range(width - 8, -1, -8)]


def encode_block(values: Values) -> bytes:
    """Encode at most LOSSLESS_BLOCK values in their own dtype."""
    if not len(values):
        return b""
    flags, parts = 0, []
    for p, plane in enumerate(planes_of(values)):
        coded = _coded(plane) if p == 0 or _promising(plane) else None
        flags |= (coded is not None) << p
        parts.append(plane.tobytes() if coded is None else coded)
    return bytes([flags]) + (b"".join(parts) if flags else values.tobytes())


def decode_block(message: bytes, numel: int, dtype: np.dtype[Any]) -> Values:
    """Decode a valid block."""
    if not numel:
        return np.empty(0, dtype)
    flags, at = message[0], 1
    if not flags:
        return np.frombuffer(message, dtype, offset=1)
    width = dtype.itemsize
    rotated = np.zeros(numel, f"u{width}")
    for p in range(width):
        if flags >> p & 1:
            length = int.from_bytes(message[at : at + 4], "little")
            part = message[at + 4 : at + 4 + length]
            frequencies, table = rans.read_frequencies(part)
            plane = rans.decode(part[table:], numel, _lanes(numel), frequencies)
            assert plane is not None
            at += 4 + length
        else:
            plane = np.frombuffer(message, np.uint8, numel, at)
            at += numel
        rotated |= plane.astype(rotated.dtype) << (8 * (width - 1 - p))
    assert at == len(message)
    bits = (rotated >> 1 | rotated << (8 * width - 1)).astype(rotated.dtype)
    return bits.view(dtype)


def encode(values: Values) -> bytes:
    """Encode any number of values: each block after its length."""
    parts = []
    for first in range(0, len(values), LOSSLESS_BLOCK):
        block = encode_block(values[first : first + LOSSLESS_BLOCK])
        parts.append(len(block).to_bytes(4, "little") + block)
    return b"".join(parts)


def decode(message: bytes, numel: int, dtype: np.dtype[Any]) -> Values:
    """Invert encode()."""
    parts, at = [np.empty(0, dtype)], 0
    for first in range(0, numel, LOSSLESS_BLOCK):
        length = int.from_bytes(message[at : at + 4], "little")
        block = message[at + 4 : at + 4 + length]
        parts.append(decode_block(block, min(LOSSLESS_BLOCK, numel - first), dtype))
        at += 4 + length
    assert at == len(message)
    return np.concatenate(parts)
