"""The C++ tests of CUDA on a GPU: as they are, and under compute-sanitizer.

test_cpp.py runs the same programs in `make test`, where those that need a GPU say so and end with
status 77. Here that is a failure.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_cases import needs_gpu

pytestmark = [needs_gpu, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "cmake"  # where setup.py built the core
TESTS = sorted(path.stem for path in (ROOT / "tests/cpp").glob("cuda_*_test.cc"))
NEED_GPU = [name for name in TESTS if "device" in name]
# Calls that fail are part of the tests; memory that is misused is not.
TOOLS = {"memcheck": ("--report-api-errors", "no"), "racecheck": ()}


@pytest.fixture(scope="module")
def programs() -> Path:
    """Build the C++ tests; return their folder."""
    scripts = str(Path(sys.executable).parent)
    cmake = shutil.which("cmake", path=scripts) or shutil.which("cmake")
    assert cmake, "pip install cmake ninja"
    for command in (
        [cmake, "-S", ROOT / "cgx_ops/csrc", "-B", BUILD, "-DCGX_BUILD_TESTS=ON"],
        [cmake, "--build", BUILD, "--target", *TESTS],
    ):
        run(*command)
    return BUILD


def run(*command: object, timeout: float = 800) -> str:
    """Run a command to its end and return what it wrote; its status must be 0."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=timeout)
    said = done.stdout[-6000:] + done.stderr[-4000:]
    assert done.returncode == 0, f"status {done.returncode}\n{said}"
    return said


def test_there_are_some() -> None:
    assert NEED_GPU, TESTS


@pytest.mark.parametrize("name", TESTS)
def test_alone(name: str, programs: Path) -> None:
    run(programs / name)


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("name", NEED_GPU)
def test_under_compute_sanitizer(name: str, tool: str, programs: Path) -> None:
    sanitizer = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    if sanitizer is None:
        pytest.skip("compute-sanitizer is neither on PATH nor in /usr/local/cuda/bin")
    options = ("--tool", tool, *TOOLS[tool], "--target-processes", "all", "--error-exitcode", 1)
    found = run(sanitizer, *options, programs / name)
    assert "ERROR SUMMARY: 0 errors" in found or "RACECHECK SUMMARY: 0 hazards" in found, found
