"""Rank program: survivors of a lost process make another communicator.

    RANK=... WORLD_SIZE=5 run_elastic.py FOLDER TRANSPORT

Processes create a communicator through files in FOLDER, without a launcher. Then ranks are killed
one after another, each in another phase of its collectives. After each loss the survivors abort,
connect again and compare all their results with those of a group that never had other ranks.
"""

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from support.file_store import allgather_by_files

from cgx_ops import CgxError, Communicator, Config, MismatchError, Unsupported
from cgx_ops._core import library
from cgx_ops._core.consistency import Gather

FOLDER, TRANSPORT = Path(sys.argv[1]), sys.argv[2]
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CONFIG = Config(bits=4, rounding="stochastic", bucket_size=64)
LARGE = 3_000_000  # values, so that a process is killed while it sends them
TIMEOUT, SOON = 30.0, 10.0  # seconds: of collectives; an immediate error, on a busy machine


def connect(members: Sequence[int], name: str, transport: str = TRANSPORT) -> Communicator:
    gather = allgather_by_files(FOLDER, members.index(RANK), len(members), name)
    return Communicator.create(
        members.index(RANK), len(members), gather, "group", transport=transport, timeout=TIMEOUT,
        elastic=True,
    )  # fmt: skip


def results(communicator: Communicator) -> list[np.ndarray]:
    """Return the results of calls, which depend only on the rank and the number of ranks."""
    random = np.random.default_rng(communicator.rank)
    return [
        communicator.allreduce(random.standard_normal(numel, np.float32), config=CONFIG, seed=5)
        for numel in (0, 1, 17, 511, 512, 513, 70_001)
    ]


def reduce_until_error(communicator: Communicator) -> CgxError:
    values = np.ones(LARGE, np.float32)
    begin = time.monotonic()
    try:
        for number in itertools.count():
            communicator.allreduce(values, config=CONFIG, name=f"call {number}")
            begin = time.monotonic()
    except CgxError as error:
        assert time.monotonic() - begin < SOON, time.monotonic() - begin
        return error
    raise AssertionError


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_between_calls(communicator: Communicator) -> None:
    communicator.allreduce(np.ones(LARGE, np.float32), config=CONFIG, name="call 0")
    die()


def die_while_sending(communicator: Communicator) -> None:
    signal.signal(signal.SIGALRM, die)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    reduce_until_error(communicator)


def die_in_the_background(communicator: Communicator) -> None:
    requests = [
        communicator.allreduce_async(np.ones(LARGE, np.float32), config=CONFIG, name=f"call {i}")
        for i in range(3)
    ]
    requests[0].wait()
    die()


DEATHS: tuple[Callable[[Communicator], None], ...] = (
    die_between_calls,
    die_while_sending,
    die_in_the_background,
)


def as_version(version: str, gather: Gather, rank: int) -> Gather:
    """Return an allgather through which this process and its peers differ in their version."""
    own, other = (text.encode().ljust(32, b"\0") for text in (library.version(), version))

    def exchange(mine: bytes) -> Sequence[bytes]:
        if not mine.startswith(own):  # not a first message
            return gather(mine)
        blobs = gather(mine.replace(own, other, 1))
        # A process of that version would find its own in its own blob only.
        return [mine if i == rank else blob.replace(own, other, 1) for i, blob in enumerate(blobs)]

    return exchange


def refuses_another_version(members: Sequence[int]) -> None:
    """Let the last member have another version: all raise, and can connect without it."""
    rank, size, last = members.index(RANK), len(members), members[-1]
    gather = allgather_by_files(FOLDER, rank, size, "another version")
    if last == RANK:
        gather = as_version("99.1", gather, rank)
    other = 0 if last == RANK else size - 1
    try:
        Communicator.create(rank, size, gather, "group", transport=TRANSPORT, elastic=True)
        raise AssertionError("no error")
    except MismatchError as error:
        assert f"this rank runs cgx {library.version()}, rank {other} cgx 99.1" in str(error), error
    if last != RANK:
        connect(members[:-1], "without it").close()


def main() -> None:
    members = list(range(SIZE))
    fresh = {}
    for size in range(2, SIZE + 1):  # of groups without losses
        if size > RANK:
            communicator = connect(members[:size], f"fresh {size}")
            fresh[communicator.size] = results(communicator)
            communicator.close()
    communicator = connect(members, "first")
    for turn, death in enumerate(DEATHS):
        victim = members[turn % len(members)]  # the lowest rank first
        if victim == RANK:
            death(communicator)
            raise AssertionError("alive")
        error = reduce_until_error(communicator)
        assert f"rank {members.index(victim)}" in str(error), error
        communicator.abort(f"rank {members.index(victim)} is lost")
        assert communicator.closed
        members.remove(victim)
        communicator = connect(members, f"after {turn}")
        # A group of the same size that is made again, with the same ranks.
        expected = results(communicator)
        communicator.abort("for another one of the same size")
        communicator = connect(members, f"again {turn}")
        for given, wanted in zip(results(communicator), expected, strict=True):
            assert given.tobytes() == wanted.tobytes()
        np.save(FOLDER / f"{len(members)} {communicator.rank}.npy", np.concatenate(expected))
        if communicator.rank == RANK:  # it had this rank in the fresh group, too
            wanted = np.concatenate(fresh[len(members)])
            assert np.concatenate(expected).tobytes() == wanted.tobytes()
        print(f"{death.__name__}: ok", flush=True)
    communicator.close()
    refuses_another_version(members)
    try:
        connect(members, "by MPI", "MPI")
        raise AssertionError("no error")
    except Unsupported as error:
        assert "ULFM" in str(error), error
    print("OK", flush=True)


if __name__ == "__main__":
    main()
