"""The largest difference of nearest and shift rounding from the exact result, with derivation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .segments import Segment, is_exact, ranks_by_host, shards
from .values import BFLOAT16, EXACT_BITS, FLOAT16, FLOAT32, Values

#
# u = 2^-24 is the unit roundoff of fp32: an operation's result is off by at most u times its size.
#
# One encoding, nearest. A bucket has values of size at most M in [lo, hi], L = 2^bits - 1 levels
# and the step s = fp32(fp32(hi - lo) / L). The scaled value fp32(fp32(x - lo) * inverse) is off
# from (x - lo) / s by three relative roundings, 3u L, and adding 0.5 by one more, u (L + 1); floor
# then puts the level within 1/2 of that. The clamp to L costs at most the 2u L by which s may be
# too small. Decoding rounds level * s (u L s) and the sum with lo (u M). With L s about hi - lo,
# which is at most 2 M:
#       |x - decoded| <= s/2 + (3 + 1 + 2 + 1) * 2 u M + 2 u M  =  s/2 + 16 u M.
# Shift adds r in (0, 1) instead of 1/2, which changes no count above, and stores, instead of lo,
# fp32(lo + fp32((1/2 - r) * s)): two roundings, u s/2 and u (M + s/2). The decoder's sum may now be
# larger than M, by s/2: u s/2. With s <= hi - lo <= 2 M (equal at one bit) that is 4 u M more:
#       |x - decoded| <= s/2 + 20 u M.
# A step below the normal range carries an error of half the smallest denormal for each level, and
# where the step's inverse is infinite (s <= 2^-128) every level is 0 and the error is the whole
# extent; L * 2^-127 is above both.
#
# The sum of W terms t_w in fp32: W - 1 roundings, each of at most u times the sizes of all terms.
# avg rounds once more. sra encodes the sum y + e1 (|e1| <= E1, all the above) again: its step is at
# most (max(y + E1) - min(y - E1)) / L, with the relative error 3 u of three roundings. Last comes
# the rounding to the tensor's dtype.

_UNIT = {FLOAT32: 2.0**-24, FLOAT16: 2.0**-11, BFLOAT16: 2.0**-8}
_HALF_SMALLEST = {FLOAT32: 2.0**-150, FLOAT16: 2.0**-25, BFLOAT16: 2.0**-134}
_U = _UNIT[FLOAT32]


def _per_bucket(
    x: npt.NDArray[np.float64],
    bucket_size: int,
    function: Callable[[npt.NDArray[np.float64]], np.float64],
) -> npt.NDArray[np.float64]:
    """Return function(bucket), repeated for each element of the bucket."""
    out = np.empty_like(x)
    for start in range(0, len(x), bucket_size):
        out[start : start + bucket_size] = function(x[start : start + bucket_size])
    return out


def _encoding_error(
    low: npt.NDArray[np.float64],
    high: npt.NDArray[np.float64],
    bits: int,
    bucket_size: int,
    dtype: np.dtype[Any],
    skip_incomplete_buckets: bool,
    rounding: Literal["nearest", "shift"],
) -> npt.NDArray[np.float64]:
    """Bound the error of encoding values that lie in [low, high], element by element."""
    largest = np.maximum(np.abs(low), np.abs(high))
    # 0 for values that already have this dtype
    raw = _UNIT[dtype] * largest + _HALF_SMALLEST[dtype]
    if bits == EXACT_BITS:
        return raw
    top = (1 << bits) - 1
    extent = _per_bucket(high, bucket_size, np.max) - _per_bucket(low, bucket_size, np.min)
    step = extent / top * (1 + 4 * _U)
    roundings = {"nearest": 16, "shift": 20}[rounding] * _U
    error = step / 2 + roundings * _per_bucket(largest, bucket_size, np.max) + top * 2.0**-127
    if skip_incomplete_buckets:
        end = len(low) // bucket_size * bucket_size
        error[end:] = raw[end:]
    return error


def _error_of_host_sums(
    xs: Sequence[npt.NDArray[np.float64]],
    segment: Segment,
    hosts: Sequence[int],
    bits: int,
    intra_bits: int,
    encoding: Callable[..., npt.NDArray[np.float64]],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Bound the error of hierarchical's sums before the division, and their terms' magnitudes.

    A host's sum has the errors of its ranks' encodings and additions; encoding it adds half a step
    of its possible range; the owner adds one sum for each other host.
    """
    ranks_of = ranks_by_host(hosts)
    lanes = min(map(len, ranks_of))
    error, sizes = np.zeros(segment.numel), np.zeros(segment.numel)
    for shard, at in enumerate(shards(segment, len(ranks_of) * lanes, bits == EXACT_BITS)):
        owner_host, lane = divmod(shard, lanes)
        for host, ranks in enumerate(ranks_of):
            terms = [xs[rank][at] for rank in ranks]
            sent = [x for rank, x in zip(ranks, terms, strict=True) if rank != ranks[lane]]
            off = np.zeros(len(terms[0]))
            if intra_bits != EXACT_BITS:
                off += sum(encoding(x, x, intra_bits) for x in sent)
            size = np.sum(np.abs(terms), axis=0) + off
            off += (len(ranks) - 1) * _U * size * (1 + len(ranks) * _U)
            if host != owner_host:
                total = np.sum(terms, axis=0)
                off += encoding(total - off, total + off, bits, dtype=FLOAT32)
            error[at] += off
            sizes[at] += size + off
    return error + (len(ranks_of) - 1) * _U * sizes * (1 + len(ranks_of) * _U), sizes


