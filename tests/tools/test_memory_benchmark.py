"""benchmarks/memory.py: its measurements are correct, and its report has every contender."""

import itertools
import mmap
from pathlib import Path

import memory
from support import launch

from cgx_ops.bench.report import Report

SIZES = {"512KiB": 512 << 10, "4MiB": 4 << 20}


def test_peak_counts_resident_pages() -> None:
    size = 64 << 20
    before = memory.resident("VmRSS")
    memory.forget_peak()
    with mmap.mmap(-1, size) as pages:  # malloc might return memory that is already resident
        assert memory.resident("VmHWM") - before < size // 2
        for at in range(0, size, mmap.PAGESIZE):
            pages[at] = 1
    # Linux counts a thread's pages in batches of at most 64.
    assert memory.resident("VmHWM") - before > size - (4 << 20)
    memory.forget_peak()
    assert memory.resident("VmHWM") - before < size // 2


def test_report(tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    launch.mpirun(2, Path(memory.__file__), "--sizes", *SIZES, "--json", path)
    report = Report.read(path)
    names = ["cgx 4", "cgx 8", "cgx 32", f"cgx 4, {memory.IN_FLIGHT} in flight", "mpi"]
    found = [memory.Taken(**record) for record in report.results]
    assert [(taken.contender, taken.size) for taken in found] == [
        *itertools.product(names, SIZES.values())
    ]
    for _, group in itertools.groupby(found, lambda taken: taken.contender):
        taken = [each.memory for each in group]
        assert taken == sorted(taken)  # the maximum so far
    assert all(len(row) == 1 + len(SIZES) for row in report.tables[0].rows)
    # Exact values are sent from copies: at some time half of 4 MiB is in transit to the peer.
    assert next(each.memory for each in found if each.contender == "cgx 32") > 0
