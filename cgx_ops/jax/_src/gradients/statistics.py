"""What quantization must lose of each leaf, inside a program: for planner.AdaptiveBits."""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from cgx_ops.errors import InvalidArgument
from cgx_ops.jax._src.collectives.options import name_of_leaf


def statistics(
    tree: Any, *, bucket_size: int = 512, compressor: Literal["uniform", "levels"] = "uniform"
) -> dict[str, jax.Array]:
    """Return each leaf's statistic (cgx_ops.planner.statistic) by value, in float32.

    Average it over the mesh axes, so that all devices have the same, and give it to
    AdaptiveBits.observe():

        found = jax.lax.pmean(statistics(gradients), "data")

    where gradients are each device's own: of jax.lax.pcast(params, "data", to="varying") where
    shard_map checks types, because JAX sums those of shared params automatically.

    Args:
        tree: a pytree of arrays, such as a device's own gradients.
        bucket_size: as the leaves travel.
        compressor: as they travel: "uniform" has sums of B R^2 / 12, "levels" of squares.

    Returns:
        A scalar for each leaf that has values, by its name in rules and plans.

    Raises:
        InvalidArgument: another compressor, or no bucket size.
    """
    if compressor not in ("uniform", "levels") or bucket_size < 1:
        raise InvalidArgument(
            f"compressor is {compressor!r} and bucket_size {bucket_size}; statistics are those of "
            "'uniform' and 'levels', in buckets of one value or more"
        )

    def loss(leaf: Any) -> jax.Array:
        flat = jnp.reshape(leaf, -1).astype(jnp.float32)
        if compressor == "levels":
            return jnp.mean(jnp.square(flat))
        size = min(bucket_size, flat.size)
        buckets = math.ceil(flat.size / size)
        last = flat.size - (buckets - 1) * size
        filled = jnp.pad(flat, (0, size - last), mode="edge").reshape(buckets, size)
        spread = jnp.square(filled.max(axis=1) - filled.min(axis=1))
        return (size * spread[:-1].sum() + last * spread[-1]) / (12 * flat.size)

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {name_of_leaf(path): loss(leaf) for path, leaf in leaves if jnp.size(leaf)}
