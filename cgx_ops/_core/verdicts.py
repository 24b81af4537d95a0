"""Which bits are fastest, by the size of a message: what follows from measured times.

    Timings     seconds of an allreduce by bits and size, as they were measured
    Verdict     bits by size, which follow from Timings alone, and the reason in words
    sentence    the verdict for a step, in one sentence
    slot_of     where the verdict of a communicator is

A prediction from a rate and a ratio is not enough: between ranks that share memory the codec's
speed decides, and an allreduce overlaps encoding with sending. So allreduces are timed
(autotune.py), exact and in each choice of bits, at a few sizes. Between and beyond these sizes time
is a line. The choice:

  1. exact, unless the fastest choice takes a tenth less time: noise shall not cost accuracy
  2. of the choices, the most bits of those that take at most a tenth more than the fastest one
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock

import numpy as np

from cgx_ops.config import Config

EXACT = 32
_WORTH = 0.9  # of the exact time, at most
_BEYOND = 16  # a verdict reaches this many times the largest size that was timed
_ALIKE = 1.1  # of the fastest choice's time, at most
# Where choices may change: eight steps from one power of two to the next.
_GRID = [int(2.0 ** (step / 8)) for step in range(8 * 10, 8 * 31)]


# ---- 1. times ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timings:
    """What an allreduce takes.

    Attributes:
        numels: values of float32 of the messages that were timed, rising.
        seconds: by bits, 32 among them, one for each of numels.
    """

    numels: tuple[int, ...]
    seconds: Mapping[int, tuple[float, ...]]

    def at(self, bits: int, numel: float) -> float:
        """Return the seconds of a message: on the line through the two nearest sizes."""
        sizes, times = self.numels, self.seconds[bits]
        if len(sizes) == 1:
            return times[0] * max(1.0, numel / sizes[0])
        right = min(max(1, int(np.searchsorted(sizes, numel))), len(sizes) - 1)
        (n0, n1), (t0, t1) = sizes[right - 1 : right + 1], times[right - 1 : right + 1]
        slope = max(0.0, (t1 - t0) / (n1 - n0))
        return max(0.0, t0 + slope * (numel - n0))


# ---- 2. what follows -----------------------------------------------------------------------------


def best_bits(timings: Timings, numel: int, element_bytes: int = 4) -> int:
    """Return in how many bits a message travels best, by the rules at the top of this file.

    Args:
        timings: 32 bits and any choices.
        numel: of the message.
        element_bytes: 2 of float16 and bfloat16, which take half the time exact.
    """
    if numel < timings.numels[0]:
        return EXACT
    exact = timings.at(EXACT, numel * element_bytes / 4)
    times = {bits: timings.at(bits, numel) for bits in timings.seconds if bits != EXACT}
    fastest = min(times.values(), default=exact)
    if fastest > _WORTH * exact:
        return EXACT
    return max(bits for bits, seconds in times.items() if seconds <= _ALIKE * fastest)


@dataclass(frozen=True)
class Verdict:
    """Bits by the size of a message.

    Attributes:
        timings: from which they follow.
        larger: (from so many values on, bits) by bytes of an element, rising; below the first,
            exact.
    """

    timings: Timings
    larger: Mapping[int, tuple[tuple[int, int], ...]]

    @classmethod
    def of(cls, timings: Timings) -> "Verdict":
        """Return what follows from times alone: equal times, equal bits."""
        return cls(timings, {width: _thresholds(timings, width) for width in (4, 2)})

    def bits(self, numel: int, element_bytes: int = 4) -> int:
        """Return the bits of a message."""
        found = EXACT
        for first, bits in self.larger[element_bytes]:
            if numel < first:
                break
            found = bits
        return found

    def __str__(self) -> str:
        """Return what pays from which size of float32 on, and by what times."""
        pays = ", ".join(
            f"{_name(bits)} from {_size(4 * first)} on" for first, bits in self.larger[4]
        )
        numel = self.timings.numels[-1]
        times = ", ".join(
            f"{_name(bits)} {1e3 * seconds[-1]:.3g} ms"
            for bits, seconds in self.timings.seconds.items()
        )
        return f"{pays or 'exact at all sizes'} ({_size(4 * numel)} takes {times})"


def _thresholds(timings: Timings, element_bytes: int) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for numel in _GRID:
        bits = best_bits(timings, numel, element_bytes)
        if bits != (found[-1][1] if found else EXACT):
            found.append((numel, bits))
    return tuple(found)


def _name(bits: int) -> str:
    return "exact" if bits == EXACT else f"{bits} bits"


def _size(size: float) -> str:
    """Return bytes in three digits: "96 KiB", "1.5 MiB"."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"


def sentence(timings: Timings, parameters: int) -> str:
    """Return whether compression is faster, and the time of a step of so many parameters.

    A step is one allreduce of all gradients, of float32. It must be near the sizes that were timed:
    what small messages take says little of large ones.
    """
    least = timings.numels[0]
    if len(timings.numels) < 2 or not least <= parameters <= _BEYOND * timings.numels[-1]:
        return (
            f"No verdict for {parameters / 1e6:.3g} M parameters, {_size(4 * parameters)}: time "
            f"two sizes or more, the largest at least {_size(4 * parameters / _BEYOND)}."
        )
    bits = best_bits(timings, parameters)
    pays = Verdict.of(timings).larger[4]
    model = f"your {parameters / 1e6:.3g} M parameters"
    exact = _duration(timings.at(EXACT, parameters))
    if bits == EXACT:
        return f"On this link compression does not pay for {model}: a step takes {exact}, exact."
    first = 0  # from there to the step's size something pays
    for numel, each in pays:
        if numel <= parameters:
            first = 0 if each == EXACT else first or numel
    compressed = _duration(timings.at(bits, parameters))
    return (
        f"On this link {_name(bits)} pay from {_size(4 * max(first, least))} on; a step of "
        f"{model}: {exact} -> {compressed}."
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


# ---- 3. by communicator --------------------------------------------------------------------------


@dataclass
class Slot:
    """The verdict of one communicator and config, once it is known.

    The lock is held while it is measured: threads may ask at the same time.
    """

    verdict: Verdict | None = None
    lock: Lock = field(default_factory=Lock)


_slots: dict[int, dict[Config, Slot]] = {}


def slot_of(comm: int, config: Config) -> Slot:
    """Return the slot of the communicator of this id."""
    slots = _slots.setdefault(comm, {})
    return slots.get(config) or slots.setdefault(config, Slot())


def in_words(comm: int) -> str:
    """Return the verdicts of the communicator of this id in words; "" if there are none."""
    slots = list(_slots.get(comm, {}).values())
    return "; ".join(str(slot.verdict) for slot in slots if slot.verdict)


def forget(comm: int) -> None:
    """Forget the verdicts of a communicator that is closed."""
    _slots.pop(comm, None)
