"""reduce_scatter and all_gather between hosts with several ranks: flat and hierarchical.

    hosts.py --hosts 2 --ranks-per-host 2 --rate 1gbit --
        python host_blocks.py --link-rate 1gbit [--json FILE]

Each round times every contender once. Afterwards some calls of each are counted: the bytes that a
host's link sends and receives, from the counters of its interface. The limit is the time in which
the link moves the bytes of the formula.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

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

COUNTERS = Path("/sys/class/net/eth0/statistics")
COUNTED_CALLS = 5

FLAT = "4 bits, flat"
CONFIGS = {
    "exact, flat": Config(32, algorithm="sra"),
    "exact, hierarchical": Config(32, algorithm="hierarchical"),
    FLAT: Config(4, rounding="nearest", algorithm="sra"),
    "4 bits, hierarchical": Config(4, rounding="nearest", algorithm="hierarchical"),
    "4 bits, 8 within hosts": Config(4, rounding="nearest", algorithm="hierarchical", intra_bits=8),
}
GLOO = "gloo, exact"


@dataclass(frozen=True)
class Found:
    """The results of one contender.

    Attributes:
        verb: "reduce_scatter" or "all_gather".
        size: of the values of all blocks, in bytes.
        seconds: median of a call.
        formula: bytes that must cross the link of a host in its busier direction; 0: unknown.
        counted: bytes that crossed it in a call, headers of all layers included; the largest over
            hosts and directions. Without an interface eth0: 0.
        limit_seconds: what the link takes for `formula`; 0: no rate is known.
    """

    verb: str
    size: int
    contender: str
    seconds: float
    formula: int
    counted: int
    limit_seconds: float


def link_bytes(world: cgx_ops.Communicator, config: Config, block: int) -> int:
    """Return the bytes that must cross a host's link in its busier direction.

    Both verbs have the same: one sends what the other receives.
    """
    of_ranks = MPI.COMM_WORLD.allgather(world.host)
    encoded = encoded_bytes(block, config)
    most = 0
    for host in range(world.hosts):
        near = of_ranks.count(host)
        far = world.size - near
        if config.algorithm == "hierarchical":
            # In one direction the blocks of all other ranks; in the other, this host's blocks, once
            # for each other host.
            most = max(most, far, near * (world.hosts - 1))
        else:
            most = max(most, near * far)
    return most * encoded


def counted(call: Callable[[], object]) -> int:
    """Return the bytes of a call over the busiest link and direction. Collective."""
    ranks = MPI.COMM_WORLD
    if not COUNTERS.exists():
        return 0

    def now() -> np.ndarray:
        return np.array([int((COUNTERS / f"{way}_bytes").read_text()) for way in ("tx", "rx")])

    ranks.Barrier()
    before = now()
    ranks.Barrier()
    for _ in range(COUNTED_CALLS):
        call()
    ranks.Barrier()
    return int(ranks.allreduce((now() - before).max(), MPI.MAX)) // COUNTED_CALLS


def measure_verb(verb: str, size: int, rate: float | None) -> list[Found]:
    ranks, world = MPI.COMM_WORLD.size, cgx_ops.init()
    scatters, block = verb == "reduce_scatter", size // 4 // ranks
    random = np.random.default_rng(world.rank)
    whole, one = block * ranks, block
    x = random.standard_normal(whole if scatters else one, np.float32)
    out = np.empty(one if scatters else whole, np.float32)
    tensors = torch.from_numpy(out), torch.from_numpy(x)
    of_gloo = dist.reduce_scatter_single if scatters else dist.all_gather_single
    calls: dict[str, Callable[[], object]] = {GLOO: lambda: of_gloo(*tensors)}
    for name, config in CONFIGS.items():
        if scatters:
            calls[name] = lambda config=config: world.reduce_scatter(x, config=config, out=out)
        elif config.intra_bits is None:
            calls[name] = lambda config=config: world.all_gather(x, config, out=out)
    contenders = {name: Timed(call) for name, call in calls.items()}
    times = measure(contenders, MpiRanks(MPI.COMM_WORLD), rounds=11, budget=20)
    found = []
    for name, samples in times.items():
        config = CONFIGS.get(name)
        must = link_bytes(world, config, block) if config else 0
        found.append(
            Found(
                verb,
                size,
                name,
                Summary.of(samples).median,
                must,
                counted(calls[name]),
                must / rate if rate else 0.0,
            )
        )
    return found


def table_of(found: list[Found], where: str) -> Table:
    flat = {(each.verb, each.size): each.seconds for each in found if each.contender == FLAT}
    rows = [
        [
            each.verb,
            size_text(each.size),
            each.contender,
            time_text(each.seconds),
            f"{flat[each.verb, each.size] / each.seconds:.2f}",
            time_text(each.limit_seconds) if each.limit_seconds else "-",
            f"{each.formula / 2**20:.3f}" if each.formula else "-",
            f"{each.counted / 2**20:.3f}" if each.counted else "-",
        ]
        for each in found
    ]
    columns = ["verb", "size", "sent", "time", "speed-up over 4 bits, flat", "limit"]
    columns += ["MiB on the link", "counted"]
    return Table(f"Blocks between hosts, {where}", columns, rows, text_columns=3)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare flat and hierarchical collectives.")
    sizes = [parse_size(size) for size in ("256KiB", "16MiB")]
    parser.add_argument("--sizes", type=parse_size, nargs="+", default=sizes)
    parser.add_argument("--link-rate", type=parse_rate, help="of each host, as in 1gbit")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    PEERS["gloo"].build(np.zeros(1, np.float32), np.zeros(1, np.float32))  # starts torch's group
    found = [
        each
        for size in options.sizes
        for verb in ("reduce_scatter", "all_gather")
        for each in measure_verb(verb, size, options.link_rate)
    ]
    hosts = rank_layout.host_count()
    if MPI.COMM_WORLD.rank != 0:
        return
    table = table_of(found, rank_layout.described(hosts, options.link_rate))
    table.print()
    if options.json:
        settings = {"ranks": MPI.COMM_WORLD.size, "hosts": hosts, "link_rate": options.link_rate}
        report = [asdict(each) for each in found]
        Report("host_blocks", settings, report, [table]).write(options.json)


if __name__ == "__main__":
    main()
