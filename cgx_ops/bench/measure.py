"""Times of contenders that run interleaved: a round times each in turn, so noise meets all alike.

Phases of measure(): a call of each contender brings memory, connections and compilers in, and a
second one, unless they are long, tells how many calls make a batch; then rounds, until there are
enough or the budget is spent.

A sample is the time of a call (the mean of a batch) on the slowest rank. Ranks agree on it, and all
decisions follow from such agreed numbers alone, so that every rank does the same.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

MIN_ROUNDS = 3  # however small the budget: a median of fewer says little
# Short calls are timed together: long enough that what a shaped link lets pass at once (0.6 ms at
# its rate, benchmarks/hosts.py) and a clock's reading weigh little.
_BATCH_SECONDS, _MAX_BATCH = 10e-3, 100
_LONG_SECONDS = 0.1


class Ranks(Protocol):
    """What measure() needs of those that call it together."""

    def meet(self) -> None:
        """Return once every rank has called."""

    def slowest(self, seconds: float) -> float:
        """Return the largest `seconds` of all ranks, on all ranks."""
        ...


class Alone:
    """The Ranks of one process."""

    def meet(self) -> None:
        """Return."""

    def slowest(self, seconds: float) -> float:
        """Return seconds."""
        return seconds


@dataclass(frozen=True)
class Timed:
    """What is timed.

    Attributes:
        call: returns when its work is done.
        prepare: runs before each batch and is not timed: for calls that overwrite their input.
    """

    call: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Summary:
    """Samples in three numbers, in seconds.

    Attributes:
        median: of the samples.
        lower: first quartile.
        upper: third quartile.
        rounds: number of samples.
    """

    median: float
    lower: float
    upper: float
    rounds: int

    @classmethod
    def of(cls, samples: list[float]) -> "Summary":
        """Summarize at least one sample; quartiles are interpolated between samples."""
        several = samples if len(samples) > 1 else samples * 2
        lower, median, upper = statistics.quantiles(several, method="inclusive")
        return cls(median, lower, upper, len(samples))


def measure(
    contenders: Mapping[str, Timed],
    ranks: Ranks,
    *,
    rounds: int,
    budget: float = math.inf,
) -> dict[str, list[float]]:
    """Return the samples of each contender, in seconds a call, equal on all ranks.

    Args:
        contenders: in the order in which a round times them; equal on all ranks.
        ranks: those that call this together.
        rounds: at most, and at least MIN_ROUNDS of them unless fewer are asked for.
        budget: seconds after which no further round begins, warming up included.
    """
    spent, batch = 0.0, {}
    for name, timed in contenders.items():
        seconds = _sample(timed, 1, ranks)
        spent += seconds
        if seconds < _LONG_SECONDS:
            seconds = _sample(timed, 1, ranks)
            spent += seconds
        batch[name] = min(_MAX_BATCH, math.ceil(_BATCH_SECONDS / max(seconds, 1e-9)))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(rounds):
        if index >= MIN_ROUNDS and spent >= budget:
            break
        for name, timed in contenders.items():
            seconds = _sample(timed, batch[name], ranks)
            samples[name].append(seconds)
            spent += seconds * batch[name]
    return samples


def _sample(timed: Timed, calls: int, ranks: Ranks) -> float:
    timed.prepare()
    ranks.meet()
    begin = time.perf_counter()
    for _ in range(calls):
        timed.call()
    return ranks.slowest((time.perf_counter() - begin) / calls)
