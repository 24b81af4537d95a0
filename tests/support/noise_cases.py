"""Helpers of the noise tests: values, and bounds for independent errors."""

from typing import Any

import numpy as np
import numpy.typing as npt

NUMEL = 1 << 16

Errors = npt.NDArray[np.float64]


def values(seed: int = 0) -> npt.NDArray[np.float32]:
    """Return values that are equal on all ranks, so that only noise can differ."""
    return np.random.default_rng(seed).standard_normal(NUMEL).astype(np.float32)


def errors(result: Any, exact: Any) -> Errors:
    """Return a result's errors, flat."""
    return (np.asarray(result, np.float64) - np.asarray(exact, np.float64)).ravel()


def check_independent(a: Errors, b: Errors) -> None:
    """Fail if two sums' errors are correlated, or the variance of their mean is not as expected.

    The correlation of n independent pairs has mean 0 and standard deviation 1/sqrt(n); five of
    these are exceeded once in 1.7 million times. The variance of the mean of two, relative to
    independent ones, is 1 + c with c = 2 E[ab] / (E[a^2] + E[b^2]). This is the correlation again
    if both have the same variance. A shared stream gives 1 for equal values.
    """
    bound = 5 / np.sqrt(a.size)
    assert min(np.abs(a).max(), np.abs(b).max()) > 0, "nothing was rounded"
    correlation = np.corrcoef(a, b)[0, 1]
    assert abs(correlation) <= bound, f"correlation {correlation:.4f}, at most {bound:.4f}"
    ratio = ((a + b) ** 2).mean() / ((a**2).mean() + (b**2).mean())
    assert abs(ratio - 1) <= bound, f"variance {ratio:.4f} times that of independent errors"
