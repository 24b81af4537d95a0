"""An outer loop over all ranks (DiLoCo), in numpy: each operation rounded to float32."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .collectives import allreduce
from .segments import Segment, is_exact

_F = np.float32
_Values = npt.NDArray[np.float32]


class OuterLoop:
    """The ranks' work after each inner step: Nesterov's SGD on anchors with averaged differences.

    Attributes:
        params: parameters of each rank, by name, flat.
        anchor, momentum, residuals: by name; residuals of each rank.
        steps: number of steps so far.
    """

    def __init__(
        self,
        first: Mapping[str, npt.NDArray[Any]],
        ranks: int,
        schedule: Any,
        members: Sequence[list[str]],
        segment_of: Callable[[str, int], Segment],
        *,
        rate: float = 0.7,
        momentum: float = 0.9,
        decay: float = 1.0,
        feedback: bool = True,
        of_senders: bool = False,
    ) -> None:
        """Create the loop.

        Args:
            first: the initial parameters, equal on all ranks.
            ranks: number of ranks.
            schedule: sent_after(step) and applied_after(step) return a fragment or None; and alpha.
            members: the names of each fragment's parameters.
            segment_of: segment_of(name, numel) returns the compression of a parameter.
            rate: learning rate of the outer SGD.
            momentum: momentum of the outer SGD; 0: none.
            decay: decay of residuals.
            feedback: whether there are residuals.
            of_senders: whether a mean is over the ranks that sent a value (one_shot), not over all.
        """
        flat: dict[str, Any] = {name: x.ravel().astype(_F) for name, x in first.items()}
        self.params: list[dict[str, Any]] = [
            {n: x.copy() for n, x in flat.items()} for _ in range(ranks)
        ]
        self.anchor: dict[str, Any] = {n: x.copy() for n, x in flat.items()}
        self.momentum: dict[str, Any] = {n: np.zeros_like(x) for n, x in flat.items()}
        self.residuals: Any = {n: [np.zeros_like(x) for _ in range(ranks)] for n, x in flat.items()}
        self.schedule, self.members, self.segment_of = schedule, members, segment_of
        self.rate, self.mu, self.decay = _F(rate), _F(momentum), decay
        self.feedback, self.of_senders = feedback, of_senders
        self.steps = 0
        self._flight: dict[str, Any] = {}

    def step(self) -> None:
        """Do the outer work after an inner step, which has changed `params`."""
        self.steps += 1
        sent = self.schedule.sent_after(self.steps)
        if sent is not None:
            self._flight = self._sent(self.members[sent])
        applied = self.schedule.applied_after(self.steps)
        if applied is not None:
            for n in self.members[applied]:
                self._apply(n, *self._flight[n])

    def _sent(self, names: list[str]) -> dict[str, Any]:
        """Return the mean and the new residuals of each parameter, all sent in one message."""
        ends = np.cumsum([self.anchor[n].size for n in names])
        segments = [
            replace(self.segment_of(n, self.anchor[n].size), offset=end - self.anchor[n].size)
            for n, end in zip(names, ends.tolist(), strict=True)
        ]
        deltas = [np.concatenate([self.anchor[n] - p[n] for n in names]) for p in self.params]
        lost = [
            np.concatenate([self.residuals[n][rank] for n in names]) * _F(self.decay)
            for rank in range(len(deltas))
        ]
        mean = self._mean(deltas, segments, lost)
        parts = [slice(each.offset, each.offset + each.numel) for each in segments]
        return {n: (mean[at], [e[at] for e in lost]) for n, at in zip(names, parts, strict=True)}

    def _mean(self, deltas: list[_Values], segments: list[Segment], lost: list[_Values]) -> _Values:
        """Return the mean of the ranks' differences; update the residuals `lost` in place."""
        if not self.of_senders:
            kept = lost if self.feedback else None
            return allreduce(deltas, segments, op="avg", algorithm="sra", residuals=kept)
        owed = [d + e for d, e in zip(deltas, lost, strict=True)]
        mean = allreduce(deltas, segments, op="avg", algorithm="one_shot", residuals=lost)
        count = np.sum([a != e for a, e in zip(owed, lost, strict=True)], 0)
        of_senders = mean * _F(len(deltas)) / np.maximum(count, 1).astype(_F)
        for segment in segments:
            if not is_exact(segment, 0):
                at = slice(segment.offset, segment.offset + segment.numel)
                mean[at] = of_senders[at]
        return mean

    def _apply(self, n: str, mean: _Values, lost: list[_Values]) -> None:
        self.momentum[n] = self.mu * self.momentum[n] + mean
        self.anchor[n] = self.anchor[n] - self.rate * (mean + self.mu * self.momentum[n])
        self.residuals[n] = lost
        alpha = _F(self.schedule.fragment_update_alpha)
        for params in self.params:
            params[n] = alpha * params[n] + (_F(1) - alpha) * self.anchor[n]
