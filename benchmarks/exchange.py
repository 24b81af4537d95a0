"""all_to_all in few bits between hosts, beside gloo and MPI_Alltoall.

    hosts.py --hosts 2 --rate 1gbit -- python exchange.py --link-rate 1gbit [--json FILE]

Every rank is on another host. A round times each once, with equal blocks.
"""

import argparse
from dataclasses import asdict, dataclass

import numpy as np
import rank_layout
import torch
import torch.distributed as dist
from mpi4py import MPI

import cgx_ops
from cgx_ops import Config
from cgx_ops._core.codec import encoded_bytes
from cgx_ops._core.text_table import Table
from cgx_ops._core.units import parse_rate, parse_size, size_text, time_text
from cgx_ops.bench.measure import Summary, Timed, measure
from cgx_ops.bench.peers import PEERS, MpiRanks
from cgx_ops.bench.report import Report

CONFIGS = {
    "exact": Config(bits=32),
    "8 bits": Config(8, rounding="nearest"),
    "4 bits": Config(4, rounding="nearest"),
}


@dataclass(frozen=True)
class Found:
    """The median time of one contender, in seconds.

    Attributes:
        size: of a rank's values, in bytes.
        limit_seconds: what the link takes for the bytes that a rank must send; 0: no rate is known.
    """

    size: int
    contender: str
    seconds: float
    limit_seconds: float


def measure_size(size: int, rate: float | None) -> list[Found]:
    ranks, world = MPI.COMM_WORLD.size, cgx_ops.init()
    rows = size // 4 // ranks * ranks
    x = np.random.default_rng(world.rank).standard_normal(rows, np.float32)
    out = np.empty_like(x)
    tensors = torch.from_numpy(out), torch.from_numpy(x)
    contenders = {
        "gloo": Timed(lambda: dist.all_to_all_single(*tensors)),
        "MPI_Alltoall": Timed(lambda: MPI.COMM_WORLD.Alltoall(x, out)),
        **{
            name: Timed(lambda config=config: world.all_to_all(x, config, out=out))
            for name, config in CONFIGS.items()
        },
    }
    times = measure(contenders, MpiRanks(MPI.COMM_WORLD), rounds=15, budget=20)
    found = []
    for name, samples in times.items():
        block = encoded_bytes(rows // ranks, CONFIGS.get(name, CONFIGS["exact"]))
        limit = block * (ranks - 1) / rate if rate else 0.0
        found.append(Found(size, name, Summary.of(samples).median, limit))
    return found


def table_of(found: list[Found], where: str) -> Table:
    exact = {each.size: each.seconds for each in found if each.contender == "exact"}
    rows = [
        [
            size_text(each.size),
            each.contender,
            time_text(each.seconds),
            f"{exact[each.size] / each.seconds:.2f}",
            time_text(each.limit_seconds) if each.limit_seconds else "-",
        ]
        for each in found
    ]
    columns = ["size", "all_to_all", "time", "speed-up over exact", "limit"]
    return Table(f"all_to_all, {where}", columns, rows, text_columns=2)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare all_to_all in few bits between hosts.")
    sizes = [parse_size(size) for size in ("256KiB", "16MiB")]
    parser.add_argument("--sizes", type=parse_size, nargs="+", default=sizes)
    parser.add_argument("--link-rate", type=parse_rate, help="of each host, as in 1gbit")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    PEERS["gloo"].build(np.zeros(1, np.float32), np.zeros(1, np.float32))  # starts torch's group
    found = [each for size in options.sizes for each in measure_size(size, options.link_rate)]
    hosts = rank_layout.host_count()
    if MPI.COMM_WORLD.rank != 0:
        return
    table = table_of(found, rank_layout.described(hosts, options.link_rate))
    table.print()
    if options.json:
        settings = {"ranks": MPI.COMM_WORLD.size, "hosts": hosts, "link_rate": options.link_rate}
        Report("exchange", settings, [asdict(each) for each in found], [table]).write(options.json)


if __name__ == "__main__":
    main()
