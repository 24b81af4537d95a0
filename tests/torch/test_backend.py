"""The torch.distributed backend "cgx": under mpirun, torchrun, and plain processes without MPI."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import launch
from support import torch_cases as tc
from support.rank_checks import Launch, RankCheck, rank_checks

RANKS = Path(__file__).parents[1] / "ranks"
# An environment without the variables of any launcher.
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
    """Run a program on n ranks, with torch's variables and without a launcher."""
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


PROGRAM = "run_torch_backend.py"
# Checks of data transfer in the core; the others do not depend on the transport, or use gloo.
OVER_MPI = ["asynchronous", "coalescing", "compression", "compressors", "data_parallel", "groups"]
# Checks that depend on the rendezvous; the others run the same code over the same transport.
FINDING = ["delegated_to_gloo", "collectives", "objects", "point_to_point", "compression", "groups"]
FINDING += ["sequence_numbers", "bad_input", "recreated_groups"]
WRAPPED = ["exact_allreduce", "delegated_to_gloo", "collectives", "objects", "point_to_point"]
WRAPPED += ["coalescing", "compression", "compressed_operations", "data_parallel", "groups"]
WRAPPED += ["sequence_numbers", "bad_input", "recreated_groups"]

slow, exhaustive = [pytest.mark.slow], [pytest.mark.exhaustive]
SHM = {**tc.ENVIRONMENT, "EXPECTED_TRANSPORT": "shm"}
MPI = {**tc.ENVIRONMENT, "COMMUNICATOR_TYPE": "MPI", "EXPECTED_TRANSPORT": "mpi"}


@rank_checks(Launch(4, PROGRAM, env=SHM), Launch(2, PROGRAM, env=SHM, marks=exhaustive))
def test_all_checks_under_mpirun(check: RankCheck) -> None:
    check.passes()


@rank_checks(
    Launch(3, PROGRAM, *OVER_MPI, env=MPI, marks=slow),
    Launch(3, PROGRAM, env=MPI, marks=exhaustive),
)
def test_checks_over_mpi(check: RankCheck) -> None:
    check.passes()


@rank_checks(
    Launch(3, PROGRAM, *WRAPPED, env={**SHM, "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, marks=exhaustive)
)
def test_debug_detail(check: RankCheck) -> None:
    """Check the backend wrapped by TORCH_DISTRIBUTED_DEBUG=DETAIL, without late ranks."""
    check.passes()


@rank_checks(
    Launch(3, PROGRAM, *FINDING, by=launch.torchrun, env=SHM, marks=slow),
    Launch(3, PROGRAM, by=launch.torchrun, env=SHM, marks=exhaustive),
)
def test_torchrun(check: RankCheck) -> None:
    """Use shared memory, without MPI."""
    check.passes()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["SHM", "TCP"])
def test_gloo_errors_name_the_lost_rank(transport: str) -> None:
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env["COMMUNICATOR_TYPE"] = transport
    outputs = launch.processes(3, "run_torch_named_loss.py", env=env, check=False)
    for rank in (0, 2):
        assert outputs[rank].count(": named") == 6, outputs[rank]


def test_lost_ranks_without_mpi() -> None:
    outputs = processes(3, "run_torch_backend_loss.py")
    for rank in (0, 2):
        assert f"rank {rank}: noticed" in outputs[rank], outputs[rank]
