"""Predict the time of an allreduce for up to 4,096 ranks, and check the predictions.

    python benchmarks/simulator.py [--json FILE] [--plot FILE]

Phases:

    measure   what values cost on one core (codec.py), and messages between two hosts (messages.py);
              growth.py on ranks of this machine and on hosts made here (hosts.py: needs root)
    fit       the other constants of cost_model.py, to few ranks on one and two hosts, at two sizes
    check     predictions against everything else that growth.py found: other sizes, more hosts, a
              slower link, several ranks a host
    predict   times by ranks at 1 and 10 Gbit/s; the fastest algorithm by ranks and size, and what
              `auto` takes beside that (predictions.py)
"""

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import codec
import cost_model
import growth
import hosts
import messages
import numpy as np
import predictions
from cost_model import EXACT, PEERS, Machine, Ranks
from growth import MPI_ALLREDUCE, Cost
from scipy.optimize import least_squares

from cgx_ops._core.text_table import Table
from cgx_ops._core.units import parse_rate, rate_text, size_text, time_text
from cgx_ops.bench.measure import Alone, Summary, Timed, measure
from cgx_ops.bench.report import Report

CORES = len(os.sched_getaffinity(0))


# ---- 1. Measure ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """Where growth.py runs.

    Attributes:
        hosts: made by hosts.py; 1: this machine itself.
        per_host: ranks on each.
        rate: of the hosts' links, as tc writes it; "": as fast as the machine is.
        sizes: bytes of fp32.
        fitted: sizes of these that constants are fitted to.
    """

    hosts: int
    per_host: int
    rate: str
    sizes: tuple[int, ...]
    fitted: tuple[int, ...] = ()

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.hosts, self.per_host)

    @property
    def link_rate(self) -> float:
        """Bytes a second."""
        return parse_rate(self.rate) if self.rate else math.inf

    def __str__(self) -> str:
        if self.hosts == 1:
            return f"{self.per_host} ranks, one host"
        each = f" of {self.per_host}" if self.per_host > 1 else ""
        link = rate_text(self.link_rate) if self.rate else "unshaped"
        return f"{self.hosts} hosts{each}, {link}"


_SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
_FITTED_NEAR = (4 << 10, 1 << 20)
_FITTED_FAR = (4 << 10, 16 << 20)  # the larger size determines the rate of the link
WORLDS = (
    World(1, 2, "", _SIZES, _FITTED_NEAR),
    World(1, 4, "", _SIZES, _FITTED_NEAR),
    World(1, 8, "", _SIZES),
    World(2, 1, "", _SIZES, _FITTED_FAR),
    World(2, 1, "1gbit", _SIZES, _FITTED_FAR),
    World(2, 1, "100mbit", _SIZES[:3]),
    World(2, 2, "1gbit", _SIZES, _FITTED_FAR),
    World(2, 4, "100mbit", (4 << 10, 32 << 10, 48 << 10, 1 << 20)),  # around what auto decides by
    World(3, 1, "1gbit", _SIZES),
    World(4, 1, "1gbit", _SIZES),
    World(4, 1, "100mbit", _SIZES[:3]),
    World(4, 2, "1gbit", _SIZES),
    World(8, 1, "1gbit", _SIZES),
    World(8, 1, "100mbit", _SIZES[:3]),
)
_BITS = (32, 4)
_BUDGET = 0.5  # seconds for each size
_CODEC_VALUES = 1 << 22
_TIMEOUT = 120  # seconds


@dataclass(frozen=True)
class Sample:
    """What was measured in a world."""

    world: World
    cost: Cost

    @property
    def fitted(self) -> bool:
        return self.cost.bytes in self.world.fitted and self.cost.algorithm != MPI_ALLREDUCE


def measure_worlds(worlds: Sequence[World]) -> Iterator[Sample]:
    for world in worlds:
        print(f"measuring {world}", flush=True)
        options = argparse.Namespace(sizes=world.sizes, bits=_BITS, budget=_BUDGET)
        found = (
            growth.processes(world.per_host, options)
            if world.hosts == 1
            else _on_hosts(world, options)
        )
        yield from (Sample(world, cost) for cost in found)


def _on_hosts(world: World, options: argparse.Namespace) -> list[Cost]:
    with (
        tempfile.TemporaryDirectory() as folder,
        hosts.Hosts(world.hosts, rate=world.rate or None) as made,
    ):
        report = Path(folder, "report.json")
        made.mpirun(world.per_host, growth.arguments(options, report), timeout=_TIMEOUT)
        return growth.read(report)


def message_costs() -> tuple[float, float]:
    """Return the processor seconds of a message between hosts, and of a byte in it."""
    with tempfile.TemporaryDirectory() as folder, hosts.Hosts(2) as made:
        report = Path(folder, "report.json")
        made.mpirun(1, [sys.executable, messages.__file__, "--json", report], timeout=_TIMEOUT)
        return messages.read(report)


def codec_rates() -> dict[tuple[str, int], float]:
    """Return seconds a value on one core, by operation and bits as cost_model.py has them."""
    operations = {"quantize": "encode", "dequantize-add": "add", "dequantize": "decode"}
    times = codec.time_all(codec.build(), _CODEC_VALUES, 5)
    rates = {
        (operations[case.operation], int(case.bits)): summary.median / _CODEC_VALUES
        for case, summary in times.items()
        if case.dtype == "fp32"
        and case.operation in operations
        and case.compressor == "uniform"
        and case.rounding != "stochastic"
    }
    copy = times[codec.memcpy_of("fp32")].median / _CODEC_VALUES
    x, total = (np.ones(_CODEC_VALUES, np.float32) for _ in range(2))
    add = measure({"add": Timed(lambda: np.add(x, total, out=total))}, Alone(), rounds=5)["add"]
    rates |= {("encode", EXACT): copy, ("decode", EXACT): copy}
    return rates | {("add", EXACT): Summary.of(add).median / _CODEC_VALUES}


# ---- 2. Fit --------------------------------------------------------------------------------------


# Fields of Machine; the others are measured separately.
_FITTED_CONSTANTS = (
    "far_alpha", "far_turn", "near_message", "near_turn", "call", "efficiency",
)  # fmt: skip


def fit(samples: Sequence[Sample], machine: Machine) -> Machine:
    """Return the machine with constants whose predictions are nearest: least squares of log(ratio).

    Logarithms of the constants are sought, so that none is negative; a sample that is far off
    counts by its distance, not by its square.
    """
    start = [math.log(getattr(machine, name)) for name in _FITTED_CONSTANTS]

    def with_constants(logs: np.ndarray) -> Machine:
        values = dict(zip(_FITTED_CONSTANTS, np.exp(logs).tolist(), strict=True))
        return replace(machine, **values)

    def misses(logs: np.ndarray) -> list[float]:
        fitted = with_constants(logs)
        return [math.log(predict(each, fitted) / each.cost.seconds) for each in samples]

    return with_constants(least_squares(misses, start, loss="soft_l1", f_scale=0.2).x)


def predict(sample: Sample, machine: Machine) -> float:
    """Return the seconds that the model gives a sample, whose hosts share this machine's cores.

    Of MPI_Allreduce, those of its best algorithm.
    """
    world, cost = sample.world, sample.cost
    constants = machine.constants(world.link_rate, CORES / world.hosts)
    names = list(PEERS) if cost.algorithm == MPI_ALLREDUCE else [cost.algorithm]
    return min(
        cost_model.predict(name, cost.bytes, cost.bits, world.ranks, constants) for name in names
    )


# ---- 3. Check ------------------------------------------------------------------------------------

_CHECKED = (
    ("one_shot", 4),
    ("sra", 4),
    ("hierarchical", 4),
    ("sra", 32),
    (MPI_ALLREDUCE, 32),
)


def check_table(samples: Sequence[Sample], predicted: Sequence[float]) -> Table:
    """Return a row for each world and size: the measured time, and the ratio of the prediction."""
    cells: dict[tuple[World, int], dict[tuple[str, int], str]] = {}
    for sample, expected in zip(samples, predicted, strict=True):
        cost = sample.cost
        text = f"{time_text(cost.seconds)} {expected / cost.seconds:5.2f}"
        row = cells.setdefault((sample.world, cost.bytes), {})
        row[cost.algorithm, cost.bits] = text + ("*" if sample.fitted else "")
    keys = list(cells)
    return Table(
        "model and measurement: the time measured, then predicted / measured",
        [
            "where",
            "size",
            *(f"{name.removesuffix('_Allreduce')} {bits}" for name, bits in _CHECKED),
        ],
        [
            [str(world), size_text(size), *(cells[world, size].get(key, "") for key in _CHECKED)]
            for world, size in keys
        ],
        text_columns=1,
        sections=[i for i in range(1, len(keys)) if keys[i][0] != keys[i - 1][0]],
        notes=[
            "*: constants were fitted to it; all else is prediction. MPI: MPI_Allreduce, against "
            "the best of ring, recursive doubling and Rabenseifner.",
            f"All hosts share {CORES} cores, which the model allows for: a host has "
            f"{CORES} / hosts.",
        ],
    )


def accuracy_table(samples: Sequence[Sample], predicted: Sequence[float]) -> Table:
    """Return a row for each kind of prediction: how far off."""
    found: dict[tuple[str, str], list[float]] = {}
    for sample, expected in zip(samples, predicted, strict=True):
        ratio = expected / sample.cost.seconds
        for group in _groups(sample):
            found.setdefault(group, []).append(ratio)
    rows = [
        [*group, str(len(ratios)), *(f"{value:.2f}" for value in _spread(ratios))]
        for group, ratios in sorted(found.items())
    ]
    return Table(
        "how far the model is off: predicted / measured",
        ["what", "of", "samples", "median", "lower quartile", "upper quartile", "min", "max"],
        rows,
        text_columns=2,
        sections=[i for i in range(1, len(rows)) if rows[i][0] != rows[i - 1][0]],
    )


def _groups(sample: Sample) -> list[tuple[str, str]]:
    if sample.fitted:
        return [("fitted", "one host, 2 hosts")]
    if sample.cost.algorithm == MPI_ALLREDUCE:
        return [("MPI_Allreduce", "predicted, never fitted")]
    large = "1 MiB and more" if sample.cost.bytes >= 1 << 20 else "64 KiB and less"
    where = str(sample.world)
    return [("cgx, all", large), ("cgx, where", where)]


def _spread(ratios: list[float]) -> tuple[float, float, float, float, float]:
    summary = Summary.of(ratios)
    return summary.median, summary.lower, summary.upper, min(ratios), max(ratios)


# ---- 4. The command ------------------------------------------------------------------------------


_MEANING = {
    "far_message": "between hosts: processor time of a message, at either end",
    "far_byte": "between hosts: processor time of a byte, at either end",
    "far_alpha": "between hosts: until a message is acted on",
    "far_turn": "the same, for each other rank on the receiver's core",
    "near_message": "within a host: processor time of a message, at either end",
    "near_turn": "within a host: wait for each other rank on the receiver's core",
    "call": "of an allreduce that does nothing",
    "efficiency": "part of a link's rate that carries messages",
}


def constants_table(machine: Machine) -> Table:
    """Return what was fitted and measured."""
    rows = [
        [
            name,
            meaning,
            "fitted" if name in _FITTED_CONSTANTS else "measured",
            _constant_text(name, getattr(machine, name)),
        ]
        for name, meaning in _MEANING.items()
    ]
    rows += [
        [f"{what}, {bits} bits", "of a value on one core", "measured", f"{rate * 1e9:.2f} ns"]
        for (what, bits), rate in sorted(machine.rates.items())
        if bits in _BITS
    ]
    return Table("constants of this machine", ["constant", "what", "", "value"], rows, 3)


def _constant_text(name: str, value: float) -> str:
    if name == "efficiency":
        return f"{value:.3f}"
    return f"{value * 1e9:.3f} ns" if value < 1e-7 else time_text(value)


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted times of an allreduce by ranks")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    parser.add_argument("--plot", metavar="FILE", help="also draw the predictions there")
    options = parser.parse_args()
    if why := hosts.refusal():
        sys.exit(f"simulator.py needs several hosts to fit a link: {why}")
    machine = Machine(codec_rates(), *message_costs())
    samples = list(measure_worlds(WORLDS))
    fitted = [sample for sample in samples if sample.fitted]
    machine = fit(fitted, machine)
    predicted = [predict(sample, machine) for sample in samples]
    tables = [
        constants_table(machine),
        check_table(samples, predicted),
        accuracy_table(samples, predicted),
        predictions.rule_table(machine),
    ]
    for table in tables:
        table.print()
    if options.plot:
        predictions.draw(machine, len(fitted)).savefig(options.plot, dpi=100)
    if options.json:
        records = [
            asdict(each.cost)
            | {"link_rate": each.world.rate, "fitted": each.fitted, "predicted_seconds": expected}
            for each, expected in zip(samples, predicted, strict=True)
        ]
        constants = {name: getattr(machine, name) for name in _MEANING}
        constants |= {f"{what} {bits}": rate for (what, bits), rate in machine.rates.items()}
        settings = {"cores": CORES, "constants": constants}
        Report("simulator", settings, records, tables).write(options.json)


if __name__ == "__main__":
    main()
