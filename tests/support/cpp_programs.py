"""Builds the C++ tests next to libcgx.so, from the same objects."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "cmake"  # where setup.py built the core


def tool(name: str) -> str:
    """Return the program of this environment, or the one on PATH."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    assert found, "pip install cmake ninja"
    return found


def run(*command: object, timeout: float = 800) -> str:
    """Run a command and return its output; its status must be 0."""
    # The descriptors of make's jobserver are not inherited: ctest 4.4 aborts without them.
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
    )
    said = done.stdout[-6000:] + done.stderr[-4000:]
    assert done.returncode == 0, f"status {done.returncode}\n{said}"
    return said


def cuda_tests() -> list[str]:
    """Return the names of the programs that test CUDA."""
    return sorted(path.stem for path in (ROOT / "tests/cpp").glob("cuda_*_test.cc"))


def built(*programs: str) -> Path:
    """Return the folder of these programs; build them if one is missing."""
    return BUILD if all((BUILD / each).exists() for each in programs) else build(*programs)


def build(*targets: str) -> Path:
    """Build these targets (default: all) and return their folder."""
    assert BUILD.exists(), f"{BUILD} is missing: build with pip install --no-build-isolation -e ."
    cmake = tool("cmake")
    run(cmake, "-S", ROOT / "cgx_ops/csrc", "-B", BUILD, "-DCGX_BUILD_TESTS=ON")
    run(cmake, "--build", BUILD, *(("--target", *targets) if targets else ()))
    return BUILD
