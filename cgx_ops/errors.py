"""The exceptions of cgx_ops, and checks of numbers that several modules share.

There is one exception per status of cgx.h. Each one is also the built-in exception that it
resembles, so that `except ValueError` works.
"""

import numbers
import operator
from typing import Any


class CgxError(RuntimeError):
    """Base class of all exceptions that cgx_ops raises.

    Example:
        >>> import cgx_ops
        >>> try:
        ...     cgx_ops.Config(bits=12)
        ... except cgx_ops.CgxError as error:
        ...     print(error)
        Config.bits is 12; it must be an integer from 1 to 8, or 32 (exact)
    """


class InvalidArgument(CgxError, ValueError):
    """A value is out of its range: an argument, a field of Config, or a CGX_* variable.

    It is also a ValueError.

    Attributes:
        field: The field of Config whose value is not accepted, whatever the other fields are. None
            for all other errors.

    Example:
        >>> import cgx_ops
        >>> try:
        ...     cgx_ops.Config(bucket_size=0)
        ... except cgx_ops.InvalidArgument as error:
        ...     print(error.field)
        bucket_size
    """

    field: str | None = None


class Unsupported(CgxError, TypeError):
    """A dtype, an operation or a memory layout is not supported. It is also a TypeError.

    Example:
        >>> import numpy as np
        >>> import cgx_ops
        >>> try:
        ...     cgx_ops.allreduce(np.arange(3))
        ... except cgx_ops.Unsupported as error:
        ...     print(str(error)[:22])
        Arrays of dtype int64
    """


class NotFound(CgxError, LookupError):
    """No communicator has this name or id. It is also a LookupError.

    Example:
        >>> import cgx_ops
        >>> try:
        ...     cgx_ops.Communicator.find("nobody")
        ... except cgx_ops.NotFound as error:
        ...     print(str(error).split(";")[0])
        no communicator is named 'nobody'
    """


class MismatchError(CgxError):
    """The ranks called one collective with different arguments. All ranks raise it.

    The communicator can still be used.

    Example:
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> import numpy as np
        >>> from cgx_ops import Communicator, MismatchError
        >>> def reduce(comm: Communicator) -> str:
        ...     try:
        ...         comm.allreduce(np.zeros(10 + comm.rank, np.float32))
        ...     except MismatchError as error:
        ...         return str(error).split(";")[0]
        >>> ranks = Communicator.local(2)
        >>> with ThreadPoolExecutor() as threads:
        ...     print(list(threads.map(reduce, ranks))[0])
        ranks 0 and 1 disagree on collective call 0: numel 10 against 11
        >>> for comm in ranks:
        ...     comm.close()
    """


class DeadlineExceeded(CgxError, TimeoutError):
    """A collective did not end in time; its communicator is closed. It is also a TimeoutError.

    The time is the argument `timeout`, else that of the communicator, else CGX_TIMEOUT (300 s).

    Example:
        >>> import numpy as np
        >>> from cgx_ops import Communicator, DeadlineExceeded
        >>> first, second = Communicator.local(2)
        >>> try:
        ...     first.allreduce(np.zeros(10, np.float32), timeout=0.05)  # alone
        ... except DeadlineExceeded:
        ...     print(first.closed)
        True
        >>> first.close()
        >>> second.close()
    """


class PeerFailed(CgxError, ConnectionError):
    """Another rank failed or gave up; the communicator is closed. It is also a ConnectionError.

    Example:
        >>> import numpy as np
        >>> from cgx_ops import Communicator, PeerFailed
        >>> first, second = Communicator.local(2)
        >>> second.close()
        >>> try:
        ...     first.allreduce(np.zeros(10, np.float32))
        ... except PeerFailed as error:
        ...     print(str(error).split(": ")[1])
        rank 1 is lost
        >>> first.close()
    """


class Closed(CgxError):
    """The communicator was already closed before the call.

    Example:
        >>> import numpy as np
        >>> from cgx_ops import Closed, Communicator
        >>> [comm] = Communicator.local(1)
        >>> comm.close()
        >>> try:
        ...     comm.allreduce(np.zeros(10, np.float32))
        ... except Closed:
        ...     print("closed")
        closed
    """


class SystemFailure(CgxError):
    """A request to MPI or to the operating system failed, or the ranks cannot be reached.

    Example:
        >>> import cgx_ops
        >>> try:
        ...     communicator = cgx_ops.init()
        ... except cgx_ops.SystemFailure as error:  # such as several ranks without an address
        ...     print(f"cannot start: {error}")
    """


class InternalError(CgxError):
    """A defect in cgx_ops. Please report the message.

    Example:
        >>> import cgx_ops
        >>> issubclass(cgx_ops.InternalError, cgx_ops.CgxError)
        True
    """


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
    """Return the exception for a failed cgx_status_t.

    Args:
        status: The status code.
        message: The text of the exception.
        field: The field of Config whose value failed, if any.
    """
    kind = KINDS[status] if 0 < status < len(KINDS) else InternalError
    error = kind(message or f"cgx status {status}")
    if isinstance(error, InvalidArgument):
        error.field = field
    return error


def require_share(what: str, value: float) -> None:
    """Raise InvalidArgument unless 0 <= value < 1, as for a momentum.

    Args:
        what: Name of the value for the message, such as "CompressedAdamW: betas[0]".
        value: The value.
    """
    if not 0 <= value < 1:
        raise InvalidArgument(f"{what} is {value!r}; it must be at least 0 and less than 1")


def is_number(value: Any) -> bool:
    """Return whether a setting is a real number; bools do not count."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def require_integer(what: str, value: Any, least: int, most: int | None = None) -> int:
    """Return a value as an int, or raise InvalidArgument unless it is an integer in this range.

    Args:
        what: Name of the value for the message, such as "ranks[0]".
        value: The value; bools are refused.
        least: The smallest accepted integer.
        most: The largest accepted integer; None for no limit. C code needs one, because it would
            take the low 32 bits of a larger number.
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
    """Return a seed, or raise InvalidArgument unless it is a signed 64-bit integer."""
    if type(seed) is int and -(2**63) <= seed < 2**63:
        return seed
    return require_integer("seed", seed, -(2**63), 2**63 - 1)
