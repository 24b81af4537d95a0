"""Plain jax.jit over sharded arrays (pjit): XLA shards the model, cgx_ops sends the gradients.

    python examples/jax_sharded.py                    # one process with four devices
    mpirun -np 2 python examples/jax_sharded.py       # two processes with two devices each

No shard_map here: arrays have shardings, and jit does the rest. Weights are sharded over "data", as
FSDP shards them: every device holds its part of the first matrix and of its momentum. Left to
itself XLA would reduce the gradients, exactly; `value_and_grad` with in_specs is the one call that
has them travel in bits. Rank 0 prints a line of JSON per epoch and per result.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import NamedSharding, P
from jax.sharding import AxisType
from jax_digits import digits
from jax_shared import (
    LEARNING_RATE,
    MOMENTUM,
    batches,
    on_mesh,
    same_everywhere,
    say,
    use_cpu_devices,
)
from jax_two_axes import Weights, initial

import cgx_ops.jax

SPECS = {"hidden": P(None, "data"), "hidden_bias": P(), "out": P("data"), "out_bias": P()}
SHARED = [name for name, spec in SPECS.items() if spec == P()]  # all devices have the whole


def scores(weights: Weights, images: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(images @ weights["hidden"] + weights["hidden_bias"])
    return hidden @ weights["out"] + weights["out_bias"]


def loss_of(weights: Weights, images: jax.Array, labels: jax.Array) -> jax.Array:
    logs = jax.nn.log_softmax(scores(weights, images))
    return -(logs * jax.nn.one_hot(labels, 10)).sum(axis=1).mean()


def train(mesh: jax.sharding.Mesh, bits: int, epochs: int) -> dict[str, Any]:
    @jax.jit
    def step(weights: Weights, velocity: Weights, images: Any, labels: Any, done: Any) -> Any:
        loss, gradients = cgx_ops.jax.value_and_grad(
            loss_of, "data", in_specs=(SPECS, P("data"), P("data")), mesh=mesh,
            bits=bits, key=jax.random.key(done),
        )(weights, images, labels)  # fmt: skip
        velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, gradients)
        return jax.tree.map(lambda w, v: w - LEARNING_RATE * v, weights, velocity), velocity, loss

    @jax.jit
    def accuracy(weights: Weights, images: jax.Array, labels: jax.Array) -> jax.Array:
        return (scores(weights, images).argmax(1) == labels).mean()

    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS)
    weights = jax.tree.map(on_mesh, initial(), shardings)
    velocity = jax.tree.map(jnp.zeros_like, weights)
    curve, done = [], 0
    with jax.set_mesh(mesh):  # several processes need it for the shard_map within the other
        for epoch in range(epochs):
            losses = []
            for images, labels in batches(mesh, epoch):
                weights, velocity, loss = step(weights, velocity, images, labels, done)
                losses.append(float(loss))
                done += 1
            curve.append(float(np.mean(losses)))
            say(bits=bits, epoch=epoch + 1, loss=curve[-1])
        _, test_images, _, test_labels = digits()
        found = float(accuracy(weights, test_images, test_labels))
    return {"mesh": dict(mesh.shape), "bits": bits, "losses": curve, "accuracy": found,
            "identical": same_everywhere([weights[name] for name in SHARED])}  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Digits by plain jit over sharded arrays.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--bits", type=int, nargs="+", default=[32, 4])
    arguments = parser.parse_args()
    use_cpu_devices(4 // cgx_ops.init().size)
    cgx_ops.jax.initialize()
    on_data = jax.make_mesh((4,), ("data",), (AxisType.Auto,))
    for bits in arguments.bits:
        say(**train(on_data, bits, arguments.epochs))
