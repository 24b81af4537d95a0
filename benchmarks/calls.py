"""Time of one blocking call in the middle of other work, as in training.

    mpirun -n 2 python benchmarks/calls.py [--json FILE]

The calls are allreduces of 4 KiB of fp32 from numpy. A round times one call of cgx_ops and one of
MPI_Allreduce in every situation:

    barrier       after a millisecond of products of arrays of 800 KB, then a barrier of all ranks
    python        after a barrier, then a millisecond of Python that touches no memory
    numpy         after a barrier, then a millisecond of such products
    back to back  CALLS calls in a row, with code and data in the processor's caches

The two take turns, so that neither finds its own code in the caches. A sample is the time of the
call on the slowest rank. It includes the wait for late ranks.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
from mpi4py import MPI

import cgx_ops
from cgx_ops import Config
from cgx_ops._core.text_table import Table
from cgx_ops._core.units import size_text, time_text
from cgx_ops.bench.measure import Summary
from cgx_ops.bench.peers import PEERS, cgx, cgx_name
from cgx_ops.bench.report import Report

NUMEL, CALLS, ROUNDS, WARM_UP = 1024, 100, 201, 5
_WORK_SECONDS, _WORK_NUMEL = 1e-3, 200_000
CONFIGS = (Config(bits=32), Config(rounding="nearest"), Config())


@dataclass(frozen=True)
class Found:
    """Seconds of a call on the slowest rank: the median over rounds, the quartiles.

    Attributes:
        mpi_seconds: the median of MPI_Allreduce, in the same rounds.
    """

    situation: str
    contender: str
    seconds: float
    lower: float
    upper: float
    mpi_seconds: float


def situations() -> dict[str, tuple[Callable[[], object], Callable[[], object], int]]:
    """Return the work before the barrier and after it, and the number of calls in a sample."""
    values = np.random.default_rng(0).standard_normal(_WORK_NUMEL, np.float32)
    product = np.empty_like(values)

    def nothing() -> None:
        pass

    def work(step: Callable[[], object]) -> None:
        end = time.perf_counter() + _WORK_SECONDS
        while time.perf_counter() < end:
            step()

    def python() -> None:
        work(nothing)

    def numpy() -> None:
        work(lambda: np.multiply(values, values, out=product))

    return {
        "barrier": (numpy, nothing, 1),
        "python": (nothing, python, 1),
        "numpy": (nothing, numpy, 1),
        "back to back": (nothing, nothing, CALLS),
    }


def sample(
    call: Callable[[], object],
    first: Callable[[], object],
    then: Callable[[], object],
    calls: int,
) -> float:
    """Return this rank's seconds of a call."""
    first()
    MPI.COMM_WORLD.Barrier()
    then()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls


def measure_calls(config: Config) -> list[Found]:
    world = MPI.COMM_WORLD
    x = np.random.default_rng(world.rank).standard_normal(NUMEL, np.float32)
    out = np.empty_like(x)
    calls = cgx(x, out, config).call, PEERS["mpi"].build(x, out).call
    places = situations()
    mine = np.array(
        [
            [[sample(call, *place) for call in calls] for place in places.values()]
            for _ in range(WARM_UP + ROUNDS)
        ]
    )
    slowest = np.empty_like(mine)
    world.Allreduce(mine, slowest, MPI.MAX)
    found = []
    for index, name in enumerate(places):
        ours, peer = (Summary.of(slowest[WARM_UP:, index, i].tolist()) for i in range(2))
        times = ours.median, ours.lower, ours.upper, peer.median
        found.append(Found(name, cgx_name(config), *times))
    return found


def table_of(found: list[Found], ranks: int) -> Table:
    rows = [
        [
            each.situation,
            each.contender,
            time_text(each.seconds),
            f"{time_text(each.lower)} - {time_text(each.upper)}",
            time_text(each.mpi_seconds),
            f"{each.seconds / each.mpi_seconds:.2f}",
        ]
        for each in found
    ]
    return Table(
        f"one call of {size_text(4 * NUMEL)} from numpy, {ranks} ranks, {cgx_ops.init().transport}",
        ["after", "contender", "time", "quartiles", "MPI_Allreduce", "ratio"],
        rows,
        text_columns=2,
        sections=[i for i, each in enumerate(found) if i and each.situation == found[0].situation],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="What one blocking call costs after other work")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    options = parser.parse_args()
    world = cgx_ops.init()
    if world.size == 1:
        raise SystemExit("calls.py is for 2 ranks or more: mpirun -n 2 python benchmarks/calls.py")
    found = [each for config in CONFIGS for each in measure_calls(config)]
    if world.rank != 0:
        return
    table = table_of(found, world.size)
    table.print()
    if options.json:
        settings = {"ranks": world.size, "transport": world.transport, "bytes": 4 * NUMEL}
        Report("calls", settings, [asdict(each) for each in found], [table]).write(options.json)


if __name__ == "__main__":
    main()
