"""A small `make soak`: all loads over all transports, with too few calls to find slow leaks."""

import os
import subprocess
import sys

import pytest
from support import launch


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_no_growth() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "soak", "--scale", "0.01"],
        env={**os.environ, "PYTHONPATH": launch.python_path()},
        capture_output=True,
        text=True,
        timeout=1750,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
