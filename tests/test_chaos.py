"""A slice of `make chaos`: what must hold when ranks die, stop, run out of something or raise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.parametrize(("transport", "rounds"), [("shm", 40), ("mpi", 12), ("hybrid", 12)])
def test_survivors(transport: str, rounds: int) -> None:
    """Each has the oracle's bits or an error in time, is usable, and has left nothing."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "chaos", "--transport", transport, "--rounds", str(rounds)]
    done = subprocess.run(
        [*command, "--seed", "1", "--seconds", "25"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
