"""The table at the end: by transport and fault."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from chaos.faults import FAULTS
from chaos.referee import Result


def table(results: Sequence[Result]) -> Table:
    """Return the table of all rounds."""
    shown = Table(title="chaos: outcomes by fault")
    for column in ("transport", "fault", "rounds", "it came", "killed"):
        shown.add_column(column, justify="left" if column in ("transport", "fault") else "right")
    shown.add_column("survivors' first errors")
    for column in ("median s", "latest s", "failed rounds"):
        shown.add_column(column, justify="right")
    transports = sorted({result.spec.transport for result in results})
    for transport in transports:
        for fault in (*FAULTS, "all"):
            rounds = [
                result
                for result in results
                if result.spec.transport == transport and fault in (result.spec.fault, "all")
            ]
            if rounds:
                shown.add_row(
                    transport, fault, *_row(rounds), style="bold" if fault == "all" else ""
                )
    return shown


def _row(rounds: Sequence[Result]) -> list[str]:
    errors = Counter(outcome.error for result in rounds for outcome in result.first_errors)
    delays = sorted(
        outcome.end - result.fault_at
        for result in rounds
        if result.fault_at is not None
        for outcome in result.first_errors
        if outcome.end >= result.fault_at
    )
    return [
        str(len(rounds)),
        str(sum(result.fault_at is not None for result in rounds)),
        str(
            sum(
                FAULTS[result.spec.fault].kills and result.fault_at is not None for result in rounds
            )
        ),
        ", ".join(f"{name} {count}" for name, count in errors.most_common()) or "-",
        f"{statistics.median(delays):.2f}" if delays else "-",
        f"{delays[-1]:.2f}" if delays else "-",
        str(sum(bool(result.failures) for result in rounds)),
    ]


def show(results: Sequence[Result], worst_lateness: float, seconds: float, jobs: int) -> None:
    """Print the table and its conditions."""
    Console(width=160).print(table(results))
    print(
        f"{len(results)} rounds in {seconds:.0f} s, {jobs} jobs of mpirun; this machine woke "
        f"sleepers up to {worst_lateness * 1e3:.0f} ms late, which alone may have exceeded "
        f"a deadline in {sum(result.excused for result in results)} rounds"
    )


def failure(result: Result) -> str:
    """Return all details of a failed round."""
    lines = [f"FAILED {result.spec}"]
    lines += [f"  {text}" for text in result.failures]
    for rank, rank_state in enumerate(result.ranks):
        tail = [f"  {line}" for line in rank_state.worker.tail().splitlines()[-40:] if line.strip()]
        lines += [f"  --- rank {rank}, process {rank_state.worker.pid} ---", *tail] if tail else []
    spec = result.spec
    again = f'TRANSPORT={spec.transport} SEED={spec.seed} ROUNDS=1 FAULT="{spec.fault}"'
    lines.append(f"  again: make chaos {again}")
    return "\n".join(lines)
