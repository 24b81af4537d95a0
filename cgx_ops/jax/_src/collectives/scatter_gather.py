"""psum_scatter_q and all_gather_q: each device's block is compressed separately.

Shapes are those of `jax.lax.psum_scatter` and `jax.lax.all_gather`.
"""

from typing import Any, Unpack

import jax

from cgx_ops.config import Config, Keywords
from cgx_ops.jax._src.collectives.blocks import (
    blocks_of,
    check_split,
    dimension_of,
    each_leaf,
    joined,
)
from cgx_ops.jax._src.collectives.mesh_groups import Axes, mesh_groups
from cgx_ops.jax._src.collectives.options import Options, checked_options
from cgx_ops.jax._src.collectives.primitive import Settings, bind, vary
from cgx_ops.jax._src.collectives.psum import warn_of_equal_leaves
from cgx_ops.jax._src.collectives.trees import sends


def psum_scatter_q(
    x: Any,
    axis_name: Axes,
    *,
    scatter_dimension: int = 0,
    tiled: bool = False,
    config: Config | None = None,
    key: jax.Array | None = None,
    name: str = "",
    **keywords: Unpack[Keywords],
) -> Any:
    """Sum over mesh axes and keep one block per device, like `jax.lax.psum_scatter`.

    Values are sent quantized and summed in float32. The sum is not compressed again. Buckets never
    cross block boundaries. The derivative is the exact one of `jax.lax.psum_scatter`.

    Args:
        x: An array or a pytree of arrays of float32, float16 or bfloat16. Each leaf is a separate
            message.
        axis_name: Name of a mesh axis, or a tuple of names.
        scatter_dimension: The dimension of `x` that is split into one block per device. Default 0.
        tiled: False (default): the dimension must equal the number of devices, and is removed.
            True: it must be a multiple of it, and stays in the result, divided by it.
        config: How values are sent, as in `psum_q`. The algorithms "one_shot" and "ring" are
            "sra"; `gather_bits` has no effect.
        key: A PRNG key for random rounding, another one in every step. None (default) rounds to
            nearest.
        name: Identifies the collective across processes, as in `psum_q`.
        **keywords: `bits`, `bucket_size`, `compressor` and `rounding` override fields of `config`.

    Returns:
        This device's block of the sums, in the structure and dtypes of `x`.

    Raises:
        ValueError: The dimension does not exist or cannot be split; a setting does not fit, as in
            `psum_q`.
        NameError: An axis name is not bound by a `shard_map` around the call.
        TypeError: A leaf, key or static argument has the wrong type, as in `psum_q`.
        NotImplementedError: The axes or the platform are not supported, as in `psum_q`; or the
            processes hold different numbers of a group's devices.
        RuntimeError: Processes cannot connect natively, or the mesh is abstract, as in `psum_q`.
        jax.errors.JaxRuntimeError: At run time, a peer failed, as in `psum_q`.

    Example:
        >>> import jax
        >>> from cgx_ops.jax import psum_scatter_q
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> blocks = jax.shard_map(
        ...     lambda x: psum_scatter_q(x, "data", tiled=True, bits=8),
        ...     mesh=mesh, in_specs=jax.P(), out_specs=jax.P("data"),
        ... )
        >>> blocks(jax.numpy.ones(4))
        Array([1., 1., 1., 1.], dtype=float32)
    """
    options = checked_options(
        "psum_scatter_q", config, keywords, key=key, name=name, verb="reduce_scatter"
    )
    warn_of_equal_leaves(options.caller, x, mesh_groups(options.caller, axis_name).axes)
    return scatter_over(options, x, axis_name, scatter_dimension, tiled=tiled)


