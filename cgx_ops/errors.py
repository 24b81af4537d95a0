"""The exceptions of cgx_ops: one kind per status of cgx.h, each also the built-in it resembles.

And what several places require of numbers that they are given.
"""

import numbers
import operator
from typing import Any


class CgxError(RuntimeError):
    """Base of everything that cgx_ops raises on its own behalf."""


class InvalidArgument(CgxError, ValueError):
    """A value out of its range: bits, bucket_size, the text of a CGX_* variable.

    Attributes:
        field: the field of Config that does not accept its value, whatever the other fields are;
            None for every other failure.
    """

    field: str | None = None


class Unsupported(CgxError, TypeError):
    """A dtype, operation or layout that no kernel serves."""


class NotFound(CgxError, LookupError):
    """No communicator has this name or id."""


class MismatchError(CgxError):
    """Ranks called one collective with different arguments."""


class DeadlineExceeded(CgxError, TimeoutError):
    """A collective outlived its deadline; its communicator is closed."""


class PeerFailed(CgxError, ConnectionError):
    """A peer died or gave up; the communicator is closed."""


class Closed(CgxError):
    """The communicator was closed before the call."""


class SystemFailure(CgxError):
    """MPI or the operating system refused."""


class InternalError(CgxError):
    """A defect in cgx_ops."""


# Indexed by cgx_status_t; 0 is success.
KINDS: tuple[type[CgxError], ...] = (
    CgxError,
    InvalidArgument,
    Unsupported,
    NotFound,
    MismatchError,
    DeadlineExceeded,
    PeerFailed,
    Closed,
    SystemFailure,
    InternalError,
)


def from_status(status: int, message: str, field: str | None = None) -> CgxError:
    """Return the exception that stands for a failed cgx_status_t.

    Args:
        status: the code.
        message: what people read.
        field: of Config, if its value is what failed.
    """
    kind = KINDS[status] if 0 < status < len(KINDS) else InternalError
    error = kind(message or f"cgx status {status}")
    if isinstance(error, InvalidArgument):
        error.field = field
    return error


def require_share(what: str, value: float) -> None:
    """Raise InvalidArgument unless a setting is a share of what stays: such as a momentum.

    Args:
        what: names it: "OneBitAdam: betas[0]".
        value: of it.
    """
    if not 0 <= value < 1:
        raise InvalidArgument(f"{what} is {value!r}; it must be at least 0 and less than 1")


def is_number(value: Any) -> bool:
    """Tell whether a setting is a real number, such as one of numpy's; True and False are none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def require_integer(what: str, value: Any, least: int, most: int | None = None) -> int:
    """Return a number as an int; raise InvalidArgument unless it is an integer in this range.

    Args:
        what: names it: "ranks[0]".
        value: of it; True and False are none.
        least: the lowest that is accepted.
        most: the highest; None: there is none. C would take the low 32 bits of a larger one for it.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        accepted = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise InvalidArgument(f"{what} is {value!r}; it must be an integer {accepted}")
    return number


def checked_seed(seed: Any) -> int:
    """Return a seed; raise InvalidArgument unless it is a signed integer of 64 bits."""
    if type(seed) is int and -(2**63) <= seed < 2**63:
        return seed
    return require_integer("seed", seed, -(2**63), 2**63 - 1)
