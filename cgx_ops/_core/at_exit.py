"""The end of a process: what is in flight ends, communicators are closed, then bindings finish.

Registered at import, so that it runs after the exit handlers of everything that imports cgx_ops.
"""

import atexit
import contextlib
import sys
from collections.abc import Callable

from cgx_ops._core import library, log
from cgx_ops.errors import CgxError

_of_bindings: list[Callable[[], object]] = []


def then(end: Callable[[], object]) -> None:
    """Have something done once nothing is in flight any more."""
    _of_bindings.append(end)


def by_exception() -> bool:
    """Return whether an uncaught exception ends the process.

    Then it does not wait: its peers get an error immediately, and Ctrl-C ends it.
    """
    return getattr(sys, "last_type", None) is not None  # set where the traceback was printed


def _finish() -> None:
    with contextlib.suppress(CgxError):  # nothing is left that could raise it
        if not by_exception():
            library.call("cgx_finish")  # peers need what this process has started
            log.ended()
        library.call("cgx_finalize")  # does nothing if nothing was started
    for end in _of_bindings:
        end()


atexit.register(_finish)
