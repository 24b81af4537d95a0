"""psum_scatter_q and all_gather_q: the two halves of an allreduce, each alone.

The block that a device keeps or gives is compressed separately. Their shapes are those of
`jax.lax.psum_scatter` and `jax.lax.all_gather`.
"""

import operator
from typing import Any, Unpack

import jax

from cgx_ops.config import Config, Keywords
from cgx_ops.jax._src.collectives.keys import CallSeeds
from cgx_ops.jax._src.collectives.mesh_groups import Axes, mesh_groups
from cgx_ops.jax._src.collectives.options import Options, check_places, checked_options
from cgx_ops.jax._src.collectives.primitive import Settings, bind, vary
from cgx_ops.jax._src.collectives.psum import warn_of_equal_leaves
from cgx_ops.jax._src.collectives.trees import checked_leaf, name_of, sends


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
    """Sum `x` over mesh axes and keep one block a device, like `jax.lax.psum_scatter`.

    Values travel compressed and are summed in float32; the sum is not compressed again. Buckets are
    those of a block. The derivative is that of `jax.lax.psum_scatter`, exact.

    Args:
        x: an array or a pytree of arrays of float32, float16 or bfloat16; each is a message of its
          own.
        axis_name: name of a mesh axis, or a tuple of names.
        scatter_dimension: the dimension of `x` that is cut into a block for each device of a group.
        tiled: False: that dimension has the size of the group, and is gone in the result. True: it
          is a multiple of that, and stays.
        config: as in `psum_q`. Not "threshold", which cannot be cut into blocks. `algorithm`,
          `gather_bits` and `intra_bits` have no effect.
        key: as in `psum_q`.
        name: as in `psum_q`.
        **keywords: bits, bucket_size, compressor and rounding, which replace those of config.

    Returns:
        This device's block of the sums.

    Raises:
        ValueError: the dimension cannot be cut so.
        Other: as `psum_q`.

    Example:
        >>> mesh = jax.make_mesh((1,), ("d",))
        >>> blocks = jax.shard_map(
        ...     lambda x: psum_scatter_q(x, "d", tiled=True, bits=8),
        ...     mesh=mesh, in_specs=jax.P(), out_specs=jax.P("d"),
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
    """Reduce as psum_scatter_q() does."""
    caller = options.caller

    def one(leaf: jax.Array, settings: Settings, seed: jax.Array) -> jax.Array:
        dimension = _dimension(caller, "scatter_dimension", scatter_dimension, leaf.ndim)
        size, length = settings.groups.size, leaf.shape[dimension]
        if length % size if tiled else length != size:
            wanted = f"a multiple of {size}" if tiled else f"{size}, or tiled=True"
            raise ValueError(
                f"{caller}: dimension {dimension} of {leaf.shape} has size {length}; the axes "
                f"{settings.groups.axes} have {size} devices, so it must be {wanted}"
            )
        if leaf.size == 0 or not sends(settings.groups, settings.configs[0]):  # the type changes
            leaf = vary(leaf, frozenset(settings.groups.axes))
            return jax.lax.psum_scatter(
                leaf, settings.groups.axes, scatter_dimension=dimension, tiled=tiled
            )
        shape = leaf.shape
        cut = (*shape[:dimension], size, length // size, *shape[dimension + 1 :])
        blocks = jax.numpy.moveaxis(leaf.reshape(cut), dimension, 0)
        kept = bind([blocks.reshape(size, 1, -1)], [seed], settings)[0]
        block = (*shape[:dimension], *([length // size] if tiled else []), *shape[dimension + 1 :])
        return kept.reshape(block)

    return _each_leaf(options, x, axis_name, one)


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
    """Gather the `x` of all devices of a group, compressed, like `jax.lax.all_gather`.

    Every device gets the same bits: its own values, too, as the others see them. Their checked type
    still varies over the axes, as that of `jax.lax.all_gather`. The derivative is exact.

    Args:
        x: an array or a pytree of arrays of float32, float16 or bfloat16; each is a message of its
          own.
        axis_name: name of a mesh axis, or a tuple of names.
        axis: the dimension of the result along which devices follow each other.
        tiled: False: that dimension is new. True: the blocks are concatenated along it.
        config: as in `psum_scatter_q`.
        key: as in `psum_q`.
        name: as in `psum_q`.
        **keywords: bits, bucket_size, compressor and rounding, which replace those of config.

    Returns:
        The gathered values.

    Raises:
        ValueError: there is no such dimension.
        Other: as `psum_q`.

    Example:
        >>> mesh = jax.make_mesh((1,), ("d",))
        >>> gather = jax.shard_map(
        ...     lambda x: all_gather_q(x, "d", tiled=True, bits=8),
        ...     mesh=mesh, in_specs=jax.P(), out_specs=jax.P("d"),
        ... )
        >>> gather(jax.numpy.ones(4))
        Array([1., 1., 1., 1.], dtype=float32)
    """
    options = checked_options(
        "all_gather_q", config, keywords, key=key, name=name, verb="all_gather"
    )

    def one(leaf: jax.Array, settings: Settings, seed: jax.Array) -> jax.Array:
        dimension = _dimension(options.caller, "axis", axis, leaf.ndim + (not tiled))
        if leaf.size == 0 or not sends(settings.groups, settings.configs[0]):
            leaf = vary(leaf, frozenset(settings.groups.axes))
            return jax.lax.all_gather(leaf, settings.groups.axes, axis=dimension, tiled=tiled)
        blocks = bind([leaf.reshape(1, -1)], [seed], settings)[0]
        blocks = jax.numpy.moveaxis(blocks.reshape(settings.groups.size, *leaf.shape), 0, dimension)
        if not tiled:
            return blocks
        shape = leaf.shape
        length = settings.groups.size * shape[dimension]
        return blocks.reshape(*shape[:dimension], length, *shape[dimension + 1 :])

    return _each_leaf(options, x, axis_name, one)


def _each_leaf(options: Options, x: Any, axis_name: Axes, one: Any) -> Any:
    caller, name = options.caller, options.name
    groups = mesh_groups(caller, axis_name)
    paths_and_leaves, tree = jax.tree_util.tree_flatten_with_path(x)
    seeds = CallSeeds(options.key, groups.call_text(options.verb, name), groups.axes)
    results = []
    for index, (path, given) in enumerate(paths_and_leaves):
        leaf, config = checked_leaf(caller, path, given), options.of(path, given)
        check_places(caller, options.key, [config], groups.axes)
        called = name_of(name, index, len(paths_and_leaves))
        settings = Settings(options.verb, "sum", groups, (config,), called)
        results.append(one(leaf, settings, seeds.of(index, leaf)))
    return jax.tree_util.tree_unflatten(tree, results)


def _dimension(caller: str, name: str, given: int, count: int) -> int:
    """Return a dimension counted from the front."""
    dimension = operator.index(given)
    if not -count <= dimension < count:
        raise ValueError(f"{caller}: {name} is {given}; it must be from {-count} to {count - 1}")
    return dimension % count
