"""Codes of variable length on a slow link: allreduce by entropy and lossless, beside fixed lengths.

    hosts.py --hosts 2 --rate 100mbit -- python variable_lengths.py --link-rate 100mbit --size 16MiB

Every rank is on another host and has standard normal values. A round times every contender. The
limit is the time that the link takes for the bytes that the rank really sent, headers included.
"""

import argparse
from dataclasses import asdict, dataclass

import ml_dtypes
import numpy as np
import rank_layout
from mpi4py import MPI

import cgx_ops
from cgx_ops import Config
from cgx_ops._core.text_table import Table
from cgx_ops._core.units import parse_rate, parse_size, rate_text, size_text, time_text
from cgx_ops.bench.measure import Summary, Timed, measure
from cgx_ops.bench.peers import MpiRanks
from cgx_ops.bench.report import Report

FP32, BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
# Each contender with its dtype, its config, and the contender whose time its speed-up refers to.
CONTENDERS: dict[str, tuple[np.dtype, Config, str]] = {
    "fp32": (FP32, Config(bits=32), "fp32"),
    "fp32, lossless": (FP32, Config(compressor="lossless"), "fp32"),
    "uniform, 4 bits": (FP32, Config(rounding="nearest", error_feedback=False), "fp32"),
    "entropy, rate 3.4": (
        FP32, Config(compressor="entropy", rate=3.4, error_feedback=False), "uniform, 4 bits",
    ),
    "entropy, rate 2": (
        FP32, Config(compressor="entropy", rate=2, error_feedback=False), "uniform, 4 bits",
    ),
    "bf16": (BF16, Config(bits=32), "bf16"),
    "bf16, lossless": (BF16, Config(compressor="lossless"), "bf16"),
}  # fmt: skip
ROUNDS = 21


@dataclass(frozen=True)
class Found:
    """The result of a contender.

    Attributes:
        contender: a key of CONTENDERS.
        sent: most bytes that a rank sends in one call.
        error: L2 norm of the result's error, divided by that of the exact sum.
        seconds, lower, upper: time of a call on the slowest rank: median and quartiles.
        limit_seconds: what the link takes for `sent`.
    """

    contender: str
    sent: int
    error: float
    seconds: float
    lower: float
    upper: float
    limit_seconds: float


def measure_all(size: int, rate: float, budget: float) -> list[Found]:
    """Time all contenders on tensors of `size` bytes in float32."""
    world, comm = MPI.COMM_WORLD, cgx_ops.init()
    x = np.random.default_rng(world.rank).standard_normal(size // 4, np.float32)
    calls, sent, error = dict[str, Timed](), dict[str, int](), dict[str, float]()
    for name, (dtype, config, _) in CONTENDERS.items():
        values = x.astype(dtype)
        out = np.empty_like(values)

        def call(values: np.ndarray = values, config: Config = config, out: np.ndarray = out):
            comm.allreduce(values, config=config, out=out)

        before = comm.stats().bytes_sent
        call()
        sent[name] = world.allreduce(comm.stats().bytes_sent - before, MPI.MAX)
        exact = values.astype(np.float64)
        world.Allreduce(MPI.IN_PLACE, exact)
        error[name] = float(np.linalg.norm(out - exact) / np.linalg.norm(exact))
        calls[name] = Timed(call)
    times = measure(calls, MpiRanks(world), rounds=ROUNDS, budget=budget)
    found = []
    for name, samples in times.items():
        s = Summary.of(samples)
        limit = sent[name] / rate
        found.append(Found(name, sent[name], error[name], s.median, s.lower, s.upper, limit))
    return found


def table_of(found: list[Found], title: str, numel: int) -> Table:
    """Return the table, a row for each contender."""
    ranks, seconds = MPI.COMM_WORLD.size, {each.contender: each.seconds for each in found}
    rows = []
    for each in found:
        other = CONTENDERS[each.contender][2]
        bits = 8 * each.sent / numel * ranks / (2 * (ranks - 1))
        ratio = f"{seconds[other] / each.seconds:.2f} {other}" if other != each.contender else ""
        rows.append([
            each.contender, f"{bits:.3f}", f"{each.error:.1e}", time_text(each.seconds),
            f"{time_text(each.lower)} - {time_text(each.upper)}", time_text(each.limit_seconds),
            f"{each.seconds / each.limit_seconds:.3f}", ratio,
        ])  # fmt: skip
    columns = ["contender", "bits", "error", "time", "quartiles", "limit", "time / limit"]
    notes = [
        "Bits: sent by a rank for each value, in each direction. Error: L2, relative to the exact "
        "sum. Limit: time of the link for the bytes that were sent. Speed-up: the time of another "
        "contender divided by this one's."
    ]
    return Table(title, [*columns, "speed-up over"], rows, notes=notes)


def main() -> None:
    parser = argparse.ArgumentParser(description="Codes of variable length on a slow link.")
    parser.add_argument("--size", type=parse_size, default=parse_size("16MiB"))
    parser.add_argument("--link-rate", type=parse_rate, required=True, help="as in 1gbit")
    parser.add_argument("--budget", type=float, default=30, help="seconds (default 30)")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    found = measure_all(options.size, options.link_rate, options.budget)
    hosts = rank_layout.host_count()
    if MPI.COMM_WORLD.rank != 0:
        return
    title = f"variable lengths, {size_text(options.size)}, {hosts} hosts, "
    table = table_of(found, title + rate_text(options.link_rate), options.size // 4)
    table.print()
    if options.json:
        settings = {"hosts": hosts, "link_rate": options.link_rate, "size": options.size}
        Report("variable_lengths", settings, [asdict(each) for each in found], [table]).write(
            options.json
        )


if __name__ == "__main__":
    main()
