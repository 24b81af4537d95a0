"""Time allreduces by number of ranks and by size: the algorithms of cgx, and MPI_Allreduce.

    python benchmarks/growth.py [--json FILE]              # 2, 4, 8, 16 threads, then processes
    mpirun -n 4 python benchmarks/growth.py [--json FILE]  # the ranks that mpirun starts
    python benchmarks/hosts.py --hosts 4 --rate 1gbit -- python benchmarks/growth.py

Phases: ranks as threads of this process; as processes, each number of them by an mpirun of this
same program; one table of all. A round times all contenders of a size in turn (measure.py).

Rounding is to nearest. one_shot stops at 1 MiB: it sends n-1 times what it is given. Exact values
alone go through the ring, as in the core's own choice. hierarchical takes part where several hosts
have several ranks.
"""

import argparse
import faulthandler
import itertools
import os
import platform
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import cgx_ops
from cgx_ops import Communicator, Config
from cgx_ops._core.arrays import Array
from cgx_ops._core.text_table import Table
from cgx_ops._core.units import parse_size, size_text, time_text
from cgx_ops.bench.measure import Ranks, Summary, Timed, measure
from cgx_ops.bench.peers import PEERS, MpiRanks
from cgx_ops.bench.report import Report

RANKS = (2, 4, 8, 16)
SIZES = ("4KiB", "64KiB", "1MiB", "16MiB")
BITS = (32, 8, 4)
MPI_ALLREDUCE = "MPI_Allreduce"

_LARGEST_ONE_SHOT = 1 << 20  # bytes
_ROUNDS = 11
_TIMEOUT = 120  # seconds for the ranks of one number


@dataclass(frozen=True)
class Cost:
    """A contender's time at one size.

    Attributes:
        transport: of cgx: "thread", "shm", "mpi" or "hybrid".
        hosts: over which the ranks are spread evenly.
        ranks: in all.
        algorithm: cgx's name of it, or MPI_ALLREDUCE.
        bits: of a value as it travels; 32: exact.
        bytes: of a rank's fp32 tensor.
        seconds: of a call on the slowest rank; the median over rounds.
        lower: first quartile of the same.
        upper: third quartile.
        rounds: how many.
    """

    transport: str
    hosts: int
    ranks: int
    algorithm: str
    bits: int
    bytes: int
    seconds: float
    lower: float
    upper: float
    rounds: int


# ---- One number of ranks -------------------------------------------------------------------------


def contenders(
    comm: Communicator, bits: Sequence[int], nested: bool, x: Array, out: Array
) -> Iterator[tuple[str, int, Timed]]:
    """Yield algorithm, bits and call of each contender at this size.

    nested: several hosts have several ranks. x: a rank's values; out: of the same shape.
    """
    for width in bits:
        algorithms = ["one_shot"] if x.nbytes <= _LARGEST_ONE_SHOT else []
        algorithms += ["sra", *(["ring"] if width == 32 else [])]
        algorithms += ["hierarchical"] if nested else []
        for algorithm in algorithms:
            config = Config(bits=width, rounding="nearest", algorithm=algorithm)  # pyright: ignore[reportArgumentType]
            yield algorithm, width, Timed(lambda c=config: comm.allreduce(x, config=c, out=out))


