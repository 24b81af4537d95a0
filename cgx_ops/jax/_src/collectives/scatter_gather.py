"""psum_scatter_q, all_gather_q and all_to_all_q: collectives with a block for each device.

Each device's block is compressed separately. Shapes are those of `jax.lax.psum_scatter`,
`jax.lax.all_gather` and `jax.lax.all_to_all`.
"""

import operator
from typing import Any, Unpack

import jax

from cgx_ops.config import Config, Keywords
from cgx_ops.jax._src.collectives.keys import CallSeeds
from cgx_ops.jax._src.collectives.mesh_groups import Axes, mesh_groups
from cgx_ops.jax._src.collectives.options import Options, check_index_key, checked_options
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
        dimension = _dimension(caller, "scatter_dimension", scatter_dimension, leaf.ndim)
        size, length = settings.groups.size, leaf.shape[dimension]
        _check_split(caller, leaf, dimension, settings, tiled=tiled)
        if leaf.size == 0 or not sends(settings.groups, settings.configs[0]):  # make the type vary
            leaf = vary(leaf, frozenset(settings.groups.axes))
            return jax.lax.psum_scatter(
                leaf, settings.groups.axes, scatter_dimension=dimension, tiled=tiled
            )
        shape = leaf.shape
        kept = bind([_blocks(leaf, dimension, size).reshape(size, 1, -1)], [seed], settings)[0]
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
        dimension = _dimension(options.caller, "axis", axis, leaf.ndim + (not tiled))
        if leaf.size == 0 or not sends(settings.groups, settings.configs[0]):
            leaf = vary(leaf, frozenset(settings.groups.axes))
            return jax.lax.all_gather(leaf, settings.groups.axes, axis=dimension, tiled=tiled)
        blocks = bind([leaf.reshape(1, -1)], [seed], settings)[0]
        return _joined(blocks.reshape(settings.groups.size, *leaf.shape), dimension, tiled=tiled)

    return _each_leaf(options, x, axis_name, one)


def all_to_all_q(
    x: Any,
    axis_name: Axes,
    split_axis: int,
    concat_axis: int,
    *,
    tiled: bool = False,
    config: Config | None = None,
    key: jax.Array | None = None,
    name: str = "",
    **keywords: Unpack[Keywords],
) -> Any:
    """Exchange blocks among all devices of a group, quantized, like `jax.lax.all_to_all`.

    The sender encodes each block once, and the receiver decodes it. A device's block for itself is
    copied exactly. If several processes have several CPU devices of a group each, blocks between
    devices of one process are exact, too. The derivative is the exact one of `jax.lax.all_to_all`.

    Args:
        x: An array or a pytree of arrays of float32, float16 or bfloat16. Each leaf is a separate
            message.
        axis_name: Name of a mesh axis, or a tuple of names.
        split_axis: The dimension of `x` that is split into one block per device.
        concat_axis: The dimension of the result along which the received blocks lie.
        tiled: False (default): `split_axis` must have as many elements as there are devices, and is
            removed; `concat_axis` is a new dimension. True: it must be a multiple of that number,
            and blocks are concatenated along `concat_axis`.
        config: How values are sent, as in `psum_q`. `algorithm`, `gather_bits` and `intra_bits`
            have no effect.
        key: A PRNG key for random rounding, another one in every step. None (default) rounds to
            nearest.
        name: Identifies the collective across processes, as in `psum_q`.
        **keywords: `bits`, `bucket_size`, `compressor` and `rounding` override fields of `config`.

    Returns:
        The received blocks, in the structure and dtypes of `x`.

    Raises:
        ValueError: A dimension does not exist or cannot be split; a setting does not fit, as in
            `psum_q`.
        NameError: An axis name is not bound by a `shard_map` around the call.
        TypeError: A leaf, key or static argument has the wrong type, as in `psum_q`.
        NotImplementedError: As in `psum_scatter_q`.
        RuntimeError: Processes cannot connect natively, or the mesh is abstract, as in `psum_q`.
        jax.errors.JaxRuntimeError: At run time, a peer failed, as in `psum_q`.

    Example:
        >>> import jax
        >>> from cgx_ops.jax import all_to_all_q
        >>> mesh = jax.make_mesh((1,), ("expert",))
        >>> dispatch = jax.shard_map(
        ...     lambda x: all_to_all_q(x, "expert", 0, 0, tiled=True, bits=8),
        ...     mesh=mesh, in_specs=jax.P(), out_specs=jax.P("expert"),
        ... )
        >>> dispatch(jax.numpy.ones((4, 2))).shape  # one device
        (4, 2)
    """
    options = checked_options(
        "all_to_all_q", config, keywords, key=key, name=name, verb="all_to_all"
    )
    caller = options.caller

    def one(leaf: jax.Array, settings: Settings, seed: jax.Array) -> jax.Array:
        split = _dimension(caller, "split_axis", split_axis, leaf.ndim)
        concat = _dimension(caller, "concat_axis", concat_axis, leaf.ndim)
        _check_split(caller, leaf, split, settings, tiled=tiled)
        size, axes = settings.groups.size, settings.groups.axes
        if leaf.size == 0 or not sends(settings.groups, settings.configs[0]):
            leaf = vary(leaf, frozenset(axes))
            return jax.lax.all_to_all(leaf, axes, split, concat, tiled=tiled)
        blocks = _blocks(leaf, split, size)
        if not tiled:
            blocks = blocks.squeeze(split + 1)
        received = bind([blocks.reshape(size, 1, -1)], [seed], settings)[0].reshape(blocks.shape)
        return _joined(received, concat, tiled=tiled)

    return _each_leaf(options, x, axis_name, one)


