"""Outer loops with changing members: one is killed in a synchronization, another joins later.

torch/test_hooks.py tests the values (tests/ranks/torch_hooks/diloco.py).
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from support import launch

dist: Any = torch.distributed  # its annotations refer to torch internals
PROGRAM = Path(__file__).parents[1] / "ranks" / "run_torch_diloco_members.py"
STEPS, DIES_AT = 40, 8


@contextlib.contextmanager
def member(port: int, folder: Path, name: str, *more: int) -> Iterator[Any]:
    """Start a member, and kill it at the end."""
    log = folder / name
    environment = {"CGX_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": launch.python_path(), "COMMUNICATOR_TYPE": "TCP"}
    # Otherwise a new member waits for an address that the others exchanged earlier.
    environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", PROGRAM, str(port), str(STEPS), *map(str, more)],
            stdout=out, stderr=subprocess.STDOUT, env=os.environ | environment,
        )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def ended(process: Any, log: Path, deadline: float) -> dict[str, Any]:
    """Return a member's report before the deadline."""
    try:
        status = process.wait(max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # makes it print its stack
        status = f"none in time; killed: {process.wait()}"
    text = log.read_text()
    assert status == 0, f"{log.name} ended with status {status}:\n{text[-4000:]}"
    return json.loads(next(line for line in text.splitlines() if line.startswith("{")))


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_members_come_and_go(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    deadline = time.monotonic() + 120
    with (
        member(store.port, tmp_path, "first") as first,
        member(store.port, tmp_path, "second") as second,
        member(store.port, tmp_path, "victim", DIES_AT) as victim,
    ):
        assert victim.wait(deadline - time.monotonic()) == -9
        with member(store.port, tmp_path, "newcomer") as newcomer:
            left = [
                ended(p, tmp_path / n, deadline) for p, n in ((first, "first"), (second, "second"))
            ]
            joined = ended(newcomer, tmp_path / "newcomer", deadline)
    for each in left:
        assert len(each["failures"]) == 1, each
        assert "fragment 0 was not applied" in each["failures"][0], each
        # Three, then the two survivors, then the new member too, unless it joins immediately.
        assert (each["sizes"][0], each["sizes"][-1]) == (3, 3), each
        assert each["begun_at"] == 0
    assert joined["sizes"][-1] == 3, joined
    assert not joined["failures"], joined
    assert joined["begun_at"] >= DIES_AT
    # it starts from the others' parameters
    assert joined["first"] < 0.9 * left[0]["first"], (joined, left)
    for each in (*left, joined):
        assert each["equal"] == [True] * 3
        assert each["applied"] == left[0]["applied"]
        assert each["learnt"] < 0.5 * left[0]["first"], each
