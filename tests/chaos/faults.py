"""The faults: a table, and the functions that a victim applies to itself.

A fault occurs in one of three ways: before a step of the traffic, on its thread; by a timer, on a
separate thread, at any moment; or immediately. A stopped process stops itself; the referee
continues it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from chaos import links

if TYPE_CHECKING:
    from chaos.member import Member

MIB = 1 << 20


class Uncaught(Exception):
    """An exception that a rank raises and does not catch."""


@dataclass(frozen=True)
class Fault:
    """A row of the table.

    Attributes:
        act: the function that the victim applies to itself.
        how: when: "timer", "step", "started" (a step between starting and waiting, if the traffic
            has one) or "never".
        kills: whether the victim's process ends.
        stops: whether the victim stops; the referee continues it after `lasts` times the deadline.
        harmless: whether all ranks must get values.
        starves: whether Python's own calls may fail, too; MemoryError is then accepted.
        interrupts: whether the victim may raise KeyboardInterrupt.
        peers_late: whether all other ranks, not the victim, sleep before their first step.
        delay_exponents: the timer's delay is 10 to a power between these, in seconds.
        lasts: bounds of the duration, in deadlines.
        deadline: the deadline of the round; None: determined by the seed.
        transports: the transports that have it; empty: all.
    """

    act: Callable[[Member], None]
    how: Literal["timer", "step", "started", "never"]
    weight: float = 1
    kills: bool = False
    stops: bool = False
    harmless: bool = False
    starves: bool = False
    interrupts: bool = False
    peers_late: bool = False
    may_be_early: bool = True
    delay_exponents: tuple[float, float] = (-4.3, -1.2)
    lasts: tuple[float, float] = (0.1, 0.3)
    deadline: float | None = None
    transports: tuple[str, ...] = ()


# ---- The victim's faults -------------------------------------------------------------------------


def _nothing(_member: Member) -> None:
    pass


def _kill(_member: Member) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _exit(_member: Member) -> None:
    os._exit(3)


def _raise(_member: Member) -> None:
    raise Uncaught("chaos: an uncaught exception")


def _stop(_member: Member) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _sleep(member: Member) -> None:
    time.sleep(member.round.lasts)


def _interrupt(_member: Member) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def _interrupt_soon(member: Member) -> None:
    """Use the kernel's timer: a thread would be late on a busy machine."""
    signal.setitimer(signal.ITIMER_REAL, member.round.delay)


def _abort(member: Member) -> None:
    """End the collectives of all ranks, which then connect again under the same name."""
    member.comm.abort("chaos: a rank aborts")


def _blink(member: Member) -> None:
    with links.away(member.store_port):
        time.sleep(member.round.lasts)


def _cut(member: Member) -> None:
    links.cut(member.store_port)


def _be_nice(_member: Member) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def _few_descriptors(member: Member) -> None:
    highest = max(map(int, os.listdir("/proc/self/fd")))
    _lower(resource.RLIMIT_NOFILE, highest + member.round.amount)


