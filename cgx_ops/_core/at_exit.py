"""End a process in order: wait for collectives in flight, close communicators, then end bindings.

The handler is registered at import, so that it runs after the exit handlers of modules that import
cgx_ops.
"""

import atexit
import contextlib
import sys
from collections.abc import Callable

from cgx_ops._core import library, log
from cgx_ops.errors import CgxError

_of_bindings: list[Callable[[], object]] = []


def then(end: Callable[[], object]) -> None:
    """Run a function at exit, after all collectives have ended."""
    _of_bindings.append(end)


def by_exception() -> bool:
    """Return whether an uncaught exception ends the process.

    If so, the process does not wait: its peers get an error immediately, and Ctrl-C works.
    """
    # Python sets last_type when it prints the traceback.
    return getattr(sys, "last_type", None) is not None


def _finish() -> None:
    with contextlib.suppress(CgxError):  # no caller is left to handle it
        if not by_exception():
            library.call("cgx_finish")  # peers wait for this process's part
            log.ended()
        library.call("cgx_finalize")  # does nothing if nothing was started
    for end in _of_bindings:
        end()


atexit.register(_finish)
