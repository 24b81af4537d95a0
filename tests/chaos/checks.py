"""What must hold after a round. Each function returns complaints: an empty list is a pass."""

from __future__ import annotations

from chaos import machine, traffic
from chaos.faults import FAULTS
from chaos.machine import Lateness
from chaos.messages import Outcome
from chaos.referee import Result

GRACE = 2.0  # seconds beyond its deadline in which an error must have come
# Where these find no memory, glibc and (under JAX) LLVM end the process; nobody can catch that.
_LAST_WORDS = (
    "memory for thread-local data: ABORT",
    "LLVM ERROR: Unable to allocate section memory",
)
NOTICED = 1.0  # seconds until a waiting call must have noticed Ctrl-C


def judge(result: Result, lateness: Lateness) -> list[str]:
    """Return what was wrong with a round."""
    slack = lateness.slack(result.begin)
    result.excused = lateness.worst_since(result.begin) > result.spec.deadline / 4
    complaints = _ends(result) + _values(result) + _errors(result) + _times(result, slack)
    for rank, told in enumerate(result.ranks):
        if told.checked:
            complaints += [f"rank {rank}: {text}" for text in told.checked.complaints]
            complaints += [
                f"rank {rank}, afterwards: {outcome.error} in {outcome.what}: {outcome.text}"
                for outcome in told.checked.outcomes
                if outcome.error
            ]
    return complaints


def _ends(result: Result) -> list[str]:
    """Those die that must, and no others; nobody is stuck."""
    fault = FAULTS[result.spec.fault]
    complaints = []
    for rank, told in enumerate(result.ranks):
        victim = rank == result.spec.victim
        due = victim and (
            fault.kills
            or (fault.starves and any(text in told.worker.tail() for text in _LAST_WORDS))
        )
        if told.stuck:
            phase = "in its checks" if told.played else "in its traffic"
            complaints.append(f"rank {rank} was stuck {phase} {told.stuck}")
        elif told.died_at is None:
            continue
        elif not due:
            complaints.append(f"rank {rank} died (exit code {told.worker.code()})")
        elif result.spec.fault == "exception" and result.spec.by_mpirun:
            continue  # MPI_Finalize waits for the others: its end is the job's
        elif not machine.wait_gone(told.worker.pid, result.spec.deadline + GRACE + 5):
            complaints.append(f"rank {rank} still runs\n{machine.describe(told.worker.pid)}")
    return complaints


def _values(result: Result) -> list[str]:
    """Equal to the oracle's, to the bit."""
    return [
        f"rank {rank}: WRONG VALUES in {outcome.what}: {outcome.text}"
        for rank, outcome in _outcomes(result, checks=True)
        if outcome.digest and outcome.case and outcome.digest != traffic.expected(
            outcome.case, outcome.hosts, outcome.size, outcome.members
        )[outcome.place]
    ]  # fmt: skip


def _errors(result: Result) -> list[str]:
    """Of a kind that the library may raise, and only where there was a fault."""
    fault = FAULTS[result.spec.fault]
    complaints = []
    for rank, outcome in _outcomes(result):
        if not outcome.error:
            continue
        text = f"rank {rank}: {outcome.error} in {outcome.what}: {outcome.text}"
        if not outcome.right_kind:
            complaints.append(f"of a wrong kind, {text}")
        # A machine that is late by so much brings a fault of its own: a deadline that passes.
        elif fault.harmless and not (result.excused and "within" in outcome.text):
            complaints.append(f"nothing harmful happened, but {text}")
    return complaints


def _times(result: Result, slack: float) -> list[str]:
    """Every call ended within its deadline and some grace; not counted while it stood still."""
    spec = result.spec
    complaints = []
    for rank, outcome in _outcomes(result):
        begin = outcome.begin
        if result.stopped and rank == spec.victim:
            begin = max(begin, min(result.stopped[1], outcome.end))
        # Making one: a bootstrap of the harness (twice the deadline), then waits of the core.
        allowed = outcome.deadline * (3 if outcome.making else 1) + GRACE + slack
        # Frameworks, and making and closing communicators, notice it at the end: docs/explanation/failures.md.
        looks_up = spec.framework == "numpy" and outcome.case
        if outcome.error == "KeyboardInterrupt" and result.fault_at and looks_up:
            begin, allowed = max(begin, result.fault_at), NOTICED + slack
        if FAULTS[spec.fault].how in ("step", "started") and rank == spec.victim:
            allowed += spec.lasts  # it slept between starting and waiting
        if outcome.end - begin > allowed:
            complaints.append(
                f"rank {rank}: {outcome.error or 'an end'} after {outcome.end - begin:.2f} s, "
                f"allowed {allowed:.2f} s, in {outcome.what}: {outcome.text}"
            )
    return complaints


def _outcomes(result: Result, *, checks: bool = False) -> list[tuple[int, Outcome]]:
    return [
        (rank, outcome)
        for rank, told in enumerate(result.ranks)
        for outcome in (
            *(told.played.outcomes if told.played else ()),
            *(told.checked.outcomes if told.checked and checks else ()),
        )
    ]
