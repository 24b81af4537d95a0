"""Test ranks that lack a resource, or that return late to released memory; without MPI.

Arguments: the scenario (a function below); a folder that serves as the store.
"""

import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from support.file_store import allgather_by_files

from cgx_ops import Communicator, Config, DeadlineExceeded, PeerFailed, SystemFailure

what, store = sys.argv[1], Path(sys.argv[2])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ONES = np.ones(1 << 20, np.float32)


def communicator(name: str, timeout: float = 30) -> Communicator:
    folder = store / name
    folder.mkdir(exist_ok=True)
    gather = allgather_by_files(folder, rank, size)
    return Communicator.create(rank, size, gather, name, transport="SHM", timeout=timeout)


def wait_for_ranks(place: str) -> None:
    """Wait until all ranks reach this point."""
    allgather_by_files(store, rank, size, place)(b"here")


def descriptors() -> set[int]:
    return set(map(int, os.listdir("/proc/self/fd")))


@contextmanager
def limited(kind: int, limit: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@contextmanager
def no_descriptor() -> Iterator[None]:
    """Use up all descriptors below the limit."""
    limit = max(descriptors()) + 1
    with limited(resource.RLIMIT_NOFILE, limit):
        fillers = []
        while True:
            try:
                fillers.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                break
        try:
            yield
        finally:
            for filler in fillers:
                os.close(filler)


def late(algorithm: Any) -> None:
    """Check that a stalled rank 1 does not write into files that reuse its descriptors.

    Rank 0 gives up in the meantime, and opens files in place of the shared memory.
    """
    comm = communicator("late", timeout=1)
    config = Config(bits=4, algorithm=algorithm)
    if rank == 1:
        request = comm.allreduce_async(ONES, config=config, timeout=20)
        (store / "pid").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            values = request.wait()
        except PeerFailed as error:
            print("told", error)
        else:
            assert (values == 2).all(), values
            print("right values")
        return
    while not (store / "pid").exists():
        time.sleep(0.01)
    time.sleep(0.2)  # rank 1 stops a moment later
    try:
        comm.allreduce(ONES, config=config)
    except DeadlineExceeded:
        comm.close()
    files = [open(store / f"mine {i}", "w+b") for i in range(24)]  # noqa: SIM115
    for i, file in enumerate(files):
        file.write(b"\1" * (8 << 20) if i % 2 else b"short")
        file.flush()
    os.kill(int((store / "pid").read_text()), signal.SIGCONT)
    time.sleep(2)
    print("gave up", len(files))


def fails_once(comm: Communicator, shortage: AbstractContextManager[None]) -> None:
    """Check that a collective that rank 1 cannot serve fails on both ranks; the next one works."""
    config = Config(bits=4, algorithm="sra")
    wait_for_ranks("before")
    try:
        with shortage:
            comm.allreduce(ONES, config=config)
    except SystemFailure as error:
        assert "rank 1 cannot go on with collective" in str(error), error
        print("told", error)
    else:
        raise AssertionError("nothing was missing")
    wait_for_ranks("between")
    assert not comm.closed
    assert (comm.allreduce(ONES, config=config) == size).all()


@contextmanager
def on_rank_1(shortage: AbstractContextManager[None]) -> Iterator[None]:
    if rank == 1:
        with shortage:
            yield
    else:
        yield


def open_files() -> None:
    fails_once(communicator("files"), on_rank_1(no_descriptor()))


def memory() -> None:
    fails_once(communicator("memory"), on_rank_1(limited(resource.RLIMIT_FSIZE, 4096)))


def many() -> None:
    """Create 16 communicators of all ranks: one descriptor each, plus one per peer."""
    before = len(descriptors())
    made = [communicator(f"group {i}") for i in range(16)]
    for comm in made:
        assert (comm.allreduce(ONES, config=Config(bits=4)) == size).all()
    used = len(descriptors()) - before
    assert used <= len(made) + size - 1, f"{used} descriptors"
    wait_for_ranks("used")
    for comm in made:
        comm.close()
    assert len(descriptors()) == before, "descriptors are left"
    print("descriptors", used)


def names() -> None:
    """Print the memory in bytes that a call with a new name costs, once the seed cache is full."""
    warm_up, calls, ones = 30_000, 20_000, np.ones(4, np.float32)
    comms = Communicator.local(2)

    def run(first: int, last: int) -> None:
        for i in range(first, last):
            requests = [
                comm.allreduce_async(ones, config=Config(bits=32), name=f"{i} of many names")
                for comm in comms
            ]
            for request in requests:
                request.wait()

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    run(0, warm_up)
    before = resident()
    run(warm_up, warm_up + calls)
    print((resident() - before) // calls)


actions = {"open_files": open_files, "memory": memory, "many": many, "names": names}
if what in actions:
    actions[what]()
else:
    late(what)