def measure_ranks(
    comm: Communicator, ranks: Ranks, hosts: int, options: argparse.Namespace, *, mpi: bool
) -> list[Cost]:
    """Measure all sizes on the ranks that call this together; equal on all of them."""
    costs = []
    for size in options.sizes:
        x = np.random.default_rng(comm.rank).standard_normal(size // 4, np.float32)
        out = np.empty_like(x)
        found = {
            (algorithm, bits): timed
            for algorithm, bits, timed in contenders(
                comm, options.bits, 1 < hosts < comm.size, x, out
            )
        }
        if mpi:
            found[MPI_ALLREDUCE, 32] = Timed(PEERS["mpi"].build(x, out).call)
        names = {f"{algorithm} {bits}": (algorithm, bits) for algorithm, bits in found}
        timed = {name: found[key] for name, key in names.items()}
        samples = measure(timed, ranks, rounds=_ROUNDS, budget=options.budget)
        costs += [
            Cost(comm.transport, hosts, comm.size, *names[name], size, *_numbers(seconds))
            for name, seconds in samples.items()
        ]
    return costs


def _numbers(samples: list[float]) -> tuple[float, float, float, int]:
    summary = Summary.of(samples)
    return summary.median, summary.lower, summary.upper, summary.rounds


class ThreadRank:
    """The Ranks of a thread among others: `seconds` has a place for each."""

    def __init__(self, rank: int, barrier: threading.Barrier, seconds: list[float]) -> None:
        self._rank, self._barrier, self._seconds = rank, barrier, seconds

    def barrier(self) -> None:
        self._barrier.wait()

    def slowest(self, seconds: float) -> float:
        self._seconds[self._rank] = seconds
        self._barrier.wait()
        slowest = max(self._seconds)
        self._barrier.wait()  # before the next value is written
        return slowest


def threads(ranks: int, options: argparse.Namespace) -> list[Cost]:
    """Measure `ranks` threads of this process."""
    barrier = threading.Barrier(ranks, timeout=_TIMEOUT)
    seconds = [0.0] * ranks

    def run(comm: Communicator) -> list[Cost]:
        try:
            rank = ThreadRank(comm.rank, barrier, seconds)
            return measure_ranks(comm, rank, 1, options, mpi=False)
        except BaseException:
            barrier.abort()  # the others would wait until their deadline
            raise
        finally:
            comm.close()

    with ThreadPoolExecutor(ranks) as pool:
        of_ranks = list(pool.map(run, Communicator.local(ranks, timeout=_TIMEOUT)))
    return of_ranks[0]


def processes(ranks: int, options: argparse.Namespace) -> list[Cost]:
    """Measure `ranks` processes, by an mpirun of this program."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [str(Path(sys.executable).with_name("mpirun")), "-n", str(ranks)]
        command += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        command += ["--oversubscribe", "--bind-to", "none"]
        process = subprocess.Popen(
            [*command, *arguments(options, report)], stdout=subprocess.DEVNULL
        )
        try:
            if status := process.wait(_TIMEOUT + 10):  # ranks end at _TIMEOUT themselves
                sys.exit(f"growth.py on {ranks} processes failed with status {status}")
        finally:
            process.terminate()  # mpirun ends its ranks
            process.wait(10)
        return read(report)


def arguments(options: argparse.Namespace, report: Path) -> list[str]:
    """Return the command of this program that writes what `options` ask for to `report`."""
    words = [sys.executable, __file__, "--json", str(report), "--budget", str(options.budget)]
    words += ["--sizes", *map(str, options.sizes), "--bits", *map(str, options.bits)]
    return words


def read(report: str | Path) -> list[Cost]:
    """Return what a report of this program holds."""
    return [Cost(**record) for record in Report.read(report).results]


# ---- The report ----------------------------------------------------------------------------------


def table_of(costs: list[Cost]) -> Table:
    """Return a row for each contender and size, a column for each number of ranks."""
    cores = len(os.sched_getaffinity(0))
    numbers = sorted({cost.ranks for cost in costs})
    found: dict[tuple[str, str, str, str], dict[int, float]] = {}
    for cost in costs:
        row = (cost.transport, size_text(cost.bytes), cost.algorithm, str(cost.bits))
        found.setdefault(row, {})[cost.ranks] = cost.seconds
    keys = list(found)
    shared = [number for number in numbers if number > cores]
    notes = [
        "Median time of a call on the slowest rank; thread: ranks are threads of one process; "
        "shm: processes; mpi, hybrid: processes on several hosts."
    ]
    if shared:
        each = ", ".join(f"{number / cores:g}" for number in shared)
        notes.append(
            f"This machine has {cores} cores: of {', '.join(map(str, shared))} ranks, {each} share "
            "a core. Their times are those of all the work on these cores, and of the scheduler: "
            "more ranks on more cores cost less."
        )
    return Table(
        "allreduce of fp32 by ranks and size, rounding to nearest",
        ["ranks are", "size", "algorithm", "bits", *(f"{number} ranks" for number in numbers)],
        [[*key, *(_cell(found[key].get(number)) for number in numbers)] for key in keys],
        text_columns=3,
        sections=[i for i in range(1, len(keys)) if keys[i][:2] != keys[i - 1][:2]],
        notes=notes,
    )


def _cell(seconds: float | None) -> str:
    return "" if seconds is None else time_text(seconds)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Cost of an allreduce by ranks and size")
    parser.add_argument(
        "--sizes", type=parse_size, nargs="+", default=[parse_size(size) for size in SIZES]
    )
    parser.add_argument("--bits", type=int, nargs="+", default=BITS)
    parser.add_argument(
        "--budget", type=float, default=0.8, help="seconds for each size (default 0.8)"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    return parser.parse_args()


def write(costs: list[Cost], options: argparse.Namespace) -> None:
    """Print the table; write the report if it is asked for."""
    table = table_of(costs)
    table.print()
    if options.json:
        settings = {"cores": len(os.sched_getaffinity(0)), "rounding": "nearest"}
        Report("growth", settings, [asdict(cost) for cost in costs], [table]).write(options.json)


def run_as_rank(options: argparse.Namespace) -> None:
    """Measure the ranks that mpirun started. A failure of one ends all."""
    from mpi4py import MPI

    faulthandler.dump_traceback_later(_TIMEOUT, exit=True)
    try:
        world = cgx_ops.init()
        hosts = len(set(MPI.COMM_WORLD.allgather(platform.node())))
        costs = measure_ranks(world, MpiRanks(MPI.COMM_WORLD), hosts, options, mpi=True)
        if world.rank == 0:
            write(costs, options)
    except BaseException:  # the others would wait for this rank for ever
        traceback.print_exc()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)


def main() -> None:
    options = parse()
    if int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        run_as_rank(options)
        return
    kinds = itertools.product((threads, processes), RANKS)
    write([cost for kind, ranks in kinds for cost in kind(ranks, options)], options)


if __name__ == "__main__":
    main()
