"""Unknown variables and invalid values are reported on every path."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import launch

from cgx_ops._core import environment, tables, variables

ROOT = Path(__file__).resolve().parents[2]


def test_documentation_lists_all_variables() -> None:
    text = (ROOT / "docs/reference/environment.md").read_text()
    assert set(re.findall(r"`(CGX_[A-Z_]+)`", text)) == variables.NAMES


def test_documentation_lists_all_compressors() -> None:
    text = (ROOT / "docs/reference/environment.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| `CGX_COMPRESSOR` |"))
    assert re.findall(r"`([a-z0-9_]+)`", row.split(" | ")[1]) == list(tables.COMPRESSORS)


def test_variables_include_all_options() -> None:
    named = {
        name for name in (*environment._VARIABLES, *environment._HOST_SWITCHES) if "CGX_" in name
    }
    assert named <= variables.NAMES


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("CGX_COMPRESION_QUANTIZATION_BITS", "did you mean CGX_COMPRESSION_QUANTIZATION_BITS?"),
        ("CGX_TIMEOUTS", "did you mean CGX_TIMEOUT?"),
        ("CGX_XYZ", "see docs/reference/environment.md"),
        ("CGX_TEST_XYZ", ""),
        ("XYZ", ""),
    ],
)
@pytest.mark.parametrize("call", ["cgx_ops.init()"])
def test_misspelt_name(name: str, hint: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "4")
    program = f"import cgx_ops; {call}; {call}"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended
    assert ended.stderr.count(f"no environment variable {name}") == bool(hint), ended.stderr
    assert hint in ended.stderr


CALLS = {
    "numpy": "import cgx_ops; cgx_ops.init()",
    "backend": "import cgx_ops.torch, torch.distributed as d; d.init_process_group('cgx')",
    "operators": "import torch, cgx_ops.torch; torch.ops.cgx.quantized_allreduce(torch.ones(9))",
    "jax": "import jax.numpy as n, cgx_ops.jax as c; c.allreduce_q(n.ones(9))",
}


@pytest.mark.parametrize("path", CALLS)
def test_invalid_timeout(path: str, tmp_path: Path) -> None:
    """Also if the caller gives a deadline, as process groups do."""
    program = tmp_path / "program.py"
    program.write_text(CALLS[path])
    outputs = launch.mpirun(2, program, env={"CGX_TIMEOUT": "abc"}, check=False)
    assert all(re.search(r"CGX_TIMEOUT\W{1,6}(is .)?abc", text) for text in outputs), outputs


EXACT = """
import torch, torch.distributed as dist, cgx_ops.torch
dist.init_process_group("cgx")
for _ in range(2):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(9, 9))
    model(torch.ones(1, 9)).sum().backward()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("bits", "count"), [("", 1), *(pytest.param(b, 0, marks=pytest.mark.slow) for b in ("32", "4"))]
)
def test_warning_without_bits(bits: str, count: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(EXACT)
    outputs = launch.mpirun(
        2, program, env={"CGX_COMPRESSION_QUANTIZATION_BITS": bits, "CGX_LOG": "1"}
    )
    assert [text.count("no bits are set") for text in outputs] == [count, 0], outputs
