"""1-bit Adam (Tang et al., ICML 2021) and SigNUM (Bernstein et al., ICLR 2019), for all ranks.

In fp32, one operation after another; messages use the reference's allreduce. An implementation that
rounds each operation has the same bits, except for square roots, which torch rounds differently.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .collectives import allreduce
from .segments import Segment
from .values import FLOAT32, Values

_F = np.float32


class OneBitAdam:
    """One parameter of all ranks, step by step.

    Attributes:
        x: the parameter, flat.
        m, v: momentum and variance, shared by all ranks.
        residuals: of each rank, for its messages and for the averages that it owns.
        off: bound of x's error so far, if square roots are off by one in the last place.
    """

    def __init__(
        self, ranks: int, x: Values, *, lr: float, warmup: int, segment: Segment,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, decay: float = 0.0,
    ) -> None:  # fmt: skip
        self.x = x.astype(FLOAT32).ravel()
        self.m, self.v = np.zeros_like(self.x), np.zeros_like(self.x)
        self.residuals = [np.zeros_like(self.x) for _ in range(ranks)]
        self.lr, self.warmup, self.segment = lr, warmup, segment
        self.betas, self.eps, self.decay = betas, eps, decay
        self.steps, self.off = 0, np.zeros_like(self.x)

    def step(self, gradients: Sequence[Values]) -> None:
        """Take a step with the ranks' gradients."""
        beta1, beta2 = self.betas
        gradients = [g.ravel() for g in gradients]
        whole = Segment(0, self.x.size, 32)
        if self.steps < self.warmup:
            g = allreduce(gradients, [whole], op="avg", algorithm="sra")
            self.m = self.m * _F(beta1) + g * _F(1 - beta1)
            self.v = self.v * _F(beta2) + g * g * _F(1 - beta2)
        else:
            own = [self.m * _F(beta1) + g * _F(1 - beta1) for g in gradients]
            lost: Any = None if self.segment.bits == 32 else self.residuals
            self.m = allreduce(own, [self.segment], op="avg", algorithm="sra", residuals=lost)
        update = np.where(self.v == 0, _F(0), self.m / (np.sqrt(self.v) + _F(self.eps)))
        self.x = self.x - _F(self.lr) * (update + _F(self.decay) * self.x)
        # The root by 2^-23; a sum, a quotient, a sum, a product by 2^-24 each; x by 2^-24.
        self.off += 2.0**-24 * (6 * self.lr * np.abs(update) + 2 * np.abs(self.x))
        self.steps += 1


class Signum:
    """One parameter of all ranks, step by step.

    Attributes:
        x: the parameter, flat.
        momenta: the momentum of each rank.
    """

    def __init__(
        self, ranks: int, x: Values, *, lr: float, momentum: float = 0.9, decay: float = 0.0
    ) -> None:
        self.x = x.astype(FLOAT32).ravel()
        self.momenta = [np.zeros_like(self.x) for _ in range(ranks)]
        self.lr, self.momentum, self.decay = lr, momentum, decay
        self.steps = 0

    def step(self, gradients: Sequence[Values]) -> None:
        """Take a step with the majority of the ranks' signs; ties and zeros alternate."""
        beta, side = self.momentum, 1 if self.steps % 2 == 0 else -1
        self.momenta = [
            m * _F(beta) + g.ravel() * _F(1 - beta)
            for m, g in zip(self.momenta, gradients, strict=True)
        ]
        votes = np.sum([np.where(m * _F(side) < 0, -1, 1) for m in self.momenta], 0)
        vote = np.where(votes < 0, -side, side).astype(FLOAT32)
        self.x = self.x - _F(self.lr) * (vote + _F(self.decay) * self.x)
        self.steps += 1
