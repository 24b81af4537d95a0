"""Segments: how each is sent, who owns which part of it, and the ranks of each host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .codec import decode, encode, message_bytes
from .settings import Compressor, Settings
from .values import (
    EXACT_BITS,
    FLOAT32,
    SMALLEST_QUANTIZED,
    Algorithm,
    Float32s,
    RoundingMode,
    Values,
    widen,
)

EAGER_BYTES = 8 * 1024  # the bytes that fit beside the header, in the first message
HEADER_BYTES = 208  # of a header, without name and values


@dataclass(frozen=True)
class Segment:
    """Elements [offset, offset + numel) of a buffer (or of a rank's block), with equal settings.

    rounding, gather_bits: None: the call's.
    """

    offset: int
    numel: int
    bits: int = 4
    bucket_size: int = 512
    compressor: Compressor = "uniform"
    density: float = 0.01
    value_bits: int = EXACT_BITS
    rotation: int = 0
    clip: bool = False
    rate: float = 2.0
    rounding: RoundingMode | None = None
    gather_bits: int | None = None

    def settings(
        self, dtype: np.dtype[Any], rounding: RoundingMode, *, skip_incomplete_buckets: bool
    ) -> Settings:
        """Return the settings of values on their way to the owner, unless they are exact."""
        return Settings(
            self.bits,
            self.bucket_size,
            self.compressor,
            self.rounding or rounding,
            self.density,
            self.value_bits,
            self.rotation,
            self.clip,
            self.rate,
            skip_incomplete_buckets,
            dtype,
        )


@dataclass(frozen=True)
class Wire:
    """The encoding of one segment's values for their receivers."""

    settings: Settings
    seeds: Sequence[int]
    noise_ranks: Sequence[int]
    # For a majority vote: the function of a rank's own values before they are added.
    ballot: Settings | None = None
    # By rank: receives the quantization error of its values, times `scale`.
    lost: Sequence[Float32s] | None = None
    scale: int = 1

    def seen(self, values: Values, first_index: int, rank: int, phase: int) -> Float32s:
        """Return decode(encode(values)) in fp32."""
        seed = self.seeds[rank]
        noise_of = (seed, self.noise_ranks[rank], phase)
        message = encode(values, self.settings, first_index, noise_of)
        decoded = decode(message, len(values), self.settings, first_index, seed)
        if self.lost is not None:
            with np.errstate(all="ignore"):
                error = (widen(values) - decoded) * np.float32(self.scale)
            at = slice(first_index, first_index + len(values))
            self.lost[rank][at] = np.where(np.isfinite(error), error, np.float32(0))
        return decoded

    def own(self, values: Values, first_index: int, rank: int) -> Float32s:
        """Return a rank's own contribution: its values, or their votes."""
        if self.ballot is None:
            return widen(values)
        return replace(self, settings=self.ballot).seen(values, first_index, rank, phase=0)


def is_exact(segment: Segment, minimal_size: int) -> bool:
    """Return whether a segment is sent raw whatever its bits; votes are always cast."""
    if segment.bits == EXACT_BITS or segment.compressor == "sign":
        return segment.bits == EXACT_BITS
    return segment.numel < max(SMALLEST_QUANTIZED, minimal_size)


def shards(segment: Segment, world_size: int, exact: bool) -> list[slice]:
    """Return each rank's part of the segment in sra and ring: split at multiples of its cut."""
    settings = segment.settings(FLOAT32, "nearest", skip_incomplete_buckets=False)
    cut = 1 if exact else settings.cut
    parts = -(-segment.numel // cut)
    cuts = [min(p * parts // world_size * cut, segment.numel) for p in range(world_size + 1)]
    return [slice(cuts[p], cuts[p + 1]) for p in range(world_size)]


def ranks_by_host(hosts: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each host, hosts in the order of their first ranks. hosts: by rank."""
    order = list(dict.fromkeys(hosts))
    return [[rank for rank, host in enumerate(hosts) if host == each] for each in order]


def is_nested(hosts: Sequence[int] | None) -> bool:
    """Return whether there are several hosts, one with several ranks."""
    return hosts is not None and 1 < len(set(hosts)) < len(hosts)


def most_sent_directly(hosts: Sequence[int] | None) -> int:
    """Return the largest encoded size that `auto` sends directly."""
    if hosts is None or not is_nested(hosts):
        return EAGER_BYTES
    pairs = max(len(ranks) * (len(hosts) - len(ranks)) for ranks in ranks_by_host(hosts))
    return min(EAGER_BYTES, max(HEADER_BYTES, 32 * 1024 // pairs))


def pick(
    segments: Sequence[Segment],
    dtype: npt.DTypeLike,
    *,
    minimal_size: int = 0,
    skip_incomplete_buckets: bool = False,
    hosts: Sequence[int] | None = None,
) -> Algorithm:
    """Return the algorithm of "auto" for an allreduce: one_shot for short messages."""
    total = 0
    for segment in segments:
        settings = segment.settings(
            np.dtype(dtype), "nearest", skip_incomplete_buckets=skip_incomplete_buckets
        )
        if is_exact(segment, minimal_size):
            settings = replace(settings, bits=EXACT_BITS)
        total += message_bytes(segment.numel, settings)
    if total <= most_sent_directly(hosts):
        return "one_shot"
    return "hierarchical" if is_nested(hosts) else "sra"
