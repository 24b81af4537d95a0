"""Handwritten digits in JAX without a mesh: one process per rank, gradients in a few bits.

    mpirun -np 2 python examples/jax_process_per_rank.py    # 32 bits (exact), then 4

As with mpi4jax, each process runs JAX on its own devices only, and `allreduce_q` averages the
gradients inside jit. A whole epoch is one program, a scan over its steps. Data, model and output
are those of jax_digits.py.
"""

import argparse
import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax_digits import (
    BATCH,
    HIDDEN,
    LEARNING_RATE,
    MOMENTUM,
    Weights,
    digits,
    logits,
    loss_of,
    same_on_all_ranks,
)

import cgx_ops
from cgx_ops import Communicator
from cgx_ops.jax import allreduce_q


def train(world: Communicator, bits: int, epochs: int) -> dict[str, Any]:
    """Train one model; return its accuracy, traffic, times and loss curve."""
    train_x, test_x, train_y, test_y = digits()
    random = np.random.default_rng(0)  # the same weights and batches on all ranks
    shapes = ((64, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 10))
    weights: Weights = [(random.normal(0, (2 / n) ** 0.5, (n, m)).astype("float32"),
                         np.zeros(m, "float32")) for n, m in shapes]  # fmt: skip
    steps = len(train_x) // (world.size * BATCH)

    def step(state: Any, batch: Any) -> Any:
        weights, velocity, done = state
        loss, gradients = jax.value_and_grad(loss_of)(weights, *batch)
        key = jax.random.key(done)  # a key rounds stochastically; without one, to nearest
        gradients = allreduce_q(gradients, world, op="avg", bits=bits, key=key)
        velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, gradients)
        rate = LEARNING_RATE * (1 + jnp.cos(jnp.pi * done / (steps * epochs))) / 2
        weights = jax.tree.map(lambda w, v: w - rate * v, weights, velocity)
        return (weights, velocity, done + 1), loss

    run_epoch = jax.jit(lambda state, batches: lax.scan(step, state, batches))
    state = (weights, jax.tree.map(np.zeros_like, weights), 0)
    curve, first_epoch, sent, start = [], 0.0, world.bytes_sent, time.perf_counter()
    for epoch in range(epochs):
        order = random.permutation(len(train_x))[: steps * world.size * BATCH]
        mine = order.reshape(steps, world.size, BATCH)[:, world.rank]
        state, losses = run_epoch(state, (train_x[mine], train_y[mine]))
        curve.append(float(losses.mean()))
        first_epoch = first_epoch or time.perf_counter() - start  # it compiles
        if world.rank == 0:
            print(json.dumps({"bits": bits, "epoch": epoch + 1, "loss": curve[-1]}), flush=True)
    seconds = time.perf_counter() - start - first_epoch
    bytes_per_step = (world.bytes_sent - sent) / (steps * epochs)
    accuracy = float((logits(state[0], jnp.asarray(test_x)).argmax(1) == test_y).mean())
    return {"framework": "jax, a process per rank", "bits": bits, "accuracy": accuracy,
            "losses": curve, "bytes_per_step": bytes_per_step, "first_epoch": first_epoch,
            "seconds": seconds, "identical": same_on_all_ranks(state[0])}  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Digits in JAX, a process per rank, no mesh.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--bits", type=int, nargs="+", default=[32, 4])
    arguments = parser.parse_args()
    communicator = cgx_ops.init()
    for bits in arguments.bits:
        result = train(communicator, bits, arguments.epochs)
        if communicator.rank == 0:
            print(json.dumps(result), flush=True)
