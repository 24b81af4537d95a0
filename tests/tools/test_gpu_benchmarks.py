"""The benchmarks of `make gpu` without a GPU: detection, MPS, figures, tables, and the programs."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import gpu
import gpu_allreduce
import gpu_kernels
import gpu_mps
import numpy as np
import pytest
import suite
import torch
from support import launch

from cgx_ops._core.codec import quantize
from cgx_ops.bench.report import Report

GPU = {"gpu": "NVIDIA H200", "gpus": 1, "driver": "13.0", "toolkit": "13.0", "mps": True}
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


# ---- 2. MPS --------------------------------------------------------------------------------------

# Like nvidia-cuda-mps-control: -d leaves a daemon, which "quit" ends. Orders are logged.
CONTROL = """#!/bin/sh
pipe=$CUDA_MPS_PIPE_DIRECTORY
[ "$1" = -d ] || { read order; echo "$order" >> "$MPS_TEST_LOG"; }
if [ "$1" = -d ]; then
  [ -d "$pipe" ] && [ -d "$CUDA_MPS_LOG_DIRECTORY" ] || exit 1
  setsid "$MPS_TEST_DAEMON" 60 > /dev/null 2>&1 &
  until [ /proc/$!/exe -ef "$MPS_TEST_DAEMON" ]; do sleep 0.01; done
  echo $! > "$pipe/nvidia-cuda-mps-control.pid"
elif [ -z "$MPS_TEST_STUBBORN" ]; then
  kill "$(cat "$pipe/nvidia-cuda-mps-control.pid")"
else
  exit 1
