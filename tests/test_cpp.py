"""The C++ tests: built beside libcgx.so from the same objects, run by ctest."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "cmake"  # where setup.py built the core


@pytest.mark.timeout(900)
def test_cpp() -> None:
    assert BUILD.exists(), f"{BUILD} is missing: build with pip install --no-build-isolation -e ."
    scripts = str(Path(sys.executable).parent)
    cmake, ninja, ctest = (shutil.which(tool, path=scripts) for tool in ("cmake", "ninja", "ctest"))
    assert cmake and ninja and ctest, "pip install cmake ninja"
    for command in (
        [cmake, "-S", ROOT / "cgx_ops/csrc", "-B", BUILD, "-DCGX_BUILD_TESTS=ON"],
        [ninja, "-C", BUILD],
        [ctest, "--test-dir", BUILD, "--output-on-failure", "--no-tests=error"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=800)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
