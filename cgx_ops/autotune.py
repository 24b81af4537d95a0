"""When compression is faster, by size: for bits_for(), auto_bits and the verdict of `bench`.

    Timings     seconds of an allreduce by bits and size, as they were measured
    Verdict     bits by size, which follow from Timings alone, and the reason in words
    measured()  Timings among ranks: the same on all of them
    sentence    the verdict for a step, in one sentence
    bits_for    a communicator's answer, measured when it is first asked for

A prediction from a rate and a ratio does not tell: where the link is memory it is the codec's speed
that decides, and an allreduce overlaps encoding with sending. So allreduces are timed, exact and in
each choice of bits, at a few sizes; in between, and beyond, time is a line. What pays:

  1. exact, unless the fastest choice takes a tenth less time: noise shall not cost accuracy
  2. of the choices, the most bits of those that take at most a tenth more than the fastest one
  3. 2 bits only where what they lose comes back (Config.keeps_residuals)
"""

import hashlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cgx_ops.config import COMPRESSORS, Config
from cgx_ops.errors import InvalidArgument

if TYPE_CHECKING:
    from cgx_ops.communicator import Communicator

_log = logging.getLogger(__name__)

EXACT = 32
SIZES = (1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22)  # values: 4 KiB to 16 MiB of float32
_CHOICES = (8, 4, 2)
_WORTH = 0.9  # of the exact time, at most
_BEYOND = 16  # times the largest size that was timed, at most, is what a verdict is given for
_ALIKE = 1.1  # of the fastest choice's time, at most
_SECONDS = 0.6  # in which measuring is to end
_MOST_ROUNDS, _MOST_TIMES = 20, 8  # of a size in one of them
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


def choices_of(config: Config) -> tuple[int, ...]:
    """Return the bits among which bits_for() chooses, besides exact."""
    fewest = 2 if config.keeps_residuals else 4
    return tuple(bits for bits in _CHOICES if bits >= fewest and _may_have(config, bits))


def require_choice(config: Config) -> None:
    """Raise InvalidArgument unless the compressor has bits to choose from."""
    if COMPRESSORS[config.compressor]["bits"] == [0, 0]:
        raise InvalidArgument(
            f"compressor {config.compressor!r} has no bits to choose: bits_for() and auto_bits "
            "are for compressors that have"
        )


