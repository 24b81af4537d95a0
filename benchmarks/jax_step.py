"""A training step in JAX with psum_q beside lax.psum over gloo, one process and device per host.

    python benchmarks/hosts.py --rate 1gbit -- python benchmarks/jax_step.py [--link-rate 1gbit]

The model is fixed (steps.py), that of ddp_step.py: 25.2 million parameters, plain SGD. The batch is
chosen so that a step without communication takes about 100 ms (--compute-ms). A step is one jitted
program; XLA's settings are its defaults.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from mpi4py import MPI
from steps import WIDTH, Step, calibrate, measured, parser_of, publish, report_of

import cgx_ops.jax
from cgx_ops.jax import numels_of, pmean_q
from cgx_ops.planner import Plan

Average = Callable[[Any], Any]  # of a tree of gradients, over "data"


def one_message(tree: Any) -> Plan:
    """Return the plan by which all leaves share a message."""
    numels = numels_of(tree)
    everything = tuple(range(len(numels)))
    return Plan(tuple(numels), tuple(numels.values()), (4,) * len(numels), (everything,))


CONTENDERS: dict[str, Average] = {  # the exact one first
    "lax.psum": lambda gradients: lax.pmean(gradients, "data"),
    "cgx 4 bits": lambda gradients: pmean_q(gradients, "data", bits=4),
    "cgx 4 bits, one message": lambda gradients: pmean_q(
        gradients, "data", bits=4, fuse=one_message(gradients)
    ),
    "cgx 4 bits, leaf by leaf": lambda gradients: pmean_q(gradients, "data", bits=4, fuse=False),
}


def loss_of(weights: Any, inputs: jax.Array) -> jax.Array:
    activations = inputs
    for matrix, bias in weights[:-1]:
        activations = jax.nn.relu(activations @ matrix + bias)
    matrix, bias = weights[-1]
    return jnp.mean((activations @ matrix + bias) ** 2)


def weights_of(mesh: jax.sharding.Mesh, layers: int) -> Any:
    """Return the weights before the first step, on all devices of the mesh."""
    scale, random = np.float32(WIDTH**-0.5), np.random.default_rng(0)
    weights = [
        (scale * random.standard_normal((WIDTH, WIDTH), np.float32), np.zeros(WIDTH, np.float32))
        for _ in range(layers)
    ]
    # device_put would compare what processes have, over the link.
    place = partial(jax.make_array_from_process_local_data, jax.NamedSharding(mesh, jax.P()))
    return jax.tree.map(place, weights)


def step_of(
    mesh: jax.sharding.Mesh,
    layers: int,
    batch: int,
    average: Average | None = None,
    kept: list[Any] | None = None,
) -> Step:
    """Return a training step: forward, backward, average, update.

    Args:
        mesh: one axis, "data".
        layers: of the model.
        batch: examples a device.
        average: of gradients; None: without communication.
        kept: the weights in a list of one, which steps replace; None: their own.
    """
    specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P()}

    # Without an average devices come to differ; JAX is not to check that they do not.
    @partial(jax.jit, donate_argnums=0)
    @partial(jax.shard_map, mesh=mesh, **specs, check_vma=average is not None)
    def program(weights: Any, inputs: jax.Array) -> Any:
        own = lax.pcast(weights, "data", to="varying")  # its gradient is this device's
        gradients = jax.grad(loss_of)(own, inputs)
        if average is not None:
            gradients = average(gradients)
        return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, gradients)

    random = np.random.default_rng(MPI.COMM_WORLD.rank)
    inputs = jax.make_array_from_process_local_data(
        jax.NamedSharding(mesh, jax.P("data")), random.standard_normal((batch, WIDTH), np.float32)
    )
    latest = [weights_of(mesh, layers)] if kept is None else kept

    def step() -> None:
        latest[0] = jax.block_until_ready(program(latest[0], inputs))

    return step


def main() -> None:
    options = parser_of("A step in JAX: psum_q beside lax.psum over gloo").parse_args()
    jax.config.update("jax_platforms", "cpu")
    cgx_ops.jax.initialize()
    mesh = jax.make_mesh((jax.device_count(),), ("data",), (jax.sharding.AxisType.Auto,))
    make = partial(step_of, mesh, options.layers)
    batch = calibrate(make, options.compute_ms / 1e3, first=32)
    steps = {name: make(batch, average) for name, average in CONTENDERS.items()}
    for step in steps.values():
        step()  # compiles, and connects
    found = measured(make(batch), steps, rounds=options.rounds, budget=options.budget)
    publish(report_of("JAX step", found, batch, options), options.json)


if __name__ == "__main__":
    main()
