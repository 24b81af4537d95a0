"""What CompressedAdamW of torch and compressed_adamw of JAX share: settings and schedule.

1. settings
2. bounds and weights
3. the schedule of the variance
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.config import Config
from cgx_ops.errors import InvalidArgument, require_integer

WarmupSteps = int | Literal["auto"]

FIRST_CHECK = 8  # the shortest warm-up with "auto"
STEPS_OF_OCTAVE = 16  # level() counts these
LARGEST_WEIGHT = 0.25  # of one refresh, so that v is an average of several gradients
MOMENTUM = Config(compressor="levels", bits=1, rotation=32)

# ---- 1. settings ---------------------------------------------------------------------------------


def checked_warmup_steps(caller: str, steps: Any) -> WarmupSteps:
    """Return a number of warm-up steps, or "auto".

    Raises:
        InvalidArgument: It is another text, or no integer of at least 1.
    """
    if isinstance(steps, str) and steps == "auto":
        return "auto"
    if isinstance(steps, str):
        raise InvalidArgument(
            f"{caller}: warmup_steps is {steps!r}; it must be 'auto' or an integer of at least 1"
        )
    return require_integer(f"{caller}: warmup_steps", steps, 1)


def checked_warmup_config(caller: str, config: Any, momentum: Config) -> Config:
    """Return the settings of gradients in the warm-up and in refreshes.

    Args:
        caller: For errors.
        config: The user's. None: 8 bits, with the algorithm of the momentum.
        momentum: Settings of the momentum.

    Raises:
        InvalidArgument: It is no Config, has error feedback, or sends votes.
    """
    if config is None:
        return Config(bits=8, error_feedback=False, algorithm=momentum.algorithm)
    if not isinstance(config, Config):
        raise InvalidArgument(f"{caller}: warmup_config is {config!r}; it must be a Config or None")
    if config.bits != EXACT_BITS and config.compressor == "sign":
        raise InvalidArgument(
            f"{caller}: warmup_config has compressor 'sign', whose votes have no magnitude: use "
            "Config(bits=8, error_feedback=False)"
        )
    if config.keeps_residuals:
        raise InvalidArgument(
            f"{caller}: warmup_config has error feedback, but the residuals belong to the momentum:"
            " add error_feedback=False"
        )
    return config


def config_of_gradients(config: Config, momentum: Config) -> Config:
    """Return the settings of one parameter's gradients, exact if its momentum is exact.

    Args:
        config: The result of checked_warmup_config().
        momentum: Settings of the parameter's momentum.
    """
    if momentum.bits == EXACT_BITS:
        return config.with_own(bits=EXACT_BITS)
    if momentum.is_exact:
        return config.with_own(compressor=momentum.compressor)
    return config.with_own(minimal_size=max(config.minimal_size, momentum.minimal_size))


# ---- 2. bounds and weights -----------------------------------------------------------------------


def longest_update(beta1: float, beta2: float) -> float:
    """Return the largest |m| / sqrt(v) that AdamW reaches with any gradients.

    m and v weight the gradient of k steps ago by (1 - beta1) beta1^k and (1 - beta2) beta2^k, so
    the bound follows from the Cauchy-Schwarz inequality. It exists if beta1^2 < beta2. Otherwise
    the ratio beta1^2 / beta2 is replaced by beta2.
    """
    ratio = min(beta1 * beta1, beta2 * beta2) / beta2 if beta2 else 0.0
    return (1 - beta1) / math.sqrt((1 - beta2) * (1 - ratio))


# ---- 3. the schedule of the variance -------------------------------------------------------------


@dataclass(frozen=True)
class VarianceSchedule:
    """When the next gradients are averaged, to update the variance v. Equal on all ranks.

    Attributes:
        due: the step of the next update of v, from 0; -1 for none.
        interval: steps between updates; 0 in the warm-up, which updates v in each step.
        done: updates with this interval so far.
        level: in the warm-up with "auto": mean logarithm of v at the last check; None before.
    """

    due: int = 0
    interval: int = 0
    done: int = 0
    level: int | None = None

    def kept(self, beta2: float) -> float:
        """Return the factor of the old v in the next update.

        A refresh has the weight of the steps since the last update, at most LARGEST_WEIGHT.
        """
        return max(beta2 ** max(self.interval, 1), min(beta2, 1 - LARGEST_WEIGHT))

    def advanced(self, step: int, *, ends: bool, refreshes: int) -> "VarianceSchedule":
        """Return the schedule after an update of v.

        Args:
            step: the step of the update, from 0.
            ends: whether the warm-up ends with this step.
            refreshes: updates with each interval; 0 for none after the warm-up.
        """
        if self.interval == 0 and not ends:
            return replace(self, due=step + 1)
        if self.interval == 0:
            return VarianceSchedule(step + 1 if refreshes else -1, 1)
        doubles = self.done + 1 >= refreshes
        interval = self.interval * 2 if doubles else self.interval
        return VarianceSchedule(step + interval, interval, 0 if doubles else self.done + 1)


def kept_by_interval(beta2: float) -> list[float]:
    """Return VarianceSchedule.kept() for intervals of 1, 2, 4, ... steps; the last for all more."""
    found = [VarianceSchedule(interval=2**i).kept(beta2) for i in range(31)]
    return found[: found.index(found[-1]) + 1]


def is_check(steps: int) -> bool:
    """Return whether "auto" looks at v after this number of steps: a power of two."""
    return steps >= FIRST_CHECK // 2 and steps & (steps - 1) == 0


def has_settled(level: int, before: int | None, numel: int) -> bool:
    """Return whether v changed by less than a factor of two since the last check.

    Args:
        level: sum over all elements of the logarithm of v, in 1/STEPS_OF_OCTAVE octaves.
        before: the same at the last check; None: there was none.
        numel: number of elements.
    """
    return before is not None and abs(level - before) < STEPS_OF_OCTAVE * numel
