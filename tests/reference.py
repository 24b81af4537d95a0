"""The numpy oracle: what every collective and the codec must give, to the bit.

Written from docs/wire_format.md and docs/design.md, and never by calling the library. Slow and
plain on purpose. All arithmetic is fp32 (numpy rounds every operation); the names follow the
documents.

    1. values: widening, rounding, sums, min and max
    2. noise: the seeds of segments and blocks, Philox4x32-10 and the lane an element gets
    3. the codec: quantize, dequantize, encoded_bytes
    4. collectives: allreduce, reduce_scatter, all_gather
    5. error_bound: how far nearest and shift rounding may be from the exact result, with the
       derivation
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

Values: TypeAlias = npt.NDArray[Any]  # float32, float16 or ml_dtypes.bfloat16, one dimension
Float32s: TypeAlias = npt.NDArray[np.float32]
Op = Literal["sum", "avg", "min", "max", "product"]
Algorithm = Literal["one_shot", "sra", "ring", "hierarchical"]
AnyAlgorithm = Literal["auto", "one_shot", "sra", "ring", "hierarchical"]
RoundingMode = Literal["nearest", "stochastic", "shift"]

EXACT_BITS = 32
SMALLEST_QUANTIZED = 16  # a segment of fewer elements always travels exact
HEADER_BYTES = 8
FLOAT32 = np.dtype(np.float32)
FLOAT16 = np.dtype(np.float16)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Segment:
    """Elements [offset, offset + numel) of a buffer (or of a rank's block), compressed alike."""

    offset: int
    numel: int
    bits: int = 4
    bucket_size: int = 512


# ---- 1. values ----------------------------------------------------------------------------------


def widen(x: Values) -> Float32s:
    """Return the same values in fp32: exact."""
    return x.astype(np.float32)


def round_to(x: Float32s, dtype: np.dtype[Any]) -> Values:
    """Round to nearest even. fp16 and bf16 get one NaN, 0x7e00 or 0x7fc0; fp32 stays as it is."""
    if dtype == FLOAT32:
        return x.copy()
    with np.errstate(all="ignore"):
        rounded = x.astype(dtype)
    nan = np.uint16(0x7E00 if dtype == FLOAT16 else 0x7FC0)
    return np.where(np.isnan(x), nan, rounded.view(np.uint16)).view(dtype)


def with_one_nan(x: Float32s) -> Float32s:
    """Make every NaN 0x7fc00000: processors differ in the payload and sign of a result's."""
    return np.where(np.isnan(x), np.uint32(0x7FC00000), x.view(np.uint32)).view(np.float32)


def order_key(x: Float32s) -> npt.NDArray[np.int32]:
    """Map values to integers of the same order: -0 < +0, NaNs outside the infinities."""
    bits = x.view(np.int32)
    return np.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits)


def from_order_key(key: npt.NDArray[np.int32]) -> Float32s:
    """Invert order_key()."""
    return np.where(key < 0, key ^ np.int32(0x7FFFFFFF), key).astype(np.int32).view(np.float32)


def combine(op: Op, a: Float32s, b: Float32s) -> Float32s:
    """Do one step of a reduction in fp32; avg adds here and divides later. NaN wins."""
    with np.errstate(all="ignore"):
        if op in ("sum", "avg"):
            return with_one_nan(a + b)
        if op == "product":
            return with_one_nan(a * b)
        pick_key = np.minimum if op == "min" else np.maximum
        extreme = from_order_key(pick_key(order_key(a), order_key(b)))
    nan = np.isnan(a) | np.isnan(b)
    return with_one_nan(np.where(nan, np.float32(np.nan), extreme))


def reduce_in_order(op: Op, terms: Sequence[Float32s]) -> Float32s:
    """Assign the first term, combine the others in the given order. avg is not divided."""
    total = terms[0].copy()
    for term in terms[1:]:
        total = combine(op, total, term)
    return total


def finish(op: Op, total: Float32s, divisor: int) -> Float32s:
    """Divide the fp32 sum if op is avg."""
    if op != "avg":
        return total
    with np.errstate(all="ignore"):
        return with_one_nan(total / np.float32(divisor))


# ---- 2. noise -----------------------------------------------------------------------------------


