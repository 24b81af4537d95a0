"""Collectives: allreduce, reduce_scatter, all_gather.

1. segments, and how their values travel
2. the algorithms
3. the verbs
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .codec import dequantize, encoded_bytes, quantize
from .philox import Seeds, seeds_of
from .values import (
    EXACT_BITS,
    FLOAT32,
    SMALLEST_QUANTIZED,
    Algorithm,
    AnyAlgorithm,
    Float32s,
    Op,
    RoundingMode,
    Values,
    combine,
    finish,
    reduce_in_order,
    round_to,
    widen,
)

# ---- 1. segments --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segment:
    """Elements [offset, offset + numel) of a buffer (or of a rank's block), compressed alike."""

    offset: int
    numel: int
    bits: int = 4
    bucket_size: int = 512


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


# ---- 2. the algorithms --------------------------------------------------------------------------

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


# ---- 3. the verbs -------------------------------------------------------------------------------


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
    residuals: Sequence[Values] | None = None,
    hosts: Sequence[int] | None = None,
    noise_ranks: Sequence[int] | None = None,
) -> Values:
    """Return the result that every rank has.

    inputs[w]: rank w's buffer; all of one shape and dtype.

    seeds: of each rank one, or one for each segment; zeros if None. noise_ranks[w]: what the
    noise's counter holds of rank w; None: w. gather_bits: of the reduced values on their way back,
    0 for the segment's own. intra_bits: of values within a host in hierarchical, 0 for exact.
    divisor: of avg; 0 for the number of ranks. residuals[w]: added to rank w's values; receives
    what was lost of them. hosts[w]: what stands for rank w's host; None: all ranks share one.
    Elements outside all segments are 0 in the result.
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
    if algorithm in ("hierarchical", "by_hosts"):
        algorithm = "hierarchical" if is_nested(hosts) else "sra"
    out = np.zeros(inputs[0].shape, dtype)
    for number, segment in enumerate(segments):
        at = slice(segment.offset, segment.offset + segment.numel)
        xs = [x[at] for x in inputs]
        if residuals:
            xs = [widen(x) + widen(lost[at]) for x, lost in zip(xs, residuals, strict=True)]
        if len(xs) == 1:
            alone = _alone(op, xs[0], divisor)
            out[at] = round_to(alone, dtype) if residuals else alone
            for residual in residuals or ():
                residual[at] = 0
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
        lost = [np.zeros(segment.numel, np.float32) for _ in xs] if residuals else None
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
        for residual, of_rank in zip(residuals or (), lost or (), strict=True):
            residual[at] = round_to(of_rank, dtype)
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
