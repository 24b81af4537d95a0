"""Time allreduces among ranks that share one GPU: by connection, bits and size, and small calls.

    python benchmarks/gpu_mps.py mpirun -n 2 python benchmarks/gpu_allreduce.py   # processes
    python benchmarks/gpu_allreduce.py --threads 2                  # threads of one process

    direct N   peers' messages are written into their memory (CUDA IPC); N bits, 32: exact
    staged N   messages go through the host's pinned memory and MPI
    mpi        the values to pinned memory, MPI_Allreduce of mpi4py there, and back
    copy       of the tensor on the device: for scale

Processes: a round times all of a size in turn, from the call until the result is there, on the
slowest rank (measure.py). A small call is also timed by the host's part alone, in a row without
waiting, and in a CUDA graph. Without NVIDIA's MPS, processes take turns on the GPU: a small call
takes milliseconds.

Threads: the time on the device of a call in a row, by CUDA events. The host's time would be that of
Python's interpreter lock. Threads have only `direct`, and no graph.
"""

import argparse
import faulthandler
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import gpu_calls
import torch
from gpu_calls import Enqueue
from growth import ThreadRank

import cgx_ops
from cgx_ops import Communicator, Config
from cgx_ops._core.text_table import Table
from cgx_ops._core.units import parse_size, size_text, time_text
from cgx_ops.bench.measure import Ranks, Summary, Timed, measure
from cgx_ops.bench.report import Report

SIZES = ("4KiB", "1MiB", "64MiB", "1GiB")
TINY = ("4KiB", "64KiB")  # with --tiny
DIRECT_BITS, STAGED_BITS = (32, 8, 4, 2), (32, 4)
COPY, MPI_ALLREDUCE = "copy", "mpi"
SMALL = 4096  # bytes
_ROUNDS, _TINY_ROUNDS = 15, 1
_THREAD_ROUNDS = 5
_HEAD_START = 150_000  # cycles in which the host puts one call on the stream
_IN_A_ROW = 50  # small calls: not so many that the GPU's queue is full
_TIMEOUT = 240  # seconds for all; then all ranks end


@dataclass(frozen=True)
class Result:
    """A contender at one size.

    Attributes:
        ranks: how many share the GPU.
        kind: "processes" or "threads".
        contender: as in the table at the top; of a small call also how it was timed.
        bytes: of a rank's fp32 tensor.
        seconds: of a call on the slowest rank; the median over rounds. Processes: from the call
            until the result is there; threads: on the device.
        lower: first quartile of the same.
        upper: third quartile.
        rounds: how many.
    """

    ranks: int
    kind: str
    contender: str
    bytes: int
    seconds: float
    lower: float
    upper: float
    rounds: int


# ---- Contenders ----------------------------------------------------------------------------------


def until_done(enqueue: Enqueue) -> Timed:
    """Return a call that ends when the stream's work has."""
    current = torch.cuda.current_stream()

    def call() -> None:
        enqueue()
        current.synchronize()

    return Timed(call, current.synchronize)


def config(bits: int) -> Config:
    return Config(bits=bits, rounding="nearest")


def by_wire(comms: Mapping[str, Communicator], x: torch.Tensor) -> dict[str, Timed]:
    """Return the contenders of a size; comms by wire."""
    y = torch.empty_like(x)
    found = {COPY: until_done(lambda: y.copy_(x))}
    for wire, widths in (("direct", DIRECT_BITS), ("staged", STAGED_BITS)):
        for bits in widths:
            call = gpu_calls.allreduce(comms[wire], x, y, config(bits))
            found[f"{wire} {bits}"] = until_done(call)
    return found


def through_the_host(x: torch.Tensor) -> Timed:
    """Return MPI_Allreduce of copies in pinned memory."""
    from mpi4py import MPI

    host, total = (torch.empty(x.shape, pin_memory=True) for _ in range(2))
    y = torch.empty_like(x)
    given, sums = host.numpy(), total.numpy()

    def call() -> None:
        host.copy_(x)
        MPI.COMM_WORLD.Allreduce(given, sums)
        y.copy_(total)
        torch.cuda.current_stream().synchronize()

    return Timed(call)


