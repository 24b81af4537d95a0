"""PowerSGD (Vogels et al., NeurIPS 2019) of one matrix, for all ranks, in float64.

Not bit for bit, because linear algebra rounds differently in each library. Otherwise the spaces
spanned by the factors, and so averages and residuals, are the same.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[Any]


class PowerSGD:
    """One matrix of every rank, step by step.

    Attributes:
        q: the initial q of the next step, (columns, rank).
        residuals: the residual of each rank.
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
    """Return the part of all ranks' gradients and residuals that is neither averaged nor kept."""
    ranks = len(gradients)
    return (
        np.sum(gradients, 0, np.float64)
        + np.sum(old, 0, np.float64)
        - (np.sum(new, 0, np.float64) + ranks * np.asarray(average, np.float64))
    )


def given_up_bound(
    gradients: Sequence[Floats], old: Sequence[Floats], rank: int, rounded: float = 0.0
) -> Floats:
    """Return a bound of given_up() with feedback "local", by element, from float32 rounding.

    A rank's value M, rounded once, becomes P q^T and a residual: r products, sums, a difference.
    Rows of P have length at most 1, so each of P q^T, and the sum of its terms' magnitudes, is at
    most as long as M's column. The average's P q^T needs r more operations, and its q a sum over
    the ranks and a quotient. So a rank's element and its column pass fewer than 2 r + ranks + 4
    operations of 2^-24 each. Columns of P are only orthonormal to about 2^-24 r; twice covers it.

    Args:
        gradients: the gradients of each rank.
        old: the residuals of each rank.
        rank: r.
        rounded: relative rounding error of the average's own dtype: 2^-9 for bfloat16.
    """
    values = [np.abs(np.asarray(g, np.float64) + e) for g, e in zip(gradients, old, strict=True)]
    sizes = np.sum([value + np.linalg.norm(value, axis=0) for value in values], 0)
    return (2 * (2 * rank + len(gradients) + 4) * 2.0**-24 + rounded) * sizes
