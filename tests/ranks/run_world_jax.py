"""Make every public call of JAX that communicates, in processes that JAX was not configured for.

    run_world_jax.py refused|single|initialized

"refused": initialize() was not called, so calls over a mesh raise and allreduce_q reduces over the
launcher's ranks. "single": CGX_WORLD=single, so each process is alone.
"initialized": the same calls after initialize() give the means over all processes.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import P, lax

import cgx_ops
import cgx_ops.jax as cgx

MODE = sys.argv[1]
RANK, SIZE = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
X = np.full((1, 600), float(RANK), np.float32)
if MODE == "initialized":
    cgx.initialize()
MEAN = RANK if MODE == "single" else (SIZE - 1) / 2

ALL, SPLIT = P(), P("data")
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
sharding = jax.NamedSharding(mesh, SPLIT)
x = jax.make_array_from_process_local_data(sharding, X)


def over_mesh(body: Callable[[Any], Any], out: Any = ALL) -> Any:
    mapped = jax.shard_map(body, mesh=mesh, in_specs=SPLIT, out_specs=out)
    return jax.jit(mapped)(x).addressable_data(0)


def loss(weights: Any, x: Any) -> Any:
    return (weights * x).mean()  # its gradient is x / 600


def gradients(body: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """Return body(weights, x) with weights that vary over the axis, as gradients do."""
    return lambda x: body(lax.pcast(jnp.zeros(600), "data", to="varying"), x[0])


def updated(optimizer: optax.GradientTransformation) -> Callable[[Any], Any]:
    def body(weights: Any, x: Any) -> Any:
        state = optimizer.init(weights)
        update, _ = optimizer.update(x, state, weights)
        return lax.pcast(update, "data", to="varying")[None]

    return gradients(body)


def in_plain_jit() -> Any:
    function = cgx.value_and_grad(loss, "data", in_specs=(P(), SPLIT), mesh=mesh, bits=4)
    return jax.jit(function)(jnp.zeros(600), x)[1].addressable_data(0) * 600


OVER_THE_MESH: dict[str, Callable[[], Any]] = {
    "psum_q": lambda: over_mesh(lambda x: cgx.psum_q(x, "data", bits=4)) / jax.device_count(),
    "pmean_q": lambda: over_mesh(lambda x: cgx.pmean_q(x, "data", bits=4)),
    "all_gather_q": lambda: over_mesh(lambda x: cgx.all_gather_q(x, "data", bits=4).mean(0), SPLIT),
    "psum_scatter_q": lambda: (
        over_mesh(
            lambda x: cgx.psum_scatter_q(jnp.tile(x, (jax.device_count(), 1)), "data", bits=4),
            SPLIT,
        )
        / jax.device_count()
    ),
    "all_to_all_q": lambda: over_mesh(
        lambda x: cgx.all_to_all_q(jnp.tile(x, (jax.device_count(), 1)), "data", 0, 0, bits=4).mean(
            0
        ),
        SPLIT,
    ),
    "compress_grads": lambda: (
        over_mesh(
            lambda x: jax.grad(lambda w: loss(cgx.compress_grads(w, "data", bits=4), x[0]))(
                jnp.zeros(600)
            )
        )
        * (600 / jax.device_count())
    ),
    "value_and_grad": in_plain_jit,
    "average_gradients": lambda: over_mesh(updated(cgx.average_gradients("data", bits=4)), SPLIT),
}


def main() -> None:
    for name, call in OVER_THE_MESH.items():
        try:
            result = call()
        except RuntimeError as error:
            assert MODE == "refused", (name, error)
            assert "cgx_ops.jax.initialize()" in str(error), (name, error)
            assert "CGX_WORLD=single" in str(error), (name, error)
        else:
            assert MODE != "refused", name
            np.testing.assert_array_equal(np.asarray(result), MEAN, err_msg=name)
    np.testing.assert_array_equal(cgx.allreduce_q(jnp.asarray(X), op="avg", bits=4), MEAN)
    np.testing.assert_array_equal(cgx_ops.allreduce(X, "avg"), MEAN)


main()
print("right")
