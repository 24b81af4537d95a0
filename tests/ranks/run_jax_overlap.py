"""Rank program: XLA computes while messages wait for their peers. Two ranks, one device each.

    run_jax_overlap.py <folder> independent | backward

Rank 1 launches a program only after a host callback in it has run on rank 0. A file signals this:

    rank 0: launch -> messages wait for rank 1 -> callback -> file
    rank 1:                                                   file -> launch

If the callback waited for a message, rank 1 would wait until its deadline. The programs:

    independent  Independent calls of psum_q, and a loop with the callback on its result. If calls
                 blocked XLA's threads, the callback could not run. There are more calls than
                 threads, and the loop makes it unlikely that XLA runs the callback before the
                 calls. A reused buffer would make operations wait for its earlier users. Here no
                 buffer can be reused: the calls' operands are the program's arguments, and shared
                 values are needed until the last call, which follows the callback.
    backward     A training step with three gradient messages, and the callback on the last
                 gradient. Here XLA could reuse buffers, and overlap.py must prevent it.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from support.jax_cases import (
    CALLS,
    NUMEL,
    SRA,
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
from cgx_ops.jax import pmean_q, psum_q

called = Path(sys.argv[1], "called")
use_cpu_devices(1)
cgx_ops.jax.initialize()
rank, mesh = jax.process_index(), mesh_of((2,), ("d",))


def callback(values: Values) -> Values:
    if rank == 0:
        called.touch()
    return values


def launched_in_turns(program: Any, *operands: Any) -> Any:
    """Compile, wait on rank 1 for the file, and run."""
    compiled = program.lower(*operands).compile()
    if rank == 1:
        deadline = time.monotonic() + float(os.environ["CGX_TIMEOUT"]) / 2
        while not called.exists():
            assert time.monotonic() < deadline, "rank 0's callback waits for a collective"
            time.sleep(0.001)
    return jax.block_until_ready(compiled(*operands))


# ---- independent ---------------------------------------------------------------------------------


def independent() -> None:
    inputs = normal(1, 2, NUMEL)

    def body(xs: list[jax.Array], start: jax.Array) -> list[jax.Array]:
        looped = lax.fori_loop(0, 100, lambda _, v: jnp.sin(v), start)
        same = lambda _: callback(inputs[rank])  # noqa: E731
        last = jax.pure_callback(same, jax.typeof(xs[0]), looped)
        return [psum_q(x, "d", config=SRA) for x in [*xs, last]]

    operands = [rows_of_processes(mesh, inputs[rank]) for _ in range(CALLS)]
    start = rows_of_processes(mesh, np.zeros(1, np.float32))
    want = expected(inputs)
    for rows in launched_in_turns(on_mesh(mesh, body).jitted, operands, start):
        assert same_bits(np.asarray(rows.addressable_data(0))[0], want)


# ---- backward ------------------------------------------------------------------------------------

LAYERS, WIDTH = 3, 1024  # 12 MiB


@jax.custom_vjp
def seen(weight: jax.Array) -> jax.Array:
    """The same; its gradient passes through the callback."""
    return weight


def _seen_backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (jax.pure_callback(callback, jax.typeof(gradient), gradient),)


seen.defvjp(lambda weight: (weight, None), _seen_backward)


def backward() -> None:
    def loss_of(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for weight in [seen(weights[0]), *weights[1:]]:
            x = jnp.tanh(x @ weight)
        return (x**2).mean()

    def step(weights: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        gradients = pmean_q(jax.grad(loss_of)(weights, x[0]), "d", bits=8)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    # check_vma: the types of a callback's values do not show that they vary over the axis.
    specs: Any = {"in_specs": (P(), P("d")), "out_specs": P(), "check_vma": False}
    program = jax.jit(jax.shard_map(step, mesh=mesh, **specs), donate_argnums=0)
    shared = jax.NamedSharding(mesh, P())
    weights = [jax.device_put(normal(i, WIDTH, WIDTH) / 32, shared) for i in range(LAYERS)]
    launched_in_turns(program, weights, rows_of_processes(mesh, normal(9 + rank, 4, WIDTH)))


{"independent": independent, "backward": backward}[sys.argv[2]]()
print("ok", flush=True)
