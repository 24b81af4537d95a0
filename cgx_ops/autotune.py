"""Bits by measurement: bits_for(), and auto_bits of the backend "cgx".

    measured()  times of allreduces among ranks: the same on all of them
    bits_for    a communicator's answer, measured when it is first asked for

_core/verdicts.py chooses bits from the times. Two bits are a choice only where error feedback
returns what they lose (Config.keeps_residuals).
"""

import hashlib
import logging
import time
from collections.abc import Sequence

import numpy as np

from cgx_ops._core.tables import COMPRESSORS
from cgx_ops._core.verdicts import EXACT, Slot, Timings, Verdict, slot_of
from cgx_ops.communicator import Communicator
from cgx_ops.config import Config
from cgx_ops.errors import InvalidArgument

_log = logging.getLogger(__name__)

SIZES = (1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22)  # values: 4 KiB to 16 MiB of float32
_CHOICES = (8, 4, 2)
_SECONDS = 0.6  # measuring ends within this time
_MOST_ROUNDS, _MOST_TIMES = 20, 8  # of a size in one of them

# ---- 1. choices ----------------------------------------------------------------------------------


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


# ---- 2. measure ----------------------------------------------------------------------------------


def measured(communicator: Communicator, config: Config) -> Timings:
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


# ---- 3. each communicator's ----------------------------------------------------------------------


def verdict_of(communicator: Communicator, config: Config) -> Verdict:
    """Return a communicator's verdict for a config; the first call is collective, and measures."""
    slot, uniform = _slot(communicator, config)
    if slot.verdict is None:
        with slot.lock:
            if slot.verdict is None:
                slot.verdict = Verdict.of(measured(communicator, uniform))
                _log.debug("communicator '%s', bits by size: %s", communicator.name, slot.verdict)
    return slot.verdict


def bits_for(
    communicator: Communicator,
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
    comes back (config.keeps_residuals). stats() reports the result.

    Args:
        communicator: of the ranks.
        numel: values of the message.
        config: the other fields of the config; None: Config().
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
        require_choice(config)
        return EXACT
    return verdict_of(communicator, config).bits(numel, element_bytes)


def set_verdict(communicator: Communicator, config: Config, verdict: Verdict) -> None:
    """Have a communicator use this verdict, the same on all ranks, and measure nothing."""
    _slot(communicator, config)[0].verdict = verdict


def _slot(communicator: Communicator, config: Config) -> tuple[Slot, Config]:
    """Return where the verdict is, and the config with the bits that count for none."""
    require_choice(config)
    uniform = config.with_own(bits=Config.bits)
    return slot_of(communicator.id, uniform), uniform
