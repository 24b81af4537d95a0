"""What all custom calls take: leaves and then seeds as operands; an op and a config."""

from typing import Any

import numpy as np

from cgx_ops import _native
from cgx_ops.config import Config


def halves(values: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Part operands, or what there is one of for each, into those of leaves and of seeds."""
    half = len(values) // 2
    return tuple(values[:half]), tuple(values[half:])


def call_attributes(op: str, config: Config) -> dict[str, Any]:
    """Return what GetSettings of xla_ffi/core.h reads."""
    return {"op": np.int64(_native.OPS[op]), "config": config.text}
