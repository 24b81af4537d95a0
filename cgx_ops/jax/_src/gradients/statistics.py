"""The expected quantization error of each leaf, for planner.AdaptiveBits."""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from cgx_ops import Config, Rules
from cgx_ops.errors import InvalidArgument
from cgx_ops.jax._src.collectives.options import name_of_leaf


def statistics(
    tree: Any,
    *,
    bucket_size: int = 512,
    compressor: Literal["uniform", "levels", "entropy"] = "uniform",
    rules: Rules = Rules(),  # noqa: B008  (immutable)
) -> dict[str, jax.Array]:
    """Measure how large the quantization error of each leaf must be, as input of adaptive bits.

    The values are those of `cgx_ops.planner.statistic`. Average them over the mesh axes, so that
    all devices have the same, and pass them to `cgx_ops.planner.AdaptiveBits.observe`::

        found = jax.lax.pmean(statistics(gradients), "data")

    Pass each device's own gradients: inside a `shard_map` that checks types, differentiate
    `jax.lax.pcast(weights, "data", to="varying")`.

    Args:
        tree: A pytree of arrays, such as a device's own gradients.
        bucket_size: The bucket size with which leaves are sent. Default 512.
        compressor: "uniform" (default), "levels" or "entropy", as leaves are sent. "uniform"
            measures the ranges of buckets, the others the mean square.
        rules: Leaves whose bits, rate or encoding these rules set are left out. By default leaves
            of one dimension or less, which `Rules` makes exact.

    Returns:
        A dict from leaf name, as in rules and plans, to a float32 scalar. Empty leaves are left
        out.

    Raises:
        cgx_ops.InvalidArgument: The compressor is another one, or `bucket_size` is less than 1.

    Example:
        >>> import jax.numpy as jnp
        >>> from cgx_ops.jax import statistics
        >>> statistics({"kernel": jnp.array([[0.0, 3.0, 6.0]]), "bias": jnp.ones(3)})
        {'kernel': Array(3., dtype=float32)}
    """
    if compressor not in ("uniform", "levels", "entropy") or bucket_size < 1:
        raise InvalidArgument(
            f"compressor is {compressor!r} and bucket_size is {bucket_size}; compressor must be "
            "'uniform', 'levels' or 'entropy', and bucket_size at least 1"
        )

    def loss(leaf: Any) -> jax.Array:
        flat = jnp.reshape(leaf, -1).astype(jnp.float32)
        if compressor != "uniform":
            return jnp.mean(jnp.square(flat))
        size = min(bucket_size, flat.size)
        buckets = math.ceil(flat.size / size)
        last = flat.size - (buckets - 1) * size
        filled = jnp.pad(flat, (0, size - last), mode="edge").reshape(buckets, size)
        spread = jnp.square(filled.max(axis=1) - filled.min(axis=1))
        return (size * spread[:-1].sum() + last * spread[-1]) / (12 * flat.size)

    config = Config(compressor=compressor)
    leaves = [(name_of_leaf(p), x) for p, x in jax.tree_util.tree_leaves_with_path(tree)]
    return {
        name: loss(x)
        for name, x in leaves
        if jnp.size(x) and not rules.fix_bits(name, jnp.ndim(x), config)
    }
