"""A collective in flight, as its caller holds it.

The core reads and writes a collective's arrays until its end, and a signal handler may raise in any
line of the caller before (Ctrl-C does). So the arrays belong to a _Flight: it holds them before the
start, the core itself writes the handle into it, and only the core's word that the collective has
ended empties it.
"""

import contextlib
from collections import deque
from ctypes import byref, c_double, c_int32, c_void_p

from cgx_ops import _native
from cgx_ops._arrays import Array
from cgx_ops.errors import CgxError

_run_for = _native.unchecked("cgx_run_for")
_LOOK_UP_S = c_double(
    0.1
)  # how long a wait stays in the core, where Python's signal handlers do not run


class _Flight:
    """The arrays that the core may touch, empty if none, and the collective's handle or null."""

    __slots__ = ("arrays", "handle")

    def __init__(self) -> None:
        self.arrays: tuple[Array, ...] = ()
        self.handle = c_void_p()

    def done(self) -> bool:
        finished = c_int32()
        _native.call("cgx_test", self.handle, byref(finished))
        return bool(finished.value)

    def wait(self) -> None:
        """Block until the end, looking up for signals; raise what went wrong, on each call."""
        ended = c_int32()
        try:
            while not ended.value:
                _native.call("cgx_wait_for", self.handle, _LOOK_UP_S, byref(ended))
        finally:
            if ended.value:
                self.arrays = ()


_flights: set[_Flight] = set()  # all that were made: none is freed with arrays of the core's
_idle: list[_Flight] = []  # to be used again: making one takes longer
_dropped: deque[_Flight] = deque()  # whose callers are gone


def _hold(*arrays: Array) -> _Flight:
    """Return a flight that holds these arrays. An exception may lose it, but frees nothing."""
    if _dropped:
        collect_dropped()
    try:
        flight = _idle.pop()
    except IndexError:
        flight = _Flight()
        _flights.add(flight)
    flight.arrays = arrays
    return flight


def _drop(flight: _Flight) -> None:
    """Give back a flight that nobody else will use."""
    if flight.handle:
        if flight.arrays:  # nobody has seen its end
            _dropped.append(flight)
            return
        handle, flight.handle = flight.handle, c_void_p()  # first: it must not be freed twice
        with contextlib.suppress(CgxError):
            _native.call("cgx_wait", handle)
    flight.arrays = ()
    _idle.append(flight)


def collect_dropped() -> None:
    """Empty the flights nobody waited for whose collectives have ended. On any thread."""
    for _ in range(len(_dropped)):
        try:
            flight = _dropped.popleft()
        except IndexError:  # another thread took the last
            return
        with contextlib.suppress(CgxError):
            if flight.done():
                flight.arrays = ()
        _drop(flight)


class Request:
    """A started collective. It keeps the arrays alive until the collective ends.

    Call wait(), from any number of threads. An exception of a signal handler (KeyboardInterrupt)
    may end a wait, never the collective: it goes on, as that of a request that is dropped does, and
    the arrays are kept until its end, because the core reads and writes them meanwhile.
    """

    def __init__(self, result: Array, *others: Array) -> None:
        self._result = result
        self._flight = _hold(result, *others)

    def done(self) -> bool:
        """Return whether wait() would return (or raise) at once."""
        return self._flight.done()

    def wait(self) -> Array:
        """Block until the collective ends and return its result; its deadline bounds this.

        Raises:
            CgxError: what went wrong, again on each call. The result is then undefined.
        """
        self._flight.wait()
        return self._result

    def __del__(self) -> None:
        if hasattr(self, "_flight"):
            _drop(self._flight)


def start(collective: _native.Collective, result: Array, *others: Array) -> Request:
    """Start a collective that writes `result` and reads or writes the others."""
    request = Request(result, *others)
    _native.call("cgx_start", byref(collective), None, None, byref(request._flight.handle))
    return request


def run(collective: _native.Collective, result: Array, *others: Array) -> Array:
    """Start such a collective, wait for its end and return its result."""
    flight = _hold(result, *others)
    try:
        status = _run_for(byref(collective), _LOOK_UP_S, byref(flight.handle))
        if status:
            _native.check(status)
        if flight.handle:  # it has not ended yet
            flight.wait()
    finally:
        _drop(flight)
    return result
