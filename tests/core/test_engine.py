"""The engine under stress and with failures: order, mismatches, deadlines, lost ranks, forks."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import launch

from cgx_ops import (
    Closed,
    Communicator,
    Config,
    DeadlineExceeded,
    InvalidArgument,
    MismatchError,
    PeerFailed,
)

TRANSPORTS = ("SHM", "MPI", "TCP")
ONES = np.ones(1000, np.float32)


@pytest.fixture
def shared_memory_cleared() -> Iterator[None]:
    """Check that the test's files in /dev/shm, including Open MPI's, disappear soon afterwards.

    Files that other jobs have created by then are ignored.
    """
    before = set(os.listdir("/dev/shm"))
    yield
    left = set(os.listdir("/dev/shm")) - before
    deadline = time.monotonic() + 60
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left &= set(os.listdir("/dev/shm"))
    assert not left


@pytest.mark.usefixtures("shared_memory_cleared")
@pytest.mark.parametrize("count", [3000, pytest.param(10_000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_any_order(transport: str, count: int) -> None:
    environment = {"COMMUNICATOR_TYPE": transport, "CGX_SOCKET_IFNAME": "lo"}
    outputs = launch.mpirun(4, "run_order.py", count, env=environment, timeout=240)
    assert all(f"all right {transport.lower()} {count}" in output for output in outputs)


def failure(how: str, transport: str, *mpirun_args: str) -> list[str]:
    """Fail the last of 4 ranks; return the output of each."""
    return launch.mpirun(
        4,
        "run_failure.py",
        how,
        4,
        env={"COMMUNICATOR_TYPE": transport, "CGX_SOCKET_IFNAME": "lo"},
        mpirun_args=mpirun_args,
        timeout=90,
        check=False,
    )


@pytest.mark.usefixtures("shared_memory_cleared")
@pytest.mark.parametrize(
    ("how", "transport"),
    [
        ("kill", "SHM"),
        pytest.param("kill", "MPI", marks=pytest.mark.slow),  # daily: under plain mpirun, below
        ("kill", "TCP"),
        pytest.param("absent", "SHM", marks=pytest.mark.exhaustive),  # as in run_torch_backend.py
        pytest.param("absent", "MPI", marks=pytest.mark.slow),
    ],
)
def test_lost_rank(how: str, transport: str) -> None:
    """Check that every other rank raises in time and names the rank and the collective."""
    outputs = failure(how, transport, "--with-ft", "ulfm")
    launch.check_survivors(outputs[:3], how)


def test_killed_rank_under_plain_mpirun() -> None:
    """Check that without fault tolerance mpirun ends the job: no rank hangs."""
    begin = time.monotonic()
    failure("kill", "SHM")
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_fork(transport: str) -> None:
    environment = {"COMMUNICATOR_TYPE": transport, "CGX_SOCKET_IFNAME": "lo"}
    outputs = launch.mpirun(2, "run_fork.py", env=environment, timeout=60)
    assert all("undisturbed" in output for output in outputs)


def test_two_jobs_side_by_side() -> None:
    """Check that two jobs of one user on one host share nothing."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor() as pool:
        jobs = [
            pool.submit(
                launch.mpirun, 2, "run_order.py", 1000, env={"COMMUNICATOR_TYPE": "SHM"}, timeout=90
            )
            for _ in range(2)
        ]
        for job in jobs:
            assert all("all right" in output for output in job.result())


def test_world_of_one_needs_no_mpirun() -> None:
    """Check that the result is the input, and MPI is not initialized."""
    program = (
        "import numpy as np, cgx_ops\n"
        "x = np.arange(5, dtype=np.float32)\n"
        "y = cgx_ops.allreduce(x, config=cgx_ops.Config(bits=1))\n"
        "assert (x == y).all() and cgx_ops.size() == 1\n"
        "from mpi4py import rc\n"
        "rc.initialize = False\n"
        "from mpi4py import MPI\n"
        "assert not MPI.Is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    ("hosts", "transport"), [("a,a,a", "shm"), ("a,b,c", "tcp"), ("a,a,b", "hybrid_tcp")]
)
def test_ranks_connected_by_a_store_need_no_mpi(tmp_path: Path, hosts: str, transport: str) -> None:
    environment = {"CGX_TEST_HOSTS": hosts, "CGX_SOCKET_IFNAME": "lo"}
    outputs = launch.processes(3, "run_bootstrap.py", tmp_path, transport, env=environment)
    assert all("no MPI needed" in output for output in outputs), outputs


MISMATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"array": np.ones(1001, np.float32)}, "numel 1000 against 1001"),
    "dtype": ({"array": np.ones(1000, np.float16)}, "dtype float32 against float16"),
    "bits": ({"config": Config(bits=8)}, "bits 4 against 8"),
    "bucket_size": ({"config": Config(bucket_size=64)}, "bucket_size 512 against 64"),
    "rounding": ({"config": Config(rounding="nearest")}, "rounding stochastic against nearest"),
    "op": ({"op": "avg"}, "op sum against avg"),
    "algorithm": ({"config": Config(algorithm="ring")}, "algorithm one_shot against ring"),
    "gather_bits": ({"config": Config(gather_bits=8)}, "gather_bits None against 8"),
    "minimal_size": ({"config": Config(minimal_size=50)}, "minimal_size 0 against 50"),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_mismatch_is_one_error_on_every_rank(what: str) -> None:
    other, text = MISMATCHES[what]

    def run(rank: int, comm: Communicator) -> str:
        arguments: dict[str, Any] = {"array": ONES, "config": Config()} | (
            other if rank == 2 else {}
        )
        with pytest.raises(MismatchError) as caught:
            comm.allreduce(**arguments)
        # The communicator is still usable: the next call works.
        assert (comm.allreduce(ONES, config=Config()) == 3).all()
        return str(caught.value)

    errors = launch.threads(3, run)
    assert len(set(errors)) == 1 and text in errors[0] and "rank" in errors[0], errors


def test_collectives_with_different_names_never_match() -> None:
    """Check that each rank waits for its own collective, and the error names the peer's."""

    def run(rank: int, comm: Communicator) -> str:
        with pytest.raises((DeadlineExceeded, PeerFailed)) as caught:
            comm.allreduce(ONES, name=f"layer {rank}", timeout=0.5)
        return str(caught.value)

    errors = launch.threads(2, run)
    assert any("has started 'layer" in error for error in errors), errors


def test_closed_communicator_raises() -> None:
    comm = Communicator.local(1)[0]
    comm.close()
    with pytest.raises(Closed):
        comm.allreduce(ONES)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_split_and_group(transport: str) -> None:
    outputs = launch.mpirun(4, "run_groups.py", env={"COMMUNICATOR_TYPE": transport}, timeout=90)
    assert all("groups are right" in output for output in outputs)


def test_bad_arguments_leave_the_communicator_usable() -> None:
    def run(rank: int, comm: Communicator) -> None:
        del rank
        bad_arguments: tuple[dict[str, Any], ...] = (
            {"op": "mean"},
            {"op": "min", "config": Config(bits=4)},
            {"timeout": -1},
            {"out": np.empty(3, np.float32)},
        )
        for bad in bad_arguments:
            with pytest.raises((InvalidArgument, TypeError, ValueError)):
                comm.allreduce(ONES, **bad)
        for array in (np.ones(3, np.int32), np.ones(3, np.complex64), np.ones(3, np.float64)):
            with pytest.raises(TypeError, match="float32"):
                comm.allreduce(array)
        assert (comm.allreduce(ONES[::2]) == 2).all()

    launch.threads(2, run)


def test_noncontiguous_arrays_and_out() -> None:
    """Check that noncontiguous arrays are copied, and results are written to `out`."""

    def run(rank: int, comm: Communicator) -> list[float]:
        x = np.arange(12, dtype=np.float32).reshape(3, 4) * (rank + 1)
        result = comm.allreduce(x.T)
        assert result.shape == (4, 3) and (result == 3 * np.arange(12).reshape(3, 4).T).all()
        comm.allreduce(x, out=x)
        return x.ravel().tolist()

    results = launch.threads(2, run)
    assert json.dumps(results[0]) == json.dumps(results[1])
    assert results[0] == (3.0 * np.arange(12)).tolist()


def test_rank_program_folder() -> None:
    """Check that every program in tests/ranks/ is used by a test or by CI."""
    here = Path(__file__).parents[1]
    users = *here.glob("*/test_*.py"), *here.glob("soak/*.py"), *here.parent.glob(".ci/*")
    tests = "".join(path.read_text() for path in users)
    for program in (here / "ranks").glob("run_*.py"):
        assert program.name in tests, program


def test_threads_split() -> None:
    """Check that ranks that are threads share a registry, with equal names on all ranks."""

    def run(rank: int, comm: Communicator) -> tuple[int, float]:
        half = comm.split(rank % 2, name="half")
        assert half is not None
        pair = comm.group([0, 3], name="ends") if rank in (0, 3) else None
        total = float(half.allreduce(np.array([rank], np.float32))[0])
        if pair is not None:
            assert float(pair.allreduce(np.array([rank], np.float32))[0]) == 3
            pair.close()
        half.close()
        return half.rank, total

    assert launch.threads(4, run) == [(0, 2.0), (0, 4.0), (1, 2.0), (1, 4.0)]
