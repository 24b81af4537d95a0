"""Steps can be launched far ahead of their results, on several CPU devices of one process."""

import os
import subprocess
import sys
import warnings

import pytest
from support import launch

from cgx_ops.jax._src.runtime import compat
from cgx_ops.jax._src.runtime import threads as _threads


@pytest.mark.parametrize(
    "how", ["ours", "mixed", *(pytest.param(x, marks=pytest.mark.slow) for x in ("twice", "jit"))]
)
def test_a_hundred_steps(how: str) -> None:
    """Launch more than 32 programs, XLA's limit of programs in flight per device."""
    (output,) = launch.processes(1, "run_jax_ahead.py", 4, 100, how)
    assert output.splitlines().count("right") == 1, output


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 8])
def test_other_numbers_of_devices(devices: int) -> None:
    (output,) = launch.processes(1, "run_jax_ahead.py", devices, 200, "ours")
    assert output.splitlines().count("right") == 1, output


@pytest.mark.parametrize(
    ("environ", "threads"),
    [
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=600"}, "1200"),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=600", "NPROC": "3"}, None),
        (
            {
                "XLA_FLAGS": "--xla_force_host_platform_device_count=600",
                "PJRT_NPROC": "4",
                "_CGX_PJRT_NPROC": "4",
            },
            "1200",
        ),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=600", "PJRT_NPROC": "3"}, "3"),
    ],
)
def test_thread_counts(
    environ: dict[str, str], threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a user's thread count is kept, but not one set by a parent's cgx_ops."""
    monkeypatch.setattr(compat, "backends_started", lambda: False)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        _threads.provide(environ)
    assert environ.get("PJRT_NPROC") == threads
    few = [str(w.message) for w in warned if "Set PJRT_NPROC to 1200" in str(w.message)]
    assert len(few) == (threads != "1200"), warned


DEVICES = 2 * len(os.sched_getaffinity(0))  # more than half as many as XLA has threads


def run(program: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    environ = {name: x for name, x in os.environ.items() if "NPROC" not in name} | variables
    command = [sys.executable, "-c", program + "; print(os.getenv('PJRT_NPROC'))"]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=environ)


def test_import_after_first_use_of_devices() -> None:
    """Check that a warning names the remedies if XLA's threads exist already."""
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    ended = run("import os, jax; jax.devices(); import cgx_ops.jax", XLA_FLAGS=flags)
    assert ended.stdout == "None\n", ended
    assert "import cgx_ops.jax or call" in ended.stderr


@pytest.mark.parametrize("then", ["initialize()", "register()"])
def test_number_of_devices_after_the_import(then: str) -> None:
    """Check that initialize(), or the first collective, provides threads for them."""
    option = f"jax.config.update('jax_num_cpu_devices', {DEVICES})"
    ended = run(f"import os, jax, cgx_ops.jax; {option}; cgx_ops.jax.{then}")
    assert ended.stdout == f"{2 * DEVICES}\n", ended
    assert "threads" not in ended.stderr, ended


def test_first_collective_after_the_number_of_devices() -> None:
    """Check that a warning names the remedies if XLA's threads exist already."""
    option = f"jax.config.update('jax_num_cpu_devices', {DEVICES})"
    ended = run(f"import os, jax, cgx_ops.jax; {option}; jax.devices(); cgx_ops.jax.register()")
    assert ended.stdout == "None\n", ended
    assert "Set the number of devices, then import" in ended.stderr, ended
