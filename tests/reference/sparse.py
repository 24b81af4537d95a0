"""Sparse values: topk, randk.

1. indices: their selection and encoding
2. the selected values
3. encode, decode
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from .buckets import FORMATS, NAN, decode_rows, encode_rows, field_bytes
from .philox import philox4x32_7
from .settings import Settings
from .values import BFLOAT16, FLOAT16, Float32s, round_to, widen, with_one_nan

Indices = npt.NDArray[np.int64]
_PLACES_PHASE = 0x706C6163

# ---- 1. indices ----------------------------------------------------------------------------------


def largest(x: Float32s, k: int) -> Indices:
    """Return the indices of the k largest magnitudes; of equal ones the first.

    NaN is largest, and equal to NaN.
    """
    key = np.minimum(x.view(np.uint32) & np.uint32(0x7FFFFFFF), 0x7F800001).astype(np.int64)
    return np.sort(np.argsort(-key, kind="stable")[:k])


def drawn(numel: int, k: int, index: int, seed: int) -> Indices:
    """Return k indices below numel, drawn by Floyd's method."""
    blocks = -(-k // 4)
    counters = np.zeros((blocks, 4), np.uint32)
    counters[:, 0], counters[:, 1] = index & 0xFFFFFFFF, index >> 32
    counters[:, 2], counters[:, 3] = np.arange(blocks), _PLACES_PHASE
    words = philox4x32_7(counters, seed & 0xFFFFFFFFFFFFFFFF).ravel()
    taken: set[int] = set()
    for i in range(k):
        j = numel - k + i
        place = int(words[i]) * (j + 1) >> 32
        taken.add(j if place in taken else place)
    return np.array(sorted(taken), np.int64)


def _low_bits(numel: int, count: int) -> int:
    return (numel // count).bit_length() - 1


def indices_bytes(numel: int, count: int) -> int:
    low = _low_bits(numel, count)
    return -(-count * low // 8) + -(-(((numel - 1) >> low) + count) // 8)


def pack_indices(indices: Indices, numel: int) -> bytes:
    """Encode by Elias-Fano: concatenated low bits; then bit (high part + i) for index i."""
    low = _low_bits(numel, len(indices))
    lows = (indices[:, None] >> np.arange(low)) & 1
    highs = np.zeros(((numel - 1) >> low) + len(indices), np.uint8)
    highs[(indices >> low) + np.arange(len(indices))] = 1
    fields = (
        np.packbits(bits.astype(np.uint8).ravel(), bitorder="little") for bits in (lows, highs)
    )
    return b"".join(field.tobytes() for field in fields)


def unpack_indices(data: bytes, numel: int, count: int) -> Indices:
    low = _low_bits(numel, count)
    low_bytes = -(-count * low // 8)
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").astype(np.int64)
    lows = (bits[: count * low].reshape(count, low) << np.arange(low)).sum(axis=1)
    highs = np.flatnonzero(bits[8 * low_bytes :]) - np.arange(count)
    return highs << low | lows


# ---- 2. values -----------------------------------------------------------------------------------


def _half(settings: Settings) -> np.dtype[np.generic]:
    return FLOAT16 if settings.dtype == FLOAT16 else BFLOAT16


def _of_values(settings: Settings) -> tuple[Settings, str]:
    """Return the settings that encode one bucket of selected values."""
    plain = replace(settings, bits=settings.value_bits, compressor="levels")
    return plain, "levels" if settings.value_bits == 1 else "magnitudes"


def value_bytes(count: int, settings: Settings) -> int:
    if settings.compressor == "randk" or settings.value_bits == 32:
        return count * settings.dtype.itemsize
    if settings.value_bits == 16:
        return 2 * count
    _, form = _of_values(settings)
    return FORMATS[form].header_bytes + field_bytes(count, settings.value_bits)


def pack_values(values: Float32s, settings: Settings) -> bytes:
    values = with_one_nan(values)
    if settings.compressor == "randk" or settings.value_bits == 32:
        return round_to(values, settings.dtype).tobytes()
    if settings.value_bits == 16:
        return round_to(values, _half(settings)).tobytes()
    plain, form = _of_values(settings)
    return encode_rows(values[None], plain, 0, (0, 0, 0), form).tobytes()


def unpack_values(data: bytes, count: int, settings: Settings) -> Float32s:
    """Decode; -0 becomes 0."""
    if settings.compressor == "randk" or settings.value_bits == 32:
        values = widen(np.frombuffer(data, settings.dtype))
    elif settings.value_bits == 16:
        values = widen(np.frombuffer(data, _half(settings)))
    else:
        plain, form = _of_values(settings)
        values = decode_rows(np.frombuffer(data, np.uint8)[None], count, plain, form)[0]
    return values + np.float32(0)


# ---- 3. encode, decode ---------------------------------------------------------------------------


def _buckets(numel: int, settings: Settings) -> Iterator[tuple[int, int, int]]:
    """Yield first, elements and selected ones of each bucket."""
    for first in range(0, numel, settings.bucket_size):
        count = min(settings.bucket_size, numel - first)
        yield first, count, settings.share(count)


def sparse_bytes(numel: int, settings: Settings) -> int:
    """Return the bytes of a message."""
    return sum(
        value_bytes(k, settings) + (indices_bytes(count, k) if settings.compressor == "topk" else 0)
        for _, count, k in _buckets(numel, settings)
    )


def encode_sparse(x: Float32s, settings: Settings, first_index: int, seed: int) -> bytes:
    message = b""
    for first, count, k in _buckets(len(x), settings):
        values = x[first : first + count]
        if settings.compressor == "randk":
            indices = drawn(count, k, first_index + first, seed)
            if not np.isfinite(values).all():
                values = np.full(count, NAN)
        else:
            indices = largest(values, k)
            message += pack_indices(indices, count)
        message += pack_values(values[indices], settings)
    return message


def decode_sparse(
    message: bytes, numel: int, settings: Settings, first_index: int, seed: int
) -> Float32s:
    out, at = np.zeros(numel, np.float32), 0

    def take(length: int) -> bytes:
        nonlocal at
        at += length
        return message[at - length : at]

    for first, count, k in _buckets(numel, settings):
        if settings.compressor == "randk":
            indices = drawn(count, k, first_index + first, seed)
        else:
            indices = unpack_indices(take(indices_bytes(count, k)), count, k)
        out[first + indices] = unpack_values(take(value_bytes(k, settings)), k, settings)
    assert at == len(message), (at, len(message))
    return out
