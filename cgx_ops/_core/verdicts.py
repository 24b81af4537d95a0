"""Choose the fastest bits for a message size from measured times.

    Timings     seconds of an allreduce by bits and message size, as measured
    Verdict     the bits for each message size, derived from Timings alone
    slot_of     the place where a communicator stores its verdict

The choice needs measured times. The link rate and the compression ratio are not enough: between
ranks that share memory the speed of the codec decides, and an allreduce overlaps encoding and
sending. So autotune.py times allreduces of a few sizes, exact and in each number of bits. Between
these sizes, and beyond the largest, time is a straight line. The rules:

  1. Exact, unless the fastest bits take at least a tenth less time. Noise must not cost accuracy.
  2. Otherwise the most bits that take at most a tenth more time than the fastest bits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock

import numpy as np

from cgx_ops.config import Config

EXACT = 32
# Step times that differ by a smaller share count as equal (the commands bench and plan).
NO_DIFFERENCE = 0.03
_WORTH = 0.9  # rule 1: largest share of the exact time
_ALIKE = 1.1  # rule 2: largest multiple of the time of the fastest bits
# The sizes at which bits may change: eight steps between two powers of two.
_GRID = [int(2.0 ** (step / 8)) for step in range(8 * 10, 8 * 31)]


# ---- 1. times ------------------------------------------------------------------------------------


def time_at(numels: Sequence[int], seconds: Sequence[float], numel: float) -> float:
    """Return the seconds of a message from the straight line through the two nearest sizes.

    Args:
        numels: Values of the measured messages, in rising order.
        seconds: The time of each of them.
        numel: Values of the message.
    """
    if len(numels) == 1:
        return seconds[0] * max(1.0, numel / numels[0])
    right = min(max(1, int(np.searchsorted(numels, numel))), len(numels) - 1)
    (n0, n1), (t0, t1) = numels[right - 1 : right + 1], seconds[right - 1 : right + 1]
    slope = max(0.0, (t1 - t0) / (n1 - n0))
    return max(0.0, t0 + slope * (numel - n0))


@dataclass(frozen=True)
class Timings:
    """Measured times of allreduces.

    Attributes:
        numels: float32 values of the measured messages, in rising order.
        seconds: By bits (including 32), the time of each message.
    """

    numels: tuple[int, ...]
    seconds: Mapping[int, tuple[float, ...]]

    def at(self, bits: int, numel: float) -> float:
        """Return the seconds of a message of `numel` values in these bits."""
        return time_at(self.numels, self.seconds[bits], numel)


# ---- 2. bits -------------------------------------------------------------------------------------


def most_bits(times: Mapping[int, float]) -> int:
    """Return the most bits that take at most a tenth more time than the fastest bits."""
    fastest = min(times.values())
    return max(bits for bits, seconds in times.items() if seconds <= _ALIKE * fastest)


def best_bits(timings: Timings, numel: int, element_bytes: int = 4) -> int:
    """Return the bits for a message by the rules at the top of this file; 32 means exact.

    Args:
        timings: Times of 32 bits and of any other numbers of bits.
        numel: Values of the message.
        element_bytes: 4, or 2 for float16 and bfloat16, which take half the time if sent exact.
    """
    if numel < timings.numels[0]:
        return EXACT
    exact = timings.at(EXACT, numel * element_bytes / 4)
    times = {bits: timings.at(bits, numel) for bits in timings.seconds if bits != EXACT}
    if min(times.values(), default=exact) > _WORTH * exact:
        return EXACT
    return most_bits(times)


@dataclass(frozen=True)
class Verdict:
    """The bits for each message size.

    Attributes:
        timings: The times from which the bits follow.
        larger: By bytes of an element, pairs (numel, bits) in rising order: messages of at least
            `numel` values use these bits. Smaller messages are exact.
    """

    timings: Timings
    larger: Mapping[int, tuple[tuple[int, int], ...]]

    @classmethod
    def of(cls, timings: Timings) -> "Verdict":
        """Return the verdict for these times. It depends on nothing else."""
        return cls(timings, {width: _thresholds(timings, width) for width in (4, 2)})

    def bits(self, numel: int, element_bytes: int = 4) -> int:
        """Return the bits for a message of `numel` values; 32 means exact."""
        found = EXACT
        for first, bits in self.larger[element_bytes]:
            if numel < first:
                break
            found = bits
        return found

    def __str__(self) -> str:
        """Return the bits by size of float32 messages, and the times of the largest message."""
        chosen = ", ".join(
            f"{_name(bits)} from {size_digits(4 * first)} on" for first, bits in self.larger[4]
        )
        numel = self.timings.numels[-1]
        times = ", ".join(
            f"{_name(bits)} {1e3 * seconds[-1]:.3g} ms"
            for bits, seconds in self.timings.seconds.items()
        )
        return f"{chosen or 'exact at all sizes'} ({size_digits(4 * numel)} takes {times})"


def _thresholds(timings: Timings, element_bytes: int) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for numel in _GRID:
        bits = best_bits(timings, numel, element_bytes)
        if bits != (found[-1][1] if found else EXACT):
            found.append((numel, bits))
    return tuple(found)


def _name(bits: int) -> str:
    return "exact" if bits == EXACT else f"{bits} bits"


def size_digits(size: float) -> str:
    """Return bytes in three digits: "96 KiB", "1.5 MiB"."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"


# ---- 3. by communicator --------------------------------------------------------------------------


@dataclass
class Slot:
    """The verdict of one communicator and config, None until it is measured.

    Hold the lock while measuring: several threads may request the verdict at the same time.
    """

    verdict: Verdict | None = None
    lock: Lock = field(default_factory=Lock)


_slots: dict[int, dict[Config, Slot]] = {}


def slot_of(comm: int, config: Config) -> Slot:
    """Return the slot for this communicator (by id) and config."""
    slots = _slots.setdefault(comm, {})
    return slots.get(config) or slots.setdefault(config, Slot())


def in_words(comm: int) -> str:
    """Return the verdicts of this communicator (by id) as text; "" if there are none."""
    slots = list(_slots.get(comm, {}).values())
    return "; ".join(str(slot.verdict) for slot in slots if slot.verdict)


def forget(comm: int) -> None:
    """Drop the verdicts of a closed communicator (by id)."""
    _slots.pop(comm, None)
