"""The expected quantization error of a tensor as one number, by which bits are allocated."""

from __future__ import annotations

import numpy as np

from .scales import largest_magnitude, prescale, sums
from .values import Values, widen


def statistic(values: Values, bucket_size: int, *, ranges: bool) -> float:
    """Return the sum over buckets of n values of n (max - min)^2 / 12, or the sum of squares.

    Computed in fp64, one bucket after another; a range is the difference in fp32, and squares are
    added in the order of every scale. NaN if a value or a range is not finite.
    """
    x = widen(values)
    total = np.float64(0)
    for start in range(0, x.size, bucket_size):
        bucket = x[None, start : start + bucket_size]
        with np.errstate(over="ignore", invalid="ignore"):
            extent = bucket.max() - bucket.min()
        if not np.isfinite(extent if ranges else bucket).all():
            return float("nan")
        if ranges:
            total += np.float64(bucket.size) * (np.float64(extent) * np.float64(extent))
        else:
            down, up = prescale(largest_magnitude(bucket))
            scaled = bucket * down
            total += sums(scaled * scaled)[0] * (np.float64(up[0]) * np.float64(up[0]))
    return float(total / 12 if ranges else total)
