"""One rule set and one model for tests that compare frameworks."""

import math
from typing import Any

from cgx_ops import Config, Rules

# Different sizes, with an even first dimension, so that two ranks can split them.
SHAPES = {
    "embedding.weight": (50, 40),
    "layers.0.up.weight": (32, 40),
    "layers.0.up.bias": (32,),
    "layers.1.up.weight": (34, 40),
    "layers.1.up.bias": (34,),
    "norm.scale": (36,),
    "head.weight": (38, 40),
    "head.bias": (38,),
}
CONFIG = Config(bits=4, bucket_size=256)
RULES = Rules(
    [
        (r"layers\.1\.", {"bits": 2}),
        ("embedding", {"compressor": "topk", "density": 0.05}),
        (r"^head\.bias$", 8),
        (r"up\.weight", {"bits": 8, "bucket_size": 64}),
        ("", {"bucket_size": 128, "rotation": 32}),
    ]
)
FIELDS = (
    "bits", "bucket_size", "compressor", "density", "gather_bits", "value_bits", "rotation", "clip",
)  # fmt: skip
# The expected settings, written by hand.
EXPECTED: dict[str, dict[str, Any]] = {
    "embedding.weight": {"compressor": "topk", "density": 0.05, "bucket_size": 128, "bits": 4},
    "layers.0.up.weight": {"bits": 8, "bucket_size": 64, "rotation": 32},
    "layers.0.up.bias": {"bits": 32, "bucket_size": 128, "rotation": 32},
    "layers.1.up.weight": {"bits": 2, "bucket_size": 64, "rotation": 32},
    "layers.1.up.bias": {"bits": 2, "bucket_size": 128, "rotation": 32},
    "norm.scale": {"bits": 32, "bucket_size": 128, "rotation": 32},
    "head.weight": {"bits": 4, "bucket_size": 128, "rotation": 32},
    "head.bias": {"bits": 8, "bucket_size": 128, "rotation": 32},
}


def name_of(numel: int) -> str:
    """Return the parameter with this number of elements."""
    return next(name for name, shape in SHAPES.items() if math.prod(shape) == numel)


def settings_of(config: Config) -> dict[str, Any]:
    """Return the settings on which frameworks must agree: all except rounding."""
    return {field: getattr(config, field) for field in FIELDS}


def expected() -> dict[str, dict[str, Any]]:
    """Return the settings of every parameter."""
    return {name: settings_of(Config(**own)) for name, own in EXPECTED.items()}
