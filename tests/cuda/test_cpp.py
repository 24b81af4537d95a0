"""The C++ tests of CUDA on a GPU: directly, and under compute-sanitizer.

cpp/test_cpp.py runs the same programs in `make test`. There, programs that need a GPU are skipped
(exit status 77); here, that is a failure.
"""

import shutil
from pathlib import Path

import pytest
from support import cpp_programs
from support.cuda_cases import needs_gpu

pytestmark = [needs_gpu, pytest.mark.timeout(140)]
TESTS = cpp_programs.cuda_tests()
NEED_GPU = [name for name in TESTS if "device" in name]
# Calls that fail are part of the tests; invalid memory accesses are not.
TOOLS = {"memcheck": ("--report-api-errors", "no"), "racecheck": ()}


@pytest.fixture(scope="module")
def programs() -> Path:
    """Return the folder of the C++ tests. `make gpu-build` builds them; a copied build has them."""
    return cpp_programs.built(*TESTS)


def test_gpu_programs_exist() -> None:
    assert NEED_GPU, TESTS


@pytest.mark.parametrize("name", TESTS)
def test_without_sanitizer(name: str, programs: Path) -> None:
    cpp_programs.run(programs / name)


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("name", NEED_GPU)
def test_under_compute_sanitizer(name: str, tool: str, programs: Path) -> None:
    sanitizer = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on PATH or in /usr/local/cuda/bin")
    options = ("--tool", tool, *TOOLS[tool], "--target-processes", "all", "--error-exitcode", 1)
    found = cpp_programs.run(sanitizer, *options, programs / name)
    assert "ERROR SUMMARY: 0 errors" in found or "RACECHECK SUMMARY: 0 hazards" in found, found