def small_calls(comms: Mapping[str, Communicator], x: torch.Tensor) -> dict[str, Timed]:
    """Return ways to time a small allreduce in 4 bits; some make _IN_A_ROW calls: calls_in()."""
    found = {}
    for wire, comm in comms.items():
        call = gpu_calls.allreduce(comm, x, torch.empty_like(x), config(4))

        def in_a_row(call: Enqueue = call) -> None:
            for _ in range(_IN_A_ROW):
                call()

        found[f"{wire} 4, until done"] = until_done(call)
        found[f"{wire} 4, the host's part"] = Timed(call, torch.cuda.current_stream().synchronize)
        found[f"{wire} 4, in a row"] = until_done(in_a_row)
        if wire == "direct":
            found[f"{wire} 4, in a graph"] = until_done(recorded(comm, x))
    return found


def calls_in(contender: str) -> int:
    """Return how many calls one of small_calls() makes."""
    return _IN_A_ROW if contender.endswith(("in a row", "in a graph")) else 1


def recorded(comm: Communicator, x: torch.Tensor) -> Enqueue:
    """Return the replay of a graph of _IN_A_ROW calls."""
    graph = torch.cuda.CUDAGraph()
    y = torch.empty_like(x)
    with torch.cuda.graph(graph):
        call = gpu_calls.allreduce(comm, x, y, config(4))
        for _ in range(_IN_A_ROW):
            call()

    def replay(_call: Enqueue = call) -> None:  # the call holds the tensors
        graph.replay()

    return replay


# ---- Processes -----------------------------------------------------------------------------------


