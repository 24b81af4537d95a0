"""Runs one round: starts it on its workers, serves their bootstraps, continues stopped ranks.

There are two phases, traffic and checks. Each ends when every rank has reported, died or passed its
limit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import time
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from chaos import machine
from chaos.faults import FAULTS
from chaos.member import USABLE_TIMEOUT
from chaos.messages import Check, Checked, Gather, Outcome, Play, Played
from chaos.pool import Worker
from chaos.rounds import JOB_DEADLINE, Round
from chaos.traffic import KINDS, LOOPBACK


@dataclass
class RankState:
    """The state of one rank, as far as the referee knows it."""

    worker: Worker
    played: Played | None = None
    checked: Checked | None = None
    died_at: float | None = None
    stuck: str = ""  # where, if it exceeded its limit

    @property
    def there(self) -> bool:
        return self.died_at is None and not self.stuck


@dataclass
class Result:
    """A round and its observations.

    fault_at: when the fault occurred, if it did; stopped: when the victim was stopped, and until
    when; excused: the machine was so late that this alone may have exceeded deadlines.
    """

    spec: Round
    ranks: list[RankState]
    begin: float
    fault_at: float | None = None
    stopped: tuple[float, float] | None = None
    excused: bool = False
    failures: list[str] = field(default_factory=list)

    @property
    def first_errors(self) -> list[Outcome]:
        """Each survivor's first failed call."""
        found = []
        for rank_state in self.ranks:
            outcomes = rank_state.played.outcomes if rank_state.played else []
            found += [outcome for outcome in outcomes if outcome.error][:1]
        return found


class Referee:
    """Runs one round."""

    def __init__(self, spec: Round, workers: list[Worker], lateness: machine.Lateness) -> None:
        self._spec, self._lateness = spec, lateness
        self._fault = FAULTS[spec.fault]
        self._result = Result(spec, [RankState(worker) for worker in workers], time.monotonic())
        self._stopped_at: float | None = None
        self._gathers: dict[int, bytes] = {}
        self._gathering: float | None = None
        self._gatherers: list[int] = []

    def run(self) -> Result:
        """Run the round."""
        result, spec = self._result, self._spec
        store = _serve_store() if KINDS[spec.traffic].needs_store else None
        self._gatherers = list(range(spec.size))
        for rank, rank_state in enumerate(result.ranks):
            rank_state.worker.connection.send(Play(spec, rank, store.port if store else None))
        deadline = max(spec.deadline, JOB_DEADLINE if spec.by_mpirun else 0)
        self._until(Played, 4 * (deadline + 2) + spec.lasts)
        note = result.ranks[spec.victim].worker.log.with_suffix(".fault").read_bytes()
        result.fault_at = struct.unpack("d", note)[0] or None
        living = [rank for rank, rank_state in enumerate(result.ranks) if rank_state.there]
        self._gatherers = living
        reducible = self._can_reduce(living)
        for rank in living:
            with contextlib.suppress(OSError):
                message = Check(tuple(living) if reducible else ())
                result.ranks[rank].worker.connection.send(message)
        self._until(Checked, 3 * USABLE_TIMEOUT + 5)
        return result

    def _can_reduce(self, living: list[int]) -> bool:
        """Return whether survivors can create a communicator: their bootstrap still works."""
        if not self._spec.by_mpirun:
            return len(living) >= 2
        if tuple(living) != self._spec.survivors:
            return False
        played = [rank_state.played for rank_state in self._result.ranks if rank_state.played]
        if any(each.base_closed for each in played):
            return False
        if self._fault.kills:  # they created one before, if they could
            made = [outcome for each in played for outcome in each.outcomes[:1]]
            return len(living) >= 2 and not any(outcome.error for outcome in made)
        return True

    # ---- Waiting for all reports -----------------------------------------------------------------

    def _until(self, kind: type[Played] | type[Checked], seconds: float) -> None:
        begin = time.monotonic()
        while waiting := [
            rank_state
            for rank_state in self._result.ranks
            if rank_state.there and not _has_reported(rank_state, kind)
        ]:
            self._let_go_on()
            self._bound_gather()
            connections = {rank_state.worker.connection: rank_state for rank_state in waiting}
            for connection in wait(list(connections), timeout=0.005 if self._fault.stops else 0.05):
                self._hear(connections[connection])  # type: ignore[index]
            bound = seconds + 2 * self._lateness.slack(begin)
            if time.monotonic() - begin > bound:
                for rank_state in waiting:
                    rank_state.stuck = (
                        f"after {bound:.1f} s\n{machine.describe(rank_state.worker.pid)}"
                    )
                time.sleep(0.3)  # time to write the stack on the signal

    def _hear(self, rank_state: RankState) -> None:
        try:
            message = rank_state.worker.connection.recv()
        except (EOFError, OSError):
            rank_state.died_at = time.monotonic()
            self._answer_gather("a rank has died")
            return
        rank = self._result.ranks.index(rank_state)
        if isinstance(message, Played):
            rank_state.played = message
            # A rank that gave up takes no part in bootstraps; the others wait in vain.
            if self._gathers:
                self._answer_gather(f"rank {rank} has given up")
        elif isinstance(message, Checked):
            rank_state.checked = message
        elif isinstance(message, Gather):
            if not self._gathers:
                self._gathering = time.monotonic()
            self._gathers[rank] = message.blob
            gone = [r for r in self._gatherers if self._gave_up(r)]
            if gone:
                self._answer_gather(f"ranks {gone} are gone")
            elif len(self._gathers) == len(self._gatherers):
                self._answer_gather([self._gathers[rank] for rank in self._gatherers])

    def _gave_up(self, rank: int) -> bool:
        rank_state = self._result.ranks[rank]
        checking = any(each.checked or each.played for each in self._result.ranks)
        return (
            not rank_state.there
            or bool(rank_state.played and not self._all_played())
            or bool(checking and rank_state.checked)
        )

    def _all_played(self) -> bool:
        return all(rank_state.played for rank_state in self._result.ranks if rank_state.there)

    def _answer_gather(self, answer: list[bytes] | str) -> None:
        for rank in self._gathers:
            with contextlib.suppress(OSError):
                self._result.ranks[rank].worker.connection.send(answer)
        self._gathers.clear()
        self._gathering = None

    def _bound_gather(self) -> None:
        """Limit the bootstrap, like a store's deadline; the harness is slower than the core."""
        if self._gathering and time.monotonic() - self._gathering > 2 * self._spec.deadline:
            self._answer_gather("a rank is late")

    def _let_go_on(self) -> None:
        """Continue the victim when it has been stopped long enough."""
        if not self._fault.stops or self._result.stopped:
            return
        pid = self._result.ranks[self._spec.victim].worker.pid
        now = time.monotonic()
        if self._stopped_at is None:
            if machine.state(pid) == "T":
                self._stopped_at = now
        elif now - self._stopped_at > self._spec.lasts:
            self._result.stopped = (self._stopped_at, now)
            os.kill(pid, signal.SIGCONT)


def _serve_store() -> Any:
    """Return a TCPStore for one round.

    It listens on IPv4 only: torch looks up each client's host name, which may wait for a name
    server with IPv6.
    """
    import torch.distributed

    dist: Any = torch.distributed
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _has_reported(rank_state: RankState, kind: type[Played] | type[Checked]) -> bool:
    return (rank_state.played if kind is Played else rank_state.checked) is not None
