"""Run steps of several CPU devices of one process, all launched before the first wait.

run_jax_ahead.py DEVICES STEPS ours|mixed|twice|jit
"""

import os
import sys
from collections.abc import Callable
from typing import Any

DEVICES, STEPS, HOW = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import P, lax  # noqa: E402

import cgx_ops.jax as cgx  # noqa: E402

mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
# The other collective that runs beside the gradients' one.
BESIDE: dict[str, Callable[[Any], Any]] = {
    "ours": lambda g: jnp.zeros(()),
    "mixed": lambda g: lax.pmean(g.sum(), "data"),
    "twice": lambda g: cgx.pmean_q(g.sum(), "data", bits=32),
}


@jax.shard_map(mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()))
def in_shard_map(w: Any, x: Any) -> Any:
    gradient = x.T @ jnp.tanh(x @ lax.pcast(w, "data", to="varying"))
    return w - 1e-3 * cgx.pmean_q(gradient, "data", bits=4), BESIDE[HOW](gradient)


def in_plain_jit(w: Any, x: Any) -> Any:
    specs = (P(), P("data"))
    loss = cgx.value_and_grad(
        lambda w, x: jnp.tanh(x @ w).sum(), "data", in_specs=specs, mesh=mesh, bits=4
    )
    value, gradient = loss(w, x)
    return w - 1e-3 * gradient, value


step = jax.jit(in_plain_jit if HOW == "jit" else in_shard_map)
w = jnp.full((64, 64), 0.01)
for _ in range(STEPS):
    w, _ = step(w, x)
assert np.isfinite(np.asarray(w)).all()
print("right")