def as_process(options: argparse.Namespace) -> list[Result]:
    """Measure on the ranks that mpirun started."""
    from mpi4py import MPI

    from cgx_ops.bench.peers import MpiRanks

    cgx_ops.init()  # MPI
    world = MPI.COMM_WORLD
    comms = {
        wire: Communicator.create(
            world.rank, world.size, world.allgather, f"gpu {wire}", transport=transport
        )
        for wire, transport in (("direct", "SHM"), ("staged", "MPI"))
    }
    rounds = _TINY_ROUNDS if options.tiny else _ROUNDS
    results = []

    def add(timed: Mapping[str, Timed], nbytes: int, calls: Callable[[str], int]) -> None:
        samples = measure(timed, MpiRanks(world), rounds=rounds, budget=options.budget)
        for name, seconds in samples.items():
            numbers = _numbers([second / calls(name) for second in seconds])
            results.append(Result(world.size, "processes", name, nbytes, *numbers))

    x = torch.randn(SMALL // 4, device="cuda")
    for wire, comm in comms.items():
        gpu_calls.allreduce(comm, x, torch.empty_like(x), config(4))()
        if comm.wire != wire:
            raise RuntimeError(
                f"The GPUs of {comm.name} are connected {comm.wire!r}, not {wire!r}: without CUDA "
                "IPC there is nothing to compare"
            )
    add(small_calls(comms, x), SMALL, calls_in)
    for nbytes in options.sizes:
        x = torch.randn(nbytes // 4, device="cuda")
        add({**by_wire(comms, x), MPI_ALLREDUCE: through_the_host(x)}, nbytes, lambda _name: 1)
        torch.cuda.synchronize()
    return results


def _numbers(seconds: list[float]) -> tuple[float, float, float, int]:
    summary = Summary.of(seconds)
    return summary.median, summary.lower, summary.upper, summary.rounds


# ---- Threads -------------------------------------------------------------------------------------


def measure_thread(comm: Communicator, ranks: Ranks, options: argparse.Namespace) -> list[Result]:
    """Measure on one of the threads that call this together."""
    results = []
    for nbytes in options.sizes:
        x = torch.randn(nbytes // 4, device="cuda")
        y = torch.empty_like(x)
        found: dict[str, Enqueue] = {COPY: lambda x=x, y=y: y.copy_(x)}
        for bits in DIRECT_BITS:
            found[f"direct {bits}"] = gpu_calls.allreduce(comm, x, y, config(bits))
        calls = 5 if nbytes >= 1 << 28 else 20
        for name, call in found.items():
            samples = []
            for _ in range(1 + (_TINY_ROUNDS if options.tiny else _THREAD_ROUNDS)):
                ranks.barrier()
                # The call before the timed ones waits for all ranks.
                seconds = gpu_calls.seconds_on_device(call, calls, _HEAD_START * calls, before=1)
                samples.append(ranks.slowest(seconds))
            numbers = _numbers(samples[1:])
            results.append(Result(options.threads, "threads", name, nbytes, *numbers))
    return results


def as_threads(options: argparse.Namespace) -> list[Result]:
    """Measure ranks that are threads of this process, each on another stream."""
    size = options.threads
    barrier, seconds = threading.Barrier(size, timeout=_TIMEOUT), [0.0] * size

    def run(comm: Communicator) -> list[Result]:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                return measure_thread(comm, ThreadRank(comm.rank, barrier, seconds), options)
        except BaseException:
            barrier.abort()  # the others would wait until their deadline
            raise

    with ThreadPoolExecutor(size) as pool:
        first, *_ = pool.map(run, Communicator.local(size, timeout=_TIMEOUT))  # waits for all
    return first


# ---- The report ----------------------------------------------------------------------------------


def tables_of(results: list[Result], settings: Mapping[str, Any]) -> list[Table]:
    """Return a table by size and, for processes, one of small calls."""
    ranks, kind = results[0].ranks, results[0].kind
    mps = ", under MPS" if settings["mps"] else ", without MPS: they take turns"
    who = f"{ranks} {kind} on one GPU{mps if kind == 'processes' else ''}; {settings['gpu']}"
    small = [each for each in results if "," in each.contender]
    rows = [
        [
            size_text(each.bytes),
            each.contender,
            time_text(each.seconds),
            f"{time_text(each.lower)} - {time_text(each.upper)}",
            f"{each.bytes / each.seconds / 1e9:.3g}",
        ]
        for each in results
        if each not in small
    ]
    what = {
        "processes": "From the call until the result is there",
        "threads": "On the device, of a call in a row",
    }[kind]
    tables = [
        Table(
            f"allreduce of fp32, {who}",
            ["size", "contender", "time", "quartiles", "algbw GB/s"],
            rows,
            text_columns=2,
            sections=[i for i in range(1, len(rows)) if rows[i][0] != rows[i - 1][0]],
            notes=[f"{what}; rounding to nearest."],
        )
    ]
    if small:
        tables.append(
            Table(
                f"a call of {size_text(SMALL)} in 4 bits, {who}",
                ["wire, and how it is timed", "time"],
                [[each.contender, time_text(each.seconds)] for each in small],
                notes=[
                    f"In a row, in a graph: a {_IN_A_ROW}th of so many. The host's part: "
                    "cgx_enqueue alone, called from Python."
                ],
            )
        )
    return tables


def main() -> None:
    parser = argparse.ArgumentParser(description="allreduce among ranks that share one GPU")
    parser.add_argument("--threads", type=int, default=0, help="ranks that are threads")
    parser.add_argument("--sizes", type=parse_size, nargs="+")
    parser.add_argument("--tiny", action="store_true", help="check only that everything runs")
    parser.add_argument("--budget", type=float, default=2, help="seconds for each size (default 2)")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    options = parser.parse_args()
    options.sizes = options.sizes or [*map(parse_size, TINY if options.tiny else SIZES)]
    faulthandler.dump_traceback_later(_TIMEOUT, exit=True)
    if options.threads:
        # CUDA has not started yet; docs/explanation/gpu.md has the reason.
        os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}
    try:
        results = as_threads(options) if options.threads else as_process(options)
        if cgx_ops.init().rank == 0:
            found = gpu_calls.settings()
            tables = tables_of(results, found)
            for table in tables:
                table.print()
            if options.json:
                records = [asdict(each) for each in results]
                Report("gpu allreduce", found, records, tables).write(options.json)
    except BaseException:  # the others would wait for this rank for ever
        traceback.print_exc()
        sys.stderr.flush()
        if options.threads:
            raise
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(1)


if __name__ == "__main__":
    main()