def error_bound(
    inputs: Sequence[Values],
    segment: Segment,
    *,
    op: Literal["sum", "avg"] = "sum",
    algorithm: Literal["one_shot", "sra", "hierarchical"] = "sra",
    rounding: Literal["nearest", "shift"] = "nearest",
    gather_bits: int = 0,
    intra_bits: int = 0,
    minimal_size: int = 0,
    skip_incomplete_buckets: bool = False,
    hosts: Sequence[int] = (),
) -> npt.NDArray[np.float64]:
    """Bound |result - exact| of allreduce for each of segment's elements.

    exact is the sum (or mean) of the inputs in float64; inputs are finite. The bound is infinite if
    the result may exceed its dtype's largest number. hosts: by rank, for hierarchical: several
    hosts, one with several ranks.
    """
    dtype, world_size = inputs[0].dtype, len(inputs)
    at = slice(segment.offset, segment.offset + segment.numel)
    xs = [x[at].astype(np.float64) for x in inputs]
    if world_size == 1:
        return np.zeros(segment.numel)
    exact = is_exact(segment, minimal_size)
    bits = EXACT_BITS if exact else segment.bits
    back_bits = EXACT_BITS if exact else gather_bits or bits
    y = np.sum(xs, axis=0)

    encoding = functools.partial(
        _encoding_error,
        bucket_size=segment.bucket_size,
        dtype=dtype,
        skip_incomplete_buckets=skip_incomplete_buckets,
        rounding=rounding,
    )
    first = np.zeros(segment.numel)
    for rank, x in enumerate(xs):
        if bits == EXACT_BITS or algorithm == "hierarchical":
            continue
        sent = encoding(x, x, bits)
        if skip_incomplete_buckets:
            sent[segment.numel // segment.bucket_size * segment.bucket_size :] = 0
        if algorithm == "sra":
            # the owner adds its own values exactly
            sent[shards(segment, world_size, exact)[rank]] = 0
        first += sent
    sizes = np.sum(np.abs(xs), axis=0) + first
    first += (world_size - 1) * _U * sizes * (1 + world_size * _U)
    if algorithm == "hierarchical":
        intra = EXACT_BITS if exact else intra_bits or EXACT_BITS
        first, sizes = _error_of_host_sums(xs, segment, hosts, bits, intra, encoding)
    if op == "avg":
        y, first, sizes = y / world_size, first / world_size, sizes / world_size
        first += _U * sizes * (1 + _U) + _HALF_SMALLEST[FLOAT32]

    second = np.zeros(segment.numel)
    if algorithm != "one_shot" and not exact:
        second = encoding(y - first, y + first, back_bits)
    error = first + second
    if dtype != FLOAT32:
        error += _UNIT[dtype] * (np.abs(y) + error) + _HALF_SMALLEST[dtype]
    return np.where(np.abs(y) + error > float(ml_dtypes.finfo(dtype).max), np.inf, error)
