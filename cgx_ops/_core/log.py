"""The logger "cgx_ops": one line when training starts, one when the process ends.

Rank 0 logs at level INFO. The logger writes to stderr, unless it or the root logger has a handler.
CGX_LOG=0 turns it off.
"""

import functools
import logging
import os
from dataclasses import dataclass

from cgx_ops._core.tables import COMPRESSORS, DEFAULT_RATE, EXACT_BITS
from cgx_ops.config import Config
from cgx_ops.errors import InvalidArgument
from cgx_ops.stats import traffic, with_unit

logger = logging.getLogger("cgx_ops")

_TRANSPORTS = {
    "self": "one process",
    "thread": "threads",
    "shm": "shared memory",
    "mpi": "MPI",
    "tcp": "TCP",
    "hybrid": "shared memory and MPI",
    "hybrid_tcp": "shared memory and TCP",
}
_reported: set[object] = set()
_left_out = 0  # bytes saved before any collective


@dataclass(frozen=True)
class Tensors:
    """The number of tensors that a step sends.

    Attributes:
        count: All tensors.
        exact: Those sent exact; None if it depends on the step.
    """

    count: int
    exact: int | None

    def __str__(self) -> str:
        exact = "" if self.exact is None else f", {self.exact} of them exact"
        return f"{self.count} tensors{exact}"


@functools.cache
def set_up() -> None:
    """Add a handler to the logger if there is none. This happens once per process.

    Raises:
        InvalidArgument: CGX_LOG is not 0 or 1.
    """
    text = os.environ.get("CGX_LOG", "")
    if text not in ("", "0", "1"):
        raise InvalidArgument(f"CGX_LOG is {text!r}; accepted: 0 (silent), 1, or unset")
    if text == "0":
        logger.setLevel(logging.CRITICAL + 1)
    elif not logger.handlers and not logging.root.handlers:
        handler = logging.StreamHandler()
        handler.addFilter(lambda _: not logging.root.handlers)  # a later basicConfig() takes over
        logger.addHandler(handler)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)


def started(
    key: object, what: str, config: Config, ranks: int, transport: str, tensors: Tensors | None
) -> None:
    """Log that compression is in use, once per key. Call it on rank 0.

    Args:
        key: Identifies what starts. Further calls with the same key do nothing.
        what: "DDP", "FSDP2", "operators", "JAX".
        config: The Config of tensors for which no rule sets something else.
        ranks: Number of ranks.
        transport: The communicator's transport, as in Stats, or another text.
        tensors: The tensors of a step; None if unknown.
    """
    if key in _reported:
        return
    _reported.add(key)
    set_up()
    how = f"{described(config)}, {ranks} ranks, {_TRANSPORTS.get(transport, transport)}"
    logger.info("cgx: %s in %s%s", what, how, f"; {tensors}" if tensors else "")


def leave_out(count: int) -> None:
    """Count bytes that a method saves before the core sees them, as PowerSGD does."""
    global _left_out
    _left_out += count


def ended() -> None:
    """Log the bytes sent, if any compression was in use. Call it when the process ends."""
    found = traffic()
    if not _reported or not found.bytes_sent:
        return
    plain = found.bytes_plain + _left_out
    logger.info("cgx: sent %s instead of %s", with_unit(found.bytes_sent), with_unit(plain))


def described(config: Config) -> str:
    """Return a config in words, such as "4 bits", "levels, 1 bit" or "entropy, rate 2"."""
    if config.bits == EXACT_BITS:
        return "exact values"
    bits = f"{config.bits} bit" + "s" * (config.bits != 1)
    if config.compressor == "uniform":
        return bits
    if config.density is not None:
        return f"{config.compressor}, density {config.density:g}"
    if config.compressor == "entropy":
        return f"entropy, rate {config.rate or DEFAULT_RATE:g}"
    has_bits = any(COMPRESSORS[config.compressor]["bits"])
    return f"{config.compressor}, {bits}" if has_bits else config.compressor
