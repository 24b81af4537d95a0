"""Measure the memory that an allreduce takes beyond its tensors.

    mpirun -n 2 python benchmarks/memory.py [--sizes SIZE ...] [--json FILE]

Each contender has its own communicator and the same two arrays, which are in memory already. It
reduces the first 1 MiB, then 4 MiB, and so on, so buffers of earlier calls count for later ones.
The result is the peak of resident memory since the first call minus the memory before it, the
largest of all ranks. Pages that ranks share count in each of them.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from mpi4py import MPI

import cgx_ops
from cgx_ops import Communicator, Config
from cgx_ops._core.text_table import Table
from cgx_ops._core.units import parse_size, size_text
from cgx_ops.bench.report import Report

SIZES = ("1MiB", "4MiB", "16MiB", "64MiB", "256MiB")
IN_FLIGHT = 8
_CALLS = 3
Array = np.ndarray
Reduce = Callable[[Array, Array], object]  # of an input, into an output


@dataclass(frozen=True)
class Taken:
    """Bytes that a contender took at most, in allreduces of up to `size` bytes."""

    contender: str
    size: int
    memory: int


def resident(field: str) -> int:
    """Return bytes of this process: VmRSS, now, or VmHWM, at most since forget_peak()."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"^{field}:\s*(\d+) kB$", status, re.MULTILINE)
    assert found, f"no {field} in /proc/self/status"
    return int(found[1]) * 1024


def forget_peak() -> None:
    """Let VmHWM begin at what is resident now (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def in_flight(comm: Communicator, config: Config, x: Array, out: Array) -> None:
    """Reduce parts of the array by simultaneous calls."""
    requests = [
        comm.allreduce_async(part, config=config, out=to)
        for part, to in zip(np.split(x, IN_FLIGHT), np.split(out, IN_FLIGHT), strict=True)
    ]
    for request in requests:
        request.wait()


def one_call(comm: Communicator, config: Config, x: Array, out: Array) -> None:
    """Reduce all of it."""
    comm.allreduce(x, config=config, out=out)


def contenders(comm: Communicator) -> dict[str, Reduce]:
    """Return the contenders by name; each of cgx's has another communicator."""

    def cgx(reduce: Callable[..., None], bits: int) -> Reduce:
        own = comm.split(0, name=f"{reduce.__name__} {bits}")
        assert own is not None
        return partial(reduce, own, Config(bits=bits))

    return {
        "cgx 4": cgx(one_call, 4),
        "cgx 8": cgx(one_call, 8),
        "cgx 32": cgx(one_call, 32),
        f"cgx 4, {IN_FLIGHT} in flight": cgx(in_flight, 4),
        "mpi": MPI.COMM_WORLD.Allreduce,
    }


def measure(name: str, reduce: Reduce, x: Array, out: Array, sizes: Sequence[int]) -> list[Taken]:
    """Return the memory of a contender, size by size; equal on all ranks."""
    before = resident("VmRSS")
    forget_peak()
    found = []
    for size in sizes:
        numel = size // x.itemsize
        for _ in range(_CALLS):
            reduce(x[:numel], out[:numel])
        memory = MPI.COMM_WORLD.allreduce(resident("VmHWM") - before, MPI.MAX)
        found.append(Taken(name, size, memory))
    return found


def table_of(found: list[Taken]) -> Table:
    names = list(dict.fromkeys(taken.contender for taken in found))
    rows = [
        [name, *(f"{taken.memory / 1e6:.1f}" for taken in found if taken.contender == name)]
        for name in names
    ]
    ranks = MPI.COMM_WORLD.size
    return Table(
        f"memory beyond the tensors, MB, {ranks} ranks on one host",
        ["contender", *dict.fromkeys(size_text(taken.size) for taken in found)],
        rows,
        notes=["At most, up to allreduces of so many bytes of fp32; of all ranks the most."],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of an allreduce beyond its tensors")
    parser.add_argument(
        "--sizes", type=parse_size, nargs="+", default=[parse_size(size) for size in SIZES]
    )
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    options = parser.parse_args()
    world = cgx_ops.init()
    sizes = sorted(options.sizes)
    x = np.random.default_rng(world.rank).standard_normal(sizes[-1] // 4, dtype=np.float32)
    out = np.ones_like(x)
    found = []
    for name, reduce in contenders(world).items():
        found += measure(name, reduce, x, out, sizes)
    if world.rank != 0:
        return
    table = table_of(found)
    table.print()
    if options.json:
        settings = {"ranks": world.size}
        Report("memory", settings, [asdict(taken) for taken in found], [table]).write(options.json)


if __name__ == "__main__":
    main()
