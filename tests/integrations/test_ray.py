"""Ray Train's TorchTrainer with TorchConfig(backend="cgx"), two CPU workers on one machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import launch

pytest.importorskip("ray.train")

HERE = Path(__file__).parent


@pytest.mark.timeout(700)
def test_training_resumes_bitwise_equal(tmp_path: Path) -> None:
    path = os.pathsep.join([str(HERE), launch.python_path()])
    ended = subprocess.run(
        [sys.executable, HERE / "run_ray.py", tmp_path],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stdout.splitlines() if line.startswith("[{")]
    first, second = json.loads(lines[-1])
    assert first["losses"][-1] < first["losses"][0] / 2
    assert first["ratio"] > 4
    assert len(set(first["digests"])) == 1
    assert second["digests"] == first["digests"]
