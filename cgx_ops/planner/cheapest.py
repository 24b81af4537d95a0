"""Choose bits for each tensor: the fewest in total whose errors sum to at most a budget.

This is a multiple-choice knapsack problem. Errors are convex in bits. So steps (one tensor to the
next lower bits), taken in the order of error per saved bit, are optimal at every total error that
they reach (L-GreCo's problem by Lagrange multipliers). Between two such points the result is off
by at most one step. That would be much for a step of a large tensor, so:

  1. Large tensors: search all combinations that may be optimal, as pairs of bits and error.
  2. Small tensors: take steps in order, as far as the rest of the budget goes.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

# Shares of all values. Together they cost less than 0.01 bit per value.
_LARGE = 0.004  # a tensor with more is large, if choices are one bit apart
_GAIN = 0.002  # combinations that can save less than this are dropped
_GRID = 0.002  # combinations whose bits differ by less than this are merged

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]


def cheapest(
    errors: _Floats, numels: Sequence[int], choices: Sequence[int], budget: float
) -> list[int]:
    """Return the bits of each tensor.

    Args:
        errors: Array (tensors, choices) with the error of each tensor in each choice; falling and
            convex in the bits.
        numels: Values of each tensor.
        choices: Bits, in rising order.
        budget: Largest sum of errors, up to its ninth digit. If no combination is within it, all
            tensors get the most bits.

    Returns:
        Entries of `choices`. Their sum, weighted by numels, is within 0.01 bit per value of the
        optimum.
    """
    budget *= 1 + 1e-9
    total = sum(numels)
    widest = max((more - fewer for fewer, more in pairwise(choices)), default=1)
    most = _LARGE * total / widest  # values of a small tensor
    large = sorted((i for i, n in enumerate(numels) if n > most), key=lambda i: (-numels[i], i))
    small = [i for i, n in enumerate(numels) if n <= most]
    grid = max(1, math.floor(_GRID * total / max(1, len(large))))
    # Combinations of the first k large tensors: bits and error; and, to walk back, the index of the
    # combination of k - 1 and the last choice.
    bits, error = np.zeros(1, np.int64), np.zeros(1)
    history: list[tuple[_Ints, _Ints]] = []
    best, best_at = math.inf, (0, 0)
    for k in range(len(large) + 1):
        rest = _Steps(errors, numels, choices, [*large[k:], *small])
        reached = bits + rest.taken(budget - error)
        if reached.min() < best:
            best, best_at = float(reached.min()), (k, int(reached.argmin()))
        hopeful = np.flatnonzero(bits + rest.at_least(budget - error) < best - _GAIN * total)
        if k == len(large) or not len(hopeful):
            break
        longer = bits[hopeful, None] + numels[large[k]] * np.array(choices)
        worse = error[hopeful, None] + errors[large[k]]
        kept = _front(longer.ravel(), worse.ravel(), grid)
        bits, error = longer.ravel()[kept], worse.ravel()[kept]
        history.append((hopeful[kept // len(choices)], kept % len(choices)))
    return _walk_back(errors, numels, choices, budget, large, small, history, best_at)


def _front(bits: _Ints, errors: _Floats, grid: int) -> _Ints:
    """Return the indices of combinations on the Pareto front of bits (in `grid`s) and error."""
    order = np.lexsort((errors, bits // grid))
    least = np.minimum.accumulate(errors[order])
    return order[np.concatenate([[True], least[1:] < least[:-1]])]


def _walk_back(
    errors: _Floats,
    numels: Sequence[int],
    choices: Sequence[int],
    budget: float,
    large: list[int],
    small: list[int],
    history: list[tuple[_Ints, _Ints]],
    best_at: tuple[int, int],
) -> list[int]:
    """Return the bits of combination `best_at`, of k large tensors; the rest by steps."""
    found = [choices[-1]] * len(numels)
    k, combination = best_at
    left = budget
    for at in range(k - 1, -1, -1):
        sources, chosen = history[at]
        choice = int(chosen[combination])
        found[large[at]] = choices[choice]
        left -= errors[large[at], choice]
        combination = int(sources[combination])
    for tensor, bits in _Steps(errors, numels, choices, [*large[k:], *small]).fill(left):
        found[tensor] = bits
    return found


class _Steps:
    """Steps of some tensors from the most bits to the fewest, the cheapest error first."""

    def __init__(
        self, errors: _Floats, numels: Sequence[int], choices: Sequence[int], tensors: list[int]
    ) -> None:
        self.tensors, self.choices = np.array(tensors, np.int64), np.array(choices)
        of_these, sizes = errors[self.tensors], np.array(numels, np.int64)[self.tensors]
        # One row per tensor, one column per step, starting with the most bits.
        self.more = of_these[:, -2::-1] - of_these[:, :0:-1]
        self.saved = sizes[:, None] * np.diff(self.choices)[::-1]
        price = self.more / np.maximum(self.saved, 1)
        steps = np.broadcast_to(np.arange(price.shape[1]), price.shape)
        self.order = np.lexsort((steps.ravel(), price.ravel()))
        first = of_these[:, -1].cumsum()[-1] if tensors else 0.0
        self.errors = np.concatenate([[0.0], self.more.ravel()[self.order].cumsum()]) + first
        saved = np.concatenate([[0], self.saved.ravel()[self.order].cumsum()])
        self.bits = sizes.sum() * self.choices[-1] - saved

    def taken(self, budget: _Floats) -> _Floats:
        """Return the bits after the steps that fit each budget; infinity if none fits."""
        steps = np.searchsorted(self.errors, budget, side="right") - 1
        return np.where(steps < 0, math.inf, self.bits[steps])

    def at_least(self, budget: _Floats) -> _Floats:
        """Return a lower bound of the bits within each budget, from fractional steps."""
        bound = np.interp(budget, self.errors, self.bits)
        return np.where(budget < self.errors[0], math.inf, bound)

    def fill(self, budget: float) -> list[tuple[int, int]]:
        """Return tensors and their bits after all steps that fit, in order."""
        columns = self.more.shape[1]
        level = [0] * len(self.tensors)
        left = budget - self.errors[0]
        for at in self.order.tolist():
            row, step = divmod(at, columns)
            if level[row] == step and self.more[row, step] <= left:
                left -= self.more[row, step]
                level[row] += 1
        return [
            (int(t), int(self.choices[-1 - k])) for t, k in zip(self.tensors, level, strict=True)
        ]
