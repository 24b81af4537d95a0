"""CompressedAdamW, and SigNUM (Bernstein et al., ICLR 2019), for all ranks.

In fp32, one operation after another; messages use the reference's allreduce. An implementation that
rounds each operation has the same bits. torch rounds square roots differently: pass its `root`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .collectives import allreduce
from .segments import Segment
from .values import FLOAT32, Values

_F = np.float32


class CompressedAdamW:
    """One parameter of all ranks, step by step.

    Attributes:
        x: the parameter, flat.
        m, v: momentum and variance, shared by all ranks.
        root: computes square roots.
        weight: sum of the weights of the gradients in v.
        residuals: of each rank, for its messages and for the averages that it owns.
        schedule: the step of the next update of v, steps between updates (0 in the warm-up), and
            updates so far with this interval.
        level: with warmup "auto": sum of the logarithms of v at the last check.
        off: bound of the rounding errors of x so far, for an implementation that adds up an update
            in another order.
    """

    def __init__(
        self, ranks: int, x: Values, *, lr: float, warmup: int | str, segment: Segment,
        variance_segment: Segment, refreshes: int = 2, root: Callable[[Values], Values] = np.sqrt,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, decay: float = 0.0,
    ) -> None:  # fmt: skip
        self.x = x.astype(FLOAT32).ravel()
        self.m, self.v = np.zeros_like(self.x), np.zeros_like(self.x)
        self.residuals = [np.zeros_like(self.x) for _ in range(ranks)]
        self.lr, self.warmup, self.refreshes = lr, warmup, refreshes
        self.segment, self.variance_segment = segment, variance_segment
        self.betas, self.eps, self.decay, self.root = betas, eps, decay, root
        self.steps, self.off = 0, np.zeros_like(self.x)
        self.weight, self.schedule, self.level = 0.0, (0, 0, 0), None

    def step(self, gradients: Sequence[Values]) -> None:
        """Take a step with the ranks' gradients."""
        beta1, beta2 = self.betas
        ranks = len(gradients)
        gradients = [g.ravel() for g in gradients]
        if self.steps == self.schedule[0]:
            g = allreduce(gradients, [self.variance_segment], op="avg", algorithm="sra")
            # A refresh stands for the steps since the last one, up to a quarter of v.
            kept = max(beta2 ** max(1, self.schedule[1]), min(beta2, 0.75))
            self.weight = self.weight * kept + (1 - kept)
            self.m = self.m * _F(beta1) + g * _F(1 - beta1)
            self.v = self.v * _F(kept) + g * g * _F(1 - kept)
            self._plan()
            u = self.m / self._denominator()
        else:
            ratio = min(beta1**2, beta2**2) / beta2
            most = (1 - beta1) / np.sqrt((1 - beta2) * (1 - ratio))
            own = [
                (self.m * _F(beta1) + g * _F(1 - beta1)) / self._denominator() for g in gradients
            ]
            own = [np.clip(u, _F(-(ranks**0.5) * most), _F(ranks**0.5 * most)) for u in own]
            lost: Any = None if self.segment.bits == 32 else self.residuals
            u = allreduce(own, [self.segment], op="avg", algorithm="sra", residuals=lost)
            u = np.clip(u, _F(-most), _F(most))
            self.m = u * self._denominator()
        self.steps += 1
        update = u / _F(1 - beta1**self.steps)
        self.x = self.x - _F(self.lr) * (update + _F(self.decay) * self.x)
        # A quotient, two sums, two products by 2^-24 each; x by 2^-24.
        self.off += 2.0**-24 * (6 * self.lr * np.abs(update) + 2 * np.abs(self.x))

    def _denominator(self) -> Values:
        return self.root(self.v / _F(self.weight)) + _F(self.eps)

    def _plan(self) -> None:
        due, interval, done = self.schedule
        if interval:
            done += 1
            if done == self.refreshes:
                interval, done = 2 * interval, 0
            self.schedule = due + interval, interval, done
        elif self._ends():
            self.schedule = (due + 1 if self.refreshes else -1), 1, 0
        else:
            self.schedule = due + 1, 0, 0

    def _ends(self) -> bool:
        """Return whether the warm-up ends with this step, which is not counted yet."""
        count = self.steps + 1
        if self.warmup != "auto":
            return count >= int(self.warmup)
        if count < 4 or count.bit_count() > 1:
            return False
        # The exponent and four leading bits of a float are its logarithm in 1/16 octaves.
        bits = (self.v / _F(self.weight)).view(np.int32) >> 19
        before, self.level = self.level, int(bits.sum(dtype=np.int64))
        return before is not None and abs(self.level - before) < 16 * self.x.size


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