def philox4x32_10(counters: npt.NDArray[np.uint32], seed: int) -> npt.NDArray[np.uint32]:
    """Run ten rounds on counters of shape (n, 4); the key is (seed low 32, seed high 32)."""
    mask = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = (counters[:, i].astype(np.uint64) for i in range(4))
    key0, key1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(10):
        product0 = c0 * np.uint64(0xD2511F53)
        product1 = c2 * np.uint64(0xCD9E8D57)
        c0 = (product1 >> np.uint64(32)) ^ c1 ^ np.uint64(key0)
        c1 = product1 & mask
        c2 = (product0 >> np.uint64(32)) ^ c3 ^ np.uint64(key1)
        c3 = product0 & mask
        key0 = (key0 + 0x9E3779B9) & 0xFFFFFFFF
        key1 = (key1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


_MASK = (1 << 64) - 1
_SEGMENT_STEP, _BLOCK_STEP = 0xD1342543DE82EF95, 0xAF251AF3B0F025B5


def derived_seed(seed: int, step: int, n: int) -> int:
    """Return the n-th seed after `seed`, of 64 bits, by SplitMix64; the 0-th is `seed` itself."""
    if n == 0:
        return seed & _MASK
    z = (seed + n * step) & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


# What a rank gives: one seed for all segments, or one for each.
Seeds: TypeAlias = Sequence[int | Sequence[int]]


def seeds_of(seeds: Seeds | None, world_size: int, segment: int, block: int = 0) -> list[int]:
    """Return each rank's seed of one segment, and of one block of a reduce_scatter."""
    own = [
        seed[segment]
        if isinstance(seed, Sequence)
        else derived_seed(int(seed), _SEGMENT_STEP, segment)
        for seed in seeds or [0] * world_size
    ]
    return [derived_seed(int(seed), _BLOCK_STEP, block) for seed in own]


def noise(index: npt.NDArray[np.int64], seed: int, rank: int, phase: int) -> Float32s:
    """Return r in (0, 1) of the elements of a segment that have these indices."""
    group, e = index // 128, index % 128
    c = 16 * group + e % 16
    # Eight elements share a block of Philox: all blocks from the first to the last, once.
    first = c.min()
    blocks = np.arange(first, c.max() + 1, dtype=np.uint64)
    counters = np.empty((len(blocks), 4), np.uint32)
    counters[:, 0] = blocks & np.uint64(0xFFFFFFFF)
    counters[:, 1] = blocks >> np.uint64(32)
    counters[:, 2] = rank
    counters[:, 3] = phase
    words = philox4x32_10(counters, seed & 0xFFFFFFFFFFFFFFFF)
    word = words[c - first, (e // 16) // 2]
    u = (word >> (16 * ((e // 16) % 2)).astype(np.uint32)) & np.uint32(0xFFFF)
    return ((u.astype(np.float64) + 0.5) / 65536).astype(np.float32)


# ---- 3. the codec -------------------------------------------------------------------------------


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


# ---- 4. collectives -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Wire:
    """How one segment's values become what their receivers see."""

    dtype: np.dtype[Any]  # of exact values
    bits: int
    bucket_size: int
    rounding: RoundingMode
    seeds: Sequence[int]
    noise_ranks: Sequence[int]
    skip_incomplete_buckets: bool
    divisor: int  # of avg
    # By rank: receives what encoding loses of its values, times `scale`.
    lost: Sequence[Float32s] | None = None
    scale: int = 1

    def seen(self, values: Values, first_index: int, rank: int, phase: int) -> Float32s:
        """Return decode(encode(values)) in fp32."""
        message = quantize(
            values,
            self.bits,
            self.bucket_size,
            rounding=self.rounding,
            seed=self.seeds[rank],
            rank=self.noise_ranks[rank],
            phase=phase,
            first_index=first_index,
            dtype=self.dtype,
            skip_incomplete_buckets=self.skip_incomplete_buckets,
        )
        decoded = dequantize(
            message,
            len(values),
            self.bits,
            self.bucket_size,
            dtype=self.dtype,
            skip_incomplete_buckets=self.skip_incomplete_buckets,
        )
        if self.lost is not None:
            with np.errstate(all="ignore"):
                error = (widen(values) - decoded) * np.float32(self.scale)
            at = slice(first_index, first_index + len(values))
            self.lost[rank][at] = np.where(np.isfinite(error), error, np.float32(0))
        return decoded

    @property
    def exact(self) -> bool:
        return self.bits == EXACT_BITS


def travels_exact(segment: Segment, minimal_size: int) -> bool:
    """Tell whether a segment's values travel raw whatever its bits."""
    return segment.bits == EXACT_BITS or segment.numel < max(SMALLEST_QUANTIZED, minimal_size)


def shards(segment: Segment, world_size: int, exact: bool) -> list[slice]:
    """Return what each rank owns of the segment in sra and ring: cut between buckets."""
    grain = 1 if exact else segment.bucket_size
    grains = -(-segment.numel // grain)
    cuts = [min(p * grains // world_size * grain, segment.numel) for p in range(world_size + 1)]
    return [slice(cuts[p], cuts[p + 1]) for p in range(world_size)]


def ranks_by_host(hosts: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each host, hosts in the order of their first ranks. hosts: by rank."""
    order = list(dict.fromkeys(hosts))
    return [[rank for rank, host in enumerate(hosts) if host == each] for each in order]


def is_nested(hosts: Sequence[int] | None) -> bool:
    """Tell whether there are several hosts, and one of several ranks."""
    return hosts is not None and 1 < len(set(hosts)) < len(hosts)


EAGER_BYTES = 8 * 1024  # what fits beside the header, in the first message


def pick(
    segments: Sequence[Segment],
    dtype: npt.DTypeLike,
    *,
    minimal_size: int = 0,
    skip_incomplete_buckets: bool = False,
    hosts: Sequence[int] | None = None,
) -> Algorithm:
    """Return what "auto" stands for: one_shot while all encoded values fit beside the header."""
    total = sum(
        encoded_bytes(
            segment.numel,
            EXACT_BITS if travels_exact(segment, minimal_size) else segment.bits,
            segment.bucket_size,
            dtype=dtype,
            skip_incomplete_buckets=skip_incomplete_buckets,
        )
        for segment in segments
    )
    if total <= EAGER_BYTES:
        return "one_shot"
    return "hierarchical" if is_nested(hosts) else "sra"


def _owner_terms(
    xs: Sequence[Values], at: slice, first_index: int, owner: int, wire: _Wire
) -> list[Float32s]:
    """Return, in rank order, the owner's own values raw, the others' as they arrive."""
    return [
        widen(x[at]) if rank == owner else wire.seen(x[at], first_index, rank, phase=0)
        for rank, x in enumerate(xs)
    ]


def _one_shot(xs: Sequence[Values], segment: Segment, op: Op, wire: _Wire, back: _Wire) -> Float32s:
    del back  # nothing is encoded a second time
    terms = [wire.seen(x, 0, rank, phase=0) for rank, x in enumerate(xs)]
    return finish(op, reduce_in_order(op, terms), wire.divisor)


def _sra(xs: Sequence[Values], segment: Segment, op: Op, wire: _Wire, back: _Wire) -> Float32s:
    out = np.empty(segment.numel, np.float32)
    for owner, at in enumerate(shards(segment, len(xs), wire.exact)):
        terms = _owner_terms(xs, at, at.start, owner, wire)
        total = finish(op, reduce_in_order(op, terms), wire.divisor)
        out[at] = back.seen(total, at.start, owner, phase=1)
    return out


def _ring(xs: Sequence[Values], segment: Segment, op: Op, wire: _Wire, back: _Wire) -> Float32s:
    world_size = len(xs)
    out = np.empty(segment.numel, np.float32)
    for owner, at in enumerate(shards(segment, world_size, wire.exact)):
        first = (owner + 1) % world_size
        arriving = wire.seen(xs[first][at], at.start, first, phase=0)
        total = arriving
        for hop in range(2, world_size + 1):
            rank = (owner + hop) % world_size
            total = combine(op, arriving, widen(xs[rank][at]))
            if rank != owner:
                arriving = wire.seen(total, at.start, rank, phase=0)
        out[at] = back.seen(finish(op, total, wire.divisor), at.start, owner, phase=1)
    return out


def _hierarchical(
    xs: Sequence[Values],
    segment: Segment,
    op: Op,
    wire: _Wire,
    back: _Wire,
    intra: _Wire,
    hosts: Sequence[int],
) -> Float32s:
    ranks_of = ranks_by_host(hosts)
    lanes = min(map(len, ranks_of))
    out = np.empty(segment.numel, np.float32)
    for shard, at in enumerate(shards(segment, len(ranks_of) * lanes, wire.exact)):
        owner_host, lane = divmod(shard, lanes)
        own_terms: list[Float32s] = []
        sums: list[Float32s] = []
        for host, ranks in enumerate(ranks_of):
            acting = ranks[lane]
            terms = [
                widen(xs[r][at]) if r == acting else intra.seen(xs[r][at], at.start, r, phase=2)
                for r in ranks
            ]
            if host == owner_host:
                own_terms = terms
            else:
                sums.append(wire.seen(reduce_in_order(op, terms), at.start, acting, phase=0))
        total = finish(op, reduce_in_order(op, own_terms + sums), wire.divisor)
        out[at] = back.seen(total, at.start, ranks_of[owner_host][lane], phase=1)
    return out


def _alone(op: Op, values: Values, divisor: int) -> Values:
    """Return what one rank gets of its own values: nothing is encoded, but avg divides."""
    if op != "avg" or divisor in (0, 1):
        return values
    return round_to(finish(op, widen(values), divisor), values.dtype)


_ALGORITHMS: dict[str, Callable[..., Float32s]] = {
    "one_shot": _one_shot,
    "sra": _sra,
    "ring": _ring,
    "hierarchical": _hierarchical,
}


def allreduce(
    inputs: Sequence[Values],
    segments: Sequence[Segment],
    *,
    op: Op = "sum",
    algorithm: AnyAlgorithm = "auto",
    rounding: RoundingMode = "nearest",
    seeds: Seeds | None = None,
    gather_bits: int = 0,
    intra_bits: int = 0,
    minimal_size: int = 0,
    skip_incomplete_buckets: bool = False,
    divisor: int = 0,
    errors: Sequence[Values] | None = None,
    hosts: Sequence[int] | None = None,
    noise_ranks: Sequence[int] | None = None,
) -> Values:
    """Return the result that every rank has.

    inputs[w]: rank w's buffer; all of one shape and dtype.

    seeds: of each rank one, or one for each segment; zeros if None. noise_ranks[w]: what the
    noise's counter holds of rank w; None: w. gather_bits: of the reduced values on their way back,
    0 for the segment's own. intra_bits: of values within a host in hierarchical, 0 for exact.
    divisor: of avg; 0 for the number of ranks. errors[w]: a buffer that receives what was lost of
    rank w's values. hosts[w]: what stands for rank w's host; None: all ranks share one. Elements
    outside all segments are 0 in the result.
    """
    dtype = inputs[0].dtype
    if algorithm == "auto":
        algorithm = pick(
            segments,
            dtype,
            minimal_size=minimal_size,
            skip_incomplete_buckets=skip_incomplete_buckets,
            hosts=hosts,
        )
    if algorithm == "hierarchical" and not is_nested(hosts):
        algorithm = "sra"
    out = np.zeros(inputs[0].shape, dtype)
    for number, segment in enumerate(segments):
        at = slice(segment.offset, segment.offset + segment.numel)
        xs = [x[at] for x in inputs]
        if len(xs) == 1:
            out[at] = _alone(op, xs[0], divisor)
            continue
        exact = travels_exact(segment, minimal_size)
        if not exact and op not in ("sum", "avg"):
            raise ValueError(f"op {op!r} on {segment.bits}-bit values")
        bits = EXACT_BITS if exact else segment.bits
        back_bits = EXACT_BITS if exact else gather_bits or bits
        divide_by = divisor or len(xs)
        # Partial sums and products are not rounded to fp16 or bf16; a minimum is one of the values.
        passed_on = algorithm in ("ring", "hierarchical") and op not in ("min", "max")
        way_out = FLOAT32 if passed_on else dtype
        lost = [np.zeros(segment.numel, np.float32) for _ in xs] if errors else None
        wire, back, intra = (
            _Wire(
                wire_dtype,
                b,
                segment.bucket_size,
                rounding,
                seeds_of(seeds, len(xs), number),
                noise_ranks or range(len(xs)),
                skip_incomplete_buckets,
                divide_by,
                lost,
                scale,
            )
            for wire_dtype, b, scale in (
                (way_out, bits, 1),
                (dtype, back_bits, divide_by if op == "avg" else 1),
                (dtype, EXACT_BITS if exact else intra_bits or EXACT_BITS, 1),
            )
        )
        levels = (intra, hosts) if algorithm == "hierarchical" else ()
        reduced = _ALGORITHMS[algorithm](xs, segment, op, wire, back, *levels)
        out[at] = round_to(reduced, dtype)
        for error, of_rank in zip(errors or (), lost or (), strict=True):
            error[at] = round_to(of_rank, dtype)
    return out


def reduce_scatter(
    inputs: Sequence[Values],
    segments: Sequence[Segment],
    *,
    op: Op = "sum",
    rounding: RoundingMode = "nearest",
    seeds: Seeds | None = None,
    minimal_size: int = 0,
    skip_incomplete_buckets: bool = False,
    divisor: int = 0,
    noise_ranks: Sequence[int] | None = None,
) -> list[Values]:
    """Return each rank's reduced block. inputs[w]: len(inputs) blocks; segments lie in a block."""
    world_size, dtype = len(inputs), inputs[0].dtype
    block = len(inputs[0]) // world_size
    outs: list[Values] = []
    for owner in range(world_size):
        out = np.zeros(block, dtype)
        for number, segment in enumerate(segments):
            start = owner * block + segment.offset
            xs = [x[start : start + segment.numel] for x in inputs]
            at = slice(segment.offset, segment.offset + segment.numel)
            if world_size == 1:
                out[at] = _alone(op, xs[0], divisor)
                continue
            exact = travels_exact(segment, minimal_size)
            if not exact and op not in ("sum", "avg"):
                raise ValueError(f"op {op!r} on {segment.bits}-bit values")
            wire = _Wire(
                dtype,
                EXACT_BITS if exact else segment.bits,
                segment.bucket_size,
                rounding,
                seeds_of(seeds, world_size, number, owner),
                noise_ranks or range(world_size),
                skip_incomplete_buckets,
                divisor or world_size,
            )
            terms = _owner_terms(xs, slice(0, segment.numel), 0, owner, wire)
            total = finish(op, reduce_in_order(op, terms), wire.divisor)
            out[at] = round_to(total, dtype)
        outs.append(out)
    return outs


def all_gather(
    blocks: Sequence[Values],
    segments: Sequence[Segment],
    *,
    rounding: RoundingMode = "nearest",
    seeds: Seeds | None = None,
    minimal_size: int = 0,
    skip_incomplete_buckets: bool = False,
    noise_ranks: Sequence[int] | None = None,
) -> Values:
    """Return all blocks, in rank order, as every rank (their owners too) sees them."""
    world_size, dtype = len(blocks), blocks[0].dtype
    outs: list[Values] = []
    for rank, block in enumerate(blocks):
        out = np.zeros(len(block), dtype)
        for number, segment in enumerate(segments):
            at = slice(segment.offset, segment.offset + segment.numel)
            if world_size == 1 or travels_exact(segment, minimal_size):
                out[at] = block[at]
                continue
            wire = _Wire(
                dtype,
                segment.bits,
                segment.bucket_size,
                rounding,
                seeds_of(seeds, world_size, number),
                noise_ranks or range(world_size),
                skip_incomplete_buckets,
                world_size,
            )
            out[at] = round_to(wire.seen(block[at], 0, rank, phase=1), dtype)
        outs.append(out)
    return np.concatenate(outs)


# ---- 5. the bound -------------------------------------------------------------------------------
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
    raw = _UNIT[dtype] * largest + _HALF_SMALLEST[dtype]  # 0 for values that are of dtype already
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
    """Bound the error of hierarchical's sums before they are divided, and their terms' sizes.

    A host's sum is off by what its ranks' encodings and additions are; encoding it adds half a step
    of what it may be; the owner adds one sum for each host but its own.
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

    exact is the sum (or mean) of the inputs in float64; inputs are finite. The bound is infinite
    where the result may exceed its dtype's largest number, and so be infinite. hosts: by rank, of
    hierarchical, which are several, one of several ranks.
    """
    dtype, world_size = inputs[0].dtype, len(inputs)
    at = slice(segment.offset, segment.offset + segment.numel)
    xs = [x[at].astype(np.float64) for x in inputs]
    if world_size == 1:
        return np.zeros(segment.numel)
    exact = travels_exact(segment, minimal_size)
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
            sent[shards(segment, world_size, exact)[rank]] = 0  # its owner adds raw values
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
