"""Rank program: equinox and optax, 2 bits with error feedback; a second run resumes half way."""

# pyright: reportMissingImports=false
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
from common_jax import EPOCHS, batches, report, restore, save
from jax import NamedSharding, P, lax

import cgx_ops.jax
from cgx_ops import Rules


def train(folder: Path, first: int = 0) -> tuple[Any, list[float]]:
    """Train from epoch `first`, with its checkpoint unless it is 0."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    model = eqx.nn.MLP(64, 10, width_size=256, depth=2, key=jax.random.key(0))
    weights, static = eqx.partition(model, eqx.is_array)
    averaged = cgx_ops.jax.average_gradients("data", bits=2, rules=Rules([("bias", 32)]), mesh=mesh)
    optimizer = optax.chain(averaged, optax.adam(3e-3))

    specs = cgx_ops.jax.state_specs(optimizer, weights, "data")
    weights = jax.device_put(weights, NamedSharding(mesh, P()))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    state = jax.jit(optimizer.init, out_shardings=shardings)(weights)

    @jax.jit
    @jax.shard_map(
        mesh=mesh, in_specs=(P(), specs, P("data"), P("data")), out_specs=(P(), specs, P())
    )
    def step(weights: Any, state: Any, points: jax.Array, labels: jax.Array) -> Any:
        def loss_of(weights: Any) -> jax.Array:
            scores = jax.vmap(eqx.combine(weights, static))(points)
            return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()

        copies = lax.pcast(weights, "data", to="varying")
        loss, gradients = jax.value_and_grad(loss_of)(copies)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, lax.pmean(loss, "data")

    if first:
        weights, state = restore(folder / str(first), (weights, state))
    losses = []
    for epoch in range(first, EPOCHS):
        if epoch == EPOCHS // 2 and not first:
            save(folder / str(epoch), (weights, state))
        total = []
        for points, labels in batches(mesh, epoch):
            weights, state, loss = step(weights, state, points, labels)
            total.append(float(loss))
        losses.append(float(np.mean(total)))
    return weights, losses


def main(folder: Path) -> None:
    jax.config.update("jax_platforms", "cpu")
    cgx_ops.jax.initialize()
    weights, losses = train(folder)
    report(losses, weights, train(folder, EPOCHS // 2)[0])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
