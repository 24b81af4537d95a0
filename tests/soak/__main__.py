"""`python -m soak`: every load over every transport, then a table; status 1 after growth."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from support import launch

from soak.loads import BATCHES, LOADS, WINDOWS, count

# Ranks and environment of each transport. thread: in one process.
TRANSPORTS: dict[str, tuple[int, str, dict[str, str]]] = {
    "thread": (1, "", {}),
    "shm": (2, "", {"COMMUNICATOR_TYPE": "SHM"}),
    "tcp": (2, "", {"COMMUNICATOR_TYPE": "TCP"}),
    "mpi": (2, "", {"COMMUNICATOR_TYPE": "MPI"}),
    "hybrid": (3, "a,a,b", {}),
}
WARM_UP = 0.3  # fraction of the windows in which pools, caches and compilers fill
# The allocator keeps or returns some MiB of pages at any time; a leak of 8 bytes per call would be
# 5 MiB in a million. Times are the fastest of ten batches in each window, and medians of the first
# and the last third after the warm-up: other users of the machine change them by half. Batches
# shorter than a scheduler's slice are not compared.
MEMORY_KIB, TIME_RATIO, SHORTEST_BATCH = 4096, 1.5, 0.005
FEWEST = 400  # calls of a trial
SECONDS = 2400.0  # limit of one launch: a stuck one is killed


@dataclass(frozen=True)
class Row:
    """The results of a load: the maximum over all ranks. failures: texts."""

    transport: str
    load: str
    calls: int
    grown: int
    descriptors: int
    threads: int
    first: float
    last: float
    seconds: float
    failures: list[str]

    @property
    def slower(self) -> bool:
        """Whether calls took longer at the end, if this can be measured."""
        batch = self.calls / (WINDOWS * BATCHES) * self.first
        return batch > SHORTEST_BATCH and self.last > TIME_RATIO * self.first


def more(what: str, early: list[dict[str, Any]], late: list[dict[str, Any]]) -> int:
    """Return the minimum number at the end minus the maximum at the beginning.

    Temporary ones, such as a helper thread, do not count.
    """
    return min(w[what] for w in late) - max(w[what] for w in early)


def soak(transport: str, load: str, calls: int) -> Row:
    """Run a load and compare."""
    ranks, hosts, environment = TRANSPORTS[transport]
    environment = {
        **environment,
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    arguments = ("run_soak.py", load, calls, 2 if transport == "thread" else 0)
    begin = time.monotonic()
    start = launch.processes if transport == "thread" else launch.mpirun
    options: dict[str, Any] = {} if transport == "thread" else {"hosts": hosts}
    try:
        outputs = start(ranks, *arguments, env=environment, timeout=SECONDS, **options)
    except AssertionError as error:
        seconds = time.monotonic() - begin
        return Row(transport, load, calls, 0, 0, 0, 0, 0, seconds, [str(error)[-2000:]])
    told = [json.loads(output.splitlines()[-1]) for output in outputs]
    failures = [f"over {each['transport']}" for each in told if each["transport"] != transport]
    grown = descriptors = threads = 0
    first = last = 0.0
    for each in told:
        windows = each["windows"][int(WARM_UP * len(each["windows"])) :]
        grown = max(grown, windows[-1]["resident"] - windows[0]["resident"])
        third = len(windows) // 3
        early, late = windows[:third], windows[-third:]
        descriptors = max(descriptors, more("descriptors", early, late))
        threads = max(threads, more("threads", early, late))
        first = max(first, statistics.median(w["seconds"] for w in early))
        last = max(last, statistics.median(w["seconds"] for w in late))
    if grown > MEMORY_KIB:
        failures.append(f"memory grew by {grown} KiB, {grown * 1024 / calls:.0f} bytes a call")
    if descriptors > 0 or threads > 0:
        failures.append(f"{descriptors} descriptors and {threads} threads more")
    seconds = time.monotonic() - begin
    return Row(transport, load, calls, grown, descriptors, threads, first, last, seconds, failures)


def show(rows: list[Row]) -> None:
    table = Table(title="soak: from the end of the warm-up to the end")
    for column in ("transport", "load"):
        table.add_column(column)
    for column in (
        "calls", "memory KiB", "descriptors", "threads", "us a call, first", "last", "s", "failed",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.transport, row.load, f"{row.calls:,}", f"{row.grown:+}", f"{row.descriptors:+}",
            f"{row.threads:+}", f"{row.first * 1e6:.1f}", f"{row.last * 1e6:.1f}",
            f"{row.seconds:.0f}", "yes" if row.failures else "",
        )  # fmt: skip
    Console(width=130).print(table)
    print(f"Allowed: {MEMORY_KIB} KiB, no descriptor, no thread, {TIME_RATIO} times as long a call")


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="factor for the number of calls")
    parser.add_argument("--transport", choices=TRANSPORTS, action="append")
    parser.add_argument("--load", choices=LOADS, action="append")
    options = parser.parse_args()
    rows = []
    for transport in options.transport or TRANSPORTS:
        for load in options.load or LOADS:
            calls = count(load, transport)
            if not calls:
                continue
            calls = max(min(FEWEST, calls), int(calls * options.scale))
            row = soak(transport, load, calls)
            if row.slower:  # another program may use the machine: measure again
                row = soak(transport, load, calls)
            if row.slower:
                row.failures.append(
                    f"calls took {row.last / row.first:.2f} times as long at the end"
                )
            print(f"{transport}, {load}: {calls} in {row.seconds:.0f} s", flush=True)
            for failure in row.failures:
                print(f"FAILED {transport}, {load}: {failure}", flush=True)
            rows.append(row)
    show(rows)
    return int(any(row.failures for row in rows))


if __name__ == "__main__":
    sys.exit(main())
