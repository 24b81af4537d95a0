"""Choose the bits of each tensor: the fewest bytes at the error of uniform bits.

    statistic()        one number per tensor, from which its error follows for any bits; the core
                       measures it (cgx_ops/_core/codec.py)
    predicted_error()  the error
    allocate_bits()    bits for all tensors, with an error budget

L-GreCo runs the codec for each tensor and number of bits, and searches a table of 10,000 error
steps. One number is enough if the error has a closed form. Min-max quantization in b bits has
2^b - 1 steps between the minimum and the maximum of a bucket. The rounding error is spread evenly
over a step. So a bucket of B values with range R has the squared error B R^2 / 12 / (2^b - 1)^2
with nearest or shift rounding, and twice that with stochastic rounding. For the fixed levels of
"levels" the error is a share of the energy, which is known for normally distributed values. The
errors and the rates of "entropy" are in rates.py.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.config import Config
from cgx_ops.errors import InvalidArgument, Unsupported
from cgx_ops.planner.cheapest import cheapest
from cgx_ops.planner.rates import Budget, check_tensors, error_share

# The error of "levels" as a share of the energy of normally distributed values, by bits: that of
# the optimal quantizer (Max 1960, Lloyd 1982), as measured with the kernels.
_LEVELS = {1: 0.3627, 2: 0.1174, 3: 0.0346, 4: 0.0095}
# In 1 bit the prediction for min-max is off by a factor of two, and models do not train.
_CHOICES: dict[str, tuple[int, ...]] = {"uniform": (2, 3, 4, 5, 6, 7, 8), "levels": (1, 2, 3, 4)}


def predicted_error(statistic: float, bits: float, config: Config | None = None) -> float:
    """Return the expected squared error of encoding and decoding a tensor once.

    It is within 10 % of the measured error from 3 bits on for normal, Laplace, Student's t (3) and
    uniform values. In 2 bits it is within 20 %; in 1 bit the error may be twice as large. For
    "levels" it holds for normal values; without rotation, values with heavier tails have up to ten
    times the error. For "entropy" it holds within 4 % for normal values in blocks of 65,536.
    Laplace and Student's t (3) values have 0.6 to 0.9 times that error.

    Args:
        statistic: The tensor's statistic(), with the same config.
        bits: 1-8 ("levels": 1-4; "entropy": the rate, 0.25-8), or 32, which has no error.
        config: Its compressor and rounding are used. None: `Config()`, with stochastic rounding.

    Raises:
        InvalidArgument: The bits are out of range.
        Unsupported: The error of this config cannot be predicted; see statistic().

    Example:
        >>> from cgx_ops.planner import predicted_error
        >>> predicted_error(225.0, 4), predicted_error(225.0, 32)
        (2.0, 0.0)
    """
    config = _served(config)
    if bits == EXACT_BITS:
        return 0.0
    if config.compressor == "entropy":
        config = config.with_own(rate=bits)  # with_own() checks the rate
        return statistic * error_share(bits, config)
    config = config.with_own(bits=bits)  # with_own() checks the bits
    if config.compressor == "levels":
        return statistic * _LEVELS[config.bits]
    at_random = config.rounding in (None, "stochastic")
    return (2 if at_random else 1) * statistic / (2**config.bits - 1) ** 2


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
    """Return the bits of each tensor: the fewest in total, with no more error than uniform bits.

    The total is within 0.01 bit per value of the optimum, and never more than that of uniform bits.
    It depends only on the arguments. The more the tensors differ in their error per value, the more
    it saves. If all have the same error per value, uniform bits are best.

    The compressor "entropy" has rates instead of bits: see allocate_rates().

    Args:
        statistics: The statistic() of each tensor, equal on all ranks.
        numels: Values of each tensor.
        budget: The error that must not exceed that of uniform bits: "squared", the total squared
            error; or "norm", the sum of the tensors' error norms (as in L-GreCo), which gives large
            tensors fewer bits.
        config: Its bits are the uniform bits; its compressor and rounding determine the errors.
            None: `Config()`, 4 bits.
        choices: The bits that tensors may have. None: 2-8, for "levels" 1-4. config.bits is added.
        fixed: Bits by index of a tensor. Such tensors count neither in the budget nor in the total.
        alpha: The budget as a multiple of the error of uniform bits, more than 0.

    Raises:
        InvalidArgument: The lists have different lengths, a statistic is negative or not finite, or
            a value is out of its range.
        Unsupported: The error of this config cannot be predicted (see statistic()), or its
            compressor is "entropy".

    Example:
        >>> from cgx_ops.planner import allocate_bits
        >>> allocate_bits([1.0, 1.0, 1.0], [1000, 1000, 1000])
        [4, 4, 4]
        >>> allocate_bits([1.0, 100.0, 0.01], [1000, 1000, 1000])
        [2, 5, 2]
    """
    config = _served(config)
    if config.compressor == "entropy":
        raise Unsupported(
            "compressor 'entropy' has rates instead of bits: call allocate_rates(), which returns "
            "the rates of the tensors"
        )
    fixed = fixed or {}
    check_tensors(statistics, numels, budget, fixed)
    if not 0 < alpha < math.inf:
        raise InvalidArgument(f"alpha is {alpha!r}; it must be more than 0")
    allowed = _CHOICES[config.compressor] if choices is None else choices
    uniform = config.bits
    options = sorted({*allowed, uniform})
    free = [i for i in range(len(numels)) if i not in fixed]

    def error(tensor: int, bits: int) -> float:
        squared = predicted_error(statistics[tensor], bits, config)
        return squared if budget == "squared" else math.sqrt(squared)

    for bits in fixed.values():
        predicted_error(0.0, bits, config)  # checks the bits
    errors = np.array([[error(i, b) for b in options] for i in free]).reshape(-1, len(options))
    most = alpha * math.fsum(error(i, uniform) for i in free)
    found = cheapest(errors, [int(numels[i]) for i in free], options, most)
    total = sum(numels[i] * b for i, b in zip(free, found, strict=True))
    if alpha >= 1 and total > uniform * sum(numels[i] for i in free):
        found = [uniform] * len(free)
    return [{**fixed, **dict(zip(free, found, strict=True))}[i] for i in range(len(numels))]


def _served(config: Config | None) -> Config:
    """Return the config if its error can be predicted, else raise Unsupported."""
    config = Config() if config is None else config
    if config.compressor not in (*_CHOICES, "entropy"):
        raise Unsupported(
            f"compressor is {config.compressor!r}; errors can be predicted for 'uniform', 'levels' "
            "and 'entropy'"
        )
    if config.rotation is not None:
        raise Unsupported("errors of rotated values cannot be predicted: leave rotation out")
    return config
