"""Steps may be launched far ahead of their results, on several CPU devices of one process."""

import launch
import pytest

from cgx_ops.jax import _threads


@pytest.mark.parametrize("how", ["ours", "mixed", "twice", "jit"])
def test_a_hundred_steps(how: str) -> None:
    """XLA lets a device have 32 programs in flight."""
    (output,) = launch.processes(1, "run_jax_ahead.py", 4, 100, how)
    assert output.endswith("right\n"), output


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 8])
def test_other_numbers_of_devices(devices: int) -> None:
    (output,) = launch.processes(1, "run_jax_ahead.py", devices, 200, "ours")
    assert output.endswith("right\n"), output


@pytest.mark.parametrize(
    ("environ", "threads"),
    [
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=600"}, "1200"),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=600", "NPROC": "3"}, None),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=600", "PJRT_NPROC": "3"}, "3"),
    ],
)
def test_threads_that_are_asked_for(environ: dict[str, str], threads: str | None) -> None:
    _threads.provide(environ)
    assert environ.get("PJRT_NPROC") == threads
