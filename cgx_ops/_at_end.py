"""The end of a program: communicators are closed, then bindings end what they have.

Registered at import, so that it runs after the exit handlers of everything that imports cgx_ops.
"""

import atexit
import contextlib
from collections.abc import Callable

from cgx_ops import _native
from cgx_ops.errors import CgxError

_of_bindings: list[Callable[[], object]] = []


def then(end: Callable[[], object]) -> None:
    """Have something done once nothing is in flight any more."""
    _of_bindings.append(end)


def _finish() -> None:
    with contextlib.suppress(CgxError):  # nobody is left to tell
        _native.call("cgx_finalize")  # does nothing if nothing was started
    for end in _of_bindings:
        end()


atexit.register(_finish)
