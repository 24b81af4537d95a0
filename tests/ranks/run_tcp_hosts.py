"""A rank on its own host that reaches the others through a folder only: no mpirun, no MPI.

    run_tcp_hosts.py CASE RANK SIZE FOLDER

CASE: `sums` runs the oracle's cases; in `kill` the last rank kills itself; in `link` this rank
signals when its host may be disconnected; in `blink` the link comes back in time; in `stranger`
the last rank connects after an unauthenticated peer. Prints one line of JSON at the end.
"""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mpi4py
import numpy as np
from run_hosts import CASES
from support import collective_cases
from support.file_store import allgather_by_files

from cgx_ops import CgxError, Communicator, Config

mpi4py.rc.initialize = False
from mpi4py import MPI  # noqa: E402

CASE, RANK, SIZE = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
# Deadline of collectives: upper bound for detecting a lost host. An unauthenticated peer takes
# longer.
TIMEOUT = {"stranger": 60.0, "blink": 20.0}.get(CASE, 4.0)
FOLDER = Path(sys.argv[4])
LAST = SIZE - 1


def wait_for(name: str) -> None:
    deadline = time.monotonic() + 30
    while not (FOLDER / name).exists():
        assert time.monotonic() < deadline, f"no rank created {name}"
        time.sleep(0.01)


def bootstrap() -> Callable[[bytes], list[bytes]]:
    """Return the allgather; for `stranger` the last rank pauses while the others listen."""
    allgather = allgather_by_files(FOLDER, RANK, SIZE)
    calls = 0

    def paused(blob: bytes) -> list[bytes]:
        nonlocal calls
        blobs = allgather(blob)
        calls += 1
        if calls == 2:  # 1: greetings; 2: addresses
            (FOLDER / "listening").touch()
            wait_for("knocked")
        return blobs

    return paused if CASE == "stranger" and RANK == LAST else allgather


def lose(comm: Communicator) -> dict[str, object]:
    """Reduce until a call fails; return that call's duration and error."""
    if RANK == LAST and CASE == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    x = np.ones(1 << 20, np.float32)
    (FOLDER / f"reducing {RANK}").touch()
    end = time.monotonic() + 30
    while time.monotonic() < end:
        begin = time.monotonic()
        try:
            comm.allreduce(x, config=Config(bits=4))
        except CgxError as error:
            seconds = time.monotonic() - begin
            return {"error": type(error).__name__, "text": str(error), "seconds": seconds}
    return {"error": ""}


def blink(comm: Communicator) -> dict[str, object]:
    """Reduce until the link has been away and back; return the longest duration of a call."""
    x = np.random.default_rng(RANK).standard_normal(1 << 20, np.float32)
    first = comm.allreduce(x, config=Config(bits=4), seed=1)
    (FOLDER / f"reducing {RANK}").touch()
    longest, back = 0.0, np.zeros(1, np.float32)
    while not back[0]:
        begin = time.monotonic()
        again = comm.allreduce(x, config=Config(bits=4), seed=1)
        assert again.tobytes() == first.tobytes()
        is_back = np.full(1, (FOLDER / "back").exists(), np.float32)
        back = comm.allreduce(is_back, "min", config=Config(bits=32))
        longest = max(longest, time.monotonic() - begin)  # of both calls: either may be in flight
    return {"seconds": longest}


def main() -> None:
    transport = "TCP" if CASE == "stranger" else None
    comm = Communicator.create(
        RANK, SIZE, bootstrap(), "hosts", transport=transport, timeout=TIMEOUT
    )
    digests = [collective_cases.run(case, comm) for case in CASES]
    said = {
        "host": socket.gethostname(),
        "transport": comm.transport,
        "digests": digests,
        "rejected_connections": comm.stats().rejected_connections,
        **(lose(comm) if CASE in ("kill", "link") else blink(comm) if CASE == "blink" else {}),
    }
    assert not MPI.Is_initialized()
    comm.close()
    print(json.dumps(said))


main()
