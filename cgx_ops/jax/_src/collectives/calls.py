"""Operands and attributes that all custom calls share: leaves, seeds, residuals, configs."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from cgx_ops._core import tables
from cgx_ops.config import Config


def parted(values: Any, feedback: bool = False) -> tuple[list[Any], list[Any], list[Any]]:
    """Split operands, or values for each operand, into those of leaves, seeds and residuals.

    There are as many of each, but no residuals without `feedback`.
    """
    count = len(values) // (3 if feedback else 2)
    return list(values[:count]), list(values[count : 2 * count]), list(values[2 * count :])


def call_attributes(op: str, configs: Sequence[Config]) -> dict[str, Any]:
    """Return the attributes that GetSettings and LeafConfigs of xla_ffi/core.h read.

    Equal configs share a line of text.
    """
    texts = [str(config) for config in configs]
    lines = {text: line for line, text in enumerate(dict.fromkeys(texts))}
    return {
        "op": np.int64(tables.OPS[op]),
        "config": "\n".join(lines),
        "config_of": np.asarray([lines[text] for text in texts], np.int64),
    }
