"""Processes that disagree, are late, fail or end: what the others are told, and how soon.

The cases are in ranks/run_jax_faults.py. Each surviving process gets an error that names the call,
within its own deadline, computes on afterwards, and ends with status 0.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from launch import mpirun, processes

from cgx_ops.address import free_address

pytestmark = pytest.mark.timeout(120)

PROGRAM = "run_jax_faults.py"


def environment(devices: int, timeout_s: int) -> dict[str, str]:
    return {
        "PYTHONPATH": str(Path(__file__).parent),
        "OMP_NUM_THREADS": "1",
        "CGX_TIMEOUT": str(timeout_s),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }


def by_mpirun(*case: object, env: dict[str, str], check: bool = True) -> list[str]:
    # Without ULFM, mpirun ends all when one is killed.
    ulfm = ("--with-ft", "ulfm")
    return mpirun(2, PROGRAM, *case, env=env, timeout=100, mpirun_args=ulfm, check=check)


def by_arguments(*case: object, env: dict[str, str], check: bool = True) -> list[str]:
    env = {**env, "COORDINATOR": "{}:{}".format(*free_address([""]))}
    return processes(2, PROGRAM, *case, env=env, timeout=100, check=check)


exhaustive = pytest.mark.exhaustive
by_devices = pytest.mark.parametrize("devices", [pytest.param(1, marks=exhaustive), 2])


def check_all(outputs: list[str]) -> None:
    for output in outputs:
        assert "ok" in output.splitlines(), (
            output
        )  # JAX may report a failed launch once more at exit


@by_devices
@pytest.mark.parametrize("case", ["other_bits_under_one_name", "other_programs_with_one_name"])
def test_processes_that_disagree(case: str, devices: int) -> None:
    check_all(by_mpirun(case, env=environment(devices, 60)))


@by_devices
@pytest.mark.parametrize(
    "case",
    [
        ("other_programs",),
        pytest.param(("never_calls", 0), marks=exhaustive),
        ("never_calls", 1),
        ("a_device_fails",),
    ],
    ids=lambda case: "_".join(map(str, case)),
)
def test_processes_that_do_not_come(case: tuple[object, ...], devices: int) -> None:
    check_all(by_mpirun(*case, env=environment(devices, 3)))


@by_devices
@pytest.mark.parametrize(
    ("launch", "victim"),
    [(by_mpirun, 0), pytest.param(by_mpirun, 1, marks=exhaustive), (by_arguments, 0),
     pytest.param(by_arguments, 1, marks=exhaustive)],
)  # fmt: skip
@pytest.mark.parametrize(
    "how",
    [
        "raises",
        pytest.param("exits", marks=exhaustive),
        pytest.param("exits_at_once", marks=exhaustive),
        "is_killed",
    ],
)
def test_processes_that_end(
    how: str, launch: Callable[..., list[str]], victim: int, devices: int
) -> None:
    """The deadline is long: only the news of the end comes in time."""
    outputs = launch(how, victim, env=environment(devices, 60), check=False)
    check_all([outputs[1 - victim]])
    assert "ok" not in outputs[victim].splitlines()


def launches(n: int) -> list[object]:
    return [pytest.param(i, marks=[exhaustive] if i >= n else []) for i in range(50)]


@pytest.mark.parametrize("launch", launches(2))
def test_the_end(launch: int) -> None:
    """Status 0, fifty times: no crash while JAX, MPI and cgx end, after success or failure."""
    case = "other_bits_under_one_name" if launch % 2 else "check_together"
    check_all(by_mpirun(case, env=environment(1 + launch // 2 % 2, 60)))
