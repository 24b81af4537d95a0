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


def test_import_after_first_use_of_devices() -> None:
    """Check that a warning names the remedies if XLA's threads exist already."""
    devices = 2 * len(os.sched_getaffinity(0))
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    environ = {name: x for name, x in os.environ.items() if "NPROC" not in name} | flags
    program = "import os, jax; jax.devices(); import cgx_ops.jax; print(os.getenv('PJRT_NPROC'))"
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environ)
    assert ended.stdout == "None\n", ended
    assert "Import cgx_ops.jax before the first use of JAX's devices" in ended.stderr