def scatter_over(
    options: Options, x: Any, axis_name: Axes, scatter_dimension: int, *, tiled: bool
) -> Any:
    """Reduce and scatter a tree, as psum_scatter_q() documents it."""
    caller = options.caller

    def one(leaf: jax.Array, settings: Settings, seed: jax.Array) -> jax.Array:
        dimension = dimension_of(caller, "scatter_dimension", scatter_dimension, leaf.ndim)
        size, length = settings.groups.size, leaf.shape[dimension]
        check_split(caller, leaf, dimension, settings, tiled=tiled)
        if leaf.size == 0 or not sends(settings.groups, settings.configs[0]):  # make the type vary
            leaf = vary(leaf, frozenset(settings.groups.axes))
            return jax.lax.psum_scatter(
                leaf, settings.groups.axes, scatter_dimension=dimension, tiled=tiled
            )
        shape = leaf.shape
        kept = bind([blocks_of(leaf, dimension, size).reshape(size, 1, -1)], [seed], settings)[0]
        block = (*shape[:dimension], *([length // size] if tiled else []), *shape[dimension + 1 :])
        return kept.reshape(block)

    return each_leaf(options, x, axis_name, one)


def all_gather_q(
    x: Any,
    axis_name: Axes,
    *,
    axis: int = 0,
    tiled: bool = False,
    config: Config | None = None,
    key: jax.Array | None = None,
    name: str = "",
    **keywords: Unpack[Keywords],
) -> Any:
    """Gather arrays from all devices of a group, quantized, like `jax.lax.all_gather`.

    All devices get bit-identical results. A device sees its own values quantized, too, as the
    others see them. As for `jax.lax.all_gather`, the checked type of the result varies over the
    axes. The derivative is the exact one of `jax.lax.all_gather`.

    Args:
        x: An array or a pytree of arrays of float32, float16 or bfloat16. Each leaf is a separate
            message.
        axis_name: Name of a mesh axis, or a tuple of names.
        axis: The dimension of the result along which the devices' values lie. Default 0.
        tiled: False (default): `axis` is a new dimension. True: values are concatenated along it.
        config: How values are sent, as in `psum_q`, with the algorithms of `psum_scatter_q`.
            `gather_bits`, if set, replaces `bits`; `intra_bits` has no effect.
        key: A PRNG key for random rounding, another one in every step. None (default) rounds to
            nearest.
        name: Identifies the collective across processes, as in `psum_q`.
        **keywords: `bits`, `bucket_size`, `compressor` and `rounding` override fields of `config`.

    Returns:
        The gathered values, in the structure and dtypes of `x`.

    Raises:
        ValueError: The dimension does not exist; a setting does not fit, as in `psum_q`.
        NameError: An axis name is not bound by a `shard_map` around the call.
        TypeError: A leaf, key or static argument has the wrong type, as in `psum_q`.
        NotImplementedError: As in `psum_scatter_q`.
        RuntimeError: Processes cannot connect natively, or the mesh is abstract, as in `psum_q`.
        jax.errors.JaxRuntimeError: At run time, a peer failed, as in `psum_q`.

    Example:
        >>> import jax
        >>> from cgx_ops.jax import all_gather_q
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> gather = jax.shard_map(
        ...     lambda x: all_gather_q(x, "data", tiled=True, bits=8),
        ...     mesh=mesh, in_specs=jax.P(), out_specs=jax.P("data"),
        ... )
        >>> gather(jax.numpy.ones(4))
        Array([1., 1., 1., 1.], dtype=float32)
    """
    options = checked_options(
        "all_gather_q", config, keywords, key=key, name=name, verb="all_gather"
    )

    def one(leaf: jax.Array, settings: Settings, seed: jax.Array) -> jax.Array:
        dimension = dimension_of(options.caller, "axis", axis, leaf.ndim + (not tiled))
        if leaf.size == 0 or not sends(settings.groups, settings.configs[0]):
            leaf = vary(leaf, frozenset(settings.groups.axes))
            return jax.lax.all_gather(leaf, settings.groups.axes, axis=dimension, tiled=tiled)
        blocks = bind([leaf.reshape(1, -1)], [seed], settings)[0]
        return joined(blocks.reshape(settings.groups.size, *leaf.shape), dimension, tiled=tiled)

    return each_leaf(options, x, axis_name, one)
