"""PowerSGD (Vogels et al., NeurIPS 2019) of one matrix, for all ranks at once, in float64.

Not to the bit: linear algebra rounds as its library likes. The spaces that factors span, and so
averages and residuals, are the same but for that.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[Any]


class PowerSGD:
    """One matrix of every rank, step by step.

    Attributes:
        q: what the next step begins with, (columns, rank).
        residuals: of each rank.
    """

    def __init__(
        self, ranks: int, rows: int, first_q: Floats, feedback: Literal["local", "torch"]
    ) -> None:
        self.q = np.asarray(first_q, np.float64)
        self.feedback = feedback
        self.residuals = [np.zeros((rows, len(first_q))) for _ in range(ranks)]

    def step(self, gradients: Sequence[Floats]) -> Floats:
        """Return the average of the ranks' gradients, as all ranks get it."""
        values = [
            np.asarray(gradient, np.float64) + residual
            for gradient, residual in zip(gradients, self.residuals, strict=True)
        ]
        basis = np.linalg.qr(self.q)[0]
        p = np.linalg.qr(np.mean([value @ basis for value in values], 0))[0]
        own = [value.T @ p for value in values]
        mean = np.mean(own, 0)
        self.q = mean if mean.any() else basis
        average = p @ mean.T
        if self.feedback == "local":
            self.residuals = [value - p @ q.T for value, q in zip(values, own, strict=True)]
        else:
            self.residuals = [value - average for value in values]
        return average


def given_up(
    gradients: Sequence[Floats], old: Sequence[Floats], average: Floats, new: Sequence[Floats]
) -> Floats:
    """Return what of all ranks' gradients and residuals is neither averaged nor kept."""
    ranks = len(gradients)
    return (
        np.sum(gradients, 0, np.float64)
        + np.sum(old, 0, np.float64)
        - (np.sum(new, 0, np.float64) + ranks * np.asarray(average, np.float64))
    )


def given_up_bound(
    gradients: Sequence[Floats], old: Sequence[Floats], rank: int, rounded: float = 0.0
) -> Floats:
    """Return how much may be given up with feedback "local": what float32 rounds, by element.

    A rank's value M, rounded once, becomes P q^T and a residual: r products, sums, a difference.
    Rows of P are at most 1 long, so that each of P q^T, and the terms of its sum together, are at
    most as long as M's column. The average's P q^T takes r operations more, and its q a sum over
    the ranks and a quotient. So fewer than 2 r + ranks + 4 operations of 2^-24 each see a rank's
    element and its column. Columns of P are only orthonormal to about 2^-24 r; twice covers it.

    Args:
        gradients: of each rank.
        old: residuals of each rank.
        rank: r.
        rounded: what of the average its own dtype rounds: 2^-9 of bfloat16.
    """
    values = [np.abs(np.asarray(g, np.float64) + e) for g, e in zip(gradients, old, strict=True)]
    sizes = np.sum([value + np.linalg.norm(value, axis=0) for value in values], 0)
    return (2 * (2 * rank + len(gradients) + 4) * 2.0**-24 + rounded) * sizes
