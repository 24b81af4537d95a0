"""Packing: small segments of a compressor without fixed length that are sent as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .philox import Seeds, seeds_of
from .segments import Segment, is_exact
from .values import Values

# Compressors without fixed length: segments of fewer elements share messages.
VARIABLE = {"entropy": 65_536, "lossless": 4096}


def _is_small(segment: Segment, minimal_size: int) -> bool:
    if is_exact(segment, minimal_size):
        return False
    return 0 < segment.numel < VARIABLE.get(segment.compressor, 0)


@dataclass(frozen=True)
class Packing:
    """The numbers of the segments of each group, in the order of the groups' first segments."""

    segments: Sequence[Segment]
    groups: list[list[int]]

    @property
    def packs(self) -> bool:
        """Whether a group has several segments."""
        return len(self.groups) < len(self.segments)

    def packed(self) -> list[Segment]:
        """Return a segment for each group, in a buffer that has all groups in order."""
        made, end = [], 0
        for group in self.groups:
            numel = sum(self.segments[number].numel for number in group)
            made.append(replace(self.segments[group[0]], offset=end, numel=numel))
            end += numel
        return made

    def seeds(self, seeds: Seeds | None, world_size: int) -> list[list[int]]:
        """Return the groups' seeds of each rank: those of their first segments."""
        of_groups = [seeds_of(seeds, world_size, group[0]) for group in self.groups]
        return [list(of_rank) for of_rank in zip(*of_groups, strict=True)]

    def load(self, buffer: Values, blocks: int = 1) -> Values:
        """Return a copy of the segments' values in the order of the groups, in each block."""
        of_blocks = buffer.reshape(blocks, -1)
        return np.concatenate([of_blocks[:, at] for at in self._places()], axis=1).reshape(-1)

    def store(self, packed: Values, buffer: Values, blocks: int = 1) -> None:
        """Write packed values to their places in each block of a buffer."""
        of_blocks, end = buffer.reshape(blocks, -1), 0
        for at in self._places():
            numel = at.stop - at.start
            of_blocks[:, at] = packed.reshape(blocks, -1)[:, end : end + numel]
            end += numel

    def stored(self, packed: Values, numel: int, blocks: int = 1) -> Values:
        """Return blocks of `numel` elements with the packed values, and 0 outside the segments."""
        buffer = np.zeros(blocks * numel, packed.dtype)
        self.store(packed, buffer, blocks)
        return buffer

    def _places(self) -> Iterator[slice]:
        for group in self.groups:
            for number in group:
                segment = self.segments[number]
                yield slice(segment.offset, segment.offset + segment.numel)


def packing_of(segments: Sequence[Segment], minimal_size: int) -> Packing:
    """Return the groups of segments: several only if all are small and have equal settings."""
    groups: dict[object, list[int]] = {}
    for number, segment in enumerate(segments):
        settings = replace(segment, offset=0, numel=0, bucket_size=1)
        groups.setdefault(settings if _is_small(segment, minimal_size) else number, []).append(
            number
        )
    return Packing(segments, list(groups.values()))
