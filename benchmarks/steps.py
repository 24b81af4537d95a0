"""Divide training steps into computation and communication.

ddp_step.py and jax_step.py share this. Phases:

    calibrate()  the batch whose step computes for the time asked for; ranks agree on it
    measured()   compute alone and every contender's step, interleaved; then one step of each with
                 the network's counters read around it
    report_of()  "communicate" is the time of a step above its computation
"""

import argparse
import functools
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpi4py import MPI

from cgx_ops._core.text_table import Table
from cgx_ops._core.units import parse_rate, time_text
from cgx_ops.bench.measure import Summary, Timed, measure
from cgx_ops.bench.peers import MpiRanks
from cgx_ops.bench.report import Report

Step = Callable[[], object]  # one step, to its end

# The model: LAYERS matrices of WIDTH x WIDTH, with biases, and ReLU between them.
WIDTH, LAYERS = 1024, 24
_COMPUTE = "compute alone"
_CALIBRATIONS, _SAMPLES = 4, 5


def parser_of(description: str) -> argparse.ArgumentParser:
    """Return the options that all have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--compute-ms", type=float, default=100, help="of a step (default 100)")
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"default {LAYERS}")
    parser.add_argument("--rounds", type=int, default=9, help="at most (default 9)")
    parser.add_argument("--budget", type=float, default=45, help="seconds (default 45)")
    parser.add_argument("--link-rate", type=parse_rate, help="of each host, as in 1gbit")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    return parser


@dataclass(frozen=True)
class Phases:
    """A contender's step; times are medians over rounds of the slowest rank.

    Attributes:
        contender: its name.
        seconds: a step.
        lower: first quartile.
        upper: third quartile.
        rounds: how many.
        compute_s: seconds of a step that does not communicate.
        communicate_s: what is left of the step.
        sent_bytes: that rank 0's network interfaces sent in one step.
        speedup: over the first contender.
    """

    contender: str
    seconds: float
    lower: float
    upper: float
    rounds: int
    compute_s: float
    communicate_s: float
    sent_bytes: int
    speedup: float


class Everyone(MpiRanks):
    """The ranks that mpirun started."""

    def __init__(self) -> None:
        super().__init__(MPI.COMM_WORLD)
        self.rank = self.comm.rank

    def gather(self, text: str) -> list[str]:
        """Return the texts of all ranks."""
        return self.comm.allgather(text)


class EveryoneByTorch:
    """The ranks that torchrun started, which have met by torch.distributed."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self._group: Any = dist.new_group(backend="gloo")
        self.rank = dist.get_rank()

    def barrier(self) -> None:
        """Return once every rank has called."""
        self.gather("")

    def slowest(self, seconds: float) -> float:
        """Return the largest `seconds` of all ranks, on all ranks."""
        return max(map(float, self.gather(repr(seconds))))

    def gather(self, text: str) -> list[str]:
        """Return the texts of all ranks."""
        import torch.distributed as dist

        texts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, text, self._group)
        return texts


@functools.cache
def ranks() -> Everyone | EveryoneByTorch:
    """Return those who run this program together."""
    by_torch = "TORCHELASTIC_RUN_ID" in os.environ
    return EveryoneByTorch() if by_torch else Everyone()


def calibrate(step_of: Callable[[int], Step], seconds: float, first: int) -> int:
    """Return the batch whose step takes about so long on the slowest rank.

    Args:
        step_of: returns a step on a batch, without communication.
        seconds: that it should take.
        first: the batch to begin with.
    """
    batch = first
    for _ in range(_CALIBRATIONS):
        step = step_of(batch)
        step()  # brings memory in, or compiles
        samples = []
        for _ in range(_SAMPLES):
            ranks().barrier()
            begin = time.perf_counter()
            step()
            samples.append(ranks().slowest(time.perf_counter() - begin))
        batch = max(1, round(batch * seconds / statistics.median(samples)))
    return batch


def measured(
    compute: Step, steps: Mapping[str, Step], *, rounds: int, budget: float
) -> list[Phases]:
    """Return the phases of each contender.

    Args:
        compute: a step without communication.
        steps: the same with it, by contender; speed-ups are over the first.
        rounds: at most.
        budget: seconds after which no further round begins.
    """
    timed = {_COMPUTE: Timed(compute)} | {name: Timed(step) for name, step in steps.items()}
    samples = measure(timed, ranks(), rounds=rounds, budget=budget)
    found = {name: Summary.of(seconds) for name, seconds in samples.items()}
    computing = found.pop(_COMPUTE).median
    exact = next(iter(found.values())).median
    return [
        Phases(
            name,
            *(summary.median, summary.lower, summary.upper, summary.rounds),
            compute_s=computing,
            communicate_s=max(0.0, summary.median - computing),
            sent_bytes=_sent_by(steps[name]),
            speedup=exact / summary.median,
        )
        for name, summary in found.items()
    ]


def _sent_by(step: Step) -> int:
    ranks().barrier()
    before = _sent_bytes()
    step()
    ranks().barrier()
    return _sent_bytes() - before


def _sent_bytes() -> int:
    """Return what this host's interfaces have sent so far, loopback left out."""
    counters = Path("/sys/class/net").glob("*/statistics/tx_bytes")
    return sum(int(path.read_text()) for path in counters if path.parts[-3] != "lo")


def report_of(what: str, found: list[Phases], batch: int, options: argparse.Namespace) -> Report:
    """Return the report, with its table.

    Args:
        what: is measured: "DDP step".
        found: of each contender.
        batch: of a rank.
        options: parser_of()'s.
    """
    rate = options.link_rate
    rows = [
        [
            each.contender,
            time_text(each.seconds),
            f"{time_text(each.lower)} - {time_text(each.upper)}",
            time_text(each.compute_s),
            time_text(each.communicate_s),
            f"{each.sent_bytes / 1e6:.1f} MB",
            time_text(each.sent_bytes / rate) if rate else "",
            f"{each.speedup:.2f}",
        ]
        for each in found
    ]
    columns = ["contender", "step", "quartiles", "compute", "communicate", "sent", "on the link"]
    notes = [
        "Step: median over rounds of the slowest rank. Compute: a step without communication. "
        "Communicate: the rest of the step. Sent: by one host, as its interface counts. On the "
        "link: the least time for that. Speed-up: of the step, over the first contender."
    ]
    parameters = options.layers * (WIDTH + 1) * WIDTH
    settings = {
        **where(),
        "link_rate": rate,
        "parameters": parameters,
        "batch": batch,
        "phases": {
            each.contender: {"compute_s": each.compute_s, "communicate_s": each.communicate_s}
            for each in found
        },
    }
    title = f"{what}, {parameters / 1e6:.1f}M parameters, {settings['hosts']} hosts"
    table = Table(title, [*columns, "speed-up"], rows, notes=notes)
    return Report(what, settings, [asdict(each) for each in found], [table])


def where() -> dict[str, int]:
    """Return the numbers of ranks and of hosts; all ranks call it."""
    hosts = ranks().gather(platform.node())
    return {"ranks": len(hosts), "hosts": len(set(hosts))}


def publish(report: Report, path: str | None) -> None:
    """Print the report's tables, and write it if there is a path; rank 0 does."""
    if ranks().rank == 0:
        for table in report.tables:
            table.print()
        if path:
            report.write(path)
