"""A collective in flight, as its caller holds it."""

import contextlib
import threading
from collections import deque
from ctypes import byref, c_int32, c_void_p

from cgx_ops import _native
from cgx_ops._arrays import Array
from cgx_ops.errors import CgxError


class Request:
    """A started collective. It keeps the arrays alive until the collective ends.

    Call wait(). A request that is dropped instead still completes: libcgx reads and writes the
    arrays meanwhile, so they are kept until then.
    """

    def __init__(self, handle: c_void_p, result: Array, buffers: tuple[Array, ...]) -> None:
        self._handle: c_void_p | None = handle
        self._result, self._buffers = result, buffers
        self._error: CgxError | None = None
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Return whether wait() would return (or raise) at once."""
        with self._lock:
            if self._handle is None:
                return True
            finished = c_int32()
            _native.call("cgx_test", self._handle, byref(finished))
            return bool(finished.value)

    def wait(self) -> Array:
        """Block until the collective ends and return its result; its deadline bounds this.

        Raises:
            CgxError: what went wrong, again on each call. The result is then undefined.
        """
        with self._lock:
            if self._handle is not None:
                handle, self._handle = self._handle, None
                try:
                    _native.call("cgx_wait", handle)
                except CgxError as error:
                    self._error = error
                self._buffers = ()
        if self._error is not None:
            raise self._error
        return self._result

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            _abandoned.append((self._handle, self._result, self._buffers))


# Requests nobody waited for, until they end: collected by the next start, on any thread.
_abandoned: deque[tuple[c_void_p | None, Array, tuple[Array, ...]]] = deque()


def collect_abandoned() -> None:
    """Free those that have ended."""
    for _ in range(len(_abandoned)):
        try:
            handle, result, buffers = _abandoned.popleft()
        except IndexError:  # another thread took the last
            return
        finished = c_int32()
        with contextlib.suppress(CgxError):
            _native.call("cgx_test", handle, byref(finished))
            if finished.value:
                _native.call("cgx_wait", handle)
        if not finished.value:
            _abandoned.append((handle, result, buffers))
