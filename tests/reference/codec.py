"""The codec: quantize, dequantize, encoded_bytes. It follows docs/reference/wire_format.md.

encode, decode and message_bytes are the same functions with Settings, for the collectives.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from . import entropy, lossless
from .buckets import decode_rows, encode_rows, record_bytes
from .philox import noise
from .rotation import rotate
from .settings import Compressor, Settings
from .sparse import decode_sparse, encode_sparse, sparse_bytes
from .values import BFLOAT16, FLOAT16, Float32s, RoundingMode, Values, round_to, widen

SPARSE = ("topk", "randk")


class Knobs(TypedDict, total=False):
    """Fields of Settings, as keyword arguments."""

    rounding: RoundingMode
    compressor: Compressor
    density: float
    value_bits: int
    rotation: int
    clip: bool
    rate: float
    skip_incomplete_buckets: bool


# ---- exact, half ---------------------------------------------------------------------------------


def _encode_exact(values: Values, settings: Settings) -> bytes:
    return _raw(values, settings).tobytes()


def _raw(values: Values, settings: Settings) -> Values:
    """Return the values in the dtype in which they are sent."""
    if values.dtype == settings.dtype:
        return values
    return round_to(widen(values), settings.dtype)


def _half(settings: Settings) -> np.dtype[Any]:
    return FLOAT16 if settings.dtype == FLOAT16 else BFLOAT16


def _round_noisily(x: Float32s, r: Float32s, dtype: np.dtype[Any]) -> npt.NDArray[np.uint16]:
    """Round to one of the two neighbors of x: noise is added to the dropped bits, and carries."""
    bits = x.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    drawn = (r * np.float32(65536) - np.float32(0.5)).astype(np.uint32)
    special = round_to(np.abs(x), dtype).view(np.uint16)
    if dtype == BFLOAT16:
        rounded = np.minimum((magnitude + drawn) >> 16, 0x7F7F)  # finite values stay finite
        rounded = np.where(magnitude >= 0x7F800000, special, rounded)
    else:
        normal = (magnitude + (drawn >> 3) - np.uint32(112 << 23)) >> 13
        small = magnitude < 0x38800000  # values below 2^-14 are multiples of 2^-24
        units = np.where(small, np.abs(x), np.float32(0)) * np.float32(2**24)
        denormal = (units + r).astype(np.uint32)
        rounded = np.minimum(np.where(small, denormal, normal), 0x7C00)
        rounded = np.where(magnitude >= 0x47800000, special, rounded)
    sign = np.where(np.isnan(x), 0, (bits >> 16) & 0x8000)
    return (rounded | sign).astype(np.uint16)


def _encode_half(
    values: Values, settings: Settings, first_index: int, noise_of: tuple[int, int, int]
) -> bytes:
    wire = _half(settings)
    if settings.mode == "nearest" or values.dtype == wire or values.size == 0:
        return _encode_exact(values, replace(settings, dtype=wire))
    r = noise(first_index + np.arange(len(values), dtype=np.int64), *noise_of)
    return _round_noisily(widen(values), r, wire).tobytes()


# ---- messages ------------------------------------------------------------------------------------


def _split(numel: int, settings: Settings) -> tuple[int, int]:
    """Return (whole buckets, elements in the short last bucket)."""
    return numel // settings.bucket, numel % settings.bucket


def _raw_tail(numel: int, settings: Settings) -> int:
    """Return the number of last elements that are sent exactly."""
    buckets = settings.grain > 1 and settings.compressor not in ("lossless", "entropy")
    if settings.skip_incomplete_buckets and buckets:
        return _split(numel, settings)[1]
    return 0


def message_bytes(numel: int, settings: Settings) -> int:
    """Return the bytes of a message."""
    if settings.exact:
        return numel * settings.dtype.itemsize
    if settings.compressor == "lossless":  # the most
        return numel * settings.dtype.itemsize - (-numel // settings.grain)
    if settings.compressor == "entropy":  # the most
        return entropy.most_bytes(numel, settings.rate)
    if raw := _raw_tail(numel, settings):
        inner = replace(settings, skip_incomplete_buckets=False)
        return message_bytes(numel - raw, inner) + raw * settings.dtype.itemsize
    if settings.compressor == "half":
        return 2 * numel
    if settings.compressor in SPARSE:
        return sparse_bytes(numel, settings)
    whole, last = _split(numel, settings)
    record = record_bytes(settings.bucket, settings)
    return whole * record + (record_bytes(last, settings) if last else 0)


def encode(
    values: Values, settings: Settings, first_index: int, noise_of: tuple[int, int, int]
) -> bytes:
    """Encode values; the first one has index first_index. noise_of: seed, rank, phase."""
    assert first_index % settings.cut == 0
    if settings.exact:
        return _encode_exact(values, settings)
    if settings.compressor == "lossless":
        return lossless.encode(_raw(values, settings))
    if settings.compressor == "entropy":
        return entropy.encode(widen(values), settings.rate, settings.mode, first_index, noise_of)
    if raw := _raw_tail(len(values), settings):
        inner = replace(settings, skip_incomplete_buckets=False)
        whole = values[: len(values) - raw]
        return encode(whole, inner, first_index, noise_of) + _encode_exact(values[-raw:], settings)
    if settings.compressor == "half":
        return _encode_half(values, settings, first_index, noise_of)
    x = widen(values)
    if settings.compressor in SPARSE:
        return encode_sparse(x, settings, first_index, noise_of[0])
    message = b""
    whole, last = _split(len(x), settings)
    end = len(x) - last
    for at, count, n in ((0, whole, settings.bucket), (end, 1, last)):
        if count and n:
            rows = x[at : at + count * n].reshape(count, n)
            if settings.rotation:
                rows = rotate(rows, settings.rotation)
            message += encode_rows(rows, settings, first_index + at, noise_of).tobytes()
    return message


def decode(
    message: bytes, numel: int, settings: Settings, first_index: int = 0, seed: int = 0
) -> Float32s:
    """Decode to fp32. seed: the seed of random indices."""
    if settings.exact:
        return widen(np.frombuffer(message, settings.dtype))
    if settings.compressor == "lossless":
        return widen(lossless.decode(message, numel, settings.dtype))
    if settings.compressor == "entropy":
        return entropy.decode(message, numel)
    if raw := _raw_tail(numel, settings):
        inner = replace(settings, skip_incomplete_buckets=False)
        cut = len(message) - raw * settings.dtype.itemsize
        head = decode(message[:cut], numel - raw, inner, first_index, seed)
        return np.concatenate([head, widen(np.frombuffer(message[cut:], settings.dtype))])
    if settings.compressor == "half":
        return widen(np.frombuffer(message, _half(settings)))
    if settings.compressor in SPARSE:
        return decode_sparse(message, numel, settings, first_index, seed)
    data, parts = np.frombuffer(message, np.uint8), [np.empty(0, np.float32)]
    whole, last = _split(numel, settings)
    at = 0
    for count, n in ((whole, settings.bucket), (1, last)):
        if count and n:
            record = record_bytes(n, settings)
            records = data[at : at + count * record].reshape(count, record)
            rows = decode_rows(records, n, settings)
            if settings.rotation:
                rows = rotate(rows, settings.rotation, back=True)
            parts.append(rows.ravel())
            at += count * record
    return np.concatenate(parts)


# ---- API by keywords -----------------------------------------------------------------------------


def encoded_bytes(
    numel: int,
    bits: int,
    bucket_size: int,
    *,
    dtype: npt.DTypeLike = np.float32,
    **knobs: Unpack[Knobs],
) -> int:
    """Return the bytes of the message for `numel` elements of a tensor of `dtype`."""
    return message_bytes(numel, Settings(bits, bucket_size, dtype=np.dtype(dtype), **knobs))


def quantize(
    values: Values,
    bits: int,
    bucket_size: int,
    *,
    seed: int = 0,
    rank: int = 0,
    phase: int = 0,
    first_index: int = 0,
    dtype: npt.DTypeLike | None = None,
    **knobs: Unpack[Knobs],
) -> bytes:
    """Encode values; the first one has index first_index in its segment.

    dtype: the tensor's dtype, in which raw values are sent; default: that of the values.
    """
    wire = values.dtype if dtype is None else np.dtype(dtype)
    settings = Settings(bits, bucket_size, dtype=wire, **knobs)
    return encode(values, settings, first_index, (seed, rank, phase))


def dequantize(
    message: bytes,
    numel: int,
    bits: int,
    bucket_size: int,
    *,
    seed: int = 0,
    first_index: int = 0,
    dtype: npt.DTypeLike = np.float32,
    **knobs: Unpack[Knobs],
) -> Float32s:
    """Decode to fp32. dtype: the tensor's dtype. round_to() gives the final result."""
    settings = Settings(bits, bucket_size, dtype=np.dtype(dtype), **knobs)
    return decode(message, numel, settings, first_index, seed)
