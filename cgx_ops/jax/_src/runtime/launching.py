"""Which Python thread launches programs with collectives among processes.

The n-th launch of a program must be the same in every process. One thread that dispatches all of
them sees to that. Several do not: which of them is first differs between processes, and XLA:CPU
runs programs of several devices one after the other, so that two processes may wait for each other
for ever. XLA does not give a handler the thread. So this makes the thread a part of jit's cache key
(jax.make_user_context): each kind of thread lowers its own program, and that is where it is known.

    claim      the thread that called initialize() launches as it likes
    launching  any thread may, in a block with a name: rank 0 gives each block a ticket, and every
               process launches by tickets
"""

import contextlib
import itertools
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import NamedTuple

import jax

from cgx_ops._core import launchers
from cgx_ops._core.exchange import exchange
from cgx_ops.errors import CgxError
from cgx_ops.jax._src.runtime import processes

_MAIN = True  # the context of the thread that launches without a name
# None, _MAIN or the name of a block.
_context = jax.make_user_context(None)


def claim() -> None:
    """Make this the thread that launches without a name."""
    _context(_MAIN).__enter__()  # until the thread ends


def launcher(named: bool, names_suffice: bool) -> str:
    """Return the name of the block that lowers a program here; "" if it needs none.

    Args:
        named: the call has a name of the user's, which distinguishes the threads' calls.
        names_suffice: such names are enough: each process has one device, a CPU.

    Raises:
        RuntimeError: an unnamed thread launches a program that only one thread may launch.
    """
    launching_here = _context.value
    if launching_here is None and threading.current_thread() is threading.main_thread():
        claim()  # jax.distributed.initialize() was called instead of ours
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
        CgxError: a process does not enter its block within CGX_TIMEOUT, or a block before this one
            does not end in it here.
    """
    if jax.process_count() == 1:
        yield
        return
    with _tickets.turn(_agree(name)), _context(name):
        yield


class _Ticket(NamedTuple):
    """A block's place in the order of launching, which rank 0 gives it."""

    number: int
    previous: int  # of the block that it follows


class _Tickets:
    """Blocks, one after the other, in the same order in every process."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._last = 0  # drawn
        self._changed = threading.Condition()
        self._ended = {0}  # blocks whose follower has not begun
        self._given_up: dict[int, int] = {}  # blocks that will not run, by the one they follow

    def draw(self) -> _Ticket:
        with self._changed:
            ticket = _Ticket(next(self._numbers), self._last)
            self._last = ticket.number
            return ticket

    def void(self, ticket: _Ticket) -> None:
        """Take back a ticket that no process got."""
        with self._changed:
            if self._last == ticket.number:
                self._last = ticket.previous

    @contextlib.contextmanager
    def turn(self, ticket: _Ticket) -> Iterator[None]:
        """Wait until the block before has ended; this one has ended after it, come what may."""
        try:
            with self._changed:
                if not self._changed.wait_for(
                    lambda: ticket.previous in self._ended, launchers.timeout()
                ):
                    raise CgxError(
                        f"block {ticket.number} of cgx_ops.jax.launching waits for block "
                        f"{ticket.previous}, whose thread has not come to its end here"
                    )
            yield
        finally:
            self.end(ticket)

    def end(self, ticket: _Ticket) -> None:
        """Let the next block begin, once the one before this has ended."""
        with self._changed:
            if ticket.previous not in self._ended:
                self._given_up[ticket.previous] = ticket.number
                return
            self._ended.discard(ticket.previous)
            number: int | None = ticket.number
            while number in self._given_up:
                number = self._given_up.pop(number)
            self._ended.add(number)
            self._changed.notify_all()


_tickets = _Tickets()


def _agree(name: str) -> _Ticket:
    """Return the ticket that rank 0 draws for the next block of this name.

    Another thread asks: who waits here may be interrupted (Ctrl-C), and the other processes, which
    are not, count on this block's end.
    """
    world = processes.world()
    answer: Future[_Ticket] = Future()

    def ask() -> None:
        drawn = _tickets.draw() if world.rank == 0 else None
        try:
            text = exchange(json.dumps(drawn).encode(), f"cgx_ops.jax.launching:{name}", world)[0]
            answer.set_result(_Ticket(*json.loads(text)))
        except Exception as error:
            if drawn is not None:
                _tickets.void(drawn)
            answer.set_exception(error)

    try:
        threading.Thread(target=ask, daemon=True).start()
        return answer.result()
    except BaseException:
        answer.add_done_callback(lambda done: done.exception() or _tickets.end(done.result()))
        raise
