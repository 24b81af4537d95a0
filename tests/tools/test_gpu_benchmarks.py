"""The parts of `make gpu` that need no GPU: detection, figures, tables, documentation."""

import ctypes
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gpu
import gpu_allreduce
import gpu_kernels
import numpy as np
import pytest
import torch

from cgx_ops._core.codec import quantize
from cgx_ops.bench.report import Report

GPU = {"gpu": "NVIDIA H200", "gpus": 1, "driver": "13.0", "toolkit": "13.0"}
MACHINE = {
    "date": "2026-11-21T12:00:00+00:00",
    "platform": "Linux",
    "cpu": "a CPU",
    "cores": 16,
    "mpi": "Open MPI 5.0",
    "versions": {"torch": "2.11.0"},
}

# ---- 1. Detection of a GPU -----------------------------------------------------------------------


class Driver:
    """A libcuda with GPUs of these names."""

    def __init__(self, *names: bytes, status: int = 0) -> None:
        self._names, self._status = names, status

    def cuInit(self, _flags: int) -> int:  # noqa: N802
        return self._status

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self._names)
        return 0

    def cuDeviceGetName(self, name: Any, size: int, ordinal: int) -> int:  # noqa: N802
        assert size == len(name)
        name.value = self._names[ordinal]
        return 0


def test_missing_gpu_is_one_line_and_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    for library, reason in (
        (missing, "no NVIDIA driver"),
        (lambda _name: Driver(status=100), "finds no GPU (cuInit: error 100)"),
        (lambda _name: Driver(), "CUDA_VISIBLE_DEVICES"),
    ):
        monkeypatch.setattr(ctypes, "CDLL", library)
        monkeypatch.setattr("sys.argv", ["gpu.py"])
        with pytest.raises(SystemExit) as end:
            gpu.main()
        assert isinstance(end.value.code, str)  # printed, and the status is 1
        assert reason in end.value.code and "\n" not in end.value.code
    assert capsys.readouterr().out == ""  # no run has started


# ---- 2. Measurements -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", gpu_kernels.DTYPES)
def test_quantizer_in_torch_equals_cgx(dtype: str) -> None:
    """Check the same minimum, step and levels, bit for bit: otherwise the comparison is unfair."""
    random = np.random.default_rng(0).standard_normal((20, gpu_kernels.BUCKET)).astype(np.float32)
    random[3] = 0.25  # a step of 0
    x = torch.from_numpy(random).to(gpu_kernels.DTYPES[dtype])
    low, step, levels = gpu_kernels.quantize_in_torch(x)
    found = torch.cat([low.view(torch.uint8), step.view(torch.uint8), levels], 1).numpy()
    want = quantize(x.float().numpy(), bits=4, bucket_size=512, rounding="nearest")
    assert found.tobytes() == want


# ---- 3. Targets and tables from sample reports ---------------------------------------------------


def kernels(seconds: dict[str, float]) -> Report:
    """Return a report: seconds by operation, of 10 bytes each, except 20 for the copy."""
    results = [
        gpu_kernels.Result(
            *("fp32", operation, 32 if operation == "copy" else 4),
            *("nearest", 20 if operation == "copy" else 10),
            *(time, time, time, 15),
            of_copy=(10 / time) / (20 / seconds["copy"]),
        )
        for operation, time in seconds.items()
    ]
    tables = [gpu_kernels.table_of(results, "NVIDIA H200")]
    return Report("gpu kernels", GPU, [asdict(r) for r in results], tables, MACHINE, "kernels")


def allreduces(kind: str, seconds: dict[tuple[str, int], float]) -> Report:
    results = [
        gpu_allreduce.Result(2, kind, contender, size, time, time, time, 15)
        for (contender, size), time in seconds.items()
    ]
    tables = gpu_allreduce.tables_of(results, "NVIDIA H200")
    return Report("gpu allreduce", GPU, [asdict(r) for r in results], tables, MACHINE, kind)


MEDIUM, SMALL = 64 << 20, 4096
REPORTS = {
    "gpu/kernels": kernels({"copy": 2.0, "quantize": 1.25, "sum of 8": 2.0, "torch": 5.0}),
    "gpu/processes-2": allreduces(
        "processes",
        {
            ("direct 4, in a row", SMALL): 25e-6,
            ("direct 32", MEDIUM): 4e-3,
            ("direct 4", MEDIUM): 1e-3,
            ("staged 32", MEDIUM): 30e-3,
            ("staged 4", MEDIUM): 5e-3,
            ("mpi", MEDIUM): 40e-3,
        },
    ),
    "gpu/threads-2": allreduces("threads", {("direct 4, in a row", SMALL): 12e-6}),
}


def test_targets_from_reports() -> None:
    reached = [row[2] for row in gpu.targets_table(REPORTS).rows]
    assert reached == ["0.80", "0.50", "4.00", "0.25", "8.0", "6.0", "12.0", "25.0"]


def test_tables_replace_tables(tmp_path: Path) -> None:
    document = tmp_path / "gpu.md"
    document.write_text(f"before\n\n{gpu.BEGIN}\n\nnot run\n\n{gpu.END}\n\nafter\n")
    gpu.write(document, REPORTS)
    text = document.read_text()
    assert text.startswith("before\n\n") and text.endswith(f"\n\n{gpu.END}\n\nafter\n")
    assert "not run" not in text
    assert "2026-11-21" in text and "1 x NVIDIA H200, driver for CUDA 13.0" in text
    for report in REPORTS.values():
        for table in report.tables:
            assert table.markdown() in text
    gpu.write(document, REPORTS)
    assert document.read_text() == text
