"""A mesh of two axes: layers split over "model", exactly; gradients averaged over "data" in bits.

    python examples/jax_two_axes.py                    # one process with four devices
    mpirun -np 2 python examples/jax_two_axes.py       # two processes with two devices each

Every place of "data" trains on its own part of the batch. Its two devices, the places of "model",
each hold half of the hidden layer: the first matrix is split by columns, the second by rows, and
`lax.psum` adds up the halves' scores. Only gradients are approximate, and only "data" carries them:
under mpirun that is the axis between processes. Rank 0 prints a line of JSON per epoch and per
result.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import NamedSharding, P, lax
from jax.sharding import AxisType
from jax_digits import digits
from jax_shared import (
    HIDDEN,
    LEARNING_RATE,
    MOMENTUM,
    batches,
    on_mesh,
    same_everywhere,
    say,
    use_cpu_devices,
)

import cgx_ops.jax
from cgx_ops import Rules

Weights = dict[str, Any]
SPECS = {"hidden": P(None, "model"), "hidden_bias": P("model"), "out": P("model"), "out_bias": P()}


def initial() -> Weights:
    random = np.random.default_rng(0)
    hidden, out = (random.normal(0, (2 / n) ** 0.5, (n, m)).astype(np.float32)
                   for n, m in ((64, HIDDEN), (HIDDEN, 10)))  # fmt: skip
    return {"hidden": hidden, "hidden_bias": np.zeros(HIDDEN, np.float32),
            "out": out, "out_bias": np.zeros(10, np.float32)}  # fmt: skip


def scores(weights: Weights, images: jax.Array) -> jax.Array:
    """Return the scores of the ten digits, from this device's half of the hidden layer."""
    half = jax.nn.relu(images @ weights["hidden"] + weights["hidden_bias"])
    return lax.psum(half @ weights["out"], "model") + weights["out_bias"]


def loss_of(weights: Weights, images: jax.Array, labels: jax.Array) -> jax.Array:
    logs = jax.nn.log_softmax(scores(weights, images))
    return -(logs * jax.nn.one_hot(labels, 10)).sum(axis=1).mean()


def train(mesh: jax.sharding.Mesh, bits: int, epochs: int) -> dict[str, Any]:
    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(SPECS, SPECS, P("data"), P("data"), P()),
                   out_specs=(SPECS, SPECS, P()))  # fmt: skip
    def step(weights: Weights, velocity: Weights, images: Any, labels: Any, done: Any) -> Any:
        gradient_of = cgx_ops.jax.value_and_grad(
            loss_of, "data", bits=bits, rules=Rules([("bias", 32)]), key=jax.random.key(done)
        )
        loss, gradients = gradient_of(weights, images, labels)
        velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, gradients)
        return jax.tree.map(lambda w, v: w - LEARNING_RATE * v, weights, velocity), velocity, loss

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(SPECS, P(), P()), out_specs=P())
    def accuracy(weights: Weights, images: jax.Array, labels: jax.Array) -> jax.Array:
        return (scores(weights, images).argmax(1) == labels).mean()

    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS)
    weights = jax.tree.map(on_mesh, initial(), shardings)
    velocity = jax.tree.map(jnp.zeros_like, weights)
    curve, done = [], 0
    for epoch in range(epochs):
        losses = []
        for images, labels in batches(mesh, epoch):
            weights, velocity, loss = step(weights, velocity, images, labels, done)
            losses.append(float(loss))
            done += 1
        curve.append(float(np.mean(losses)))
        say(bits=bits, epoch=epoch + 1, loss=curve[-1])
    _, test_images, _, test_labels = digits()
    return {"mesh": dict(mesh.shape), "bits": bits, "losses": curve,
            "accuracy": float(accuracy(weights, test_images, test_labels)),
            "identical": same_everywhere(weights)}  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Digits on a mesh of two axes.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--bits", type=int, nargs="+", default=[32, 4])
    arguments = parser.parse_args()
    use_cpu_devices(4 // cgx_ops.init().size)
    cgx_ops.jax.initialize()
    two_by_two = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Auto,) * 2)
    for bits in arguments.bits:
        say(**train(two_by_two, bits, arguments.epochs))
