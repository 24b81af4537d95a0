"""A rank in one round: its communicator, its traffic, and the outcomes of its calls."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import struct
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from support.collective_cases import Case

from cgx_ops import (
    Closed,
    Communicator,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    PeerFailed,
    SystemFailure,
    Unsupported,
)
from chaos import faults, traffic
from chaos.faults import FAULTS
from chaos.messages import Gather, Outcome, Play

USABLE_TIMEOUT = 10.0  # seconds; of the check that a process can still reduce


class Failed(Exception):
    """A call of the traffic failed, which ends the traffic."""


class BootstrapFailed(ConnectionError):
    """The referee could not gather: a rank of the bootstrap is lost or late."""


class Member:
    """A rank in one round, as used by traffic and faults."""

    def __init__(
        self, play: Play, connection: Connection, base: Communicator | None, notes: int
    ) -> None:
        self.round, self.rank, self.store_port = play.round, play.rank, play.store_port
        self.size, self.is_victim = self.round.size, play.rank == self.round.victim
        self.fault = FAULTS[self.round.fault]
        self.name = f"round {self.round.seed}"
        self._connection, self._base, self._notes = connection, base, notes
        self._ctrl_c = faults.CtrlC()
        self._comm: Communicator | None = None
        self.names: list[str] = []  # names of the communicators that the round creates
        self.survivors: Communicator | None = None
        self.outcomes: list[Outcome] = []
        self.children: list[int] = []
        self.threads: list[threading.Thread] = []
        self.timers: list[threading.Thread] = []
        self.passes = self.steps = 0
        self.fault_at: float | None = None
        self.complaints: list[str] = []
        self.over = self._slept = False
        # A rank that was stopped must detect that its peers closed their connections, not wait for
        # its own deadline.
        self.timeout = self.round.deadline
        if self.is_victim and self.round.fault == "stop, started":
            self.timeout *= 4

    clock = staticmethod(time.monotonic)

    @property
    def comm(self) -> Communicator:
        assert self._comm is not None
        return self._comm

    # ---- The communicator ------------------------------------------------------------------------

    def make(self) -> None:
        """Create the round's communicator, and one of the survivors if that needs a bootstrap."""
        rest = self.round.survivors
        if self._base is not None and len(rest) in range(2, self.size) and self.rank in rest:
            self.survivors = self.attempt(None, lambda: self._group(rest, "rest"), making=True)
        if self.round.early:
            faults.arm(self)
        self._comm = self.attempt(None, lambda: self._group(range(self.size), ""), making=True)
        assert self.comm.transport in self._possible_transports(), self.comm.transport
        if not self.round.early:
            faults.arm(self)

    def again(self, ranks: tuple[int, ...]) -> Communicator:
        """Return a new communicator of the survivors, under the name of the old one if it can."""
        if self.survivors is not None:
            return self.survivors
        if self._base is None:
            place = ranks.index(self.rank)
            return self._create(place, len(ranks), f"{self.name} ", USABLE_TIMEOUT, elastic=True)
        return self._group(range(self.size), "again")

    def _group(self, ranks: Any, suffix: str) -> Communicator:
        name = f"{self.name} {suffix}"
        if suffix != "rest":
            self.names.append(name)
        if self._base is None:
            return self._create(self.rank, self.size, name, self.timeout)
        return self._base.group([self.round.members[rank] for rank in ranks], name=name)

    def _create(
        self, rank: int, size: int, name: str, timeout: float, *, elastic: bool = False
    ) -> Communicator:
        return Communicator.create(rank, size, self._gather, name, timeout=timeout, elastic=elastic)

    def _gather(self, blob: bytes) -> list[bytes]:
        with self._ctrl_c.held():
            self._connection.send(Gather(blob))
        while not self._connection.poll(0.05):
            pass
        with self._ctrl_c.held():
            answer = self._connection.recv()
        if isinstance(answer, str):
            raise BootstrapFailed(answer)
        return answer

    def _possible_transports(self) -> set[str]:
        hosts = self.round.hosts
        possible = {self.round.transport}
        if self.round.transport == "hybrid" and hosts and len(set(hosts)) == 1:
            possible = {"shm"}
        if self.round.early and self.round.fault in ("descriptors", "memory", "shared memory"):
            possible.add("mpi")  # the fallback of all ranks
        return possible

    def note_fault(self, now: float) -> None:
        """Report the time to the referee, even if this process dies immediately afterwards."""
        self.fault_at = now
        os.pwrite(self._notes, struct.pack("d", now), 0)

    # ---- What traffic calls ----------------------------------------------------------------------

    def step(self, *, started: bool = False) -> None:
        """Apply the fault if it is due, before a call or between starting and waiting."""
        if self.fault.peers_late and not self.is_victim and not self._slept:
            self._slept = True
            time.sleep(self.round.lasts)
        self.steps += 1
        if not self.is_victim or self.fault_at is not None or self.fault.how == "timer":
            return
        due = self.steps > self.round.step
        if (self.fault.how == "step" and due) or (self.fault.how == "started" and started):
            faults.suffer(self)

    def attempt(
        self,
        case: Case | None,
        function: Callable[[], Any],
        *,
        begin: float | None = None,
        ranks: tuple[int, ...] | None = None,
        local: int = 0,
        deadline: float | None = None,
        making: bool = False,
    ) -> Any:
        """Call a function and record the outcome.

        Args:
            case: the case for the oracle; None: the call returns no values.
            function: the call.
            begin: when its deadline began; None: now.
            ranks: the participating ranks of the round; None: all.
            local: number of ranks inside this process that participate instead, this one as rank 0.
            deadline: allowed seconds; None: the round's.
            making: whether the call creates a communicator.

        Raises:
            Failed: the call raised; the traffic ends.
            KeyboardInterrupt: passed through.
        """
        begin = time.monotonic() if begin is None else begin
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:
            error = raised
            if isinstance(raised, faults.Uncaught):
                raise
        end = time.monotonic()
        ranks = tuple(range(self.size)) if ranks is None else ranks
        hosts = None if local or not self.round.hosts else self.round.hosts
        values = case is not None and error is None
        self.outcomes.append(
            Outcome(
                what=f"pass {self.passes} step {self.steps}: {_brief(case)}",
                begin=begin,
                end=end,
                deadline=deadline or self.timeout,
                case=case,
                size=local or len(ranks),
                hosts=hosts and tuple(hosts[rank] for rank in ranks),
                members=None if local else tuple(self.round.members[rank] for rank in ranks),
                place=0 if local or self.rank not in ranks else ranks.index(self.rank),
                digest=traffic.digest(result) if values else "",
                error=type(error).__name__ if error else "",
                text=f"begins with {_first(result)}" if values else str(error),
                right_kind=error is None or self._is_right(error),
                making=making,
            )
        )
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        if error is not None:
            raise Failed from None
        return result

    def attempt_on_thread(self, case: Case, function: Callable[[], Any]) -> bool:
        """Do the same as attempt(), but return whether the call succeeded."""
        try:
            self.attempt(case, function)
        except Failed:
            return False
        return True

    def stop_if_failed(self) -> None:
        if any(outcome.error for outcome in self.outcomes):
            raise Failed

    def _is_right(self, error: BaseException) -> bool:
        if isinstance(error, KeyboardInterrupt):
            return self.is_victim and self.fault.interrupts
        if "Too many open files" in str(error) and self.round.fault == "descriptors":
            return True  # also for gloo's sockets
        if "defect in cgx" in str(error) or "disagree on collective" in str(error):
            return False
        # Mismatched ranks, or arguments out of range, would be a defect of the library here.
        kinds: list[type[BaseException]] = [
            DeadlineExceeded, PeerFailed, Closed, SystemFailure, BootstrapFailed, Unsupported,
        ]  # fmt: skip
        if "torch" in sys.modules:
            import torch.distributed

            kinds.append(torch.distributed.DistError)
            if self.round.traffic == "torch backend" and type(error) is RuntimeError:
                return "connectFullMesh" in str(error)  # raised by gloo inside of the backend
        if "jax" in sys.modules:
            import jax

            kinds.append(jax.errors.JaxRuntimeError)
        if self.is_victim and self.round.fault == "abort":  # operators look for its name
            kinds.append(InvalidArgument)
        if self.is_victim and self.fault.starves:  # raised by Python itself
            kinds += [MemoryError, ImportError]
        return isinstance(error, tuple(kinds))

    # ---- The round -------------------------------------------------------------------------------

    def play(self) -> None:
        """Create the communicator, run the traffic, close. Errors become outcomes."""
        interrupted = False
        try:
            with self._ctrl_c:
                self.make()
                for number in range(self.round.passes):
                    self.passes = number
                    rng = random.Random(f"{self.round.seed} {self.passes}")
                    traffic.KINDS[self.round.traffic].run(self, rng)
        except KeyboardInterrupt:
            interrupted = True
        except Failed:
            pass
        except (MemoryError, RuntimeError):  # raised by this file: a thread that cannot start
            if not (self.is_victim and self.fault.starves):
                raise
        self.over = True
        gc.collect()  # exceptions refer to frames, frames to arrays and requests
        # Allocate memory, to detect that the library still writes to arrays freed by the interrupt.
        sizes = traffic.SIZES if interrupted else ()
        canaries = [np.full(size, 7, np.float32) for size in sizes for _ in range(8)]
        time.sleep(self.round.lasts + 0.1 if interrupted else 0)
        # by name: an interrupt may have occurred before there was an object
        for name in self.names:
            with contextlib.suppress(Failed, NotFound):
                self.attempt(None, Communicator.find(name).close)
        faults.restore_limits()
        for thread in (*self.timers, *self.threads):
            thread.join(self.round.deadline + USABLE_TIMEOUT)
        overwritten = sum(int((canary != 7).sum()) for canary in canaries)
        for changed in traffic.changed_inputs():
            self.complaints.append(f"an unrelated array was overwritten: {changed}")
        if overwritten:
            self.complaints.append(f"{overwritten} elements of unrelated arrays were overwritten")


def _brief(case: Case | None) -> str:
    if case is None:
        return "no values"
    feedback = " with feedback" if case.feedback else ""
    how = f"{case.dtype} by {case.compressor} in {case.bits} bits{feedback}"
    return f"{case.verb} {case.algorithm} of {case.size} {how}"


def _first(values: Any) -> list[Any]:
    return values.ravel()[:3].tolist()
