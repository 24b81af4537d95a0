"""What Deep Gradient Compression is in any framework: its settings, the warm-up, what is sparse.

A rank adds its gradients, with momentum, to what it has not sent yet, sends the largest values of
that, and keeps the rest (Lin, Han, Mao, Wang, Dally: Deep Gradient Compression, ICLR 2018).
torch/ddp/deep_gradient/ and jax/_src/transforms/deep_gradient.py do it, each in its framework's
arrays.
"""

import math
from dataclasses import dataclass
from typing import Any

from cgx_ops._core import tables
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.config import Config
from cgx_ops.errors import InvalidArgument, is_number, require_integer

# The densities of the warm-up, for a quarter of its steps each: as in the paper.
WARMUP = (0.25, 0.0625, 0.015625, 0.00390625)
COMPRESSORS = ("topk", "threshold")
_MOST_ON_GPUS = 8192  # values among which kernels choose


@dataclass(frozen=True)
class Method:
    """How gradients become what is sent; checked when it is made.

    Attributes:
        density: the share of a layer's values that are sent, more than 0 and at most 1.
        momentum: m, at least 0 and less than 1.
        nesterov: whether it is Nesterov's.
        clip: a rank's gradient of a layer is scaled down to an L2 norm of at most clip / sqrt(W),
            for W ranks; None: it is not.
        warmup_steps: steps with more than `density`, which falls in the stages of WARMUP.
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
                f"nesterov is {self.nesterov!r}, momentum {self.momentum!r}; nesterov must be True "
                "or False, and Nesterov's momentum must be more than 0"
            )
        if self.clip is not None and not (is_number(self.clip) and 0 < self.clip < math.inf):
            raise InvalidArgument(f"clip is {self.clip!r}; it must be a number above 0, or None")
        steps = require_integer("warmup_steps", self.warmup_steps, 0)
        object.__setattr__(self, "warmup_steps", steps)
        for name in ("density", "momentum", "clip"):  # Python's numbers leave dtypes as they are
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else float(value))

    def stages(self) -> list[tuple[int, float]]:
        """Return from which step on a layer is at least how dense, in order; the last: 0.

        Stage i of the four begins at step ceil(i * warmup_steps / 4).
        """
        starts = [-(-i * self.warmup_steps // len(WARMUP)) for i in range(len(WARMUP))]
        stages = [*zip(starts, WARMUP, strict=True), (self.warmup_steps, 0.0)]
        ends = [start for start, _ in stages[1:]]
        return [*(s for s, end in zip(stages, ends, strict=False) if s[0] < end), stages[-1]]

    def least_density(self, step: int) -> float:
        """Return how dense a layer is at least in a step, counted from 0."""
        return next(least for start, least in reversed(self.stages()) if start <= step)

    def limit(self, ranks: int) -> float | None:
        """Return the largest norm of one rank's gradient of a layer; None: any."""
        return None if self.clip is None else self.clip / math.sqrt(ranks)


def checked_config(config: Config) -> Config:
    """Return how values travel, if Deep Gradient Compression can send them so.

    Raises:
        InvalidArgument: it cannot, or a field says what an argument of its own says.
    """
    if config.compressor not in COMPRESSORS:
        raise InvalidArgument(
            f"compressor is {config.compressor!r}; Deep Gradient Compression sends the largest "
            "values: it must be 'topk' or 'threshold'"
        )
    if config.density is not None:
        raise InvalidArgument(
            f"Config.density is {config.density!r}; give density as an argument of its own"
        )
    if config.algorithm in ("sra", "ring"):
        raise InvalidArgument(
            f"Config.algorithm is {config.algorithm!r}, which chooses anew among sums, so that a "
            "rank does not know which of its values were sent: it must be 'auto', 'by_hosts', "
            "'one_shot' or 'hierarchical'"
        )
    if config.error_feedback is False or config.residual_decay != 1:
        raise InvalidArgument(
            f"Config.error_feedback is {config.error_feedback!r}, residual_decay "
            f"{config.residual_decay!r}; what is not sent is always kept, and all of it"
        )
    return config


def is_sparse(layer: str, own: Config, numel: int) -> bool:
    """Tell whether a layer is sent sparse; else it is averaged exact.

    Args:
        layer: its name, for errors.
        own: how it travels.
        numel: its elements.

    Raises:
        InvalidArgument: a rule has it travel in another way.
    """
    if own.bits == EXACT_BITS or numel < max(tables.SMALLEST_COMPRESSED, own.minimal_size):
        return False
    if own.compressor not in COMPRESSORS:
        raise InvalidArgument(
            f"a rule gives layer '{layer}' compressor={own.compressor!r}; Deep Gradient "
            "Compression has 'topk' and 'threshold', or bits=32 (exact)"
        )
    return True


def sparse_knobs(
    method: Method, own: Config, numel: int, step: int, *, gpu: bool
) -> dict[str, Any]:
    """Return the fields of Config by which a sparse layer is sent.

    Args:
        method: of all layers.
        own: how this one travels.
        numel: its elements, of all of which the largest are chosen.
        step: counted from 0.
        gpu: whether it is on a GPU, which chooses among fewer.
    """
    return {
        "compressor": own.compressor,
        "density": max(own.density or method.density, method.least_density(step)),
        "value_bits": own.value_bits,
        "bucket_size": min(numel, _MOST_ON_GPUS) if gpu else numel,
    }
