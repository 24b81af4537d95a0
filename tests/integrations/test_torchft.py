"""torchft over the backend "cgx": its process group, error feedback, and killed replicas."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support import launch
from torch._C._distributed_c10d import TCPStore

coordination = pytest.importorskip("torchft.coordination")

ROOT = Path(__file__).parents[2]


@pytest.fixture
def lighthouse() -> Iterator[str]:
    """Return the address of a lighthouse that waits 1 s for lost replicas, 10 s for slow ones."""
    server = coordination.LighthouseServer(
        bind="[::]:0", min_replicas=2, join_timeout_ms=10_000, quorum_tick_ms=20,
        heartbeat_timeout_ms=1000,
    )  # fmt: skip
    yield server.address()
    server.shutdown()


def test_trains(train: Callable, lighthouse: str) -> None:
    train("run_torchft.py", lighthouse, start=launch.processes)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("transport", ["SHM", "TCP"])
def test_process_group(transport: str) -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    env = {"COMMUNICATOR_TYPE": transport}
    outputs = launch.processes(3, "run_torchft_groups.py", store.port, env=env, timeout=380)
    launch.check_ok(outputs)


@pytest.mark.timeout(200)
def test_feedback_is_conserved(tmp_path: Path, lighthouse: str) -> None:
    """Require that all committed gradients equal what was applied, plus all residuals.

    The bound is that of support/conservation.py, with one more operation for each value: the
    average is multiplied if a replica does not participate.
    """
    launch.processes(4, "run_torchft_feedback.py", tmp_path, lighthouse, timeout=180)
    saved = [dict(np.load(tmp_path / f"{i}.npz")) for i in range(4)]
    steps, size = int(saved[0]["steps"]), 4
    assert {2, 3} == set(saved[0]["sizes"]) and len(saved[0]["sizes"]) > 30
    assert np.array_equal(saved[0]["applied"], saved[1]["applied"])
    missing = np.sum([each["given"] for each in saved], axis=0) - saved[0]["applied"]
    missing -= np.sum([each["residual"] for each in saved], axis=0)
    assert all(np.abs(each["residual"]).max() > 0 for each in saved)
    bound = np.sum([each["largest"] for each in saved], axis=0) + 6 * size
    assert (np.abs(missing) <= steps * 2 * (size + 4) * 2.0**-24 * bound).all()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("method", ["ddp", "feedback", "diloco"])
def test_killed_replicas_come_back(method: str) -> None:
    """Kill a replica in each phase of a step (examples/torchft_digits.py)."""
    command = [sys.executable, ROOT / "examples/torchft_digits.py", "--method", method]
    env = {**os.environ, "PYTHONPATH": launch.python_path(), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*command, "--timeout", "350"], env=env, capture_output=True, text=True, timeout=380
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    *kills, result = [json.loads(x) for x in ended.stdout.splitlines() if x.startswith("{")]
    phases = ["forward", "backward", "allreduce", "commit", "optimizer"]
    assert [kill["killed in"] for kill in kills] == phases
    assert result["identical"] and result["last"] < result["first"] / 4, result