fi
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a fake MPS; return the file with its orders."""
    control, daemon = tmp_path / "nvidia-cuda-mps-control", tmp_path / "nvidia-cuda-mps-server"
    control.write_text(CONTROL)
    control.chmod(0o755)
    daemon.write_bytes(Path("/bin/sleep").read_bytes())
    daemon.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("MPS_TEST_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("MPS_TEST_DAEMON", str(daemon))
    monkeypatch.delenv(gpu_mps.FOLDER, raising=False)
    return tmp_path / "log"


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)


@pytest.mark.parametrize("stubborn", ["", "1"])
def test_mps_ends_after_a_failure(
    log: Path, stubborn: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MPS_TEST_STUBBORN", stubborn)
    pid, folder = 0, Path()

    def fails() -> None:
        nonlocal pid, folder
        with gpu_mps.daemon() as variables:
            folder = Path(variables[gpu_mps.FOLDER])
            pid = int((folder / "nvidia-cuda-mps-control.pid").read_text())
            assert alive(pid)
            monkeypatch.setenv(gpu_mps.FOLDER, str(folder))
            assert gpu_mps.running()
            monkeypatch.delenv(gpu_mps.FOLDER)
            raise RuntimeError("the command failed")

    with pytest.raises(RuntimeError, match="the command failed"):
        fails()
    assert gone(pid) and not folder.exists()
    assert log.read_text() == "quit -t 10\n"
    assert ("MPS: killed" in capfd.readouterr().out) == bool(stubborn)


def test_files_of_an_ended_mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpu_mps.FOLDER, str(tmp_path))
    assert not gpu_mps.running()
    for pid in (os.getpid(), 2**22 + 1):  # another program's, and more than Linux uses
        (tmp_path / "nvidia-cuda-mps-control.pid").write_text(f"{pid}\n")
        assert not gpu_mps.running()


def test_mps_ends_when_it_is_terminated(log: Path) -> None:
    program = [sys.executable, "benchmarks/gpu_mps.py", "sleep", "60"]
    process = subprocess.Popen(program, cwd=suite.ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "MPS: started.\n"
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
    assert log.read_text() == "quit -t 10\n"


def test_command_runs_with_and_without_mps(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = ("benchmarks/gpu_mps.py", sys.executable, "-c")
    source = f"import os; print(os.environ.get({gpu_mps.FOLDER!r})); raise SystemExit(3)"

    def run() -> str:
        done = subprocess.run(
            [sys.executable, *program, source], cwd=suite.ROOT, capture_output=True, text=True,
            timeout=60, env={**os.environ, "PYTHONPATH": launch.python_path()},
        )  # fmt: skip
        assert done.returncode == 3, done.stderr
        return done.stdout

    assert "MPS: started.\n/" in run()
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert "MPS: not available" in run() and run().endswith("None\n")


# ---- 3. Measurements -----------------------------------------------------------------------------


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


# ---- 4. Targets and tables from sample reports ---------------------------------------------------


def kernels(seconds: dict[tuple[str, str, str], float]) -> Report:
    """Return a report: seconds by dtype, operation and rounding, of 10 bytes each; copy: of 20."""
    results = [
        gpu_kernels.Result(
            *(dtype, operation, 32 if operation == "copy" else 4, rounding),
            *(20 if operation == "copy" else 10, time, time, time, 15),
            of_copy=(10 / time) / (20 / seconds[dtype, "copy", "-"]),
        )
        for (dtype, operation, rounding), time in seconds.items()
    ]
    tables = [gpu_kernels.table_of(results, "NVIDIA H200")]
    return Report("gpu kernels", GPU, [asdict(r) for r in results], tables, MACHINE, "kernels")


def allreduces(kind: str, seconds: dict[tuple[str, int], float]) -> Report:
    results = [
        gpu_allreduce.Result(2, kind, contender, size, time, time, time, 15)
        for (contender, size), time in seconds.items()
    ]
    tables = gpu_allreduce.tables_of(results, GPU)
    return Report("gpu allreduce", GPU, [asdict(r) for r in results], tables, MACHINE, kind)


SMALL, MEDIUM, LARGE = 4096, 64 << 20, 1 << 30
REPORTS = {
    "gpu/kernels": kernels(
        {
            ("fp32", "copy", "-"): 2.0,
            ("fp32", "quantize", "nearest"): 1.25,
            ("fp32", "quantize", "stochastic"): 2.0,
            ("fp32", "dequantize", "-"): 1.0,
            ("fp32", "sum of 8", "nearest"): 2.0,
            ("fp32", "sum of 2", "nearest"): 4.0,
            ("fp32", "own + 2", "nearest"): 1.6,
            ("fp32", "torch", "nearest"): 5.0,
            ("bf16", "copy", "-"): 2.0,
            ("bf16", "quantize", "nearest"): 1.25,
        }
    ),
    "gpu/processes-2": allreduces(
        "processes",
        {
            ("direct 4, the host's part", SMALL): 9e-6,
            ("direct 4, in a row", SMALL): 25e-6,
            ("direct 4, in a graph", SMALL): 10e-6,
            ("direct 32", MEDIUM): 4e-3,
            ("direct 4", MEDIUM): 1e-3,
            ("direct 4", LARGE): 2e9,
        },
    ),
    "gpu/threads-2": allreduces("threads", {("direct 4", MEDIUM): 1e-3}),
}


def test_targets_from_reports() -> None:
    rows = gpu.targets_table(REPORTS).rows
    # The least traffic of 1 GiB is 4.85e9 bytes; the copy in the report moves 10 bytes a second.
    assert [(row[2], row[3]) for row in rows] == [
        ("0.80", "no"), ("0.50", "no"), ("1.00", "yes"), ("0.80", "yes"), ("not run", ""),
        ("0.50", "yes"), ("0.25", "no"), ("0.62", "yes"), ("4.00", "yes"), ("0.25", "yes"),
        ("4.12", "no"), ("9.00", "yes"), ("25.00", "no"), ("10.00", "yes"),
    ]  # fmt: skip


def test_targets_are_those_of_the_project() -> None:
    limits = [target.most if target.least is None else target.least for target in gpu.TARGETS]
    assert limits == [0.9, 0.75, 0.88, 0.8, 0.8, 0.45, 0.38, 0.6, 2.5, 0.45, 2, 10, 15, 10]


def test_tables_replace_tables(tmp_path: Path) -> None:
    document = tmp_path / "gpu.md"
    document.write_text(f"before\n\n{gpu.BEGIN}\n\nold text\n\n{gpu.END}\n\nafter\n")
    gpu.write(document, REPORTS)
    text = document.read_text()
    assert text.startswith("before\n\n") and text.endswith(f"\n\n{gpu.END}\n\nafter\n")
    assert "old text" not in text
    assert "2026-11-21" in text and "1 x NVIDIA H200, driver for CUDA 13.0" in text
    assert "under NVIDIA's MPS" in text and "2 processes on one GPU, under MPS" in text
    for report in REPORTS.values():
        for table in report.tables:
            assert table.markdown() in text
    gpu.write(document, REPORTS)
    assert document.read_text() == text


# ---- 5. The programs, with a stand-in for a GPU: support/no_gpu.py -------------------------------


@pytest.mark.slow
def test_all_programs_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program = "tests/ranks/run_without_gpu.py"
    runs = [replace(one, program=(program, *one.program), timeout=60) for one in gpu.RUNS]
    document = tmp_path / "gpu.md"
    document.write_text(f"{gpu.BEGIN}\n{gpu.END}\n")
    monkeypatch.setattr(suite, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu, "RUNS", [*runs])
    monkeypatch.setattr(gpu, "DOCUMENT", document)
    monkeypatch.setattr(gpu.gpu_present, "require", lambda: ["stand-in"])
    monkeypatch.setenv("PYTHONPATH", launch.python_path())
    monkeypatch.chdir(suite.ROOT)

    def main(*arguments: str) -> object:
        monkeypatch.setattr("sys.argv", ["gpu.py", *arguments])
        with pytest.raises(SystemExit) as end:
            gpu.main()
        return end.value.code

    assert main("--tiny") is False, capfd.readouterr()
    assert document.read_text() == f"{gpu.BEGIN}\n{gpu.END}\n"
    reports = {one.name: Report.read(tmp_path / f"{one.name}-tiny.json") for one in runs}
    rows = {row[0]: row[2] for row in gpu.targets_table(reports).rows}
    missing = [what for what, reached in rows.items() if reached == "not run"]
    assert [what[:19] for what in missing] == ["allreduce of 64 MiB", "allreduce of 1 GiB,"]
    for name, report in reports.items():
        report.write(tmp_path / f"{name}.json")
    assert main("--tables") is False
    text = document.read_text()
    assert "2 processes on one GPU, without MPS" in text and "| own + 2" in text
