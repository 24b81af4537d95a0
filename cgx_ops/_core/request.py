"""A collective in flight.

The core reads and writes the arrays until the collective ends. A signal handler, such as that of
Ctrl-C, may raise an exception in the caller before. So the arrays belong to a Flight
(numpy_ops/flight.h), which releases them only when the core reports the end.
"""

from ctypes import addressof

from cgx_ops import _numpy_ops
from cgx_ops._core import library, structs
from cgx_ops._core.arrays import Array


class Request:
    """A started collective, as Communicator.allreduce_async() returns it.

    It keeps the arrays alive until the collective ends. Any number of threads may call wait(). An
    exception in a signal handler (KeyboardInterrupt) may end a wait, but never the collective. A
    collective whose request is deleted continues, too, and its arrays stay alive until its end.

    Args:
        flight: The collective and its arrays.
        result: The array that wait() returns.

    Raises:
        CgxError: done() and wait() report errors; the constructor raises none.

    Example:
        >>> import numpy as np
        >>> from cgx_ops import Communicator
        >>> [comm] = Communicator.local(1)
        >>> request = comm.allreduce_async(np.ones(1000, np.float32), name="layer 1")
        >>> request.wait().shape  # compute something else before
        (1000,)
        >>> request.done()
        True
        >>> comm.close()
    """

    def __init__(self, flight: _numpy_ops.Flight, result: Array) -> None:
        self._flight, self._result = flight, result

    def done(self) -> bool:
        """Return whether wait() would return or raise immediately."""
        return self._flight.done()

    def wait(self) -> Array:
        """Block until the collective ends and return its result. Its timeout bounds the wait.

        Returns:
            `out` of the call, or the new array.

        Raises:
            CgxError: The collective failed; each call raises the error again. The result is
                undefined.
        """
        library.check(self._flight.wait())
        return self._result


def start(collective: structs.Collective, result: Array, *others: Array) -> Request:
    """Start a collective that writes `result`, and reads or writes the other arrays."""
    request = Request(_numpy_ops.Flight((result, *others)), result)
    library.check(request._flight.start(addressof(collective)))
    return request


def run(collective: structs.Collective, result: Array, *others: Array) -> Array:
    """Start a collective, wait for its end and return its result."""
    library.check(_numpy_ops.run(addressof(collective), (result, *others)))
    return result
