"""What all calls take: leaves, seeds and perhaps residuals as operands; an op and a config."""

from typing import Any

import numpy as np

from cgx_ops import _native
from cgx_ops.config import Config


def parted(values: Any, feedback: bool = False) -> tuple[list[Any], list[Any], list[Any]]:
    """Part operands, or what there is one of for each: of leaves, of seeds, of residuals.

    There are as many of each, but without `feedback` no residuals.
    """
    count = len(values) // (3 if feedback else 2)
    return list(values[:count]), list(values[count : 2 * count]), list(values[2 * count :])


def call_attributes(op: str, config: Config) -> dict[str, Any]:
    """Return what GetSettings of xla_ffi/core.h reads."""
    return {"op": np.int64(_native.OPS[op]), "config": config.text}
