"""Choose bits by measurement: bits_for(), and auto_bits of the backend "cgx".

    measured()   times allreduces among ranks; all ranks get the same times
    bits_for()   returns the bits for a message; it measures on its first use

_core/verdicts.py chooses the bits from the times. 2 bits are a choice only with error feedback
(Config.keeps_residuals).
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
_MOST_ROUNDS, _MOST_TIMES = 20, 8  # _MOST_TIMES: of one size in a round

# ---- 1. choices ----------------------------------------------------------------------------------


def choices_of(config: Config) -> tuple[int, ...]:
    """Return the bits from which bits_for() chooses, besides exact."""
    fewest = 2 if config.keeps_residuals else 4
    return tuple(bits for bits in _CHOICES if bits >= fewest and _may_have(config, bits))


def require_choice(config: Config) -> None:
    """Raise InvalidArgument unless the bits of the compressor can be chosen."""
    if COMPRESSORS[config.compressor]["bits"] == [0, 0]:
        raise InvalidArgument(
            f"compressor {config.compressor!r} has no bits to choose: bits_for() and auto_bits "
            "need a compressor such as 'uniform' or 'levels'"
            + ("; for 'entropy', set Config(rate=...)" if config.compressor == "entropy" else "")
        )


def _may_have(config: Config, bits: int) -> bool:
    """Return whether the compressor has these bits, and error feedback converges with them."""
    try:
        config.with_own(bits=bits)
    except InvalidArgument:
        return False
    return True


# ---- 2. measure ----------------------------------------------------------------------------------


def measured(communicator: Communicator, config: Config) -> Timings:
    """Time float32 allreduces among these ranks: the minimum of several rounds, equal on all ranks.

    All ranks must call it with an equal config. It takes less than a second: on slow links it
    leaves out large sizes. Other collectives that run at the same time make the times longer.
    """
    name = f"cgx_ops.auto/{hashlib.sha256(repr(config).encode()).hexdigest()[:8]}"
    configs = {bits: config.with_own(bits=bits) for bits in (EXACT, *choices_of(config))}
    some = np.random.default_rng(communicator.rank).standard_normal(1 << 16, np.float32)
    values = np.resize(some, SIZES[-1])
    out = np.empty_like(values)

    def timed(numel: int, bits: int) -> float:
        start = time.perf_counter()
        communicator.allreduce(values[:numel], "sum", configs[bits], out=out[:numel], name=name)
        return time.perf_counter() - start

    def largest(seconds: Sequence[float]) -> list[float]:
        mine = np.array(seconds, np.float32)
        return communicator.allreduce(mine, "max", configs[EXACT], name=name).tolist()

    for bits in configs:  # opens connections and allocates memory
        timed(SIZES[0], bits)
    # First all sizes that fit, once. Then, while time is left, each size equally long.
    start, elapsed, costs = time.perf_counter(), 0.0, list[float]()
    rounds: list[list[list[float]]] = [[]]
    for numel in SIZES:
        if costs and elapsed + SIZES[1] / SIZES[0] * costs[-1] > _SECONDS:
            break
        rounds[0].append([timed(numel, bits) for bits in configs])
        elapsed, cost = largest([time.perf_counter() - start, sum(rounds[0][-1])])
        costs.append(cost)
    sizes = SIZES[: len(costs)]
    while elapsed * (1 + 1 / len(rounds)) <= _SECONDS and len(rounds) < _MOST_ROUNDS:
        rounds.append([])
        for numel, cost in zip(sizes, costs, strict=True):
            times = int(min(_MOST_TIMES, max(costs) / cost))
            found = [[timed(numel, bits) for bits in configs] for _ in range(times)]
            rounds[-1].append(np.min(found, axis=0).tolist())
        elapsed = largest([time.perf_counter() - start])[0]
    least = largest(np.min(rounds, axis=0).ravel().tolist())
    table = np.array(least).reshape(len(sizes), len(configs))
    return Timings(sizes, dict(zip(configs, map(tuple, table.T.tolist()), strict=True)))


# ---- 3. by communicator --------------------------------------------------------------------------


def verdict_of(communicator: Communicator, config: Config) -> Verdict:
    """Return a communicator's verdict for a config. The first call measures, on all ranks."""
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
    """Return the fastest number of bits for an allreduce of `numel` values; 32 means exact.

    The first call for a communicator and config times allreduces of 4 KiB to 16 MiB, for at most a
    second; all ranks must make it. All ranks get the same answer, by these rules:

    1. Exact, unless 8, 4 or 2 bits take at least a tenth less time. (2 bits only with error
       feedback.)
    2. Otherwise the most bits that take at most a tenth more time than the fastest.

    `communicator.stats().auto` shows the result.

    Args:
        communicator: The ranks.
        numel: Values of the message.
        config: The other settings; None: `Config()`.
        element_bytes: 4, or 2 for float16 and bfloat16.

    Raises:
        InvalidArgument: `element_bytes` or `numel` is out of range, or the bits of the compressor
            cannot be chosen.
        CgxError: See Communicator.

    Example:
        >>> import cgx_ops
        >>> bits = cgx_ops.bits_for(cgx_ops.init(), 25_000_000)
        >>> bits in (32, 8, 4)  # exact with one rank
        True
    """
    if element_bytes not in (2, 4):
        raise InvalidArgument(f"element_bytes is {element_bytes}; it must be 2 or 4")
    if numel < 0:
        raise InvalidArgument(f"numel is {numel}; it must be an integer >= 0")
    config = Config() if config is None else config
    if communicator.size == 1:
        require_choice(config)
        return EXACT
    return verdict_of(communicator, config).bits(numel, element_bytes)


def _slot(communicator: Communicator, config: Config) -> tuple[Slot, Config]:
    """Return the slot of the verdict, and the config in bits that do not depend on its own."""
    require_choice(config)
    uniform = config.with_own(bits=next((b for b in _CHOICES if _may_have(config, b)), EXACT))
    return slot_of(communicator.id, uniform), uniform
