"""A Config of every compressor, for tests of the torch binding."""

from dataclasses import replace
from typing import Any

from cgx_ops import Config, InvalidArgument

_SETTINGS: tuple[dict[str, Any], ...] = (
    {"compressor": "uniform", "bits": 3, "rounding": "nearest"},
    {"compressor": "uniform", "bits": 2, "rounding": "stochastic", "rotation": 32},
    {"compressor": "levels", "bits": 1},
    {"compressor": "levels", "bits": 2, "rotation": 64, "gather_bits": 4},
    {"compressor": "sign"},
    {"compressor": "onebit"},
    {"compressor": "ternary", "clip": True},
    {"compressor": "qsgd", "bits": 6},
    {"compressor": "half"},
    {"compressor": "mxfp8"},
    {"compressor": "mxfp8_e5m2", "rounding": "stochastic"},
    {"compressor": "mxfp4", "rotation": 32},
    {"compressor": "nvfp4"},
    {"compressor": "topk", "density": 0.1},
    {"compressor": "topk", "density": 1 / 3, "value_bits": 8},
    {"compressor": "randk", "density": 0.25},
    {"compressor": "entropy", "rate": 2.0},
    {"compressor": "entropy", "rate": 3.0, "rounding": "shift"},
    {"compressor": "lossless"},
)
CONFIGS = tuple(Config(**{"bucket_size": 64, "algorithm": "sra", **own}) for own in _SETTINGS)


def _converges(config: Config) -> bool:
    try:
        replace(config, error_feedback=True)
    except InvalidArgument:
        return False
    return True


# Configs for which error feedback converges.
FEEDBACK = tuple(config for config in CONFIGS if _converges(config))
