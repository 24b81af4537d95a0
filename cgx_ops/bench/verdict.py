"""Decide for `python -m cgx_ops bench` whether compression is faster than exact allreduce.

The recommended compressed setting is compared with the fastest exact way that was measured. This
library's own exact path (32 bits) is one of these ways. A setting is faster or slower only if both
conditions hold; otherwise there is no difference:

  - The step times differ by at least 3 % of the longer one.
  - The interquartile ranges of the two measured times do not overlap.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cgx_ops._core.units import time_text
from cgx_ops._core.verdicts import (
    EXACT,
    NO_DIFFERENCE,
    Timings,
    Verdict,
    most_bits,
    size_digits,
    time_at,
)
from cgx_ops.bench.results import Result

DEFAULT_PARAMETERS = 25_000_000  # ResNet-50
_BEYOND = 16  # largest multiple of the largest measured size that a verdict covers


@dataclass(frozen=True)
class Series:
    """The measured times of one contender, by message size.

    Attributes:
        name: The contender's name.
        numels: float32 values of the messages, in rising order.
        seconds: The median of each.
        lower: The first quartile of each.
        upper: The third quartile of each.
    """

    name: str
    numels: tuple[int, ...]
    seconds: tuple[float, ...]
    lower: tuple[float, ...]
    upper: tuple[float, ...]

    @classmethod
    def all_of(cls, results: Sequence[Result]) -> "dict[str, Series]":
        """Return the series of each contender. The last measurement of a size counts."""
        found: dict[str, dict[int, Result]] = {}
        for result in results:
            found.setdefault(result.contender, {})[result.bytes // 4] = result
        return {name: cls._of(name, by_numel) for name, by_numel in found.items()}

    @classmethod
    def _of(cls, name: str, by_numel: dict[int, Result]) -> "Series":
        numels = tuple(sorted(by_numel))
        rows = [by_numel[numel] for numel in numels]
        return cls(
            name,
            numels,
            tuple(row.seconds for row in rows),
            tuple(row.lower for row in rows),
            tuple(row.upper for row in rows),
        )

    def at(self, numel: int) -> float:
        """Return the median for a message of `numel` values."""
        return time_at(self.numels, self.seconds, numel)

    def range_at(self, numel: int) -> tuple[float, float]:
        """Return the quartiles for a message of `numel` values."""
        return time_at(self.numels, self.lower, numel), time_at(self.numels, self.upper, numel)


@dataclass(frozen=True)
class Comparison:
    """A compressed setting compared with the fastest exact way.

    Attributes:
        exact: Name of the fastest exact contender.
        compressed: Name of the compressed contender.
        exact_seconds: A step with the exact one: compute plus one allreduce of all gradients.
        compressed_seconds: A step with the compressed one.
        outcome: Whether the compressed step is faster or slower.
        overlap: Whether the interquartile ranges of the measured times overlap.
    """

    exact: str
    compressed: str
    exact_seconds: float
    compressed_seconds: float
    outcome: Literal["faster", "slower", "no difference"]
    overlap: bool

    @classmethod
    def of(cls, exact: Series, compressed: Series, numel: int, compute: float) -> "Comparison":
        """Compare two contenders for a step of `numel` gradients and `compute` seconds."""
        (exact_low, exact_high) = exact.range_at(numel)
        (low, high) = compressed.range_at(numel)
        overlap = low <= exact_high and exact_low <= high
        before, after = compute + exact.at(numel), compute + compressed.at(numel)
        outcome = "faster" if after < before else "slower"
        if overlap or abs(after - before) < NO_DIFFERENCE * max(before, after):
            outcome = "no difference"
        return cls(exact.name, compressed.name, before, after, outcome, overlap)

    def sentence(self, step: str) -> str:
        """Return the comparison as text; `step` names the step, as in "a step of 25 M ..."."""
        before, after = time_text(self.exact_seconds), time_text(self.compressed_seconds)
        if self.outcome == "no difference":
            reason = f"the times differ by less than {NO_DIFFERENCE:.0%}"
            if self.overlap:
                reason = "the interquartile ranges of the measured times overlap"
            return (
                f"no difference between {self.compressed} and {self.exact}, the fastest exact way "
                f"measured here. {step} takes {after} with the former, {before} with the latter; "
                f"{reason}."
            )
        ratio = self.exact_seconds / self.compressed_seconds
        factor = f"{ratio:.3g} times as fast" if ratio > 1 else f"{1 / ratio:.3g} times as long"
        return (
            f"{self.compressed} is {self.outcome} than {self.exact}, the fastest exact way "
            f"measured here. {step} takes {after} instead of {before} ({factor})."
        )


def out_of_reach(parameters: int, sizes: Sequence[int]) -> str:
    """Return why no verdict on a model is possible from these sizes (in bytes); "" if it is.

    Times of small messages do not predict those of large ones. So the gradients must not be smaller
    than the smallest size, nor 16 times larger than the largest one.
    """
    size = 4 * parameters
    if size in sizes:
        return ""
    least = size / _BEYOND
    model = f"{parameters / 1e6:.3g} M parameters have {size_digits(size)} of gradients"
    if len({*sizes}) < 2:
        return f"{model}: measure two sizes or more, or exactly {size} bytes (--sizes)"
    if size < min(sizes):
        return f"{model}: measure a size of at most {size_digits(size)} (--sizes)"
    if least > max(sizes):
        return f"{model}: measure a size of at least {size_digits(least)} (--sizes)"
    return ""


def parameters_for(sizes: Sequence[int]) -> int:
    """Return the default number of parameters: 25 million, or the values of the largest size."""
    return max(sizes) // 4 if out_of_reach(DEFAULT_PARAMETERS, sizes) else DEFAULT_PARAMETERS


@dataclass(frozen=True)
class Contenders:
    """The contenders that the verdict compares, by name.

    Attributes:
        exact: Exact ways, this library's among them.
        recommended: This library in 8, 4 ... bits, by bits.
        configs: Settings that the user gave by --config.
        peers: Other libraries' compressed ways.
    """

    exact: Sequence[str]
    recommended: dict[int, str]
    configs: Sequence[str]
    peers: Sequence[str]


def verdict(
    results: Sequence[Result], contenders: Contenders, parameters: int, compute: float | None
) -> tuple[list[str], list[Comparison]]:
    """Return the verdict as sentences, and the comparisons in it.

    Args:
        results: The measurements.
        contenders: The names of the contenders to compare.
        parameters: Number of the model's float32 gradients.
        compute: Seconds of a step without communication; None if unknown.
    """
    series = Series.all_of(results)
    exact = [series[name] for name in contenders.exact if name in series]
    bits = {b: series[name] for b, name in contenders.recommended.items() if name in series}
    if not exact:
        return ["Verdict: none, because no exact way was measured: add --bits 32."], []
    compressed = [series[name] for name in contenders.configs if name in series]
    if bits:
        recommended = most_bits({b: each.at(parameters) for b, each in bits.items()})
        compressed.insert(0, bits[recommended])
    if not compressed:
        return ["Verdict: none, because no compressed setting was measured: add --bits 8 4."], []
    fastest = min(exact, key=lambda each: each.at(parameters))
    size = size_digits(4 * parameters)
    step = f"A step of {parameters / 1e6:.3g} M parameters"
    if compute is None:
        step = f"An allreduce of {parameters / 1e6:.3g} M gradients"
    found = [Comparison.of(fastest, each, parameters, compute or 0.0) for each in compressed]
    lines = [f"Verdict: {each.sentence(step)}" for each in found]
    if compute is None:
        lines.append(
            f"Compute is not included: one allreduce of all gradients ({size}). Pass "
            "--compute MS, the time of your model's step without communication, for step times."
        )
    else:
        lines.append(
            f"Assumed: {time_text(compute)} of compute, then one allreduce of all gradients "
            f"({size}), without overlap. Training that overlaps them gains less."
        )
    peers = {name: series[name].at(parameters) for name in contenders.peers if name in series}
    if peers:
        times = ", ".join(f"{n} {time_text((compute or 0) + t)}" for n, t in peers.items())
        lines.append(f"With the other compressed ways: {times}.")
    if bits and found[0].outcome == "faster":
        lines += _smallest(exact, bits, parameters)
    return lines, found


def _smallest(exact: list[Series], bits: dict[int, Series], parameters: int) -> list[str]:
    """Return from which message size on compression is at least a tenth faster, as text."""
    numels = exact[0].numels
    if len(numels) < 2:
        return []
    seconds = {b: each.seconds for b, each in bits.items()}
    seconds[EXACT] = tuple(min(times) for times in zip(*(e.seconds for e in exact), strict=True))
    first = 0
    for numel, chosen in Verdict.of(Timings(numels, seconds)).larger[4]:
        if numel <= parameters:
            first = 0 if chosen == EXACT else first or numel
    if not first:
        return []
    size = size_digits(4 * max(first, numels[0]))
    return [f"Messages of {size} or more take at least a tenth less time compressed than exact."]
