"""Noise: the seeds of segments and blocks, Philox4x32-7, and the lane of an element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .values import Float32s


def philox4x32_7(counters: npt.NDArray[np.uint32], seed: int) -> npt.NDArray[np.uint32]:
    """Run seven rounds on counters of shape (n, 4); the key is (seed low 32, seed high 32)."""
    mask = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = (counters[:, i].astype(np.uint64) for i in range(4))
    key0, key1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(7):
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


# The seeds of a rank: one for all segments, or one for each.
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
    """Return r in (0, 1) for the elements of a segment with these indices."""
    group, e = index // 128, index % 128
    c = 16 * group + e % 16
    # Eight elements share a block of Philox: compute all blocks from the first to the last once.
    first = c.min()
    blocks = np.arange(first, c.max() + 1, dtype=np.uint64)
    counters = np.empty((len(blocks), 4), np.uint32)
    counters[:, 0] = blocks & np.uint64(0xFFFFFFFF)
    counters[:, 1] = blocks >> np.uint64(32)
    counters[:, 2] = rank
    counters[:, 3] = phase
    words = philox4x32_7(counters, seed & 0xFFFFFFFFFFFFFFFF)
    word = words[c - first, (e // 16) // 2]
    u = (word >> (16 * ((e // 16) % 2)).astype(np.uint32)) & np.uint32(0xFFFF)
    return ((u.astype(np.float64) + 0.5) / 65536).astype(np.float32)
