"""Helpers of the diloco tests: a model, and the updates of its inner steps."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax

from cgx_ops import Rules
from cgx_ops.jax import DiLoCo
from support.jax_cases import Values, normal, same_bits, spread, with_config

# Three layers, in two or three fragments, and a bias that is exact because of its size. XLA:CPU
# runs the last one in the background; programs below about 1000 operations run immediately.
SHAPES = {
    "blocks/0/kernel": (24, 30),
    "blocks/0/bias": (12,),
    "blocks/1/kernel": (7, 90),
    "head/kernel": (1700,),
}


PLAIN: dict[str, Any] = {"sync_every": 2, "bits": 4}
STREAMING: dict[str, Any] = {
    "sync_every": 6, "fragments": 3, "fragment_sync_delay": 1, "fragment_update_alpha": 0.5,
    "bits": 2, "compressor": "levels", "algorithm": "sra",
}  # fmt: skip
SPARSE: dict[str, Any] = {
    "sync_every": 2, "compressor": "topk", "density": 4 / 64, "bucket_size": 64,
    "mean_over": "senders", "residual_decay": 0.95, "outer_optimizer": optax.sgd(0.8),
}  # fmt: skip


def loop_options(options: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the arguments of diloco(), which compresses all leaves."""
    return with_config(**{"rules": Rules(exact_vectors=False), **options, **more})


def weights(dtype: Any = np.float32) -> Any:
    """Return one device's parameters, as a tree."""
    leaves = [normal(i, *shape).astype(dtype) for i, shape in enumerate(SHAPES.values())]
    return tree_of(dict(zip(SHAPES, leaves, strict=True)))


def tree_of(leaves: dict[str, Any]) -> Any:
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *folders, last = name.split("/")
        at = tree
        for folder in folders:
            at = at.setdefault(folder, {})
        at[last] = leaf
    return tree


def leaf_of(tree: Any, name: str) -> Any:
    for word in name.split("/"):
        tree = tree[word]
    return tree


def started(loop: DiLoCo) -> Any:
    """Return the initial parameters and state."""
    return loop.replicate(weights()), loop.init(weights())


def moves(step: int, devices: int) -> dict[str, Values]:
    """Return the update of an inner step for each device, independent of the parameters."""
    return {
        name: 0.1 * normal(1000 * step + i, 1, *shape)
        + 0.2 * normal(1000 * step + 500 + i, devices, *shape)
        for i, (name, shape) in enumerate(SHAPES.items())
    }


def added(params: Any, by: Any) -> Any:
    """Return parameters after an inner step."""
    return jax.tree.map(lambda p, d: p + d.astype(p.dtype), params, by)


moved = jax.jit(added)


def spread_moves(mesh: Any, step: int, devices: int) -> Any:
    """Return the updates as arrays of the mesh."""
    rows = jax.P("d")
    return tree_of({n: spread(mesh, x, rows) for n, x in moves(step, devices).items()})


def trained(
    loop: DiLoCo, mesh: Any, start: Any, steps: Sequence[int],
    outer: Callable[..., Any] | None = None,
) -> Any:  # fmt: skip
    """Return parameters and state after these steps."""
    params, state = start
    for step in steps:
        params = moved(params, spread_moves(mesh, step, mesh.size))
        params, state = (outer or loop.outer)(params, state)
    return params, state


def all_same(a: Any, b: Any) -> bool:
    """Return whether two trees have the same leaves, bit for bit."""
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(a) == len(b) and all(map(same_bits, a, b))
