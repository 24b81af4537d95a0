"""A collective in flight, as its caller holds it.

The core reads and writes a collective's arrays until its end, and a signal handler may raise in any
line of the caller before (Ctrl-C does). So the arrays belong to a Flight (numpy_ops/flight.h),
which lets go of them at the core's word only.
"""

from ctypes import addressof

from cgx_ops import _numpy_ops
from cgx_ops._core import library, structs
from cgx_ops._core.arrays import Array


class Request:
    """A started collective. It keeps the arrays alive until the collective ends.

    Call wait(), from any number of threads. An exception of a signal handler (KeyboardInterrupt)
    may end a wait, never the collective: it goes on, as that of a request that is dropped does, and
    the arrays are kept until its end, because the core reads and writes them meanwhile.
    """

    def __init__(self, flight: _numpy_ops.Flight, result: Array) -> None:
        self._flight, self._result = flight, result

    def done(self) -> bool:
        """Return whether wait() would return (or raise) at once."""
        return self._flight.done()

    def wait(self) -> Array:
        """Block until the collective ends and return its result; its deadline bounds this.

        Raises:
            CgxError: what went wrong, again on each call. The result is then undefined.
        """
        library.check(self._flight.wait())
        return self._result


def start(collective: structs.Collective, result: Array, *others: Array) -> Request:
    """Start a collective that writes `result` and reads or writes the others."""
    request = Request(_numpy_ops.Flight((result, *others)), result)
    library.check(request._flight.start(addressof(collective)))
    return request


def run(collective: structs.Collective, result: Array, *others: Array) -> Array:
    """Start such a collective, wait for its end and return its result."""
    library.check(_numpy_ops.run(addressof(collective), (result, *others)))
    return result
