"""Time contenders in interleaved rounds: each round times each one in turn, so noise affects all.

measure() first calls each contender once to load memory, connections and compiled code. A second
call, unless calls are long, determines how many calls make a batch. Then rounds follow until there
are enough or the budget is spent.

A sample is the time of a call (the mean of a batch) on the slowest rank. Ranks share the samples,
and all decisions depend only on them, so all ranks make the same ones.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

MIN_ROUNDS = 3  # with any budget: a median of fewer means little
# Short calls are timed in batches. They are long compared with the burst of a shaped link (0.6 ms
# at its rate, benchmarks/hosts.py) and with reading the clock.
_BATCH_SECONDS, _MAX_BATCH = 10e-3, 100
_LONG_SECONDS = 0.1


class Ranks(Protocol):
    """The functions that measure() needs from the ranks that call it together."""

    def barrier(self) -> None:
        """Return once all ranks have called it."""

    def slowest(self, seconds: float) -> float:
        """Return the largest `seconds` of all ranks, on all ranks."""
        ...


class Alone:
    """The Ranks of a single process."""

    def barrier(self) -> None:
        """Return."""

    def slowest(self, seconds: float) -> float:
        """Return seconds."""
        return seconds


@dataclass(frozen=True)
class Timed:
    """A call to time.

    Attributes:
        call: The call; it returns when its work is done.
        prepare: Runs before each batch and is not timed, for calls that overwrite their input.
    """

    call: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Summary:
    """A summary of samples, in seconds.

    Attributes:
        median: Median of the samples.
        lower: First quartile.
        upper: Third quartile.
        rounds: Number of samples.
    """

    median: float
    lower: float
    upper: float
    rounds: int

    @classmethod
    def of(cls, samples: list[float]) -> "Summary":
        """Summarize one or more samples. Quartiles are interpolated between samples."""
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
    """Return the samples of each contender, in seconds per call, equal on all ranks.

    Args:
        contenders: Contenders in the order in which a round times them, equal on all ranks.
        ranks: The ranks that call this together.
        rounds: Largest number of rounds. At least MIN_ROUNDS are made, unless `rounds` is smaller.
        budget: Seconds, including the warm-up, after which no round starts.
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
    ranks.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        timed.call()
    return ranks.slowest((time.perf_counter() - begin) / calls)
