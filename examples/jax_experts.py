"""Handwritten digits with a mixture of experts in JAX, whose tokens travel in a few bits.

    python examples/jax_experts.py                     # one process with four devices
    mpirun -np 4 python examples/jax_experts.py        # four processes with a device each

Each device has one expert. A gate sends every token to one expert (top-1 routing), which takes at
most `CAPACITY` times its fair share of a device's tokens; the others pass unchanged. Blocks are
padded to that capacity, so all are equal, and `all_to_all_q` sends them to the experts and back in
`bits` bits, and their gradients, too. Rank 0 prints a line of JSON per epoch and per result.
"""

import argparse
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import NamedSharding, P, lax
from jax.sharding import AxisType
from jax_digits import digits
from jax_shared import (
    BATCH,
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
from cgx_ops import Config

Weights = dict[str, Any]
DEVICES, CAPACITY, BALANCE = 4, 1.25, 0.01  # BALANCE: weight of the loss that spreads tokens evenly
REPLICAS = {"inner": P(), "gate": P(), "out": P()}
SPECS = {**REPLICAS, "first": P("data"), "second": P("data")}  # the experts' two layers


def initial(seed: int) -> Weights:
    random = np.random.default_rng(seed)

    def layer(*shape: int) -> Any:
        return random.normal(0, (2 / shape[-2]) ** 0.5, shape).astype(np.float32)

    return {"inner": layer(64, HIDDEN), "gate": layer(HIDDEN, DEVICES), "out": layer(HIDDEN, 10),
            "first": layer(DEVICES, HIDDEN, HIDDEN),
            "second": layer(DEVICES, HIDDEN, HIDDEN)}  # fmt: skip


def exchanged(blocks: jax.Array, bits: int) -> jax.Array:
    """Send each device its block, (DEVICES, capacity, HIDDEN), and gradients back."""
    few = Config(bits)
    return cgx_ops.jax.all_to_all_q(blocks, "data", 0, 0, tiled=True, config=few, grad_config=few)


def through_experts(weights: Weights, tokens: jax.Array, bits: int) -> tuple[jax.Array, jax.Array]:
    """Add to each token the output of its expert; also return how unequal the experts' shares are.

    Args:
        weights: Those of this device: one expert's, (1, HIDDEN, HIDDEN) each.
        tokens: This device's, (n, HIDDEN).
        bits: The bits in which tokens and their gradients travel.

    Returns:
        Tokens, (n, HIDDEN), and the imbalance, 1 if all experts get equally many.
    """
    chances = jax.nn.softmax(tokens @ weights["gate"])
    chosen = jax.nn.one_hot(chances.argmax(1), DEVICES)
    imbalance = DEVICES * (chosen.mean(0) * chances.mean(0)).sum()

    # The place of each token in its expert's block; one_hot is 0 for places past the capacity.
    capacity = math.ceil(CAPACITY * len(tokens) / DEVICES)
    place = ((jnp.cumsum(chosen, 0) - 1) * chosen).sum(1)
    to_places = chosen[:, :, None] * jax.nn.one_hot(place, capacity)[:, None]

    blocks = jnp.einsum("nec,nh->ech", to_places, tokens)
    arrived = exchanged(blocks, bits)
    found = jax.nn.relu(arrived @ weights["first"][0]) @ weights["second"][0]
    found = exchanged(found, bits)
    combined = jnp.einsum("nec,ech->nh", to_places, found) * chances.max(1, keepdims=True)
    return tokens + combined, imbalance


def scores(weights: Weights, images: jax.Array, bits: int) -> tuple[jax.Array, jax.Array]:
    """Return the scores of the ten digits, and the experts' imbalance."""
    tokens, imbalance = through_experts(weights, jax.nn.relu(images @ weights["inner"]), bits)
    return tokens @ weights["out"], imbalance


def train(mesh: jax.sharding.Mesh, bits: int, epochs: int, seed: int) -> dict[str, Any]:
    def loss_of(weights: Weights, images: jax.Array, labels: jax.Array) -> tuple[Any, Any]:
        found, imbalance = scores(weights, images, bits)
        logs = jax.nn.log_softmax(found)
        loss = -(logs * jax.nn.one_hot(labels, 10)).sum(axis=1).mean()
        return loss + BALANCE * imbalance, loss

    def own(weights: Weights) -> Weights:
        """Make replicas vary, so that JAX does not sum their gradients itself."""
        return {
            name: lax.pcast(w, "data", to="varying") if name in REPLICAS else w
            for name, w in weights.items()
        }

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(SPECS, SPECS, P("data"), P("data")),
                   out_specs=(SPECS, SPECS, P()))  # fmt: skip
    def step(weights: Weights, velocity: Weights, images: Any, labels: Any) -> Any:
        (_, loss), gradients = jax.value_and_grad(loss_of, has_aux=True)(
            own(weights), images, labels
        )
        gradients = {  # an expert's gradient is the sum over all devices' tokens
            name: lax.pmean(g, "data") if name in REPLICAS else g / DEVICES
            for name, g in gradients.items()
        }
        velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, gradients)
        weights = jax.tree.map(lambda w, v: w - LEARNING_RATE * v, weights, velocity)
        return weights, velocity, lax.pmean(loss, "data")

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(SPECS, P("data"), P("data")), out_specs=P())
    def accuracy(weights: Weights, images: jax.Array, labels: jax.Array) -> jax.Array:
        return lax.pmean((scores(weights, images, bits)[0].argmax(1) == labels).mean(), "data")

    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS)
    weights = jax.tree.map(on_mesh, initial(seed), shardings)
    velocity = jax.tree.map(jnp.zeros_like, weights)
    curve = []
    for epoch in range(epochs):
        losses = []
        for images, labels in batches(mesh, epoch):
            weights, velocity, loss = step(weights, velocity, images, labels)
            losses.append(float(loss))
        curve.append(float(np.mean(losses)))
        say(bits=bits, epoch=epoch + 1, loss=curve[-1])
    _, test_images, _, test_labels = digits()
    whole = len(test_images) // (DEVICES * BATCH) * DEVICES * BATCH  # equal parts
    spread = NamedSharding(mesh, P("data"))
    tested = [on_mesh(part[:whole], spread) for part in (test_images, test_labels)]
    return {"mesh": dict(mesh.shape), "bits": bits, "losses": curve,
            "accuracy": float(accuracy(weights, *tested)),
            "identical": same_everywhere({name: weights[name] for name in REPLICAS})}  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Digits with a mixture of experts, in JAX.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--bits", type=int, nargs="+", default=[32, 8, 4])
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    arguments = parser.parse_args()
    use_cpu_devices(DEVICES // cgx_ops.init().size)
    cgx_ops.jax.initialize()
    experts = jax.make_mesh((DEVICES,), ("data",), (AxisType.Auto,))
    for bits in arguments.bits:
        say(**train(experts, bits, arguments.epochs, arguments.seed))
