"""A process that exits with steps in flight finishes them, because its peers need them."""

import pytest
from support import launch


@pytest.mark.parametrize(
    "how", [*(pytest.param(x, marks=pytest.mark.slow) for x in ("global", "local")), "allreduce_q"]
)
def test_processes_that_do_not_wait(how: str) -> None:
    outputs = launch.mpirun(3, "run_jax_exit.py", how)
    assert outputs[0].splitlines().count("right") == 1, outputs


def test_an_exception_with_steps_in_flight() -> None:
    """Check that an exception ends its process, but the steps in flight still reach the others."""
    outputs = launch.mpirun(2, "run_jax_exit.py", "raises", check=False)
    assert "an error of the script's own" in outputs[1], outputs
