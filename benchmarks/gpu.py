"""Measure on a GPU and write the tables of docs/explanation/gpu_speed.md; `make gpu` runs it.

    python benchmarks/gpu.py            # the runs below, then the tables
    python benchmarks/gpu.py --tables   # only these, from the reports in benchmarks/results/gpu/
    python benchmarks/gpu.py --tiny     # check that everything runs; the document is unchanged

Each run is one command, printed before it starts, which writes a report. A run that fails leaves
none; the others go on, and the exit status is 1. Processes run under NVIDIA's MPS if there is one.
"""

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gpu_mps
import gpu_present
from suite import ROOT, Run, run

from cgx_ops._core.text_table import Table, paragraph
from cgx_ops.bench.report import Report

DOCUMENT = ROOT / "docs/explanation/gpu_speed.md"
BEGIN, END = "<!-- tables of benchmarks/gpu.py -->", "<!-- end of tables -->"

RUNS = (
    Run("gpu/kernels", ("benchmarks/gpu_kernels.py",)),
    Run("gpu/processes-2", ("benchmarks/gpu_allreduce.py",), ranks=2),
    Run("gpu/threads-2", ("benchmarks/gpu_allreduce.py", "--threads", "2")),
)

# ---- Targets -------------------------------------------------------------------------------------

Reports = Mapping[str, Report]  # by the name of the run
_SMALL, _MEDIUM, _LARGE = 4096, 64 << 20, 1 << 30  # bytes of a tensor
Figure = Callable[[Reports], float]  # KeyError if a report lacks it


@dataclass(frozen=True)
class Target:
    """A target of a figure.

    Attributes:
        what: The name of the figure.
        figure: Finds it in the reports.
        least: The smallest accepted value; or None.
        most: The largest accepted value; or None.
        text: How values are written.
    """

    what: str
    figure: Figure
    least: float | None = None
    most: float | None = None
    text: str = "{:.2f}"

    def row(self, reports: Reports) -> list[str]:
        """Return what, target, reached, and whether that is enough."""
        limit = self.most if self.least is None else self.least
        aim = f"at {'most' if self.least is None else 'least'} {self.text.format(limit)}"
        try:
            found = self.figure(reports)
        except KeyError:
            return [self.what, aim, "not run", ""]
        met = found >= self.least if self.least is not None else found <= (self.most or 0)
        return [self.what, aim, self.text.format(found), "yes" if met else "no"]


def _find(report: Report, key: str, **wanted: Any) -> float:
    """Return the field of the one result that has these values."""
    found = [each for each in report.results if wanted.items() <= each.items()]
    if not found:
        raise KeyError(f"{wanted} in {report.part}")
    return found[0][key]


def _kernel(reports: Reports, operation: str, key: str, dtype: str, rounding: str) -> float:
    wanted = {"dtype": dtype, "operation": operation, "rounding": rounding}
    bits = 32 if operation == "copy" else 4
    return _find(reports["gpu/kernels"], key, bits=bits, **wanted)


def _of_copy(operation: str, dtype: str = "fp32", rounding: str = "nearest") -> Figure:
    """Return the share of a copy's bandwidth."""
    return lambda reports: _kernel(reports, operation, "of_copy", dtype, rounding)


def _time(reports: Reports, contender: str, size: int) -> float:
    return _find(reports["gpu/processes-2"], "seconds", contender=contender, bytes=size)


def _over(slow: str, fast: str) -> Figure:
    return lambda reports: _time(reports, slow, _MEDIUM) / _time(reports, fast, _MEDIUM)


def _small(how: str) -> Figure:
    return lambda reports: 1e6 * _time(reports, f"direct 4, {how}", _SMALL)


def _over_least_traffic(reports: Reports) -> float:
    """Return the time of the largest allreduce over that of its least traffic.

    On each of 2 ranks, values are read once and results are written once. The message of half of
    the values to the peer, and that of their sum, are written once and read once.
    """
    values = _LARGE / 4
    in_4_bits = values * (0.5 + 8 / 512)  # bytes of a message of all values
    traffic = 2 * (2 * _LARGE + 2 * in_4_bits)
    copy = reports["gpu/kernels"]
    moved, seconds = (_find(copy, key, dtype="fp32", operation="copy") for key in _RATE)
    return _time(reports, "direct 4", _LARGE) / (traffic * seconds / moved)


_RATE = ("bytes", "seconds")

