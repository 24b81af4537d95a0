"""The end of a process that uses JAX: what it has launched is finished before it leaves its peers.

Most scripts wait for a result on process 0 only. The other processes reach their end with steps in
flight, which their peers need.
"""

import atexit
import contextlib

import jax
import jax.numpy as jnp

from cgx_ops._core import at_exit
from cgx_ops.jax._src.runtime import handlers


def register() -> None:
    """Have the process finish what it has launched when it ends. Once per process.

    Exit handlers run in reverse order: this one before JAX ends its backends and before cgx_ops
    closes its communicators.
    """
    atexit.register(_finish)


def _finish() -> None:
    if not handlers.used() or at_exit.by_exception():
        return
    with contextlib.suppress(Exception):  # a failed launch was reported where its result was read
        jax.effects_barrier()
    for array in jax.live_arrays():
        with contextlib.suppress(Exception):
            array.block_until_ready()
    with contextlib.suppress(Exception):
        _follow_launches()


def _follow_launches() -> None:
    """Wait for programs of which no result is left, by one that XLA runs after them.

    XLA runs programs of several devices one after the other, in the order of their launches.
    """
    mesh = jax.make_mesh((jax.device_count(),), ("all",))
    sharding = jax.NamedSharding(mesh, jax.P("all"))
    zeros = jax.jit(lambda: jnp.zeros(jax.device_count()), out_shardings=sharding)
    zeros().block_until_ready()
