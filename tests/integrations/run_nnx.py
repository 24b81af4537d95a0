"""Rank program: flax nnx with its Optimizer, gradients in 4 bits; a second run resumes half way."""

# pyright: reportMissingImports=false
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from common_jax import EPOCHS, batches, report, restore, save
from flax import nnx
from jax import NamedSharding, P

import cgx_ops.jax
from cgx_ops import Rules


class Classifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(64, 256, rngs=rngs)
        self.second = nnx.Linear(256, 256, rngs=rngs)
        self.last = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, points: jax.Array) -> jax.Array:
        return self.last(jax.nn.relu(self.second(jax.nn.relu(self.first(points)))))


def train(folder: Path, first: int = 0) -> tuple[Any, list[float]]:
    """Train from epoch `first`, with its checkpoint unless it is 0."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    model = Classifier(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))
    state = jax.device_put(state, NamedSharding(mesh, P()))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=(P(), P()))
    def step(state: Any, points: jax.Array, labels: jax.Array) -> Any:
        model, optimizer = nnx.merge(graph, state)
        shape, weights = nnx.split(model)

        def loss_of(weights: Any) -> jax.Array:
            scores = nnx.merge(shape, weights)(points)
            return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()

        key = jax.random.key(optimizer.step.get_value())
        loss, gradients = cgx_ops.jax.value_and_grad(
            loss_of, "data", bits=4, key=key, rules=Rules([("bias", 32)])
        )(weights)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    if first:
        state = restore(folder / str(first), state)
    losses = []
    for epoch in range(first, EPOCHS):
        if epoch == EPOCHS // 2 and not first:
            save(folder / str(epoch), state)
        total = []
        for points, labels in batches(mesh, epoch):
            state, loss = step(state, points, labels)
            total.append(float(loss))
        losses.append(float(np.mean(total)))
    return state[0], losses


def main(folder: Path) -> None:
    jax.config.update("jax_platforms", "cpu")
    cgx_ops.jax.initialize()
    weights, losses = train(folder)
    report(losses, weights, train(folder, EPOCHS // 2)[0])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
