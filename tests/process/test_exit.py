"""A process that exits with collectives in flight completes them, because its peers need them."""

import pytest
from support import launch


@pytest.mark.parametrize(
    "how", ["numpy", "backend", pytest.param("operators", marks=pytest.mark.slow)]
)
def test_ranks_that_do_not_wait(how: str) -> None:
    outputs = launch.mpirun(3, "run_exit.py", how)
    assert outputs[0].splitlines().count("right") == 1, outputs


@pytest.mark.slow
def test_ranks_that_do_not_wait_without_mpi() -> None:
    outputs = launch.torchrun(2, "run_exit.py", "backend")
    assert outputs[0].splitlines().count("right") == 1, outputs
