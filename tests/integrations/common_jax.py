"""Helpers of the JAX rank programs: examples, batches, checkpoints, reports."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax import NamedSharding, P

import cgx_ops

EPOCHS, BATCH = 6, 64  # batch of all ranks together


def batches(mesh: jax.sharding.Mesh, epoch: int) -> Iterator[tuple[jax.Array, jax.Array]]:
    """Yield an epoch's batches of 512 points with labels of a linear teacher."""
    random = np.random.default_rng(0)
    points, teacher = (random.standard_normal((n, 64), np.float32) for n in (512, 10))
    labels = (points @ teacher.T).argmax(1).astype(np.int32)
    spread = NamedSharding(mesh, P("data"))
    order = np.random.default_rng([1, epoch]).permutation(len(points))
    for chosen in order.reshape(-1, BATCH):
        yield tuple(jax.device_put(part[chosen], spread) for part in (points, labels))  # type: ignore


def save(folder: Path, tree: Any) -> None:
    """Save a tree of arrays (collective)."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, tree)


def restore(folder: Path, like: Any) -> Any:
    """Return a saved tree, with the shapes and the shardings of `like` (collective)."""
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
    )
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder, shapes)


def _digest(tree: Any) -> str:
    leaves = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))
    return hashlib.sha256(leaves).hexdigest()


def report(losses: list[float], weights: Any, resumed: Any) -> None:
    """Print the report (conftest.Trained) as the last line. Weights are replicated."""
    (stats,) = (each for name, each in cgx_ops.stats().items() if name.startswith("jax:"))
    facts = {
        "losses": losses,
        "ratio": stats.ratio,
        "digest": _digest(weights),
        "resumed": _digest(resumed),
    }
    print(json.dumps(facts), flush=True)