def _little_memory(member: Member) -> None:
    with open("/proc/self/statm") as statm:
        size = int(statm.read().split()[0]) * resource.getpagesize()
    _lower(resource.RLIMIT_AS, size + (0, MIB // 8, MIB, 8 * MIB)[member.round.amount])


def _no_shared_memory(member: Member) -> None:
    """Make ftruncate of memory files fail, like a full /dev/shm or a container's limit."""
    _lower(resource.RLIMIT_FSIZE, (0, 4096, 64 << 10, MIB)[member.round.amount])


def _lower(limit: int, value: int) -> None:
    _before.setdefault(limit, resource.getrlimit(limit))
    resource.setrlimit(limit, (value, _before[limit][1]))


_before: dict[int, tuple[int, int]] = {}


def restore_limits() -> None:
    """Restore the limits that the faults have lowered."""
    while _before:
        resource.setrlimit(*_before.popitem())
    with contextlib.suppress(PermissionError):  # the process keeps its priority in this case
        os.setpriority(os.PRIO_PROCESS, 0, 0)


def _fork(use: bool) -> Callable[[Member], None]:
    def act(member: Member) -> None:
        child = os.fork()
        if child:
            member.children.append(child)
            return
        status = 99
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            status = _use(member) if use else 0
            if member.round.amount % 2:
                atexit._run_exitfuncs()  # as a child does when its interpreter exits
        finally:
            os._exit(status)

    return act


def _use(member: Member) -> int:
    """Make calls that a child must not make: they must raise immediately."""
    from cgx_ops import Closed

    begin = time.monotonic()
    try:
        member.comm.allreduce(np.ones(100, np.float32))
        return 1
    except Closed:
        pass
    return 2 if time.monotonic() - begin > 2 else 0


FAULTS: dict[str, Fault] = {
    "none": Fault(_nothing, "never", harmless=True, weight=2),
    "slow": Fault(_sleep, "step", harmless=True),
    "nice": Fault(_be_nice, "step"),
    "late": Fault(_sleep, "step", lasts=(1.2, 1.6)),
    "kill -9": Fault(_kill, "timer", kills=True, weight=2),
    "os._exit": Fault(_exit, "timer", kills=True),
    "exception": Fault(_raise, "step", kills=True, may_be_early=False),
    "stop, short": Fault(_stop, "timer", stops=True, harmless=True),
    "stop, long": Fault(_stop, "timer", stops=True, lasts=(1.2, 1.6)),
    "stop, started": Fault(
        _stop, "started", stops=True, lasts=(1.4, 1.7), weight=2, may_be_early=False
    ),
    "abort": Fault(_abort, "timer", may_be_early=False, weight=2),
    "blink": Fault(_blink, "timer", harmless=True, may_be_early=False, transports=("tcp",)),
    "blink, long": Fault(
        _blink, "timer", may_be_early=False, lasts=(1.2, 1.6), transports=("tcp",)
    ),
    "cut": Fault(_cut, "timer", may_be_early=False, transports=("tcp",)),
    "descriptors": Fault(_few_descriptors, "timer", weight=2),
    "memory": Fault(_little_memory, "timer", starves=True),
    "shared memory": Fault(_no_shared_memory, "timer"),
    "fork": Fault(_fork(use=False), "started", harmless=True, may_be_early=False),
    "fork that calls": Fault(_fork(use=True), "started", harmless=True, may_be_early=False),
    "ctrl-c": Fault(
        _interrupt, "timer", interrupts=True, weight=2, delay_exponents=(-5, -2), lasts=(0, 0)
    ),
    # In the middle of starting; the others start when all of the victim's resources are freed.
    "ctrl-c, starting": Fault(
        _interrupt_soon, "started", interrupts=True, peers_late=True, may_be_early=False, weight=2,
        delay_exponents=(-5, -2.5), lasts=(0.1, 0.1),
    ),
    # The others are late and the victim waits: it must react before they come.
    "ctrl-c, waiting": Fault(
        _interrupt, "timer", interrupts=True, peers_late=True, may_be_early=False, weight=0.5,
        delay_exponents=(-1.5, -1), lasts=(0.7, 0.7), deadline=4.0,
    ),
}  # fmt: skip


# ---- Timing --------------------------------------------------------------------------------------


class CtrlC:
    """Raise KeyboardInterrupt inside `with`, once; later signals of the round have no effect.

    Handles SIGINT, and the timer's SIGALRM, which replaces it.
    """

    def __init__(self) -> None:
        self._armed = self._pending = False
        self._held = 0

    def __enter__(self) -> CtrlC:
        self._armed = True
        for number in (signal.SIGINT, signal.SIGALRM):
            # installed permanently: a late signal finds nothing armed
            signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self._armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _handle(self, _signal: int, _frame: object) -> None:
        if self._armed and self._held:
            self._pending = True
        elif self._armed:
            self._armed = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the interrupt back while the harness does something that must not be interrupted."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        if self._pending and not self._held:
            self._pending = self._armed = False
            raise KeyboardInterrupt


def arm(member: Member) -> None:
    """Start the victim's timer, if its fault uses one."""
    fault = FAULTS[member.round.fault]
    if not member.is_victim or fault.how != "timer":
        return

    def run() -> None:
        time.sleep(member.round.delay)
        if not member.over:
            suffer(member)

    timer = threading.Thread(target=run, daemon=True)
    member.timers.append(timer)
    timer.start()


def suffer(member: Member) -> None:
    """Apply the fault now."""
    member.note_fault(time.monotonic())
    FAULTS[member.round.fault].act(member)
