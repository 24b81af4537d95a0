"""Devices and processes that disagree, are late, fail or end: what the others are told, how soon.

The cases are in ranks/run_jax_faults.py: each surviving process gets an error that names the call,
within its own deadline, computes on afterwards, and ends with status 0.
"""

import itertools
from collections.abc import Callable

import pytest
from launch import mpirun, processes

from cgx_ops.address import free_address

pytestmark = pytest.mark.timeout(120)

PROGRAM = "run_jax_faults.py"


def environment(devices: int, timeout_s: int) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": "1",
        "CGX_TIMEOUT": str(timeout_s),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }


def by_mpirun(*case: object, env: dict[str, str], check: bool = True) -> list[str]:
    # Without ULFM, mpirun ends all when one is killed; with it, its status hides signals.
    ulfm = ("--with-ft", "ulfm")
    return mpirun(2, PROGRAM, *case, env=env, timeout=100, mpirun_args=ulfm, check=check)


def by_plain_mpirun(*case: object, env: dict[str, str]) -> list[str]:
    return mpirun(2, PROGRAM, *case, env=env, timeout=100)


def by_arguments(*case: object, env: dict[str, str], check: bool = True) -> list[str]:
    env = {**env, "COORDINATOR": "{}:{}".format(*free_address([""]))}
    return processes(2, PROGRAM, *case, env=env, timeout=100, check=check)


def check_outputs(outputs: list[str], victim: int | None = None) -> None:
    """Require that every process but the victim came to the end of its case."""
    for rank, output in enumerate(outputs):
        # Not the last line: JAX may report a launch that failed once more at exit.
        assert ("ok" in output.splitlines()) == (rank != victim), output


exhaustive = pytest.mark.exhaustive
by_devices = pytest.mark.parametrize("devices", [pytest.param(1, marks=exhaustive), 2])


@by_devices
@pytest.mark.parametrize(
    "case",
    [
        pytest.param("other_bits_under_one_name", marks=exhaustive),  # test_the_end() has it
        "other_programs_with_one_name",
    ],
)
def test_processes_that_disagree(case: str, devices: int) -> None:
    check_outputs(by_mpirun(case, env=environment(devices, 60)))


@by_devices
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(("other_programs",), marks=exhaustive),
        pytest.param(("never_calls", 0), marks=exhaustive),
        ("never_calls", 1),
    ],
    ids=lambda case: "_".join(map(str, case)),
)
def test_processes_that_do_not_come(case: tuple[object, ...], devices: int) -> None:
    check_outputs(by_mpirun(*case, env=environment(devices, 5)))


def test_the_device_of_a_process() -> None:
    check_outputs(by_mpirun("a_device_fails", env=environment(1, 60)))


def test_a_device_of_one_process() -> None:
    env = environment(8, 60)
    check_outputs(processes(1, PROGRAM, "one_of_several_devices_fails", env=env, timeout=100))


@pytest.mark.parametrize("launch", [by_mpirun, pytest.param(by_arguments, marks=exhaustive)])
def test_a_device_of_several_in_a_process(launch: Callable[..., list[str]]) -> None:
    check_outputs(launch("one_of_several_devices_fails", env=environment(2, 60)))


DAILY_ENDS = [("raises", by_mpirun, 0), ("is_killed", by_arguments, 0)]


@by_devices
@pytest.mark.parametrize(
    ("how", "launch", "victim"),
    [
        pytest.param(*end, marks=[] if end in DAILY_ENDS else exhaustive)
        for end in itertools.product(
            ("raises", "exits", "exits_at_once", "is_killed"), (by_mpirun, by_arguments), (0, 1)
        )
    ],
)
def test_processes_that_end(
    how: str, launch: Callable[..., list[str]], victim: int, devices: int
) -> None:
    """The deadline is long: only the news of the end comes in time."""
    status_is_the_survivor_s = how.startswith("exits")
    outputs = launch(how, victim, env=environment(devices, 60), check=status_is_the_survivor_s)
    check_outputs(outputs, victim)


# ---- the end -----------------------------------------------------------------------------------

# After success, after an error of all, after the loss of a process: (launch, case, victim).
# Not with ULFM: mpirun then ends with status 0 though all ranks crash.
ENDS: list[tuple[Callable[..., list[str]], str, int | None]] = [
    (by_plain_mpirun, "check_together", None),
    (by_plain_mpirun, "other_bits_under_one_name", None),
    (by_plain_mpirun, "exits", 1),
    (by_arguments, "exits_at_once", 0),
]
LAUNCHES = 50


@pytest.mark.parametrize(
    "number", [pytest.param(i, marks=() if i < len(ENDS) else exhaustive) for i in range(LAUNCHES)]
)
def test_the_end(number: int) -> None:
    """Status 0 of all, every time: nothing crashes while JAX, MPI and cgx end."""
    launch, case, victim = ENDS[number % len(ENDS)]
    devices = 1 + (number + number // len(ENDS)) % 2
    args = (case,) if victim is None else (case, victim)
    check_outputs(launch(*args, env=environment(devices, 60)), victim)
