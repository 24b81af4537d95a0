"""Deep Gradient Compression for any framework: settings, warm-up, and which layers are sparse.

Each rank adds its gradients, with momentum, to its unsent values, sends the largest of them, and
stores the rest (Lin, Han, Mao, Wang, Dally: Deep Gradient Compression, ICLR 2018).
torch/ddp/deep_gradient/ and jax/_src/transforms/deep_gradient.py implement it with the arrays of
their frameworks.
"""

import math
from dataclasses import dataclass
from typing import Any

from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.config import Config
from cgx_ops.errors import InvalidArgument, is_number, require_integer

# The densities of the warm-up, each for a quarter of its steps, as in the paper.
WARMUP = (0.25, 0.0625, 0.015625, 0.00390625)
_MOST_ON_GPUS = 8192  # largest bucket of the GPU kernels


@dataclass(frozen=True)
class Method:
    """The settings of the method; checked on construction.

    Attributes:
        density: Share of a layer's values that are sent, more than 0 and at most 1.
        momentum: The momentum, at least 0 and less than 1.
        nesterov: Whether it is Nesterov's momentum.
        clip: A rank's gradient of a layer is scaled to an L2 norm of at most clip / sqrt(W), for W
            ranks. None: no clipping.
        warmup_steps: Number of steps with a higher density, which falls in the stages of WARMUP.
    """

    density: float
    momentum: float
    nesterov: bool
    clip: float | None
    warmup_steps: int

    def __post_init__(self) -> None:
        if not is_number(self.density) or not 0 < self.density <= 1:
            raise InvalidArgument(
                f"density is {self.density!r}; it must be more than 0 and at most 1"
            )
        if not is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise InvalidArgument(
                f"momentum is {self.momentum!r}; it must be at least 0 and less than 1"
            )
        if type(self.nesterov) is not bool or (self.nesterov and not self.momentum):
            raise InvalidArgument(
                f"nesterov is {self.nesterov!r} and momentum is {self.momentum!r}; nesterov must "
                "be True or False, and Nesterov's momentum must be more than 0"
            )
        if self.clip is not None and not (is_number(self.clip) and 0 < self.clip < math.inf):
            raise InvalidArgument(f"clip is {self.clip!r}; it must be a number above 0, or None")
        steps = require_integer("warmup_steps", self.warmup_steps, 0)
        object.__setattr__(self, "warmup_steps", steps)
        for name in ("density", "momentum", "clip"):  # Python's numbers do not change dtypes
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else float(value))

    def stages(self) -> list[tuple[int, float]]:
        """Return pairs (first step, least density), in order; the last density is 0.

        Stage i of the four starts at step ceil(i * warmup_steps / 4).
        """
        starts = [-(-i * self.warmup_steps // len(WARMUP)) for i in range(len(WARMUP))]
        stages = [*zip(starts, WARMUP, strict=True), (self.warmup_steps, 0.0)]
        ends = [start for start, _ in stages[1:]]
        return [*(s for s, end in zip(stages, ends, strict=False) if s[0] < end), stages[-1]]

    def least_density(self, step: int) -> float:
        """Return the least density of a layer in a step, counted from 0."""
        return next(least for start, least in reversed(self.stages()) if start <= step)

    def limit(self, ranks: int) -> float | None:
        """Return the largest norm of one rank's gradient of a layer; None for no limit."""
        return None if self.clip is None else self.clip / math.sqrt(ranks)


def checked_config(config: Config) -> Config:
    """Return the config if Deep Gradient Compression can use it.

    Raises:
        InvalidArgument: It cannot, or a field duplicates an argument of the method.
    """
    if config.compressor != "topk":
        raise InvalidArgument(
            f"compressor is {config.compressor!r}; Deep Gradient Compression sends the largest "
            "values: it must be 'topk'"
        )
    if config.density is not None:
        raise InvalidArgument(
            f"Config.density is {config.density!r}; give density as an argument, not in the Config"
        )
    if config.algorithm in ("sra", "ring"):
        raise InvalidArgument(
            f"Config.algorithm is {config.algorithm!r}, which selects again among the sums, so "
            "that a rank cannot track which of its values were sent: it must be 'auto', "
            "'by_hosts', 'one_shot' or 'hierarchical'"
        )
    if config.error_feedback is False or config.residual_decay != 1:
        raise InvalidArgument(
            f"Config.error_feedback is {config.error_feedback!r} and residual_decay is "
            f"{config.residual_decay!r}; Deep Gradient Compression always stores all unsent "
            "values: leave both out"
        )
    return config


def is_sparse(layer: str, own: Config, numel: int) -> bool:
    """Return whether a layer is sent sparse; otherwise it is averaged exact.

    Args:
        layer: Name of the layer, for errors.
        own: Its Config.
        numel: Its number of elements.

    Raises:
        InvalidArgument: A rule sets another compressor.
    """
    if own.bits == EXACT_BITS or own.is_short(numel):
        return False
    if own.compressor != "topk":
        raise InvalidArgument(
            f"a rule gives layer '{layer}' compressor={own.compressor!r}; Deep Gradient "
            "Compression supports 'topk' and bits=32 (exact)"
        )
    return True


def sparse_knobs(
    method: Method, own: Config, numel: int, step: int, *, gpu: bool
) -> dict[str, Any]:
    """Return the fields of Config that the method sets for a sparse layer.

    Args:
        method: The settings of all layers.
        own: The Config of this layer.
        numel: Its number of elements; the largest of all of them are sent.
        step: The step, counted from 0.
        gpu: Whether the layer is on a GPU, where selection works in smaller buckets.
    """
    return {
        "density": max(own.density or method.density, method.least_density(step)),
        "bucket_size": min(numel, _MOST_ON_GPUS) if gpu else numel,
    }
