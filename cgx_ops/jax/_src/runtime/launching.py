"""Which Python thread launches programs with collectives among processes.

The n-th launch of a program must be the same in every process. That holds if one thread dispatches
all programs. With several threads the order differs between processes, and XLA:CPU runs programs of
several devices one after the other, so two processes could wait for each other forever. XLA does
not pass the thread to a handler. So this module makes the thread a part of jit's cache key
(jax.make_user_context): each kind of thread lowers its own program, and the lowering can check it.

    claim      the thread that called initialize() launches freely, if no other thread launches
    launching  any thread launches in a block with a name: rank 0 assigns a ticket to each block,
               and every process launches in the order of the tickets

Launches of the thread of claim() outside of blocks have no tickets, so they have no order among
the blocks of other threads. This is a warning, not an error, because a user may wait for one
thread before the other launches.

If a process has one CPU device, XLA runs the programs of each thread on a separate execution
stream, so programs of two blocks could run at the same time. XLA's own collectives (jax.lax.psum)
have no names and would be confused. So all blocks, and the thread of claim(), share one stream.
"""

import contextlib
import itertools
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax

from cgx_ops._core import launchers
from cgx_ops._core.exchange import exchange
from cgx_ops._core.user_warnings import warn_once
from cgx_ops.errors import CgxError
from cgx_ops.jax._src.runtime import compat, processes

_MAIN = True  # the context of the thread that launches without a name
# None, _MAIN or the name of a block.
_context = jax.make_user_context(None)
# The execution stream of ordered launches: any number that no other stream has.
_STREAM = 0x636779


def claim() -> None:
    """Make this the thread that launches without a name."""
    _context(_MAIN).__enter__()  # until the thread ends
    compat.set_execution_stream(_STREAM)


def launching_here() -> Any:
    """Return this thread's context: _MAIN, the name of its block, or None."""
    if _context.value is None and threading.current_thread() is threading.main_thread():
        claim()  # the user called jax.distributed.initialize() instead of ours
    return _context.value


def launcher(named: bool, names_suffice: bool) -> str:
    """Return the name of the block that lowers a program here; "" if it needs none.

    Args:
        named: Whether the user named the call, which distinguishes the calls of threads.
        names_suffice: Whether such names are enough: each process has one device, a CPU, and the
            caller adds no collectives of XLA.

    Raises:
        RuntimeError: An unnamed thread launches a program that only one thread may launch.
    """
    here = launching_here()
    if here is _MAIN:
        _threads.note_outside()
    if here is None and not (named and names_suffice):
        raise RuntimeError(
            "a collective among processes was launched by another thread than the one that called "
            "cgx_ops.jax.initialize(); the order in which threads launch differs between "
            'processes. Launch it in a block `with cgx_ops.jax.launching("..."):`, with a '
            "different name for each thread"
            + (", or give the collective a name (name=)" if names_suffice else "")
        )
    return here if isinstance(here, str) else ""


@contextlib.contextmanager
def launching(name: str) -> Iterator[None]:
    """Launch programs from several Python threads, in the same order in all processes.

    Programs with collectives are normally launched by one thread: the one that called `initialize`.
    If other threads launch them, too, every thread does so inside this context manager::

        with cgx_ops.jax.launching("evaluation"):
            result = step(batch)
        print(result)

    That includes the thread that called `initialize`. In every process, one thread enters each
    block of a name, equally often. Put only calls of jitted functions into a block, because blocks
    of other threads wait for its end. A block costs one message between the processes. With one
    process it does nothing.

    Args:
        name: The name of the block; threads that launch at the same time need different names.

    Yields:
        None: The body runs when it is the block's turn.

    Raises:
        cgx_ops.CgxError: A process does not enter its block within `CGX_TIMEOUT`, or the previous
            block of this process does not end in that time.

    Example:
        >>> import jax
        >>> from cgx_ops.jax import launching
        >>> with launching("evaluation"):
        ...     jax.jit(lambda x: x + 1)(1.0)
        Array(2., dtype=float32, weak_type=True)
    """
    if jax.process_count() == 1:
        yield
        return
    if launching_here() is not _MAIN:
        _threads.note_block(threading.current_thread())
    with _tickets.turn(_agree(name)), _context(name), compat.execution_stream(_STREAM):
        yield


class _Threads:
    """The threads that launch, and a warning if not all of their launches are in blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_blocks: set[threading.Thread] = set()  # without the thread of claim()
        self._outside = False  # whether the thread of claim() launches outside of blocks

    def note_outside(self) -> None:
        """Note that the thread of claim() launches outside of a block."""
        with self._lock:
            self._outside = True
        self._check()

    def note_block(self, thread: threading.Thread) -> None:
        """Note that another thread launches in a block."""
        with self._lock:
            self._in_blocks.add(thread)
        self._check()

    def _check(self) -> None:
        with self._lock:
            self._in_blocks = {thread for thread in self._in_blocks if thread.is_alive()}
            mixed = self._outside and self._in_blocks
        if mixed:
            warn_once(
                "several Python threads launch programs with collectives among processes, and the "
                "thread that called cgx_ops.jax.initialize() has launched programs outside of a "
                "block. If it still does while another thread launches, the order differs between "
                "processes, which then wait for each other until CGX_TIMEOUT. Put the launches of "
                'that thread into blocks `with cgx_ops.jax.launching("..."):`, too'
            )


_threads = _Threads()


class _Ticket(NamedTuple):
    """A block's position in the launch order, assigned by rank 0."""

    number: int
    previous: int  # the number of the block before it


class _Tickets:
    """Blocks, one after the other, in the same order in every process."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._last = 0  # the last number drawn
        self._changed = threading.Condition()
        self._ended = {0}  # ended blocks whose successor has not begun
        self._given_up: dict[int, int] = {}  # blocks that will not run, by the block before them

    def draw(self) -> _Ticket:
        with self._changed:
            ticket = _Ticket(next(self._numbers), self._last)
            self._last = ticket.number
            return ticket

    def void(self, ticket: _Ticket) -> None:
        """Take back a ticket that no process received."""
        with self._changed:
            if self._last == ticket.number:
                self._last = ticket.previous

    @contextlib.contextmanager
    def turn(self, ticket: _Ticket) -> Iterator[None]:
        """Wait until the previous block has ended; end this block in every case."""
        try:
            with self._changed:
                if not self._changed.wait_for(
                    lambda: ticket.previous in self._ended, launchers.timeout()
                ):
                    raise CgxError(
                        f"block {ticket.number} of cgx_ops.jax.launching waited for block "
                        f"{ticket.previous}, which did not end in time in this process"
                    )
            yield
        finally:
            self.end(ticket)

    def end(self, ticket: _Ticket) -> None:
        """Let the next block begin, after the previous block has ended."""
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

    Another thread does the exchange: the waiting thread may be interrupted (Ctrl-C), while the
    other processes count on this block's end.
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
