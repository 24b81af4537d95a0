"""Algorithms of allreduce: who encodes which values, and the order of summation.

xs: each rank's values of one segment. wire, back: encoding towards the owner and back. Each
function returns the result in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .segments import Segment, Wire, ranks_by_host, shards
from .values import Float32s, Op, Values, combine, finish, reduce_in_order


@dataclass(frozen=True)
class Directions:
    """The two directions of a segment, and the operation between them."""

    wire: Wire
    back: Wire
    intra: Wire
    op: Op
    divisor: int  # of avg
    exact: bool
    hosts: Sequence[int]

    def finish(self, total: Float32s) -> Float32s:
        return finish(self.op, total, self.divisor)


def owner_terms(
    xs: Sequence[Values], at: slice, first_index: int, owner: int, wire: Wire
) -> list[Float32s]:
    """Return, in rank order, the owner's own values, and the others' after decoding."""
    return [
        wire.own(x[at], first_index, rank)
        if rank == owner
        else wire.seen(x[at], first_index, rank, phase=0)
        for rank, x in enumerate(xs)
    ]


def one_shot(xs: Sequence[Values], segment: Segment, directions: Directions) -> Float32s:
    terms = [directions.wire.seen(x, 0, rank, phase=0) for rank, x in enumerate(xs)]
    total = directions.finish(reduce_in_order(directions.op, terms))
    # Nothing is encoded a second time, but the sum of votes is a vote.
    return directions.back.own(total, 0, 0)


def sra(xs: Sequence[Values], segment: Segment, directions: Directions) -> Float32s:
    out = np.empty(segment.numel, np.float32)
    for owner, at in enumerate(shards(segment, len(xs), directions.exact)):
        terms = owner_terms(xs, at, at.start, owner, directions.wire)
        total = directions.finish(reduce_in_order(directions.op, terms))
        out[at] = directions.back.seen(total, at.start, owner, phase=1)
    return out


def ring(xs: Sequence[Values], segment: Segment, directions: Directions) -> Float32s:
    world_size, wire = len(xs), directions.wire
    out = np.empty(segment.numel, np.float32)
    for owner, at in enumerate(shards(segment, world_size, directions.exact)):
        first = (owner + 1) % world_size
        arriving = wire.seen(wire.own(xs[first][at], at.start, first), at.start, first, phase=0)
        total = arriving
        for hop in range(2, world_size + 1):
            rank = (owner + hop) % world_size
            total = combine(directions.op, arriving, wire.own(xs[rank][at], at.start, rank))
            if rank != owner:
                arriving = wire.seen(total, at.start, rank, phase=0)
        out[at] = directions.back.seen(directions.finish(total), at.start, owner, phase=1)
    return out


def host_terms(
    xs: Sequence[Values], at: slice, owner_host: int, acting: Sequence[int], directions: Directions
) -> list[Float32s]:
    """Return the values of the owner's host in rank order, and the sums of the others, decoded.

    acting: for each host, the owner or its delegate there.
    """
    own_terms: list[Float32s] = []
    sums: list[Float32s] = []
    for host, ranks in enumerate(ranks_by_host(directions.hosts)):
        terms = [
            directions.wire.own(xs[r][at], at.start, r)
            if r == acting[host]
            else directions.intra.seen(xs[r][at], at.start, r, phase=2)
            for r in ranks
        ]
        if host == owner_host:
            own_terms = terms
        else:
            host_sum = reduce_in_order(directions.op, terms)
            sums.append(directions.wire.seen(host_sum, at.start, acting[host], phase=0))
    return own_terms + sums


def hierarchical(xs: Sequence[Values], segment: Segment, directions: Directions) -> Float32s:
    ranks_of = ranks_by_host(directions.hosts)
    lanes = min(map(len, ranks_of))
    out = np.empty(segment.numel, np.float32)
    for shard, at in enumerate(shards(segment, len(ranks_of) * lanes, directions.exact)):
        owner_host, lane = divmod(shard, lanes)
        acting = [ranks[lane] for ranks in ranks_of]
        terms = host_terms(xs, at, owner_host, acting, directions)
        total = directions.finish(reduce_in_order(directions.op, terms))
        out[at] = directions.back.seen(total, at.start, ranks_of[owner_host][lane], phase=1)
    return out


def hierarchical_block(xs: Sequence[Values], owner: int, directions: Directions) -> Float32s:
    """Return the sum of a reduce_scatter's block, which rank `owner` gets."""
    ranks_of = ranks_by_host(directions.hosts)
    (owner_host,) = [host for host, ranks in enumerate(ranks_of) if owner in ranks]
    place = ranks_of[owner_host].index(owner)
    acting = [ranks[place % len(ranks)] for ranks in ranks_of]
    terms = host_terms(xs, slice(0, len(xs[0])), owner_host, acting, directions)
    return directions.finish(reduce_in_order(directions.op, terms))


def direct_block(xs: Sequence[Values], owner: int, directions: Directions) -> Float32s:
    """Return the same sum, to which each rank sends its values directly."""
    terms = owner_terms(xs, slice(0, len(xs[0])), 0, owner, directions.wire)
    return directions.finish(reduce_in_order(directions.op, terms))


ALGORITHMS = {"one_shot": one_shot, "sra": sra, "ring": ring, "hierarchical": hierarchical}