def _may_have(config: Config, bits: int) -> bool:
    """Tell whether the compressor has these bits, and error feedback converges in them."""
    try:
        config.with_own(bits=bits)
    except InvalidArgument:
        return False
    return True


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
    """Return whether compression pays, and what a step of so many parameters takes.

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


# ---- 3. measure ----------------------------------------------------------------------------------


def measured(communicator: "Communicator", config: Config) -> Timings:
    """Time allreduces of float32 among these ranks: the least of several rounds, the same on all.

    Collective: every rank calls it with an equal config. It takes under a second: on slow links
    large sizes are left out. Others' collectives may run, which it then measures too.
    """
    name = f"cgx_ops.auto/{hashlib.sha256(repr(config).encode()).hexdigest()[:8]}"
    ways = {bits: config.with_own(bits=bits) for bits in (EXACT, *choices_of(config))}
    some = np.random.default_rng(communicator.rank).standard_normal(1 << 16, np.float32)
    values = np.resize(some, SIZES[-1])
    out = np.empty_like(values)

    def timed(numel: int, bits: int) -> float:
        start = time.perf_counter()
        communicator.allreduce(values[:numel], "sum", ways[bits], out=out[:numel], name=name)
        return time.perf_counter() - start

    def largest(seconds: Sequence[float]) -> list[float]:
        mine = np.array(seconds, np.float32)
        return communicator.allreduce(mine, "max", ways[EXACT], name=name).tolist()

    for bits in ways:  # connections, and memory that is taken once
        timed(SIZES[0], bits)
    # All sizes that fit, once; then, as long as there is time, small ones as long as large ones.
    start, elapsed, costs = time.perf_counter(), 0.0, list[float]()
    rounds: list[list[list[float]]] = [[]]
    for numel in SIZES:
        if costs and elapsed + SIZES[1] / SIZES[0] * costs[-1] > _SECONDS:
            break
        rounds[0].append([timed(numel, bits) for bits in ways])
        elapsed, cost = largest([time.perf_counter() - start, sum(rounds[0][-1])])
        costs.append(cost)
    sizes = SIZES[: len(costs)]
    while elapsed * (1 + 1 / len(rounds)) <= _SECONDS and len(rounds) < _MOST_ROUNDS:
        rounds.append([])
        for numel, cost in zip(sizes, costs, strict=True):
            times = int(min(_MOST_TIMES, max(costs) / cost))
            found = [[timed(numel, bits) for bits in ways] for _ in range(times)]
            rounds[-1].append(np.min(found, axis=0).tolist())
        elapsed = largest([time.perf_counter() - start])[0]
    least = largest(np.min(rounds, axis=0).ravel().tolist())
    table = np.array(least).reshape(len(sizes), len(ways))
    return Timings(sizes, dict(zip(ways, map(tuple, table.T.tolist()), strict=True)))


# ---- 4. each communicator's ----------------------------------------------------------------------

# By communicator and config; measured under a lock of their own, since threads may ask at a time.
_verdicts: dict[tuple[int, Config], Verdict] = {}
_locks: dict[tuple[int, Config], threading.Lock] = {}


def verdict_of(communicator: "Communicator", config: Config) -> Verdict:
    """Return a communicator's verdict for a config; the first call is collective, and measures."""
    key = _key(communicator, config)
    found = _verdicts.get(key)
    if found is None:
        with _locks.setdefault(key, threading.Lock()):
            found = _verdicts.get(key)
            if found is None:
                found = Verdict.of(measured(communicator, key[1]))
                _verdicts[key] = found
                _log.debug("communicator '%s', bits by size: %s", communicator.name, found)
    return found


def bits_for(
    communicator: "Communicator",
    numel: int,
    config: Config | None = None,
    *,
    element_bytes: int = 4,
) -> int:
    """Return in how many bits an allreduce of so many values is best sent; 32: exact.

    Collective when it is first asked of a communicator with this config: allreduces of 4 KiB to
    16 MiB are timed, for a second at most, and ranks agree on the times. All else follows from
    those, so that all ranks get the same answers: exact, unless 8, 4 or 2 bits take a tenth less
    time; then the most bits that take little more than the fastest; 2 only where what is lost
    comes back (config.keeps_residuals). stats() tells what was found.

    Args:
        communicator: of the ranks.
        numel: values of the message.
        config: how values travel but for the bits; None: Config().
        element_bytes: 4, or 2 of float16 and bfloat16.

    Raises:
        InvalidArgument: other bytes; a compressor without bits to choose.
        CgxError: see Communicator.
    """
    if element_bytes not in (2, 4):
        raise InvalidArgument(f"element_bytes is {element_bytes}; it must be 2 or 4")
    if numel < 0:
        raise InvalidArgument(f"numel is {numel}; it must be 0 or more")
    config = Config() if config is None else config
    if communicator.size == 1:
        _key(communicator, config)  # which refuses a compressor without bits to choose
        return EXACT
    return verdict_of(communicator, config).bits(numel, element_bytes)


def set_verdict(communicator: "Communicator", config: Config, verdict: Verdict) -> None:
    """Have a communicator use this verdict, the same on all ranks, and measure nothing."""
    _verdicts[_key(communicator, config)] = verdict


def _key(communicator: "Communicator", config: Config) -> tuple[int, Config]:
    require_choice(config)
    return communicator.id, config.with_own(bits=Config.bits)


def told_of(comm: int) -> str:
    """Return the verdicts of the communicator of this id in words; "" if none was asked for."""
    return "; ".join(str(verdict) for (id_, _), verdict in list(_verdicts.items()) if id_ == comm)


def forget(comm: int) -> None:
    """Forget what was measured of a communicator that is closed."""
    _forget(_verdicts, comm)
    _forget(_locks, comm)


def _forget(known: dict[Any, Any], comm: int) -> None:
    for key in [key for key in list(known) if key[0] == comm]:
        known.pop(key, None)
