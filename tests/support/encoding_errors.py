"""Errors of encoded values."""

import numpy as np

from cgx_ops import Config, dequantize, quantize


def squared_error(values: np.ndarray, config: Config) -> float:
    """Return the sum of the squared errors of values after they are encoded and decoded."""
    decoded = dequantize(quantize(values, config), values.size, config=config)
    return float(np.square(values.astype(np.float64) - decoded).sum())
