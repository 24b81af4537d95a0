"""Which Python thread launches programs with collectives among processes.

The n-th launch of a program must be the same in every process. One thread that dispatches all of
them sees to that. Several do not: which of them is first differs between processes, and XLA:CPU
runs programs of several devices one after the other, so that two processes may wait for each other
for ever. XLA tells a handler nothing of threads. So this makes the thread a part of jit's cache key
(jax.make_user_context): each kind of thread lowers its own program, and that is where it is known.

    claim      the thread that called initialize() launches as it likes
    launching  any thread may, in a block with a name: rank 0 gives each block a ticket, and every
               process launches by tickets
"""

import contextlib
import itertools
import threading
from collections.abc import Iterator

import jax

from cgx_ops.address import exchange
from cgx_ops.jax import _runtime

_MAIN = True  # the context of the thread that launches without a name
# None, _MAIN or the name of a block.
_context = jax.make_user_context(None)


def claim() -> None:
    """Make this the thread that launches without a name."""
    _context(_MAIN).__enter__()  # until the thread ends


def launcher(named: bool, names_suffice: bool) -> str:
    """Return the name of the block that lowers a program here; "" if it needs none.

    Args:
        named: the call has a name of the user's, which tells the threads' calls apart.
        names_suffice: such names are enough: each process has one device, a CPU.

    Raises:
        RuntimeError: a thread that nobody knows launches what only one thread may.
    """
    launching_here = _context.value
    if launching_here is None and threading.current_thread() is threading.main_thread():
        claim()  # somebody called jax.distributed.initialize() instead of ours
        return ""
    if launching_here is None and not (named and names_suffice):
        raise RuntimeError(
            "a collective among processes is launched by another thread than the one that called "
            "cgx_ops.jax.initialize(): in which order threads launch differs between processes. "
            'Launch it in a block `with cgx_ops.jax.launching("..."):`, with a name for each thread'
            + (", or give the collective a name (name=)" if names_suffice else "")
        )
    return launching_here if isinstance(launching_here, str) else ""


@contextlib.contextmanager
def launching(name: str) -> Iterator[None]:
    """Launch programs from one of several Python threads, in an order that all processes share.

    Every process runs the same blocks: one thread of each enters a block of this name, as often as
    in the others. Only the calls of jitted functions belong into it, since blocks of other threads
    wait for its end:

        with cgx_ops.jax.launching("evaluation"):
            result = step(batch)
        print(result)

    Costs a message between the processes. In one process it does nothing.

    Args:
        name: of the thread, among those that launch at the same time.

    Raises:
        CgxError: a process does not enter its block within CGX_TIMEOUT.
    """
    if jax.process_count() == 1:
        yield
        return
    name_of_exchange = f"cgx_ops.jax.launching:{name}"
    ticket = int(exchange(str(_tickets.draw()), name_of_exchange, _runtime.world())[0])
    with _tickets.turn(ticket), _context(name):
        yield


class _Tickets:
    """Numbers of blocks in the order of launching: drawn on rank 0, served in every process."""

    def __init__(self) -> None:
        self._drawn = itertools.count()
        self._changed = threading.Condition()
        self._serving = 0

    def draw(self) -> int:
        with self._changed:
            return next(self._drawn)

    @contextlib.contextmanager
    def turn(self, ticket: int) -> Iterator[None]:
        """Wait until all smaller tickets are done."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._serving == ticket, _runtime.timeout()):
                raise TimeoutError(
                    f"block {ticket} of cgx_ops.jax.launching waits for block {self._serving}, "
                    "whose thread has not come to its end here"
                )
        try:
            yield
        finally:
            with self._changed:
                self._serving = ticket + 1
                self._changed.notify_all()


_tickets = _Tickets()
