"""Measure on a GPU and write the tables of docs/explanation/gpu.md; `make gpu` runs it.

    python benchmarks/gpu.py            # the runs below, then the tables
    python benchmarks/gpu.py --tables   # only these, from the reports in benchmarks/results/gpu/

Each run is one command, printed before it starts, which writes a report. A run that fails leaves
none; the others go on, and the exit status is 1.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_present
from suite import ROOT, Run, run

from cgx_ops._core.table import Table
from cgx_ops.bench.report import Report

DOCUMENT = ROOT / "docs/explanation/gpu.md"
BEGIN, END = "<!-- tables of benchmarks/gpu.py -->", "<!-- end of tables -->"

RUNS = (
    Run("gpu/kernels", ("benchmarks/gpu_kernels.py",)),
    Run("gpu/processes-2", ("benchmarks/gpu_allreduce.py",), ranks=2),
    Run("gpu/processes-4", ("benchmarks/gpu_allreduce.py",), ranks=4),
    Run("gpu/threads-2", ("benchmarks/gpu_allreduce.py", "--threads", "2")),
)

# ---- Targets -------------------------------------------------------------------------------------

Reports = Mapping[str, Report]  # by the name of the run
_MEDIUM, _SMALL = 64 << 20, 4096  # bytes of a tensor


@dataclass(frozen=True)
class Target:
    """A target of a figure.

    Attributes:
        what: it is.
        aim: in words.
        figure: finds it in the reports; KeyError if a report that it needs is missing.
        text: how the figure is written.
    """

    what: str
    aim: str
    figure: Callable[[Reports], float]
    text: str = "{:.2f}"


def _kernel(reports: Reports, operation: str, key: str = "of_copy") -> float:
    return _find(
        reports["gpu/kernels"], key, dtype="fp32", operation=operation, bits=4, rounding="nearest"
    )


def _time(reports: Reports, contender: str, size: int = _MEDIUM, kind: str = "processes") -> float:
    return _find(reports[f"gpu/{kind}-2"], "seconds", contender=contender, bytes=size)


def _find(report: Report, key: str, **wanted: Any) -> float:
    """Return the field of the one result that has these values."""
    (found,) = [each for each in report.results if wanted.items() <= each.items()]
    return found[key]


def _over(slow: str, fast: str) -> Callable[[Reports], float]:
    return lambda reports: _time(reports, slow) / _time(reports, fast)


def _small(contender: str, kind: str) -> Callable[[Reports], float]:
    return lambda reports: 1e6 * _time(reports, contender, _SMALL, kind)


TARGETS = (
    Target(
        "quantize, 4 bits nearest, 1 GiB of fp32: bandwidth over a copy's",
        "at least 0.85",
        lambda reports: _kernel(reports, "quantize"),
    ),
    Target(
        "sum of 8 messages of 4 bits, 1 GiB of fp32 each: bandwidth over a copy's",
        "at least 0.80",
        lambda reports: _kernel(reports, "sum of 8"),
    ),
    Target(
        "quantize, 4 bits: how many times faster than compiled PyTorch",
        "",
        lambda reports: (
            _kernel(reports, "torch", "seconds") / _kernel(reports, "quantize", "seconds")
        ),
    ),
    Target(
        "64 MiB, 2 processes, direct: time in 4 bits over exact",
        "at most 0.5",
        _over("direct 4", "direct 32"),
    ),
    Target(
        "64 MiB, 2 processes, staged: how many times faster in 4 bits than MPI_Allreduce",
        "at least 5",
        _over("mpi", "staged 4"),
        "{:.1f}",
    ),
    Target(
        "64 MiB, 2 processes, staged: how many times faster in 4 bits than exact",
        "at least 5",
        _over("staged 32", "staged 4"),
        "{:.1f}",
    ),
    Target(
        "4 KiB, 2 threads, direct: a call in a row, us",
        "below 30",
        _small("direct 4, in a row", "threads"),
        "{:.1f}",
    ),
    Target(
        "4 KiB, 2 processes, direct: a call in a row, us",
        "below 30",
        _small("direct 4, in a row", "processes"),
        "{:.1f}",
    ),
)


def targets_table(reports: Reports) -> Table:
    """Return a row for each target; "not run" where a report is missing."""
    rows = []
    for target in TARGETS:
        try:
            reached = target.text.format(target.figure(reports))
        except KeyError:
            reached = "not run"
        rows.append([target.what, target.aim, reached])
    return Table("targets", ["what", "aim", "reached"], rows, text_columns=2)


# ---- The document --------------------------------------------------------------------------------


def text_of(reports: Reports) -> str:
    """Return the text between the markers of the document."""
    newest = max(reports.values(), key=lambda report: report.machine["date"])
    gpu = "{gpus} x {gpu}, driver for CUDA {driver}, built with CUDA {toolkit}".format(
        **newest.settings
    )
    versions = ", ".join(f"{name} {number}" for name, number in newest.machine["versions"].items())
    where = "{cpu}, {cores} cores; {platform}".format(**newest.machine)
    parts = [f"{newest.machine['date']}. {gpu}. {where}. {newest.machine['mpi']}, {versions}."]
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measures on a GPU; writes docs/explanation/gpu.md's tables"
    )
    parser.add_argument("--tables", action="store_true", help="only write, from older reports")
    options = parser.parse_args()
    os.chdir(ROOT)
    failed = False
    if not options.tables:
        gpu_present.require()
        for one in RUNS:
            print(shlex.join(one.command()), flush=True)
            outcome = run(one)
            print(f"{one.name}: {outcome}", flush=True)
            failed |= outcome != "done"
    reports = {one.name: Report.read(one.report) for one in RUNS if one.report.exists()}
    if not reports:
        sys.exit("No report in benchmarks/results/gpu/: docs/explanation/gpu.md is unchanged.")
    write(DOCUMENT, reports)
    targets_table(reports).print()
    sys.exit(failed)


if __name__ == "__main__":
    main()
