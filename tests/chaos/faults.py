"""The faults: a table, and what the victim does to itself.

A fault is brought in one of three ways: before a step of the traffic, on the thread that runs it;
by a timer, on a thread of its own, at any moment; or at once. What stops a process, it does to
itself too; the referee lets it go on.
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

if TYPE_CHECKING:
    from chaos.member import Member

MIB = 1 << 20


class Uncaught(Exception):
    """What a rank raises and nobody catches."""


@dataclass(frozen=True)
class Fault:
    """A row of the table.

    Attributes:
        act: what the victim does to itself.
        how: where: "timer", "step", "started" (a step between starting and waiting, if the traffic
            has one) or "never".
        kills: the victim's process ends.
        stops: it stands still, and the referee lets it go on after `lasts` times the deadline.
        harmless: all ranks must get values.
        starves: what the victim lacks also fails Python's own calls: MemoryError is then right.
        interrupts: the victim's KeyboardInterrupt is right.
        peers_late: all other ranks sleep so long before their first step, instead of the victim.
        delay_exponents: the timer's delay is 10 to a power between these, in seconds.
        lasts: bounds of how long it lasts, in deadlines.
        deadline: of the round; None: the seed picks it.
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


# ---- What the victim does ------------------------------------------------------------------------


def _nothing(_member: Member) -> None:
    pass


def _kill(_member: Member) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _exit(_member: Member) -> None:
    os._exit(3)


def _raise(_member: Member) -> None:
    raise Uncaught("chaos: nobody catches this")


def _stop(_member: Member) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _sleep(member: Member) -> None:
    time.sleep(member.round.lasts)


def _interrupt(_member: Member) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def _interrupt_soon(member: Member) -> None:
    """By the kernel's timer: a thread of ours would be late on a busy machine."""
    signal.setitimer(signal.ITIMER_REAL, member.round.delay)


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
    """Make ftruncate of memory files fail, as a full /dev/shm or a limit of a container would."""
    _lower(resource.RLIMIT_FSIZE, (0, 4096, 64 << 10, MIB)[member.round.amount])


def _lower(limit: int, value: int) -> None:
    _before.setdefault(limit, resource.getrlimit(limit))
    resource.setrlimit(limit, (value, _before[limit][1]))


_before: dict[int, tuple[int, int]] = {}


def restore_limits() -> None:
    """Give back what the faults took from this process."""
    while _before:
        resource.setrlimit(*_before.popitem())
    with contextlib.suppress(PermissionError):  # it stays nice then
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
                atexit._run_exitfuncs()  # as a child that leaves its interpreter does
        finally:
            os._exit(status)

    return act


def _use(member: Member) -> int:
    """Call what a child may not: it must get an error, at once."""
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
    "descriptors": Fault(_few_descriptors, "timer", weight=2),
    "memory": Fault(_little_memory, "timer", starves=True),
    "shared memory": Fault(_no_shared_memory, "timer"),
    "fork": Fault(_fork(use=False), "started", harmless=True, may_be_early=False),
    "fork that calls": Fault(_fork(use=True), "started", harmless=True, may_be_early=False),
    "ctrl-c": Fault(
        _interrupt, "timer", interrupts=True, weight=2, delay_exponents=(-5, -2), lasts=(0, 0)
    ),
    # In the middle of starting, and the others come when all that the victim had is freed.
    "ctrl-c, starting": Fault(
        _interrupt_soon, "started", interrupts=True, peers_late=True, may_be_early=False, weight=2,
        delay_exponents=(-5, -2.5), lasts=(0.1, 0.1),
    ),
    # The others come late, the victim waits: it must hear of it before they come.
    "ctrl-c, waiting": Fault(
        _interrupt, "timer", interrupts=True, peers_late=True, may_be_early=False, weight=0.5,
        delay_exponents=(-1.5, -1), lasts=(0.7, 0.7), deadline=4.0,
    ),
}  # fmt: skip


# ---- When ----------------------------------------------------------------------------------------


class CtrlC:
    """Raises KeyboardInterrupt inside `with`, once: later signals of the round change nothing.

    Of SIGINT, and of the timer's SIGALRM, which stands for it.
    """

    def __init__(self) -> None:
        self._armed = self._pending = False
        self._held = 0

    def __enter__(self) -> CtrlC:
        self._armed = True
        for number in (signal.SIGINT, signal.SIGALRM):
            signal.signal(number, self._handle)  # for good: a late one finds nothing armed
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
        """Wait with it: for what the harness itself must not leave half done."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        if self._pending and not self._held:
            self._pending = self._armed = False
            raise KeyboardInterrupt


def arm(member: Member) -> None:
    """Start the victim's timer, if its fault comes by one."""
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
    """Bring the fault, now."""
    member.note_fault(time.monotonic())
    FAULTS[member.round.fault].act(member)
