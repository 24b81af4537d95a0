"""Collectives on numpy arrays in flight, and bootstraps (numpy_ops/*.cc).

Used by cgx_ops/_core/request.py, call.py, communicator.py and bootstrap.py.

A status is one of cgx.h; library.check() raises what it stands for. An address is that of a
structs.Collective.
"""

from collections.abc import Callable
from typing import Any

MUST_BE_CHECKED: int  # no status

def run(address: int, arrays: tuple[Any, ...]) -> int:
    """Start a collective that uses these arrays, wait for its end and return a status.

    Signals' handlers run meanwhile. What they raise ends the wait, not the collective, until whose
    end the arrays are kept.
    """

def repeat(pattern: int, source: Any, result: Any, stream: int, count: Callable[[], int]) -> int:
    """Run the collective at address `pattern` on other arrays of the same dtype and shape.

    Its seed is the count()-th of the stream (cgx/call_seeds.h).

    Returns a status, or MUST_BE_CHECKED: such arrays may be refused, and nothing was done.
    """

def create(bootstrap: int, allgather: Callable[[bytes], bytes], comm: int) -> int:
    """Make a communicator by the structs.Bootstrap at this address and return a status.

    allgather, in place of its own, returns all ranks' bytes end to end; what it raises, and what a
    signal's handler raises meanwhile, is raised here. comm: the address that receives the id.
    """

def collect_dropped() -> None:
    """Let go of the arrays of dropped flights that have ended since. On any thread."""

class Flight:
    """A collective in flight. It keeps `arrays` until the end, also if it is dropped before."""

    def __init__(self, arrays: tuple[Any, ...]) -> None: ...
    def start(self, address: int) -> int:
        """Start it, once; return a status."""

    def wait(self) -> int:
        """Block until the end and return a status, on each call; signals as in run()."""

    def done(self) -> bool:
        """Return whether wait() would return at once."""
