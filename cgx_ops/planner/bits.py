"""In how many bits each tensor travels: the fewest bytes at the error of uniform bits.

    statistic()        one number of a tensor, from which its error follows for all bits; the core
                       measures it, as its encoder does (cgx_ops/_core/codec.py)
    predicted_error()  that error
    allocate_bits()    bits for all tensors, with an error budget

L-GreCo runs the codec once for every tensor and candidate, and searches a table of 10,000 error
steps. One number is enough where the error has a form. Min-max quantization in b bits has 2^b - 1
steps between a bucket's minimum and maximum, and a value is off by a part of a step that is spread
evenly: so a bucket of B values with range R loses B R^2 / 12 / (2^b - 1)^2 by rounding to nearest
or by shift, and twice that at random. For the fixed levels of "levels" the error is a share of the
energy that is known for values that are distributed normally.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.config import Config
from cgx_ops.errors import InvalidArgument, Unsupported
from cgx_ops.planner.cheapest import cheapest

Budget = Literal["squared", "norm"]

# What "levels" loses of the energy of a bucket of normally distributed values, by bits: the error
# of the best quantizer of so many levels (Max 1960, Lloyd 1982), measured of the kernels.
_LEVELS = {1: 0.3627, 2: 0.1174, 3: 0.0346, 4: 0.0095}
# Below 2 bits the prediction for min-max is off by a factor of two, and nothing trains with it.
_CHOICES: dict[str, tuple[int, ...]] = {"uniform": (2, 3, 4, 5, 6, 7, 8), "levels": (1, 2, 3, 4)}


def predicted_error(statistic: float, bits: int, config: Config | None = None) -> float:
    """Return the expected squared error of encoding and decoding a tensor once, in its units.

    Within 10 % of what is measured from 3 bits on for normal, Laplace, Student's t (3) and uniform
    values; in 2 bits within 20 %, in 1 bit up to twice as much. "levels": of normal values only;
    heavier tails lose up to ten times as much, unless they are rotated.

    Args:
        statistic: of the tensor, as statistic() of the same config returns it.
        bits: 1-8 ("levels" 1-4), or 32: no error.
        config: its compressor and rounding count; None: Config(), which rounds at random.

    Raises:
        InvalidArgument: bits out of range.
        Unsupported: see statistic().
    """
    config = _served(config)
    if bits == EXACT_BITS:
        return 0.0
    config = config.with_own(bits=bits)  # which checks them
    if config.compressor == "levels":
        return statistic * _LEVELS[bits]
    at_random = config.rounding in (None, "stochastic")
    return (2 if at_random else 1) * statistic / (2**bits - 1) ** 2


def allocate_bits(
    statistics: Sequence[float],
    numels: Sequence[int],
    budget: Budget = "squared",
    *,
    config: Config | None = None,
    choices: Sequence[int] | None = None,
    fixed: Mapping[int, int] | None = None,
    alpha: float = 1.0,
) -> list[int]:
    """Return the bits of each tensor: the fewest in all, at no more error than uniform bits.

    Within 0.01 bit a value of the best there is, and never more than uniform bits. Depends on the
    arguments alone. Where all tensors lose as much a value, uniform is best and nothing is gained;
    the wider they differ, the more.

    Args:
        statistics: of each tensor, see statistic(); the same on all ranks if the bits must be.
        numels: values of each tensor.
        budget: what may not exceed that of uniform bits: "squared", the sum of the tensors' squared
            errors, which is the squared error of all; "norm", the sum of their norms (L-GreCo's),
            which spares large tensors more.
        config: its bits are the uniform ones, and its compressor and rounding make the errors;
            None: Config(), 4 bits.
        choices: bits that tensors may have; None: 2-8, of "levels" 1-4. config.bits is added.
        fixed: bits that the user sets, by the tensor's number; they count on neither side.
        alpha: the budget, as a multiple of the error of uniform bits: more than 0.

    Raises:
        InvalidArgument: lists of different lengths; a statistic that is negative or not finite;
            values out of their range.
        Unsupported: see statistic().
    """
    config = _served(config)
    fixed = fixed or {}
    _check(statistics, numels, budget, fixed, alpha)
    allowed = _CHOICES[config.compressor] if choices is None else choices
    uniform = config.bits
    options = sorted({*allowed, uniform})
    free = [i for i in range(len(numels)) if i not in fixed]

    def error(tensor: int, bits: int) -> float:
        squared = predicted_error(statistics[tensor], bits, config)
        return squared if budget == "squared" else math.sqrt(squared)

    for bits in fixed.values():
        predicted_error(0.0, bits, config)  # checks them
    errors = np.array([[error(i, b) for b in options] for i in free]).reshape(-1, len(options))
    most = alpha * math.fsum(error(i, uniform) for i in free)
    found = cheapest(errors, [int(numels[i]) for i in free], options, most)
    total = sum(numels[i] * b for i, b in zip(free, found, strict=True))
    if alpha >= 1 and total > uniform * sum(numels[i] for i in free):
        found = [uniform] * len(free)
    return [{**fixed, **dict(zip(free, found, strict=True))}[i] for i in range(len(numels))]


def _served(config: Config | None) -> Config:
    """Return the config if its error can be predicted."""
    config = Config() if config is None else config
    if config.compressor not in _CHOICES:
        raise Unsupported(
            f"compressor is {config.compressor!r}; errors are predicted of 'uniform' and 'levels'"
        )
    if config.rotation is not None:
        raise Unsupported("errors of rotated values are not predicted: leave rotation out")
    return config


def _check(
    statistics: Sequence[float],
    numels: Sequence[int],
    budget: str,
    fixed: Mapping[int, int],
    alpha: float,
) -> None:
    if len(statistics) != len(numels):
        raise InvalidArgument(
            f"there are {len(statistics)} statistics and {len(numels)} numels; there must be one "
            "of each for every tensor"
        )
    for name, entries in (("statistics", statistics), ("numels", numels)):
        for i, entry in enumerate(entries):
            if not 0 <= entry < math.inf:
                raise InvalidArgument(f"{name}[{i}] is {entry!r}; it must be a number >= 0")
    if budget not in ("squared", "norm"):
        raise InvalidArgument(f"budget is {budget!r}; it must be 'squared' or 'norm'")
    for i in fixed:
        if not 0 <= i < len(numels):
            raise InvalidArgument(f"fixed has tensor {i}; there are {len(numels)}, from 0")
    if not 0 < alpha < math.inf:
        raise InvalidArgument(f"alpha is {alpha!r}; it must be more than 0")
