"""Choose the rate of each tensor for the compressor "entropy": the least error at a mean rate.

    error_share()      the error of a rate as a share of the signal
    allocate_rates()   rates for all tensors, with a budget of bytes

At high rates an entropy-coded uniform quantizer has the error (2^(2h) / 12) 4^-R, where h is the
entropy of the density of the values (Gish and Pierce 1968; Sullivan 1996). For normal values with
variance 1 this is (2 pi e / 12) 4^-R. At low rates the error falls more slowly. So the model
describes the slope of the error: its logarithm is linear in the rate, in a few pieces.

The best rates have equal slopes: no bit reduces the error of one tensor by more than that of
another one (reverse water-filling). In the logarithm of the slope, a tensor's rate is linear in
pieces, too. So is the mean rate, and one sort of all ends of pieces finds the slope.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cgx_ops._core.codec import encoded_bytes
from cgx_ops._core.tables import COMPRESSORS, DEFAULT_RATE, EXACT_BITS
from cgx_ops.config import Config
from cgx_ops.errors import InvalidArgument, Unsupported

Budget = Literal["squared", "norm"]

HIGHEST = 8.0  # the highest rate
_BILLION = 10**9  # Rates are compared in billionths, as the core has them,
_STEP = _BILLION // 100  # and differ by hundredths of a bit.

# By rounding, points (rate, log2 of the negative slope of the error); between them it is linear.
# The last piece is the formula for high rates. The others were fitted to computed errors of
# normally distributed values. "nearest" has a dead zone and one shift of the levels, as the encoder
# chooses them; "shift" is subtractive dither, whose noise the frequencies do not depend on.
_SLOPES = {
    "nearest": ((0.25, -0.3836), (1.1486, -1.3168), (8.0, -15.0195)),
    "shift": ((0.25, 8.414), (0.6396, 3.7394), (1.6145, -1.4764), (3.2666, -5.5527), (8, -15.0195)),
}
_LAST = math.tau * math.e / 12 / 4**HIGHEST  # the error at the highest rate

_Floats = npt.NDArray[np.float64]


def rate_of(config: Config) -> float:
    """Return the rate of a config of compressor "entropy"."""
    return DEFAULT_RATE if config.rate is None else config.rate


def bits_of(config: Config) -> int | float:
    """Return the mean bits per value of a config: its bits, or the rate of "entropy"."""
    if config.compressor == "entropy" and config.bits != EXACT_BITS:
        return float(rate_of(config))
    return config.bits


def settings_of(bits: float) -> dict[str, Any]:
    """Return the field of Config that sets the bits of a tensor: a float is a rate."""
    return {"rate": bits} if isinstance(bits, float) else {"bits": bits}


def message_bytes(numel: int, config: Config) -> int:
    """Return the bytes of a tensor in a message; for "entropy", those of its rate.

    If the reduced values have other bits (`gather_bits`), it is the mean of both messages.

    For "lossless" it is the upper bound, slightly more than the bytes of exact values. Messages of
    gradients have about 0.83 (float32) or 0.66 (bfloat16) of those bytes.
    """
    if config.is_short(numel):
        return encoded_bytes(numel, Config(EXACT_BITS))
    if config.compressor == "entropy" and config.bits != EXACT_BITS:
        return math.ceil(rate_of(config) * numel / 8)
    size = encoded_bytes(numel, config)
    if config.gather_bits is None or config.bits == EXACT_BITS:  # exact values come back exact
        return size
    return (size + encoded_bytes(numel, config.with_own(bits=config.gather_bits))) // 2


def error_share(rate: float, config: Config) -> float:
    """Return the expected squared error at a rate, as a share of the sum of squares."""
    (found,) = _errors(np.array([rate]), _SLOPES[_rounding(config)])
    return float(found)


def allocate_rates(
    statistics: Sequence[float],
    numels: Sequence[int],
    budget: Budget = "squared",
    *,
    config: Config,
    fixed: Mapping[int, float] | None = None,
) -> list[float]:
    """Return the rate of each tensor: the least error in total, at the mean rate of the config.

    The mean is weighted by numels. It is at most the config's rate, and less than 0.01 below it.
    Rates are multiples of 0.01 from 0.25 to 8. They depend only on the arguments. The more the
    tensors differ in their sum of squares per value, the lower is the error. If that is equal for
    all, they have the config's rate.

    Args:
        statistics: The statistic() of each tensor, equal on all ranks.
        numels: Values of each tensor.
        budget: The error to minimize: "squared", the total squared error; or "norm", the sum of
            the tensors' error norms, which gives large tensors fewer bits.
        config: A config of compressor "entropy"; its rate is the mean.
        fixed: Rates by index of a tensor. They are not part of the error and of the mean.

    Raises:
        InvalidArgument: The lists have different lengths, a statistic is negative or not finite, or
            a rate is out of its range.
        Unsupported: The config has another compressor.

    Example:
        >>> from cgx_ops import Config
        >>> from cgx_ops.planner import allocate_rates
        >>> config = Config(compressor="entropy", rate=2)
        >>> allocate_rates([1.0, 1.0, 1.0], [1000, 1000, 1000], config=config)
        [2.0, 2.0, 2.0]
        >>> allocate_rates([1.0, 16.0, 1 / 16], [1000, 1000, 1000], config=config)
        [1.87, 3.88, 0.25]
    """
    if config.compressor != "entropy" or config.bits == EXACT_BITS:
        raise Unsupported(
            f"compressor is {config.compressor!r} and bits is {config.bits}; allocate_rates() is "
            "for compressor 'entropy', allocate_bits() for 'uniform' and 'levels'"
        )
    fixed = fixed or {}
    check_tensors(statistics, numels, budget, fixed)
    for rate in fixed.values():
        config.with_own(rate=rate)  # checks the rate
    free = [i for i in range(len(numels)) if i not in fixed and numels[i] > 0]
    mean = float(rate_of(config))
    found = dict.fromkeys(range(len(numels)), mean)
    if free:
        sizes = [int(numels[i]) for i in free]
        weights = np.array([statistics[i] for i in free], np.float64)
        weights = weights if budget == "squared" else np.sqrt(weights)
        rates = _in_hundredths(_equal_slopes(weights, sizes, budget, config), sizes, mean)

        def error(rates: _Floats) -> float:
            shares = _errors(rates, _SLOPES[_rounding(config)])
            return float((weights * (shares if budget == "squared" else np.sqrt(shares))).sum())

        if error(np.array(rates)) < error(np.full(len(free), mean)):
            found |= dict(zip(free, rates, strict=True))
    found |= {i: float(rate) for i, rate in fixed.items()}
    return [found[i] for i in range(len(numels))]


def check_tensors(
    statistics: Sequence[float], numels: Sequence[int], budget: str, fixed: Mapping[int, float]
) -> None:
    """Check the arguments of an allocation; see allocate_bits() and allocate_rates()."""
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
            raise InvalidArgument(
                f"fixed has the index {i}, but there are {len(numels)} tensors, from 0"
            )


# ---- 1. the model --------------------------------------------------------------------------------


def _rounding(config: Config) -> str:
    return config.rounding or COMPRESSORS["entropy"]["roundings"][0]


def _errors(rates: _Floats, slopes: Sequence[tuple[float, float]]) -> _Floats:
    """Return the errors at some rates: the integrals of the slopes from there on."""
    found = np.full(rates.shape, _LAST)
    for (low, at_low), (high, at_high) in pairwise(slopes):
        falls = (at_low - at_high) / (high - low)
        at_rate = at_low - falls * (np.clip(rates, low, high) - low)
        found += (2**at_rate - 2**at_high) / (falls * math.log(2))
    return found


@functools.cache
def _pieces(rounding: str, budget: Budget) -> tuple[_Floats, _Floats]:
    """Return rates, and log2 of the slopes of the error or of its root.

    The slopes of the root are linear in pieces of a quarter of a bit, up to a thousandth.
    """
    points = dict(_SLOPES[rounding])
    if budget == "squared":
        return np.array([*points]), np.array([*points.values()])
    rates = np.array(sorted({*points, *(n / 4 for n in range(1, 17))}))
    squared = np.interp(rates, [*points], [*points.values()])
    roots = np.log2(_errors(rates, _SLOPES[rounding])) / 2
    return rates, (squared - 1 - roots).round(9)  # independent of the processor


# ---- 2. equal slopes -----------------------------------------------------------------------------


def _equal_slopes(
    weights: _Floats, numels: Sequence[int], budget: Budget, config: Config
) -> _Floats:
    """Return the rates with equal slopes whose mean is that of the config.

    The error of a tensor is that of the model, or its root, times its entry of `weights`.
    """
    rates, slopes = _pieces(_rounding(config), budget)
    sizes = np.array(numels, np.float64)
    own = _log2(weights / sizes)
    # A piece is used from the level `top` down to the level `bottom`.
    top, bottom = own[:, None] + slopes[:-1], own[:, None] + slopes[1:]
    values = sizes[:, None] * np.diff(rates)
    levels = np.concatenate([top.ravel(), bottom.ravel()])
    growths = (values / (top - bottom)).ravel()
    order = np.argsort(-levels, kind="stable")
    levels = levels[order]
    growth = np.concatenate([growths, -growths])[order].cumsum()
    total = np.concatenate([[0.0], (growth[:-1] * (levels[:-1] - levels[1:])).cumsum()])
    wanted = (rate_of(config) - rates[0]) * sizes.sum()
    last = min(int(np.searchsorted(total, wanted)), len(levels) - 1)
    first = max(0, last - 1)
    rise = total[last] - total[first]
    share = (wanted - total[first]) / rise if rise > 0 else 0.0
    level = levels[first] - share * (levels[first] - levels[last])
    used = np.clip((top - level) / (top - bottom), 0, 1)
    return rates[0] + (used * np.diff(rates)).sum(axis=1)


def _log2(values: _Floats) -> _Floats:
    """Return the logarithms to 2^-30, equal on all processors; of 0, that of a tiny value."""
    fraction, exponent = np.frexp(values)
    fraction, found = 2 * fraction, exponent - 1.0
    for place in range(1, 31):
        fraction = fraction * fraction
        above = fraction >= 2
        found += above * 0.5**place
        fraction = np.where(above, fraction / 2, fraction)
    return np.where(values > 0, found, -1100.0)


# ---- 3. hundredths -------------------------------------------------------------------------------


def _in_hundredths(rates: _Floats, numels: Sequence[int], mean: float) -> list[float]:
    """Round rates so that their mean stays within the budget, and close to it."""
    most = round(mean * _BILLION)
    exact = [round(rate * _BILLION) for rate in rates.tolist()]
    rounded = [rate // _STEP * _STEP for rate in exact]
    left = sum(n * (most - rate) for n, rate in zip(numels, rounded, strict=True))
    for i in sorted(range(len(numels)), key=lambda i: (rounded[i] - exact[i], -numels[i], i)):
        if numels[i] * _STEP <= left and rounded[i] + _STEP <= HIGHEST * _BILLION:
            rounded[i] += _STEP
            left -= numels[i] * _STEP
    return [rate // _STEP / 100 for rate in rounded]
