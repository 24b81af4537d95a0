"""initialize(): under mpirun, under launchers that JAX detects, by arguments; twice or too late."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.launch import check_ok, mpirun, processes

import cgx_ops
from cgx_ops._core.exchange import free_address

pytestmark = pytest.mark.timeout(120)

PROGRAM = "run_jax_initialize.py"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CGX_TIMEOUT": "60",
    "XLA_FLAGS": "",
}


def by_arguments(n: int, *checks: str, **env: str) -> None:
    address = "{}:{}".format(*free_address([""]))
    own = {"COORDINATOR": address, "PROCESSES": str(n)}
    check_ok(processes(n, PROGRAM, *checks, env={**ENVIRONMENT, **own, **env}, timeout=110), checks)


def by_mpirun(n: int, *checks: str, **env: str) -> None:
    check_ok(mpirun(n, PROGRAM, *checks, env={**ENVIRONMENT, **env}, timeout=110), checks)


exhaustive = pytest.mark.exhaustive
Launch = Callable[..., None]
both = pytest.mark.parametrize("launch", [by_mpirun, by_arguments])


@pytest.mark.parametrize(
    ("launch", "devices"),
    [
        pytest.param(launch, n, marks=[] if (launch, n) == (by_arguments, 2) else exhaustive)
        for launch in (by_mpirun, by_arguments)
        for n in (1, 2, 4)
    ],
)
def test_all_devices_are_one_mesh(launch: Launch, devices: int) -> None:
    launch(2, "works", XLA_FLAGS=f"--xla_force_host_platform_device_count={devices}")


@pytest.mark.slow
def test_after_errors_and_twice() -> None:
    """Run under mpirun, with devices set by JAX's own option."""
    checks = ["rank_differs_from_mpirun", "port_in_use", "works", "twice"]
    by_mpirun(2, *checks, JAX_NUM_CPU_DEVICES="2")


@exhaustive
def test_twice_by_arguments() -> None:
    """Run the mpirun checks with JAX's own start."""
    by_arguments(2, "works", "twice")


@pytest.mark.slow
def test_after_a_missing_process() -> None:
    by_arguments(2, "missing_process", "works")


@pytest.mark.slow
def test_launcher_detected_by_jax() -> None:
    """Use SLURM's variables, by which JAX detects it. Each process adds its rank."""
    address, port = free_address([""])
    by_arguments(
        2, "detected", SLURM_JOB_ID="1", SLURM_STEP_NODELIST=address, SLURM_NTASKS="2",
        JAX_COORDINATOR_PORT=str(port),
    )  # fmt: skip


@both
def test_single_process(launch: Launch) -> None:
    launch(1, "single_process")


@pytest.mark.slow
def test_processes_that_only_xla_connects() -> None:
    """The core may use MPI only, which is not started."""
    by_arguments(2, "unreachable", COMMUNICATOR_TYPE="MPI")


@pytest.mark.parametrize(
    ("launch", "checks"),
    [
        pytest.param(
            by_mpirun, ["late_on_one_rank", "not_initialized", "works_alone"],
            marks=pytest.mark.slow,
        ),
        (by_arguments, ["invalid_port", "late_on_one_rank", "works_alone"]),
    ],
)  # fmt: skip
def test_called_too_late(launch: Launch, checks: list[str]) -> None:
    launch(2, *checks)


def test_coordinator_ignores_unauthenticated_peers() -> None:
    """Check that peers without the token are not counted and block no process."""
    program = Path(cgx_ops.__file__).parent / "jax/_src/runtime/coordinator.py"
    command = [sys.executable, "-P", str(program), "127.0.0.1", "0", "2", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as coordinator:
        assert coordinator.stdout is not None
        port, lifeline, word = coordinator.stdout.readline().split()
        for wanted in (port, lifeline):  # it listens on the loopback address only
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.2", int(wanted)))
        at = ("127.0.0.1", int(lifeline))
        silent = socket.create_connection(at)
        strangers = [socket.create_connection(at) for _ in range(3)]
        strangers[0].sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        strangers[1].sendall(b"0" * len(word))
        strangers[2].close()
        for stranger in strangers[:2]:
            stranger.settimeout(60)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""  # it was disconnected
        known = [socket.create_connection(at) for _ in range(2)]
        known[0].sendall(word[:5].encode())
        known[1].sendall(word.encode())
        known[0].sendall(word[5:].encode())
        known[0].close()
        with pytest.raises(subprocess.TimeoutExpired):
            coordinator.wait(0.5)
        known[1].close()
        assert coordinator.wait(60) == 0
        silent.close()
