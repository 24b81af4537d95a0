"""The codec: quantize, dequantize, encoded_bytes. It follows docs/wire_format.md."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .philox import noise
from .values import (
    EXACT_BITS,
    HEADER_BYTES,
    Float32s,
    RoundingMode,
    Values,
    from_order_key,
    order_key,
    round_to,
    widen,
)


def _quantize_rows(
    x: Float32s, first_index: int, bits: int, rounding: RoundingMode, noise_of: tuple[int, int, int]
) -> npt.NDArray[np.uint8]:
    """Encode buckets of equal length, one a row, as records, one a row.

    first_index: of x[0, 0] in its segment. noise_of: its seed, rank and phase.
    """
    index = first_index + np.arange(x.size, dtype=np.int64).reshape(x.shape)
    if rounding == "stochastic":
        r = noise(index.ravel(), *noise_of).reshape(x.shape)
    elif rounding == "shift":
        r = noise(index[:, 0], *noise_of)[:, None]  # one for each bucket
    else:
        r = np.full((1, 1), 0.5, np.float32)
    top = np.float32((1 << bits) - 1)
    key = order_key(x)
    lo = from_order_key(key.min(axis=1))
    hi = from_order_key(key.max(axis=1))
    with np.errstate(all="ignore"):
        extent = hi - lo
        finite = np.isfinite(x).all(axis=1) & np.isfinite(extent)
        step = extent / top
        inverse = np.float32(1) / step
        flat = ~finite | (step == 0) | np.isinf(inverse)
        scaled = (x - lo[:, None]) * inverse[:, None] + r
        level = np.minimum(np.floor(scaled), top)
        if rounding == "shift":
            lo = np.where(flat, lo, lo + (np.float32(0.5) - r[:, 0]) * step)
            finite &= np.isfinite(lo)  # a grid shifted beyond the lowest number is none
            flat |= ~finite
    levels = np.where(flat[:, None], np.float32(0), level).astype(np.uint8)
    header = np.stack([lo, step], axis=1)
    header[~finite] = np.uint32(0x7FC00000).view(np.float32)
    # Level j fills bits [j*bits, (j+1)*bits) of a little-endian integer.
    spread = np.unpackbits(levels[:, :, None], axis=2, count=bits, bitorder="little")
    field = np.packbits(spread.reshape(len(x), -1), axis=1, bitorder="little")
    return np.concatenate([header.view(np.uint8), field], axis=1)


def _dequantize_rows(records: npt.NDArray[np.uint8], numel: int, bits: int) -> Float32s:
    """Decode records of buckets of `numel` elements: fp32, shape (rows, numel)."""
    header = np.ascontiguousarray(records[:, :HEADER_BYTES]).view(np.float32)
    spread = np.unpackbits(
        records[:, HEADER_BYTES:], axis=1, count=numel * bits, bitorder="little"
    ).reshape(len(records), numel, bits)
    level = np.packbits(spread, axis=2, bitorder="little")[:, :, 0].astype(np.float32)
    with np.errstate(all="ignore"):
        x = header[:, :1] + level * header[:, 1:]
    return x.astype(np.float32)


def _split(numel: int, bucket_size: int) -> tuple[int, int]:
    """Return (whole buckets, elements in the short last bucket)."""
    return numel // bucket_size, numel % bucket_size


def _record_bytes(numel: int, bits: int) -> int:
    return HEADER_BYTES + (numel * bits + 7) // 8


def encoded_bytes(
    numel: int,
    bits: int,
    bucket_size: int,
    *,
    dtype: npt.DTypeLike = np.float32,
    skip_incomplete_buckets: bool = False,
) -> int:
    """Return the bytes of the message for `numel` elements of a tensor of `dtype`."""
    width = np.dtype(dtype).itemsize
    if bits == EXACT_BITS:
        return numel * width
    whole, last = _split(numel, bucket_size)
    tail = 0
    if last:
        tail = last * width if skip_incomplete_buckets else _record_bytes(last, bits)
    return whole * _record_bytes(bucket_size, bits) + tail


def quantize(
    values: Values,
    bits: int,
    bucket_size: int,
    *,
    rounding: RoundingMode = "nearest",
    seed: int = 0,
    rank: int = 0,
    phase: int = 0,
    first_index: int = 0,
    dtype: npt.DTypeLike | None = None,
    skip_incomplete_buckets: bool = False,
) -> bytes:
    """Encode values whose first is element first_index of its segment.

    dtype: of the tensor, in which raw values travel; the values' own if None.
    """
    assert first_index % bucket_size == 0 or bits == EXACT_BITS
    wire = values.dtype if dtype is None else np.dtype(dtype)
    if bits == EXACT_BITS:
        raw = values if values.dtype == wire else round_to(widen(values), wire)
        return raw.tobytes()
    x = widen(values)
    noise_of = (seed, rank, phase)
    whole, last = _split(len(x), bucket_size)
    end = whole * bucket_size
    message = b""
    if whole:
        rows = x[:end].reshape(whole, bucket_size)
        message += _quantize_rows(rows, first_index, bits, rounding, noise_of).tobytes()
    if last and skip_incomplete_buckets:
        message += quantize(values[end:], EXACT_BITS, bucket_size, dtype=wire)
    elif last:
        row = x[None, end:]
        message += _quantize_rows(row, first_index + end, bits, rounding, noise_of).tobytes()
    return message


def dequantize(
    message: bytes,
    numel: int,
    bits: int,
    bucket_size: int,
    *,
    dtype: npt.DTypeLike = np.float32,
    skip_incomplete_buckets: bool = False,
) -> Float32s:
    """Decode to fp32. dtype: of the tensor. round_to() makes what is delivered."""
    wire = np.dtype(dtype)
    data = np.frombuffer(message, np.uint8)
    if bits == EXACT_BITS:
        return widen(data.view(wire))
    whole, last = _split(numel, bucket_size)
    record = _record_bytes(bucket_size, bits)
    parts = [np.empty(0, np.float32)]
    if whole:
        rows = data[: whole * record].reshape(whole, record)
        parts.append(_dequantize_rows(rows, bucket_size, bits).ravel())
    tail = data[whole * record :]
    if last and skip_incomplete_buckets:
        parts.append(widen(tail.view(wire)))
    elif last:
        parts.append(_dequantize_rows(tail[None, :], last, bits).ravel())
    return np.concatenate(parts)
