"""Enough threads for XLA:CPU to launch steps of several devices ahead of their collectives.

XLA runs the programs of a process's CPU devices on as many threads as there are cores, or devices
if these are more. A thread waits while it launches a program on a device that has 32 in flight, and
another one while a program waits for a collective. So each device may take two: with fewer, the
program that the others wait for gets none.
"""

import os
import re
from collections.abc import MutableMapping

import jax

_THREADS = "PJRT_NPROC"  # XLA reads it when the backend starts; NPROC is its older name


def provide(environ: MutableMapping[str, str] = os.environ) -> None:
    """Ask XLA for two threads for each CPU device, unless the user has asked for a number."""
    flag = re.findall(r"--xla_force_host_platform_device_count=(\d+)", environ.get("XLA_FLAGS", ""))
    option: int = getattr(jax.config, "jax_num_cpu_devices")  # noqa: B009  (it has no stub)
    devices = max(option, *map(int, flag), 1)
    cores = len(os.sched_getaffinity(0))
    if devices > 1 and 2 * devices > cores and not {_THREADS, "NPROC"} & environ.keys():
        environ[_THREADS] = str(2 * devices)
