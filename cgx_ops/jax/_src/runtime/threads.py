"""Enough threads for XLA:CPU to launch steps of several devices ahead of their collectives.

XLA runs the programs of a process's CPU devices on as many threads as there are cores, or devices
if these are more. A thread blocks while it launches a program on a device that has 32 in flight.
Another thread blocks while a program waits for a collective. So each device may need two. With
fewer, the program that the others wait for could get none.
"""

import os
import re
from collections.abc import MutableMapping

import jax

from cgx_ops._core.user_warnings import warn_once
from cgx_ops.jax._src.runtime import compat

_THREADS = "PJRT_NPROC"  # read by XLA when the backend starts; NPROC is its older name
_OURS = "_CGX_PJRT_NPROC"  # the number that cgx_ops set: a child process may need another one


def provide(environ: MutableMapping[str, str] = os.environ) -> None:
    """Request two XLA threads for each CPU device, unless the user has set a number.

    Called by the import, by initialize() and before the first collective, because the number of
    devices may be set in between. Warns if it is too late, or if the user's number is too small.
    """
    late = compat.backends_started()
    devices = _devices_now() if late else _devices_to_come(environ)
    is_ours = environ.get(_THREADS, "") == environ.get(_OURS)
    if not late and is_ours:
        del environ[_THREADS]  # for another number of devices, or by a parent process
    given = environ.get(_THREADS) or environ.get("NPROC")
    threads = int(given) if given and given.isdecimal() else len(os.sched_getaffinity(0))
    if devices == 1 or max(threads, devices) >= 2 * devices:
        return
    if late or given:
        warn_once(
            f"JAX has {devices} CPU devices in this process and {max(threads, devices)} threads "
            "for them, so steps that are launched far ahead of their results can fail. "
            + (
                f"Set {_THREADS} to {2 * devices}"
                if given and not is_ours
                else "Set the number of devices, then import cgx_ops.jax or call "
                "cgx_ops.jax.initialize() before the first use of JAX's devices"
            )
            + "; or call jax.block_until_ready at least every 16 steps"
        )
        return
    environ[_THREADS] = environ[_OURS] = str(2 * devices)


def _devices_now() -> int:
    return jax.local_device_count() if jax.default_backend() == "cpu" else 1


def _devices_to_come(environ: MutableMapping[str, str]) -> int:
    flag = re.findall(r"--xla_force_host_platform_device_count=(\d+)", environ.get("XLA_FLAGS", ""))
    option: int = getattr(jax.config, "jax_num_cpu_devices")  # noqa: B009  (it has no stub)
    return max(option, *map(int, flag), 1)
