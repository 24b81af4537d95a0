"""The torch.distributed backend "cgx": under mpirun, torchrun, and plain processes without MPI."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from support import launch
from support import torch_cases as tc

RANKS = Path(__file__).parents[1] / "ranks"
# Their own environment: nothing of a launcher of these tests.
PLAIN = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("OMPI_", "PMIX_", "CGX_", "MASTER_", "TORCHELASTIC_"))
    and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "COMMUNICATOR_TYPE")
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def processes(n: int, program: str, *args: str, timeout: float = 90) -> list[str]:
    """Run a program on n ranks as multiprocessing would: torch's variables, and no launcher."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(n)}
    common["PYTHONPATH"] = launch.python_path()
    started = [
        subprocess.Popen(
            [sys.executable, str(RANKS / program), *args],
            env={**PLAIN, **tc.ENVIRONMENT, **common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(n)
    ]
    deadline = time.monotonic() + timeout
    try:
        outputs = [
            process.communicate(timeout=max(1, deadline - time.monotonic()))[0]
            for process in started
        ]
    finally:
        for process in started:
            process.kill()
    assert not any(process.returncode for process in started), "\n---\n".join(outputs)
    return outputs


def check(outputs: Sequence[str], transport: str) -> None:
    for rank, output in enumerate(outputs):
        assert f"rank {rank}: all checks over {transport}" in output, output


# What moves data in the core; the rest knows no transport, or is gloo's.
OVER_MPI = ["asynchronous", "coalescing", "compression", "compressors", "data_parallel", "groups"]
# What depends on how ranks find each other; the rest is the same code over the same transport.
FINDING = ["other_kinds", "collectives", "objects", "point_to_point", "compression", "groups"]
FINDING += ["sequence_numbers", "bad_input", "begin_again"]


@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
def test_every_case_under_mpirun(n: int) -> None:
    check(launch.mpirun(n, "run_torch_backend.py", env=tc.ENVIRONMENT), "shm")


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases", [OVER_MPI, pytest.param([], marks=pytest.mark.exhaustive)], ids=["a_few", "all"]
)
def test_cases_over_mpi(cases: list[str]) -> None:
    environment = {**tc.ENVIRONMENT, "COMMUNICATOR_TYPE": "MPI"}
    check(launch.mpirun(3, "run_torch_backend.py", *cases, env=environment), "mpi")


@pytest.mark.exhaustive
def test_debug_detail() -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the backend; it too meets no late rank."""
    cases = ["exact_allreduce", "other_kinds", "collectives", "objects", "point_to_point"]
    cases += ["coalescing", "compression", "what_is_compressed", "data_parallel", "groups"]
    cases += ["sequence_numbers", "bad_input", "begin_again"]
    environment = {**tc.ENVIRONMENT, "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    check(launch.mpirun(3, "run_torch_backend.py", *cases, env=environment), "shm")


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases", [FINDING, pytest.param([], marks=pytest.mark.exhaustive)], ids=["finding", "all"]
)
def test_torchrun(cases: list[str]) -> None:
    """Shared memory, without MPI."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "3", str(RANKS / "run_torch_backend.py"), *cases]
    done = subprocess.run(
        command,
        env={**PLAIN, **tc.ENVIRONMENT, "PYTHONPATH": launch.python_path()},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check([done.stdout] * 3, "shm")


@pytest.mark.parametrize("transport", ["SHM", "TCP"])
def test_errors_of_gloo_name_the_lost_rank(transport: str) -> None:
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env["COMMUNICATOR_TYPE"] = transport
    outputs = launch.processes(3, "run_torch_named_loss.py", env=env, check=False)
    for rank in (0, 2):
        assert outputs[rank].count(": named") == 6, outputs[rank]


def test_lost_ranks_without_mpi() -> None:
    outputs = processes(3, "run_torch_backend_loss.py")
    for rank in (0, 2):
        assert f"rank {rank}: noticed" in outputs[rank], outputs[rank]
