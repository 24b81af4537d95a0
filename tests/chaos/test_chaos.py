"""A part of `make chaos`: ranks die, stop, run out of resources or raise."""

import os
import subprocess
import sys

import pytest
from support import launch

ROUNDS = [("shm", 6)]
ROUNDS += [pytest.param(each, 4, marks=pytest.mark.slow) for each in ("tcp", "mpi", "hybrid")]
ROUNDS += [pytest.param(*more, marks=pytest.mark.exhaustive) for more in [("shm", 40), ("tcp", 40)]]
ROUNDS += [pytest.param(each, 12, marks=pytest.mark.exhaustive) for each in ("mpi", "hybrid")]


@pytest.mark.parametrize(("transport", "rounds"), ROUNDS)
def test_survivors(transport: str, rounds: int) -> None:
    """Check that survivors have correct bits or an error in time, are usable, and leave nothing."""
    command = [sys.executable, "-m", "chaos", "--transport", transport, "--rounds", str(rounds)]
    done = subprocess.run(
        [*command, "--seed", "1", "--seconds", "200"],
        env={**os.environ, "PYTHONPATH": launch.python_path()},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
