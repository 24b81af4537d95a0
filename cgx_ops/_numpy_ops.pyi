"""Run collectives on numpy arrays, and create communicators (numpy_ops/*.cc).

cgx_ops/_core/request.py, call.py, communicator.py and bootstrap.py use this module. A status is one
of cgx.h; library.check() raises its exception. An address is that of a structs.Collective.
"""

from collections.abc import Callable
from typing import Any

MUST_BE_CHECKED: int  # not a status

def run(address: int, arrays: tuple[Any, ...]) -> int:
    """Start a collective on these arrays, wait for its end and return a status.

    Signal handlers run during the wait. An exception in one ends the wait, but not the collective.
    The arrays stay alive until the collective ends.
    """

def repeat(pattern: int, source: Any, result: Any, stream: int, count: Callable[[], int]) -> int:
    """Run the collective at address `pattern` on other arrays of the same dtype and shape.

    Its seed is the n-th of the stream, where n is the result of count() (cgx/call_seeds.h).

    Returns:
        A status, or MUST_BE_CHECKED if the arrays may be invalid; then nothing was done.
    """

def create(bootstrap: int, allgather: Callable[[bytes], bytes], comm: int) -> int:
    """Create a communicator from the structs.Bootstrap at this address; return a status.

    Args:
        bootstrap: Address of the struct.
        allgather: Replaces the struct's function; it returns the bytes of all ranks end to end.
            Exceptions in it and in signal handlers are raised to the caller.
        comm: Address that receives the id.
    """

def collect_dropped() -> None:
    """Release the arrays of deleted flights that have ended. Any thread may call it."""

class Flight:
    """A collective in flight. Its arrays stay alive until the end, even if it is deleted before."""

    def __init__(self, arrays: tuple[Any, ...]) -> None: ...
    def start(self, address: int) -> int:
        """Start the collective, once; return a status."""

    def wait(self) -> int:
        """Block until the end and return a status, on each call; signals as in run()."""

    def done(self) -> bool:
        """Return whether wait() would return immediately."""
