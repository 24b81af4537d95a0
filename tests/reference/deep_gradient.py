"""Deep Gradient Compression (Lin et al., ICLR 2018) of one layer, for all ranks.

Implements the paper's Algorithm 4 in float32, rounding every operation once: the same operations
give the same bits. Gradients are each rank's own; the average is over W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .sparse import largest
from .values import BFLOAT16, Float32s

WARMUP = (0.25, 0.0625, 0.015625, 0.00390625)


def density_at(step: int, warmup_steps: int, density: float) -> float:
    """Return the fraction of values sent in a step: a quarter of the warm-up for each of WARMUP.

    In integers, as documented: stage i lasts while i * steps <= 4 * step < (i + 1) * steps.
    """
    if step >= warmup_steps:
        return density
    return max(WARMUP[4 * step // warmup_steps], density)


class DeepGradient:
    """One layer of every rank, step by step.

    Attributes:
        u: momentum of each rank; equal on all ranks if the layer is not sparse.
        v: the values of each rank that are not sent yet.
    """

    def __init__(
        self,
        ranks: int,
        numel: int,
        *,
        momentum: float,
        nesterov: bool = False,
        clip: float | None = None,
        sparse: bool = True,
        value_bits: int = 32,
    ) -> None:
        self.u = np.zeros((ranks, numel), np.float32)
        self.v = np.zeros((ranks, numel), np.float32)
        self.momentum = np.float32(momentum)
        self.nesterov, self.clip, self.sparse = nesterov, clip, sparse
        self.value_bits = value_bits

    def step(self, gradients: Sequence[Float32s], density: float) -> Float32s:
        """Return the average that replaces the ranks' gradients."""
        ranks = len(gradients)
        clipped = [self.clipped(g, ranks) for g in gradients]
        if not self.sparse:  # the mean first, then momentum
            mean = self._mean(clipped)
            results = [self._corrected(u, mean) for u in self.u]
            return results[0].copy()
        for u, v, g in zip(self.u, self.v, clipped, strict=True):
            v += self._corrected(u, g)
        if ranks == 1 or density == 1:  # everything is sent, without a mask: plain momentum SGD
            sent = list(self.v.copy())
            self.v[:] = 0
        else:
            sent = [self._sparsified(u, v, density) for u, v in zip(self.u, self.v, strict=True)]
        return self._mean(sent)

    def clipped(self, gradient: Float32s, ranks: int) -> Float32s:
        """Return a rank's gradient, with an L2 norm of at most clip / sqrt(ranks)."""
        if self.clip is None:
            return gradient
        norm = np.linalg.norm(gradient.astype(np.float64))
        scale = min(1.0, self.clip / np.sqrt(ranks) / norm) if norm else 1.0
        return gradient * np.float32(scale)

    def _corrected(self, u: Float32s, g: Float32s) -> Float32s:
        """Update the momentum in place; return the corrected gradient."""
        if self.nesterov:
            u += g
            u *= self.momentum
            return u + g
        u *= self.momentum
        u += g
        return u

    def _sparsified(self, u: Float32s, v: Float32s, density: float) -> Float32s:
        """Remove the largest values from v; mask the momentum there."""
        k = max(1, -(-round(density * 10**9) * len(v) // 10**9))
        indices = largest(v, k)
        indices = indices[v[indices] != 0]  # zeros are not sent
        sent = np.zeros_like(v)
        sent[indices] = v[indices]
        if self.value_bits == 16:
            sent = sent.astype(BFLOAT16).astype(np.float32)
        v -= sent
        u[indices] = 0
        return sent

    def _mean(self, values: Sequence[Float32s]) -> Float32s:
        total = np.zeros_like(values[0])
        for of_rank in values:
            total += of_rank
        return total / np.float32(len(values))
