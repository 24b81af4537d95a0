"""`make soak` in small: all loads over all transports, too few calls to find slow leaks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_nothing_grows() -> None:
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "soak", "--scale", "0.01"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=1150,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
