"""Devices and processes that mismatch, are late, fail or end: the others' errors and delays.

The checks are in ranks/run_jax_faults.py. Each surviving process gets an error that names the call
within its deadline, can compute afterwards, and exits with status 0.
"""

import itertools
from collections.abc import Callable

import pytest
from support.launch import check_ok, mpirun, processes

from cgx_ops._core.exchange import free_address

pytestmark = pytest.mark.timeout(120)

PROGRAM = "run_jax_faults.py"


def environment(devices: int, timeout_s: int) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": "1",
        "CGX_TIMEOUT": str(timeout_s),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }


def by_mpirun(*args: object, env: dict[str, str], check: bool = True) -> list[str]:
    # Without ULFM, mpirun ends all ranks when one is killed; with it, the exit status hides
    # signals.
    ulfm = ("--with-ft", "ulfm")
    return mpirun(2, PROGRAM, *args, env=env, timeout=100, mpirun_args=ulfm, check=check)


def by_plain_mpirun(*args: object, env: dict[str, str]) -> list[str]:
    return mpirun(2, PROGRAM, *args, env=env, timeout=100)


def by_arguments(*args: object, env: dict[str, str], check: bool = True) -> list[str]:
    env = {**env, "COORDINATOR": "{}:{}".format(*free_address([""]))}
    return processes(2, PROGRAM, *args, env=env, timeout=100, check=check)


def check_outputs(outputs: list[str], victim: int = -1) -> None:
    """Require that every process but the victim finished its checks."""
    for rank, output in enumerate(outputs):
        # Not always the last line: JAX may report a failed launch again at exit.
        if rank == victim:
            assert "ok all" not in output.splitlines(), output
        else:
            check_ok([output])


exhaustive = pytest.mark.exhaustive
by_devices = pytest.mark.parametrize("devices", [pytest.param(1, marks=exhaustive), 2])

# Checks that leave all processes and their communicator usable.
WHOLE = (
    "mismatched_bits",
    "mismatched_exchange",
    "one_name_in_different_programs",
    "dependent_programs",
)


@exhaustive  # covered by test_clean_exit() on two devices
def test_mismatched_processes() -> None:
    check_outputs(by_mpirun(-1, *WHOLE, env=environment(1, 60)))


@by_devices
def test_launch_failed_on_one_process(devices: int) -> None:
    check_outputs(by_mpirun(-1, "launch_failed_on_one_process", env=environment(devices, 60)))


@by_devices
@pytest.mark.parametrize(
    ("victim", "check"),
    [
        pytest.param(-1, "different_programs", marks=exhaustive),
        pytest.param(0, "never_calls", marks=exhaustive),
        (1, "never_calls"),
        pytest.param(1, "never_exchanges", marks=pytest.mark.slow),
    ],
)
def test_missing_processes(victim: int, check: str, devices: int) -> None:
    check_outputs(by_mpirun(victim, check, env=environment(devices, 5)))


def test_only_device_fails() -> None:
    check_outputs(by_mpirun(-1, "only_device_fails", env=environment(1, 60)))


def test_one_device_of_a_single_process_fails() -> None:
    env, check = environment(8, 60), "one_of_several_devices_fails"
    check_outputs(processes(1, PROGRAM, -1, check, env=env, timeout=100))


@exhaustive  # covered by test_clean_exit() under mpirun
def test_one_of_several_devices_fails() -> None:
    check_outputs(by_arguments(-1, "one_of_several_devices_fails", env=environment(2, 60)))


DAILY_ENDS = [("raises", by_mpirun, 0), ("killed", by_arguments, 0)]
DAILY_ENDS += [("killed_before_an_exchange", by_arguments, 1)]
KINDS = ("raises", "exits", "exits_immediately", "killed", "killed_before_an_exchange")


@by_devices
@pytest.mark.parametrize(
    ("how", "launch", "victim"),
    [
        pytest.param(*end, marks=[] if end in DAILY_ENDS else exhaustive)
        for end in itertools.product(KINDS, (by_mpirun, by_arguments), (0, 1))
    ],
)
def test_processes_that_end(
    how: str, launch: Callable[..., list[str]], victim: int, devices: int
) -> None:
    """Use a long deadline: the error comes in time only if the end is detected."""
    status_is_the_survivor_s = how.startswith("exits")
    outputs = launch(victim, how, env=environment(devices, 60), check=status_is_the_survivor_s)
    check_outputs(outputs, victim)


# ---- the end -------------------------------------------------------------------------------------

# Exits after success, after an error on all ranks, and after the loss of a process: launch, victim,
# checks, and the devices per process that they need.
# Not with ULFM: mpirun then exits with status 0 although all ranks crash.
ENDS: list[tuple[Callable[..., list[str]], int, tuple[str, ...], int]] = [
    (by_plain_mpirun, -1, ("check_together",), 1),
    (by_plain_mpirun, -1, (*WHOLE, "one_of_several_devices_fails"), 2),
    (by_plain_mpirun, 1, ("exits",), 1),
    (by_arguments, 0, ("exits_immediately",), 1),
]
LAUNCHES = 50


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(i, marks=() if i == 1 else pytest.mark.slow if i < len(ENDS) else exhaustive)
        for i in range(LAUNCHES)
    ],
)
def test_clean_exit(number: int) -> None:
    """Check that all processes exit with status 0, without a crash of JAX, MPI or cgx."""
    launch, victim, checks, least = ENDS[number % len(ENDS)]
    devices = max(least, 1 + (number + number // len(ENDS)) % 2)
    check_outputs(launch(victim, *checks, env=environment(devices, 60)), victim)
