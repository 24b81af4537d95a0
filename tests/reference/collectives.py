"""Collectives: allreduce, reduce_scatter, all_gather, all_to_all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .algorithms import ALGORITHMS, Directions, direct_block, hierarchical_block
from .packing import packing_of
from .philox import Seeds, seeds_of
from .segments import Segment, Wire, is_exact, is_nested, pick
from .settings import Settings
from .values import (
    EXACT_BITS,
    FLOAT32,
    AnyAlgorithm,
    Op,
    RoundingMode,
    Values,
    finish,
    round_to,
    round_to_finite,
    widen,
)


def _check(op: Op, settings: Settings) -> None:
    exact = settings.exact or settings.compressor == "lossless"
    if not exact and op not in ("sum", "avg"):
        raise ValueError(f"op {op!r} on values of compressor {settings.compressor!r}")


def _seeds(
    seeds: Seeds | None, world_size: int, segment: int, settings: Settings, block: int = 0
) -> list[int]:
    """Return each rank's seed; random indices have one seed for all blocks."""
    if settings.compressor != "randk" or settings.exact:
        return seeds_of(seeds, world_size, segment, block)
    own = seeds_of(seeds, world_size, segment)
    assert len(set(own)) == 1, "ranks draw their indices from one seed"
    return own


def _alone(op: Op, values: Values, settings: Settings, divisor: int) -> Values:
    """Return a single rank's result: nothing is encoded, but votes are cast, and avg divides."""
    if settings.votes:
        return round_to(Wire(settings, [0], [0]).seen(values, 0, 0, 1), values.dtype)
    if op != "avg" or divisor in (0, 1):
        return values
    return round_to(finish(op, widen(values), divisor), values.dtype)


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
    """Return the result, which is the same on every rank.

    inputs[w]: rank w's buffer; all have one shape and dtype.

    rounding: for compressors with several roundings. seeds: one per rank, or one per segment and
    rank; zeros if None. noise_ranks[w]: rank w's number in the noise's counter; None: w.
    gather_bits: of the reduced values on their way back, 0 for the segment's own. intra_bits: of
    values within a host in hierarchical, 0 for exact. divisor: of avg; 0 for the number of ranks.
    residuals[w]: added to rank w's values; receives the new residual. hosts[w]: an id of rank w's
    host; None: all ranks share one. Elements outside all segments are 0 in the result.
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
    packing = packing_of(segments, minimal_size)
    if len(inputs) > 1 and packing.packs:
        lost = residuals and [packing.load(residual) for residual in residuals]
        result = allreduce(
            [packing.load(x) for x in inputs],
            packing.packed(),
            op=op,
            algorithm=algorithm,
            rounding=rounding,
            seeds=packing.seeds(seeds, len(inputs)),
            gather_bits=gather_bits,
            intra_bits=intra_bits,
            minimal_size=minimal_size,
            skip_incomplete_buckets=skip_incomplete_buckets,
            divisor=divisor,
            residuals=lost,
            hosts=hosts,
            noise_ranks=noise_ranks,
        )
        for of_rank, residual in zip(lost or (), residuals or (), strict=True):
            packing.store(of_rank, residual)
        return packing.stored(result, len(inputs[0]))
    out = np.zeros(inputs[0].shape, dtype)
    for number, segment in enumerate(segments):
        at = slice(segment.offset, segment.offset + segment.numel)
        xs = [x[at] for x in inputs]
        own = segment.settings(dtype, rounding, skip_incomplete_buckets=skip_incomplete_buckets)
        exact = replace(own, bits=EXACT_BITS)
        if is_exact(segment, minimal_size):
            own = exact
        _check(op, own)
        if residuals:
            xs = [widen(x) + widen(lost[at]) for x, lost in zip(xs, residuals, strict=True)]
        if len(xs) == 1:
            alone = _alone(op, xs[0], own, divisor)
            out[at] = round_to(alone, dtype) if residuals else alone
            for residual in residuals or ():
                residual[at] = 0
            continue
        divide_by = divisor or len(xs)
        back = intra = own
        if not own.exact and not own.votes:
            to_gather = gather_bits if segment.gather_bits is None else segment.gather_bits
            back = replace(own, bits=to_gather or own.bits)
            intra = replace(own, bits=intra_bits or EXACT_BITS)
        # Partial sums and products are not rounded to fp16 or bf16, counts of votes are exact; a
        # minimum is one of the values.
        way_out = own
        if algorithm in ("ring", "hierarchical") and op not in ("min", "max"):
            way_out = replace(exact if own.votes else own, dtype=FLOAT32)
        lost = [np.zeros(segment.numel, np.float32) for _ in xs] if residuals else None
        wire, back, intra = (
            Wire(
                settings,
                _seeds(seeds, len(xs), number, own),
                noise_ranks or range(len(xs)),
                own if own.votes else None,
                lost,
                scale,
            )
            for settings, scale in (
                (way_out, 1),
                (back, divide_by if op == "avg" else 1),
                (intra, 1),
            )
        )
        directions = Directions(wire, back, intra, op, divide_by, own.exact, hosts or ())
        out[at] = round_to(ALGORITHMS[algorithm](xs, segment, directions), dtype)
        for residual, of_rank in zip(residuals or (), lost or (), strict=True):
            residual[at] = round_to_finite(of_rank, dtype)
    return out


def reduce_scatter(
    inputs: Sequence[Values],
    segments: Sequence[Segment],
    *,
    op: Op = "sum",
    algorithm: AnyAlgorithm = "auto",
    rounding: RoundingMode = "nearest",
    seeds: Seeds | None = None,
    intra_bits: int = 0,
    minimal_size: int = 0,
    skip_incomplete_buckets: bool = False,
    divisor: int = 0,
    residuals: Sequence[Values] | None = None,
    hosts: Sequence[int] | None = None,
    noise_ranks: Sequence[int] | None = None,
) -> list[Values]:
    """Return each rank's reduced block. inputs[w]: len(inputs) blocks; segments lie in a block.

    residuals[w]: as inputs[w]. All other arguments are those of allreduce().
    """
    world_size, dtype = len(inputs), inputs[0].dtype
    block = len(inputs[0]) // world_size
    if algorithm == "auto":
        algorithm = pick(
            segments,
            dtype,
            minimal_size=minimal_size,
            skip_incomplete_buckets=skip_incomplete_buckets,
            hosts=hosts,
        )
    packing = packing_of(segments, minimal_size)
    if world_size > 1 and packing.packs:
        lost = residuals and [packing.load(residual, world_size) for residual in residuals]
        results = reduce_scatter(
            [packing.load(x, world_size) for x in inputs],
            packing.packed(),
            op=op,
            algorithm=algorithm,
            rounding=rounding,
            seeds=packing.seeds(seeds, world_size),
            intra_bits=intra_bits,
            minimal_size=minimal_size,
            skip_incomplete_buckets=skip_incomplete_buckets,
            divisor=divisor,
            residuals=lost,
            hosts=hosts,
            noise_ranks=noise_ranks,
        )
        for of_rank, residual in zip(lost or (), residuals or (), strict=True):
            packing.store(of_rank, residual, world_size)
        return [packing.stored(result, block) for result in results]
    nested = algorithm in ("hierarchical", "by_hosts") and is_nested(hosts)
    outs: list[Values] = []
    for owner in range(world_size):
        out = np.zeros(block, dtype)
        for number, segment in enumerate(segments):
            start = owner * block + segment.offset
            of_block = slice(start, start + segment.numel)
            xs = [x[of_block] for x in inputs]
            at = slice(segment.offset, segment.offset + segment.numel)
            if residuals:
                pairs = zip(xs, residuals, strict=True)
                xs = [widen(x) + widen(lost[of_block]) for x, lost in pairs]
            settings = _settings(segment, dtype, rounding, minimal_size, skip_incomplete_buckets)
            _check(op, settings)
            if world_size == 1:
                alone = _alone(op, xs[0], settings, divisor)
                out[at] = round_to(alone, dtype) if residuals else alone
                for residual in residuals or ():
                    residual[of_block] = 0
                continue
            way_out = intra = settings
            if not settings.exact and not settings.votes:
                intra = replace(settings, bits=intra_bits or EXACT_BITS)
            if nested and op not in ("min", "max"):
                bits = EXACT_BITS if settings.votes else settings.bits
                way_out = replace(settings, bits=bits, dtype=FLOAT32)
            lost = [np.zeros(segment.numel, np.float32) for _ in xs] if residuals else None
            wire, back, intra = (
                Wire(
                    each,
                    _seeds(seeds, world_size, number, settings, owner),
                    noise_ranks or range(world_size),
                    settings if settings.votes else None,
                    lost,
                )
                for each in (way_out, settings, intra)
            )
            divide_by = divisor or world_size
            directions = Directions(wire, back, intra, op, divide_by, settings.exact, hosts or ())
            total = (hierarchical_block if nested else direct_block)(xs, owner, directions)
            out[at] = round_to(back.own(total, 0, owner), dtype)
            for residual, of_rank in zip(residuals or (), lost or (), strict=True):
                residual[of_block] = round_to_finite(of_rank, dtype)
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
    """Return all blocks, in rank order, with the same values on every rank and their owners."""
    world_size, dtype = len(blocks), blocks[0].dtype
    packing = packing_of(segments, minimal_size)
    if world_size > 1 and packing.packs:
        result = all_gather(
            [packing.load(block) for block in blocks],
            packing.packed(),
            rounding=rounding,
            seeds=packing.seeds(seeds, world_size),
            minimal_size=minimal_size,
            skip_incomplete_buckets=skip_incomplete_buckets,
            noise_ranks=noise_ranks,
        )
        return packing.stored(result, len(blocks[0]), world_size)
    outs: list[Values] = []
    for rank, block in enumerate(blocks):
        out = np.zeros(len(block), dtype)
        for number, segment in enumerate(segments):
            at = slice(segment.offset, segment.offset + segment.numel)
            settings = _settings(segment, dtype, rounding, minimal_size, skip_incomplete_buckets)
            if settings.exact or (world_size == 1 and not settings.votes):
                out[at] = block[at]
                continue
            seeds_here = _seeds(seeds, world_size, number, settings)
            wire = Wire(settings, seeds_here, noise_ranks or range(world_size))
            out[at] = round_to(wire.seen(block[at], 0, rank, phase=1), dtype)
        outs.append(out)
    return np.concatenate(outs)


def all_to_all(
    inputs: Sequence[Values],
    splits: Sequence[Sequence[int]],
    segment: Segment,
    *,
    rounding: RoundingMode = "nearest",
    seeds: Seeds | None = None,
    minimal_size: int = 0,
    skip_incomplete_buckets: bool = False,
    noise_ranks: Sequence[int] | None = None,
) -> list[Values]:
    """Return each rank's blocks from all ranks. inputs[w]: rank w's blocks for all ranks.

    splits[w][p]: the size of rank w's block for rank p. segment: the settings of every block.
    """
    world_size, dtype = len(inputs), inputs[0].dtype
    received: list[list[Values]] = [[] for _ in inputs]
    for rank, values in enumerate(inputs):
        start = 0
        for owner, numel in enumerate(splits[rank]):
            block = values[start : start + numel]
            start += numel
            own = replace(segment, offset=0, numel=numel)
            settings = _settings(own, dtype, rounding, minimal_size, skip_incomplete_buckets)
            if owner != rank and not settings.exact:
                seeds_here = _seeds(seeds, world_size, 0, settings, owner)
                wire = Wire(settings, seeds_here, noise_ranks or range(world_size))
                block = round_to(wire.seen(block, 0, rank, phase=0), dtype)
            received[owner].append(block)
    return [np.concatenate(blocks) for blocks in received]


def _settings(
    segment: Segment,
    dtype: np.dtype[np.generic],
    rounding: RoundingMode,
    minimal_size: int,
    skip_incomplete_buckets: bool,
) -> Settings:
    """Return the settings of a segment in one direction."""
    settings = segment.settings(dtype, rounding, skip_incomplete_buckets=skip_incomplete_buckets)
    if is_exact(segment, minimal_size):
        return replace(settings, bits=EXACT_BITS)
    return settings
