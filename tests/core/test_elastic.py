"""Communicators that survivors of a lost process make, and aborted communicators."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from support import launch

from cgx_ops import Closed, Communicator, PeerFailed

REASON = "it is rebuilt without rank 2"


@pytest.mark.parametrize("transport", ["SHM", "TCP", "AUTO"])
@pytest.mark.timeout(120)
def test_survivors_connect_again(tmp_path: Path, transport: str) -> None:
    outputs = launch.processes(
        5, "run_elastic.py", tmp_path, transport, timeout=100, check=False,
        env={"CGX_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    assert [output.rstrip().endswith("OK") for output in outputs].count(True) == 2, outputs
    for size in (4, 3, 2):
        saved = [np.load(tmp_path / f"{size} {rank}.npy") for rank in range(size)]
        for each in saved[1:]:
            assert each.tobytes() == saved[0].tobytes(), "ranks differ"


def test_an_abort_ends_collectives_of_peers_with_its_reason() -> None:
    first, second, third = Communicator.local(3, timeout=60)
    waiting = [
        first.allreduce_async(np.ones(100, np.float32)),
        second.allreduce_async(np.ones(100, np.float32)),
    ]
    third.abort(REASON)
    for request in waiting:
        with pytest.raises(PeerFailed, match=f"rank 2 gave up: {REASON}"):
            request.wait()
    for each in (first, second):
        assert each.closed
        each.close()


def test_an_abort_ends_own_collectives() -> None:
    first, second = Communicator.local(2, timeout=60)
    request = first.allreduce_async(np.ones(100, np.float32))
    first.abort(REASON)
    with pytest.raises(Closed, match=REASON):
        request.wait()
    with pytest.raises(Closed):
        first.allreduce(np.ones(100, np.float32))
    second.close()


def test_an_abort_ends_a_call_of_another_thread() -> None:
    first, second = Communicator.local(2, timeout=60)
    seen = []

    def reduce() -> None:
        with pytest.raises(Closed, match=REASON):
            first.allreduce(np.ones(100, np.float32))
        seen.append(True)

    thread = threading.Thread(target=reduce)
    thread.start()
    while second.bytes_sent == 0 and first.bytes_sent == 0:  # its header
        pass
    first.abort(REASON)
    thread.join(20)
    assert seen
    second.abort("over")


def test_aborting_twice_or_after_a_close_does_nothing() -> None:
    first, second = Communicator.local(2)
    first.abort(REASON)
    first.abort(REASON)
    second.close()
    second.abort(REASON)


def test_results_reach_peers_before_an_abort() -> None:
    first, second = Communicator.local(2)
    values = [np.full(100_000, 3, np.float32), np.full(100_000, 4, np.float32)]
    requests = [c.allreduce_async(v) for c, v in zip((first, second), values, strict=True)]
    requests[0].wait()
    first.abort(REASON)
    np.testing.assert_array_equal(requests[1].wait(), np.full(100_000, 7, np.float32))
    second.close()
