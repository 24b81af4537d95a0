"""The end of a process that uses JAX: finish all launched programs before its peers lose it.

Most scripts wait for a result on process 0 only. The other processes then reach their end while
steps are in flight, which their peers need.
"""

import atexit
import contextlib

import jax
import jax.numpy as jnp

from cgx_ops._core import at_exit
from cgx_ops.jax._src.runtime import handlers


def register() -> None:
    """Make the process finish launched programs at exit. Call once per process.

    Exit handlers run in reverse order: this one before JAX ends its backends and before cgx_ops
    closes its communicators.
    """
    atexit.register(_finish)


def _finish() -> None:
    if not handlers.used() or at_exit.by_exception():
        return
    with contextlib.suppress(Exception):  # failed launches are reported where results are read
        jax.effects_barrier()
    for array in jax.live_arrays():
        with contextlib.suppress(Exception):
            array.block_until_ready()
    with contextlib.suppress(Exception):
        _follow_launches()


def _follow_launches() -> None:
    """Wait for programs without live results, by launching one that XLA runs after them.

    XLA runs programs of several devices one after the other, in the order of their launches.
    """
    mesh = jax.make_mesh((jax.device_count(),), ("all",))
    sharding = jax.NamedSharding(mesh, jax.P("all"))
    zeros = jax.jit(lambda: jnp.zeros(jax.device_count()), out_shardings=sharding)
    zeros().block_until_ready()
