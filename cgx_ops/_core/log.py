"""The logger `cgx_ops`: a line when training starts, and one when the process ends.

On rank 0, at level INFO. If neither the logger nor the root logger has a handler, the logger gets
one for stderr. CGX_LOG=0 silences it.
"""

import functools
import logging
import os
from dataclasses import dataclass

from cgx_ops._core.tables import EXACT_BITS
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
_left_out = 0  # bytes that no collective was given


@dataclass(frozen=True)
class Tensors:
    """How many tensors a step sends, and how many of them exact; None: it depends on the step."""

    count: int
    exact: int | None

    def __str__(self) -> str:
        exact = "" if self.exact is None else f", {self.exact} of them exact"
        return f"{self.count} tensors{exact}"


@functools.cache
def set_up() -> None:
    """Give the logger a handler if there is none. Once per process.

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
    """Log that something starts to send, once for each key. Call it on rank 0.

    Args:
        key: of what starts; another call with the same key does nothing.
        what: "DDP", "FSDP2", "operators", "JAX".
        config: how tensors travel for which no rule sets something else.
        ranks: how many take part.
        transport: of their communicator, as Stats has it; or a text of the caller's.
        tensors: of a step; None: not known.
    """
    if key in _reported:
        return
    _reported.add(key)
    set_up()
    how = f"{described(config)}, {ranks} ranks, {_TRANSPORTS.get(transport, transport)}"
    logger.info("cgx: %s in %s%s", what, how, f"; {tensors}" if tensors else "")


def leave_out(count: int) -> None:
    """Count bytes that a method makes superfluous before the core sees them, as PowerSGD does."""
    global _left_out
    _left_out += count


def ended() -> None:
    """Log what was sent, if anything has started. At the end of the process."""
    found = traffic()
    if not _reported or not found.bytes_sent:
        return
    plain = found.bytes_plain + _left_out
    logger.info("cgx: sent %s instead of %s", with_unit(found.bytes_sent), with_unit(plain))


def described(config: Config) -> str:
    """Return a config in a few words: "4 bits", "exact", "levels, 1 bit", "topk, density 0.01"."""
    if config.bits == EXACT_BITS:
        return "exact values"
    bits = f"{config.bits} bit" + "s" * (config.bits != 1)
    if config.compressor == "uniform":
        return bits
    if config.density is not None:
        return f"{config.compressor}, density {config.density:g}"
    return f"{config.compressor}, {bits}"