TARGETS = (
    Target("quantize, fp32, nearest: share of a copy's bandwidth", _of_copy("quantize"), 0.90),
    Target(
        "quantize, fp32, stochastic: the same",
        _of_copy("quantize", rounding="stochastic"),
        0.75,
    ),
    Target("dequantize, fp32: the same", _of_copy("dequantize", rounding="-"), 0.88),
    Target("quantize, bf16, nearest: the same", _of_copy("quantize", "bf16"), 0.80),
    Target("dequantize, bf16: the same", _of_copy("dequantize", "bf16", "-"), 0.80),
    Target("sum of 8 messages, fp32: the same", _of_copy("sum of 8"), 0.45),
    Target("sum of 2 messages, fp32: the same", _of_copy("sum of 2"), 0.38),
    Target("own values and 2 messages, fp32: the same", _of_copy("own + 2"), 0.60),
    Target(
        "quantize, fp32, nearest: times faster than compiled PyTorch",
        lambda reports: (
            _kernel(reports, "torch", "seconds", "fp32", "nearest")
            / _kernel(reports, "quantize", "seconds", "fp32", "nearest")
        ),
        2.5,
    ),
    Target(
        "allreduce of 64 MiB, direct: time in 4 bits over exact",
        _over("direct 4", "direct 32"),
        most=0.45,
    ),
    Target(
        "allreduce of 1 GiB, direct, 4 bits: time over that of the least traffic",
        _over_least_traffic,
        most=2,
    ),
    Target("cgx_enqueue of 4 KiB, direct: host, us", _small("the host's part"), most=10),
    Target("allreduce of 4 KiB, direct, in a row: us", _small("in a row"), most=15),
    Target("allreduce of 4 KiB, direct, in a graph: us", _small("in a graph"), most=10),
)


def targets_table(reports: Reports) -> Table:
    """Return a row for each target; "not run" where a report lacks the figure."""
    rows = [target.row(reports) for target in TARGETS]
    notes = ["4 bits; kernels: 2^28 values; allreduces: 2 processes on one GPU."]
    return Table("targets", ["what", "target", "reached", "met"], rows, text_columns=2, notes=notes)


# ---- The document --------------------------------------------------------------------------------


def text_of(reports: Reports) -> str:
    """Return the text between the markers of the document."""
    newest = max(reports.values(), key=lambda report: report.machine["date"])
    gpu = "{gpus} x {gpu}, driver for CUDA {driver}, built with CUDA {toolkit}".format(
        **newest.settings
    )
    mps = any(report.settings["mps"] for report in reports.values())
    versions = ", ".join(f"{name} {number}" for name, number in newest.machine["versions"].items())
    where = "{cpu}, {cores} cores; {platform}".format(**newest.machine)
    made = f"{newest.machine['date']}. {gpu}. {where}. {newest.machine['mpi']}, {versions}."
    parts = [paragraph(made)]
    parts.append(f"Processes ran {'under' if mps else 'without'} NVIDIA's MPS.")
    parts.append(targets_table(reports).markdown())
    for report in reports.values():
        parts += [table.markdown() for table in report.tables]
        parts.append(f"`{report.command}`")
    return "\n\n".join(parts)


def write(document: Path, reports: Reports) -> None:
    """Replace the text between the markers of the document by the tables."""
    before, begin, rest = document.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        sys.exit(f"{document} lacks the lines {BEGIN!r} and {END!r}, between which tables belong")
    document.write_text(f"{before}{BEGIN}\n\n{text_of(reports)}\n\n{END}{after}")


def tiny(one: Run) -> Run:
    """Return a run that only checks that its program works."""
    return replace(one, name=f"{one.name}-tiny", program=(*one.program, "--tiny"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measures on a GPU; writes docs/explanation/gpu_speed.md's tables"
    )
    parser.add_argument("--tables", action="store_true", help="only write, from older reports")
    parser.add_argument("--tiny", action="store_true", help="check only that everything runs")
    options = parser.parse_args()
    os.chdir(ROOT)
    failed = False
    runs = {one.name: tiny(one) if options.tiny else one for one in RUNS}
    if not options.tables:
        gpu_present.require()
        for name, one in runs.items():
            print(shlex.join(one.command()), flush=True)
            with gpu_mps.daemon() if one.ranks > 1 else contextlib.nullcontext({}) as variables:
                outcome = run(one, variables)
            print(f"{name}: {outcome}", flush=True)
            failed |= outcome != "done"
    reports = {name: Report.read(one.report) for name, one in runs.items() if one.report.exists()}
    if not reports:
        sys.exit(
            "No report in benchmarks/results/gpu/: docs/explanation/gpu_speed.md is unchanged."
        )
    if not options.tiny:
        write(DOCUMENT, reports)
    targets_table(reports).print()
    sys.exit(failed)


if __name__ == "__main__":
    main()
