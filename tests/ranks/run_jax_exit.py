"""Processes that exit with steps in flight that their peers need; only process 0 waits for them.

run_jax_exit.py global|local|allreduce_q|raises
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import P, lax

import cgx_ops.jax as cgx

HOW = sys.argv[1]
STEPS = 60
cgx.initialize()
RANK, SIZE = jax.process_index(), jax.process_count()
mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
def over_mesh(w: jax.Array, x: jax.Array) -> jax.Array:
    gradient = x.T @ jnp.tanh(x @ lax.pcast(w, "d", to="varying"))
    return w - 1e-3 * cgx.pmean_q(gradient, "d", bits=4)


@jax.jit
def by_ranks(w: jax.Array, x: jax.Array) -> jax.Array:
    return w - 1e-3 * cgx.allreduce_q(x.T @ jnp.tanh(x @ w), op="avg", bits=4)


def trained() -> jax.Array:
    values = np.random.default_rng(RANK).normal(size=(128, 256)).astype(np.float32)
    if HOW == "allreduce_q":
        w, x, step = jnp.full((256, 256), 0.01), jnp.asarray(values), by_ranks
    else:
        sharding = jax.NamedSharding(mesh, P("d"))
        x = jax.make_array_from_process_local_data(sharding, values)
        ones = np.full((256, 256), 0.01, np.float32)
        w, step = jax.device_put(ones, jax.NamedSharding(mesh, P())), over_mesh
    for _ in range(STEPS):
        w = step(w, x)
    return w


def main() -> None:
    """Exit without keeping a result."""
    w = trained()
    if RANK == 0:
        assert np.isfinite(np.asarray(w.addressable_data(0))).all()
        print("right")
    elif HOW == "raises":
        raise RuntimeError("an error of the script's own")


if HOW == "global":
    weights = trained()
    if RANK == 0:
        assert np.isfinite(np.asarray(weights.addressable_data(0))).all()
        print("right")
else:
    main()
