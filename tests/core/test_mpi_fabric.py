"""The wire `mpi`, in which MPI transfers device memory.

Ranks are processes with devices simulated by threads (tests/cpp/fake_device.h). The memory of such
a device is host memory, which any MPI can access.
"""

from pathlib import Path

import pytest
from support import cpp_programs, launch


@pytest.fixture(scope="module")
def program() -> Path:
    """Build mpi_fabric_ranks; return its path."""
    return cpp_programs.build("mpi_fabric_ranks") / "mpi_fabric_ranks"


def ranks(
    program: Path, n: int, case: str, *mpirun_args: str, transport: str = "MPI", check: bool = True
) -> list[str]:
    env = {"COMMUNICATOR_TYPE": transport, "CGX_TIMEOUT": "60", "OMP_NUM_THREADS": "1"}
    return launch.mpirun(
        n, "run_program.py", program, case, env=env, mpirun_args=mpirun_args, check=check
    )


@pytest.mark.timeout(900)  # includes the build
@pytest.mark.parametrize("n", [2, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (3, 4))])
def test_results_are_those_of_cpus(n: int, program: Path) -> None:
    """Check that no warning about MPI appears if it can access device memory."""
    assert ranks(program, n, "cases") == ["all well\n"] * n


def test_auto_does_not_select_it(program: Path) -> None:
    for output in ranks(program, 2, "auto", transport="AUTO"):
        told, ended = output.splitlines()
        assert "the wire 'staged' because better ones are not available: direct: rank 0: " in told
        assert ended == "all well"


@pytest.mark.slow
def test_many_ranks(program: Path) -> None:
    assert ranks(program, 8, "tiny") == ["all well\n"] * 8


@pytest.mark.slow  # daily: test_killed_rank
def test_late_rank(program: Path) -> None:
    """Check that the others raise at the deadline, with NaN on their devices, and all exit."""
    outputs = ranks(program, 3, "late", "--with-ft", "ulfm", check=False)
    assert outputs == ["all well\n"] * 3


def test_killed_rank(program: Path) -> None:
    outputs = ranks(program, 3, "killed", "--with-ft", "ulfm", check=False)
    assert outputs[:2] == ["all well\n"] * 2
