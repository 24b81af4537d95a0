"""MPI and TCP between hosts: the same allreduce over both transports, and over gloo.

    hosts.py --hosts 2 --rate 1gbit -- python transports.py --link-rate 1gbit [--json FILE]

Every rank is on another host. A round times cgx over MPI and over TCP, each exact and in 4 bits,
MPI_Allreduce and gloo. `tcp / mpi` is the median over rounds of the ratio of their times.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import rank_layout
from mpi4py import MPI

import cgx_ops
from cgx_ops import Communicator, Config
from cgx_ops._core.codec import encoded_bytes
from cgx_ops._core.text_table import Table
from cgx_ops._core.units import parse_rate, parse_size, size_text, time_text
from cgx_ops.bench.allreduce import SIZES
from cgx_ops.bench.measure import Summary, Timed, measure
from cgx_ops.bench.peers import PEERS, MpiRanks
from cgx_ops.bench.report import Report

CONFIGS = {"exact": Config(bits=32), "4 bits": Config(rounding="nearest")}
ROUNDS = 21


@dataclass(frozen=True)
class Found:
    """Medians of one size, in seconds.

    Attributes:
        config: a key of CONFIGS.
        limit_seconds: what the link takes for the bytes that a host must send; 0: no rate is known.
        tcp_over_mpi: the median of the rounds' ratios.
    """

    size: int
    config: str
    mpi_seconds: float
    tcp_seconds: float
    tcp_over_mpi: float
    gloo_seconds: float
    mpi_allreduce_seconds: float
    limit_seconds: float


def communicators() -> dict[str, Communicator]:
    """Return one over each transport, of all ranks."""
    world = cgx_ops.init()

    def allgather(blob: bytes) -> Sequence[bytes]:
        return MPI.COMM_WORLD.allgather(blob)

    return {
        name: Communicator.create(world.rank, world.size, allgather, name, transport=name)
        for name in ("MPI", "TCP")
    }


def measure_size(size: int, over: dict[str, Communicator], rate: float | None) -> list[Found]:
    x = np.random.default_rng(MPI.COMM_WORLD.rank).standard_normal(size // 4, np.float32)
    out = np.empty_like(x)
    contenders = {
        f"{transport} {name}": Timed(lambda comm=comm, config=config: comm.allreduce(
            x, config=config, out=out
        ))
        for transport, comm in over.items()
        for name, config in CONFIGS.items()
    }  # fmt: skip
    for peer in ("mpi", "gloo"):
        built = PEERS[peer].build(x, out)
        contenders[peer] = Timed(built.call, built.prepare)
    times = measure(contenders, MpiRanks(MPI.COMM_WORLD), rounds=ROUNDS, budget=20)
    median = {name: Summary.of(samples).median for name, samples in times.items()}
    ranks = MPI.COMM_WORLD.size
    found = []
    for name, config in CONFIGS.items():
        ratios = [
            tcp / mpi for tcp, mpi in zip(times[f"TCP {name}"], times[f"MPI {name}"], strict=True)
        ]
        limit = encoded_bytes(x.size, config) * 2 * (ranks - 1) / ranks / rate if rate else 0.0
        found.append(Found(
            size, name, median[f"MPI {name}"], median[f"TCP {name}"], statistics.median(ratios),
            median["gloo"], median["mpi"], limit,
        ))  # fmt: skip
    return found


def table_of(found: list[Found], where: str) -> Table:
    rows = [
        [
            size_text(each.size),
            each.config,
            time_text(each.mpi_seconds),
            time_text(each.tcp_seconds),
            f"{each.tcp_over_mpi:.3f}",
            time_text(each.mpi_allreduce_seconds),
            time_text(each.gloo_seconds),
            time_text(each.limit_seconds) if each.limit_seconds else "-",
        ]
        for each in found
    ]
    columns = ["size", "cgx", "over MPI", "over TCP", "tcp / mpi", "MPI_Allreduce", "gloo", "limit"]
    return Table(f"transports, {where}", columns, rows, text_columns=2)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare MPI and TCP between hosts.")
    sizes = [parse_size(size) for size in (SIZES[0], "256KiB", "4MiB", SIZES[-1])]
    parser.add_argument("--sizes", type=parse_size, nargs="+", default=sizes)
    parser.add_argument("--link-rate", type=parse_rate, help="of each host, as in 1gbit")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    over = communicators()
    found = [each for size in options.sizes for each in measure_size(size, over, options.link_rate)]
    hosts = rank_layout.host_count()
    if MPI.COMM_WORLD.rank != 0:
        return
    table = table_of(found, rank_layout.described(hosts, options.link_rate))
    table.print()
    if options.json:
        settings = {"ranks": MPI.COMM_WORLD.size, "hosts": hosts, "link_rate": options.link_rate}
        Report("transports", settings, [asdict(each) for each in found], [table]).write(
            options.json
        )


if __name__ == "__main__":
    main()
