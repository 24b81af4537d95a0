"""What all custom calls take: leaves and then seeds as operands, the core's knobs as attributes."""

from typing import Any

import numpy as np

from cgx_ops import _native
from cgx_ops.config import Config


def halves(values: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Part operands, or what there is one of for each, into those of leaves and of seeds."""
    half = len(values) // 2
    return tuple(values[:half]), tuple(values[half:])


def knob_attributes(op: str, algorithm: str, config: Config) -> dict[str, Any]:
    """Return an op, an algorithm and the other knobs, but for bits, as cgx.h numbers them."""
    numbers = {
        "op": _native.OPS[op],
        "algorithm": _native.ALGORITHMS[algorithm],
        "rounding": _native.ROUNDINGS[config.rounding],
        "gather_bits": config.gather_bits or 0,
        "intra_bits": config.intra_bits or 0,
        "skip_incomplete_buckets": config.skip_incomplete_buckets,
        "minimal_size": config.minimal_size,
        "bucket_size": config.bucket_size,
    }
    return {knob: np.int64(number) for knob, number in numbers.items()}
