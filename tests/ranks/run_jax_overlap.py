"""Rank program: other thunks run while psum_q waits for its peers. Two ranks, one device each.

The program has calls of psum_q and, independent of them, a loop and a host callback on its result.
Rank 1 launches it only after the callback of rank 0 has run, of which a file tells:

    rank 0: launch -> the calls wait for rank 1 -> loop -> callback -> file
    rank 1:                                                            file -> launch

Calls that blocked XLA's threads would keep the callback from running, and rank 1 would wait until
its deadline. XLA may run the callback before it starts the calls; so there are more calls than
threads, and the loop makes that unlikely. It cannot fail where nothing blocks: XLA makes what uses
a buffer again wait for all that used it before, but there is none to use again. Operands of the
calls are the program's own; what they share is needed until the last call, which follows the
callback.
"""

import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax_cases import (
    CALLS,
    NUMEL,
    Values,
    expected,
    mesh_of,
    normal,
    on_mesh,
    rows_of_processes,
    same_bits,
    use_cpu_devices,
)

import cgx_ops.jax
from cgx_ops.jax import psum_q

called = Path(sys.argv[1], "called")
use_cpu_devices(1)
cgx_ops.jax.initialize()
rank = jax.process_index()


inputs = normal(1, 2, NUMEL)


def callback(_: jax.Array) -> Values:
    if rank == 0:
        called.touch()
    return inputs[rank]


def body(xs: list[jax.Array], start: jax.Array) -> list[jax.Array]:
    looped = lax.fori_loop(0, 100, lambda _, v: jnp.sin(v), start)
    last = jax.pure_callback(callback, jax.typeof(xs[0]), looped)
    return [psum_q(x, "d", algorithm="sra") for x in [*xs, last]]


mesh = mesh_of((2,), ("d",))
operands = [rows_of_processes(mesh, inputs[rank]) for _ in range(CALLS)]
start = rows_of_processes(mesh, np.zeros(1, np.float32))
step = on_mesh(mesh, body)

step.jitted.lower(operands, start).compile()
if rank == 1:
    deadline = time.monotonic() + float(os.environ["CGX_TIMEOUT"]) / 2
    while not called.exists():
        assert time.monotonic() < deadline, "rank 0's callback waits for the collectives beside it"
        time.sleep(0.001)
sums = step(operands, start)
want = expected(inputs)
for rows in sums:
    assert same_bits(np.asarray(rows.addressable_data(0))[0], want)
print("ok", flush=True)