def _blocks(leaf: jax.Array, dimension: int, size: int) -> jax.Array:
    """Return `size` equal blocks along a dimension, in front."""
    shape = leaf.shape
    cut = (*shape[:dimension], size, shape[dimension] // size, *shape[dimension + 1 :])
    return jax.numpy.moveaxis(leaf.reshape(cut), dimension, 0)


def _joined(blocks: jax.Array, dimension: int, *, tiled: bool) -> jax.Array:
    """Move axis 0, the devices', to a dimension; tiled: concatenate the blocks along it."""
    moved = jax.numpy.moveaxis(blocks, 0, dimension)
    if not tiled:
        return moved
    shape = moved.shape
    length = shape[dimension] * shape[dimension + 1]
    return moved.reshape(*shape[:dimension], length, *shape[dimension + 2 :])


def _check_split(
    caller: str, leaf: jax.Array, dimension: int, settings: Settings, *, tiled: bool
) -> None:
    """Raise ValueError unless a dimension has a block for each device."""
    size, length = settings.groups.size, leaf.shape[dimension]
    if length % size if tiled else length != size:
        wanted = f"a multiple of {size}" if tiled else f"{size}, or tiled=True"
        raise ValueError(
            f"{caller}: dimension {dimension} of {leaf.shape} has size {length}; the axes "
            f"{settings.groups.axes} have {size} devices, so it must be {wanted}"
        )


def _each_leaf(options: Options, x: Any, axis_name: Axes, one: Any) -> Any:
    caller, name = options.caller, options.name
    groups = mesh_groups(caller, axis_name)
    paths_and_leaves, tree = jax.tree_util.tree_flatten_with_path(x)
    seeds = CallSeeds(options.key, groups.call_text(options.verb, name), groups.axes)
    results = []
    for index, (path, given) in enumerate(paths_and_leaves):
        leaf, config = checked_leaf(caller, path, given), options.of(path, given)
        check_index_key(caller, options.key, [config], groups.axes)
        called = name_of(name, index, len(paths_and_leaves))
        settings = Settings(options.verb, "sum", groups, (config,), called)
        results.append(one(leaf, settings, seeds.of(index, leaf)))
    return jax.tree_util.tree_unflatten(tree, results)


def _dimension(caller: str, name: str, given: int, count: int) -> int:
    """Return a dimension as an index from the front; raise ValueError if it does not exist."""
    dimension = operator.index(given)
    if not -count <= dimension < count:
        raise ValueError(f"{caller}: {name} is {given}; it must be from {-count} to {count - 1}")
    return dimension % count
