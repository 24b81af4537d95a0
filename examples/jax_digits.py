"""Handwritten digits in JAX on several ranks, with gradients sent in a few bits.

    mpirun -np 2 python examples/jax_digits.py              # 32 bits (exact), then 4

Each rank is a process with one CPU device, and one mesh covers all of them. Inside shard_map each
rank differentiates the loss on its part of the batch, and `pmean_q` averages the gradients. The
pcast marks the weights as a copy per rank; without it JAX would sum the gradients itself, exact.
Rank 0 prints a line of JSON per epoch and per result.
"""

import argparse
import contextlib
import hashlib
import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import NamedSharding, P, lax
from jax.sharding import AxisType
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import cgx_ops
import cgx_ops.jax
from cgx_ops import Communicator, Config

HIDDEN, BATCH, LEARNING_RATE, MOMENTUM = 256, 32, 0.1, 0.9
Weights = list[tuple[Any, Any]]  # the matrix and the bias of each layer


def digits() -> list[Any]:
    """Return train and test images (n, 64) in [0, 1], train and test labels (n,)."""
    images, labels = load_digits(return_X_y=True)
    images = images.astype(np.float32) / 16
    return train_test_split(images, labels, test_size=1 / 3, random_state=0, stratify=labels)


def logits(weights: Weights, images: jax.Array) -> jax.Array:
    """Return the scores of the ten digits, (n, 10)."""
    *hidden, (last, last_bias) = weights
    for matrix, bias in hidden:
        images = jax.nn.relu(images @ matrix + bias)
    return images @ last + last_bias


def loss_of(weights: Weights, images: jax.Array, labels: jax.Array) -> jax.Array:
    scores = jax.nn.log_softmax(logits(weights, images))
    return -jnp.take_along_axis(scores, labels[:, None], axis=1).mean()


def same_on_all_ranks(weights: Weights) -> bool:
    """Return whether the weights of all ranks have equal bits.

    It compares the minimum and maximum of each byte of a hash over the ranks.
    """
    data = b"".join(np.asarray(w.addressable_data(0)).tobytes() for w in jax.tree.leaves(weights))
    digest = np.frombuffer(hashlib.sha256(data).digest(), np.uint8).astype(np.float32)
    low, high = (cgx_ops.allreduce(digest, op, Config(bits=32)) for op in ("min", "max"))
    return bool((low == high).all())


def bytes_sent(world: Communicator) -> int:
    """Return how many bytes this rank sent for the mesh.

    The mesh's communicator is named after its processes.
    """
    with contextlib.suppress(cgx_ops.NotFound):  # the first collective makes it
        return Communicator.find("jax:" + ",".join(map(str, range(world.size)))).bytes_sent
    return 0


def train(world: Communicator, bits: int, epochs: int) -> dict[str, Any]:
    """Train one model; return its accuracy, traffic, times and loss curve."""
    train_x, test_x, train_y, test_y = digits()
    random = np.random.default_rng(0)  # the same weights and batches on all ranks
    shapes = ((64, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 10))
    weights: Weights = [(random.normal(0, (2 / n) ** 0.5, (n, m)).astype("float32"),
                         np.zeros(m, "float32")) for n, m in shapes]  # fmt: skip
    velocity = jax.tree.map(np.zeros_like, weights)
    steps = len(train_x) // (world.size * BATCH)
    mesh = jax.make_mesh((world.size,), ("data",), axis_types=(AxisType.Auto,))
    spread = NamedSharding(mesh, P("data"))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), P(), P("data"), P("data"), P()),
                   out_specs=(P(), P(), P("data")))  # fmt: skip
    def step(weights: Weights, velocity: Weights, images: Any, labels: Any, done: Any) -> Any:
        mine = jax.tree.map(lambda w: lax.pcast(w, "data", to="varying"), weights)
        loss, gradients = jax.value_and_grad(loss_of)(mine, images, labels)
        key = jax.random.key(done)  # a key rounds stochastically; without one, to nearest
        gradients = cgx_ops.jax.pmean_q(gradients, "data", bits=bits, key=key)
        velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, gradients)
        rate = LEARNING_RATE * (1 + jnp.cos(jnp.pi * done / (steps * epochs))) / 2
        return jax.tree.map(lambda w, v: w - rate * v, weights, velocity), velocity, loss[None]

    curve, first_step, sent, start = [], 0.0, bytes_sent(world), time.perf_counter()
    for epoch in range(epochs):
        order = random.permutation(len(train_x))[: steps * world.size * BATCH]
        losses = []
        for mine in order.reshape(steps, world.size, BATCH)[:, world.rank]:
            images, labels = (jax.make_array_from_process_local_data(spread, part[mine])
                              for part in (train_x, train_y))  # fmt: skip
            done = epoch * steps + len(losses)
            weights, velocity, loss = step(weights, velocity, images, labels, done)
            losses.append(float(loss.addressable_data(0)[0]))
            first_step = first_step or time.perf_counter() - start  # it compiles
        curve.append(float(np.mean(losses)))
        if world.rank == 0:
            print(json.dumps({"bits": bits, "epoch": epoch + 1, "loss": curve[-1]}), flush=True)
    seconds = time.perf_counter() - start - first_step
    bytes_per_step = (bytes_sent(world) - sent) / (steps * epochs)
    trained = jax.tree.map(lambda w: np.asarray(w.addressable_data(0)), weights)
    accuracy = float((logits(trained, jnp.asarray(test_x)).argmax(1) == test_y).mean())
    return {"framework": "jax", "bits": bits, "accuracy": accuracy, "losses": curve,
            "bytes_per_step": bytes_per_step, "first_step": first_step, "seconds": seconds,
            "identical": same_on_all_ranks(weights)}  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Digits in JAX.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--bits", type=int, nargs="+", default=[32, 4])
    arguments = parser.parse_args()
    communicator = cgx_ops.init()
    cgx_ops.jax.initialize()
    for bits in arguments.bits:
        result = train(communicator, bits, arguments.epochs)
        if communicator.rank == 0:
            print(json.dumps(result), flush=True)
