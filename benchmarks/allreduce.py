"""Allreduce beside the peers a user would take instead: MPI_Allreduce and gloo.

    mpirun -n 2 python benchmarks/allreduce.py [--json FILE]

All contenders run interleaved in one process per rank, on preallocated results; a round times a few
calls of each in turn, the table shows medians over rounds of the slowest rank. Ratios are to the
faster peer: below 1 cgx is faster. `limit` is a memcpy of the tensor: a rank must at least read its
values and write the result once.
"""

import argparse
import json
import platform
import socket
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from rich.console import Console
from rich.table import Table

import cgx_ops
from cgx_ops import Config

PEERS = ("MPI", "gloo")
BITS = (32, 8, 4)


def contenders(numel: int) -> dict[str, Callable[[], object]]:
    """Return a call of each contender, on buffers of its own."""
    world = MPI.COMM_WORLD
    x = np.random.default_rng(world.rank).standard_normal(numel).astype(np.float32)
    out, zeros = np.empty_like(x), torch.zeros(numel)  # gloo adds in place: zeros stay zeros
    calls: dict[str, Callable[[], object]] = {
        "limit": lambda: np.copyto(out, x),
        "MPI": lambda: world.Allreduce(x, out),
        "gloo": lambda: dist.all_reduce(zeros),
    }
    for bits in BITS:
        config = Config(bits=bits)
        calls[f"cgx {bits}"] = lambda config=config: cgx_ops.allreduce(x, config=config, out=out)
    return calls


def measure(numel: int, rounds: int) -> dict[str, float]:
    """Return the median seconds of one call of each contender."""
    world = MPI.COMM_WORLD
    calls = contenders(numel)
    repeats = max(1, min(50, 2**20 // max(1, numel)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds + 2):
        for name, call in calls.items():
            world.Barrier()
            begin = time.perf_counter()
            for _ in range(repeats):
                call()
            seconds = world.allreduce((time.perf_counter() - begin) / repeats, MPI.MAX)
            if index >= 2:  # the first rounds bring memory in
                times[name].append(seconds)
    return {name: statistics.median(values) for name, values in times.items()}


def table_of(results: dict[int, dict[str, float]]) -> Table:
    title = f"allreduce of fp32, {MPI.COMM_WORLD.size} ranks, {cgx_ops.init().transport}"
    table = Table(title=f"{title}: microseconds (ratio to the faster peer)")
    table.add_column("bytes", justify="right")
    names = list(next(iter(results.values())))
    for name in names:
        table.add_column(name, justify="right")
    for size, times in results.items():
        peer = min(times[name] for name in PEERS)
        cells = [
            f"{times[name] * 1e6:.0f}"
            + (f" ({times[name] / peer:.2f})" if name.startswith("cgx") else "")
            for name in names
        ]
        table.add_row(str(size), *cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Allreduce beside MPI and gloo")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--largest", type=int, default=64 << 20, help="bytes")
    parser.add_argument("--json", help="also write the results to this file")
    arguments = parser.parse_args()
    cgx_ops.init()
    world = MPI.COMM_WORLD
    torch.set_num_threads(1)  # as every other contender
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = world.bcast(f"tcp://127.0.0.1:{free.getsockname()[1]}")
    dist.init_process_group("gloo", address, rank=world.rank, world_size=world.size)

    results = {}
    size = 4 << 10
    while size <= arguments.largest:
        results[size] = measure(size // 4, arguments.rounds)
        size *= 4
    if world.rank == 0:
        Console(width=130).print(table_of(results))
        if arguments.json:
            with open(arguments.json, "w") as file:
                json.dump({"machine": platform.platform(), "seconds": results}, file, indent=1)
    dist.destroy_process_group()


main()
