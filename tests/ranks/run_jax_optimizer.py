"""Rank program: average_gradients on two processes with two devices each, and its checkpoint.

    run_jax_optimizer.py first FOLDER      steps 0 and 1, then save
    run_jax_optimizer.py second FOLDER     restore, in new processes, then steps 2 and 3

Each step's mean and residuals must equal the oracle's, which computes all steps in both runs.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax import NamedSharding, lax
from jax.sharding import PartitionSpec as P
from support.jax_cases import SRA, expected, mesh_of, normal, same_bits, seed_of, use_cpu_devices

import cgx_ops.jax
from cgx_ops.jax import average_gradients, state_specs

use_cpu_devices(2)
cgx_ops.jax.initialize()
HALF, FOLDER = sys.argv[1], Path(sys.argv[2])
STEPS, NUMEL, KEY = 4, 3000, jax.random.key(7)
ROWS = normal(8, STEPS, 4, NUMEL)
MESH = mesh_of((4,), ("d",))
SPREAD = NamedSharding(MESH, P("d"))


def oracle() -> list[tuple[Any, Any]]:
    """Return each step's mean and residuals."""
    residual, steps = np.zeros((4, NUMEL), np.float32), []
    for step, rows in enumerate(ROWS):
        seeds = [seed_of(jax.random.fold_in(KEY, step))] * 4
        residual = residual.copy()
        mean = expected(rows, op="avg", bits=2, seeds=seeds, residuals=list(residual))
        steps.append((mean, residual))
    assert not residual[1::2].any(), "only the first device of a process has a residual"
    return steps


def on_devices(rows: Any) -> jax.Array:
    return jax.make_array_from_callback(rows.shape, SPREAD, lambda index: rows[index])


optimizer = optax.chain(
    average_gradients("d", bits=2, config=SRA, key=KEY, mesh=MESH),
    optax.identity(),
)
weights = np.zeros(NUMEL, np.float32)
specs = state_specs(optimizer, weights, "d")
shardings = jax.tree.map(lambda spec: NamedSharding(MESH, spec), specs)


def body(weights: jax.Array, state: Any, rows: jax.Array) -> Any:
    copies = lax.pcast(weights, "d", to="varying")
    gradient = jax.grad(lambda w: (w * rows[0]).sum())(copies)
    return optimizer.update(gradient, state)


step = jax.jit(
    jax.shard_map(body, mesh=MESH, in_specs=(P(), specs, P("d")), out_specs=(P(), specs)),
    donate_argnums=1,
)
state: Any = jax.jit(optimizer.init, out_shardings=shardings)(weights)
steps = range(2) if HALF == "first" else range(2, STEPS)
with ocp.StandardCheckpointer() as checkpointer:
    if HALF == "second":
        like = jax.tree.map(
            lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), state, shardings
        )
        state = checkpointer.restore(FOLDER, like)
    wanted = oracle()
    for index in steps:
        mean, state = step(weights, state, on_devices(ROWS[index]))
        assert int(state[0].step) == index + 1
        for shard in mean.addressable_shards:
            assert same_bits(shard.data, wanted[index][0]), index
        for shard in state[0].residual.addressable_shards:
            assert same_bits(shard.data, wanted[index][1][shard.index]), index
    if HALF == "first":
        checkpointer.save(FOLDER, state)
print("ok", HALF, flush=True)
