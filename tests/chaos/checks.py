"""Conditions after a round. Each function returns complaints; an empty list is a pass."""

from __future__ import annotations

from chaos import machine, traffic
from chaos.faults import FAULTS
from chaos.machine import Lateness
from chaos.messages import Outcome
from chaos.referee import Result

GRACE = 2.0  # seconds after its deadline within which an error must be raised
# If these get no memory, glibc and (under JAX) LLVM abort the process, which cannot be caught.
_LAST_WORDS = (
    "memory for thread-local data: ABORT",
    "LLVM ERROR: Unable to allocate section memory",
)
NOTICED = 1.0  # seconds within which a waiting call must react to Ctrl-C


def judge(result: Result, lateness: Lateness) -> list[str]:
    """Return the complaints about a round."""
    slack = lateness.slack(result.begin)
    result.excused = lateness.worst_since(result.begin) > result.spec.deadline / 4
    complaints = _ends(result) + _values(result) + _errors(result) + _times(result, slack)
    for rank, rank_state in enumerate(result.ranks):
        if rank_state.checked:
            complaints += [f"rank {rank}: {text}" for text in rank_state.checked.complaints]
            complaints += [
                f"rank {rank}, afterwards: {outcome.error} in {outcome.what}: {outcome.text}"
                for outcome in rank_state.checked.outcomes
                if outcome.error
            ]
    return complaints


def _ends(result: Result) -> list[str]:
    """Check that exactly the expected processes died, and none is stuck."""
    fault = FAULTS[result.spec.fault]
    complaints = []
    for rank, rank_state in enumerate(result.ranks):
        victim = rank == result.spec.victim
        due = victim and (
            fault.kills
            or (fault.starves and any(text in rank_state.worker.tail() for text in _LAST_WORDS))
        )
        if rank_state.stuck:
            phase = "in its checks" if rank_state.played else "in its traffic"
            complaints.append(f"rank {rank} was stuck {phase} {rank_state.stuck}")
        elif rank_state.died_at is None:
            continue
        elif not due:
            complaints.append(f"rank {rank} died (exit code {rank_state.worker.code()})")
        elif result.spec.fault == "exception" and result.spec.by_mpirun:
            continue  # MPI_Finalize waits for the others, so its end is that of the job
        elif not machine.wait_gone(rank_state.worker.pid, result.spec.deadline + GRACE + 5):
            complaints.append(f"rank {rank} still runs\n{machine.describe(rank_state.worker.pid)}")
    return complaints


def _values(result: Result) -> list[str]:
    """Check that values equal the oracle's, bit for bit."""
    return [
        f"rank {rank}: WRONG VALUES in {outcome.what}: {outcome.text}"
        for rank, outcome in _outcomes(result, checks=True)
        if outcome.digest and outcome.case and outcome.digest != traffic.expected(
            outcome.case, outcome.hosts, outcome.size, outcome.members
        )[outcome.place]
    ]  # fmt: skip


def _errors(result: Result) -> list[str]:
    """Check that errors have a kind that the library may raise, and only after a fault."""
    fault = FAULTS[result.spec.fault]
    complaints = []
    for rank, outcome in _outcomes(result):
        if not outcome.error:
            continue
        text = f"rank {rank}: {outcome.error} in {outcome.what}: {outcome.text}"
        if not outcome.right_kind:
            complaints.append(f"wrong kind of error: {text}")
        # A machine this late causes a fault itself: a deadline passes.
        elif fault.harmless and not (result.excused and "within" in outcome.text):
            complaints.append(f"there was no harmful fault, but {text}")
    return complaints


def _times(result: Result, slack: float) -> list[str]:
    """Check that every call ended within its deadline plus grace, excluding time when stopped."""
    spec = result.spec
    complaints = []
    for rank, outcome in _outcomes(result):
        begin = outcome.begin
        if result.stopped and rank == spec.victim:
            begin = max(begin, min(result.stopped[1], outcome.end))
        # Creating a communicator: a bootstrap of the harness (twice the deadline), then waits of
        # the core.
        allowed = outcome.deadline * (3 if outcome.making else 1) + GRACE + slack
        # Frameworks, and creating and closing communicators, react at their end (failures.md).
        looks_up = spec.framework == "numpy" and outcome.case
        if outcome.error == "KeyboardInterrupt" and result.fault_at and looks_up:
            begin, allowed = max(begin, result.fault_at), NOTICED + slack
        if FAULTS[spec.fault].how in ("step", "started") and rank == spec.victim:
            allowed += spec.lasts  # the rank slept between starting and waiting
        if outcome.end - begin > allowed:
            complaints.append(
                f"rank {rank}: {outcome.error or 'an end'} after {outcome.end - begin:.2f} s, "
                f"allowed {allowed:.2f} s, in {outcome.what}: {outcome.text}"
            )
    return complaints


def _outcomes(result: Result, *, checks: bool = False) -> list[tuple[int, Outcome]]:
    return [
        (rank, outcome)
        for rank, rank_state in enumerate(result.ranks)
        for outcome in (
            *(rank_state.played.outcomes if rank_state.played else ()),
            *(rank_state.checked.outcomes if rank_state.checked and checks else ()),
        )
    ]
