"""psum_scatter_q and all_gather_q: the two halves of an allreduce, each by itself.

The block that a device keeps or gives is compressed by itself. Their shapes are those of
`jax.lax.psum_scatter` and `jax.lax.all_gather`.
"""

import operator
from typing import Any

import jax

from cgx_ops.config import Compressor
from cgx_ops.jax._keys import CallSeeds
from cgx_ops.jax.knobs import Knobs, check_places, checked_knobs
from cgx_ops.jax.mesh_groups import Axes, mesh_groups
from cgx_ops.jax.primitive import Settings, Verb, bind, vary
from cgx_ops.jax.psum import warn_of_equal_leaves
from cgx_ops.jax.trees import checked_leaf, name_of, sends


def psum_scatter_q(
    x: Any,
    axis_name: Axes,
    *,
    scatter_dimension: int = 0,
    tiled: bool = False,
    bits: int = 4,
    bucket_size: int = 512,
    key: jax.Array | None = None,
    name: str = "",
    skip_incomplete_buckets: bool = False,
    minimal_size: int = 0,
    compressor: Compressor = "uniform",
    density: float | None = None,
    value_bits: int | None = None,
    rotation: int | None = None,
    clip: bool = False,
) -> Any:
    """Sum `x` over mesh axes and keep one block a device, like `jax.lax.psum_scatter`.

    Values travel in `bits` bits and are summed in float32; the sum is not compressed again. The
    derivative is that of `jax.lax.psum_scatter`, exact.

    Args:
        x: an array or a pytree of arrays of float32, float16 or bfloat16; each is a message of its
          own.
        axis_name: name of a mesh axis, or a tuple of names.
        scatter_dimension: the dimension of `x` that is cut into a block for each device of a group.
        tiled: False: that dimension has the size of the group, and is gone in the result. True: it
          is a multiple of that, and stays.
        bits: 1 to 8 bits an element, or 32: exact.
        bucket_size: elements of a block that share one minimum and step, >= 1.
        key: as in `psum_q`.
        name: as in `psum_q`.
        skip_incomplete_buckets: send a block's last bucket exact if it is not full.
        minimal_size: blocks with fewer elements travel exact.
        compressor: as in `psum_q`, but "threshold", which cannot be cut into blocks.
        density: this and the others are the compressor's, as in `psum_q`.
        value_bits: as in `psum_q`.
        rotation: as in `psum_q`.
        clip: as in `psum_q`.

    Returns:
        This device's block of the sums.

    Raises:
        ValueError: the dimension cannot be cut so.
        Other: as `psum_q`.
    """
    caller = "psum_scatter_q"
    knobs = checked_knobs(
        caller, key=key, name=name, bits=bits, bucket_size=bucket_size,
        skip_incomplete_buckets=skip_incomplete_buckets, minimal_size=minimal_size,
        compressor=compressor, density=density, value_bits=value_bits, rotation=rotation, clip=clip,
        verb="reduce_scatter",
    )  # fmt: skip

    def one(leaf: jax.Array, settings: Settings, seed: jax.Array) -> jax.Array:
        dimension = _dimension(caller, "scatter_dimension", scatter_dimension, leaf.ndim)
        size, length = settings.groups.size, leaf.shape[dimension]
        if length % size if tiled else length != size:
            wanted = f"a multiple of {size}" if tiled else f"{size}, or tiled=True"
            raise ValueError(
                f"{caller}: dimension {dimension} of {leaf.shape} has size {length}; the axes "
                f"{settings.groups.axes} have {size} devices, so it must be {wanted}"
            )
        if leaf.size == 0 or not sends(settings.groups, knobs.config):  # but the type changes
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

    warn_of_equal_leaves(caller, x, mesh_groups(caller, axis_name).axes)
    return _each_leaf(caller, "reduce_scatter", x, axis_name, knobs, one)


def all_gather_q(
    x: Any,
    axis_name: Axes,
    *,
    axis: int = 0,
    tiled: bool = False,
    bits: int = 4,
    bucket_size: int = 512,
    key: jax.Array | None = None,
    name: str = "",
    skip_incomplete_buckets: bool = False,
    minimal_size: int = 0,
    compressor: Compressor = "uniform",
    density: float | None = None,
    value_bits: int | None = None,
    rotation: int | None = None,
    clip: bool = False,
) -> Any:
    """Gather the `x` of all devices of a group, like `jax.lax.all_gather`, in `bits` bits.

    Every device gets the same bits: its own values, too, as the others see them. Their checked type
    still varies over the axes, as that of `jax.lax.all_gather`. The derivative is exact.

    Args:
        x: an array or a pytree of arrays of float32, float16 or bfloat16; each is a message of its
          own.
        axis_name: name of a mesh axis, or a tuple of names.
        axis: the dimension of the result along which devices follow each other.
        tiled: False: that dimension is new. True: the blocks are concatenated along it.
        bits: 1 to 8 bits an element, or 32: exact.
        bucket_size: elements that share one minimum and step, >= 1.
        key: as in `psum_q`.
        name: as in `psum_q`.
        skip_incomplete_buckets: send the last bucket exact if it is not full.
        minimal_size: arrays with fewer elements travel exact.
        compressor: as in `psum_q`, but "threshold", which cannot be cut into blocks.
        density: this and the others are the compressor's, as in `psum_q`.
        value_bits: as in `psum_q`.
        rotation: as in `psum_q`.
        clip: as in `psum_q`.

    Returns:
        The gathered values.

    Raises:
        ValueError: there is no such dimension.
        Other: as `psum_q`.
    """
    caller = "all_gather_q"
    knobs = checked_knobs(
        caller, key=key, name=name, bits=bits, bucket_size=bucket_size,
        skip_incomplete_buckets=skip_incomplete_buckets, minimal_size=minimal_size,
        compressor=compressor, density=density, value_bits=value_bits, rotation=rotation, clip=clip,
        verb="all_gather",
    )  # fmt: skip

    def one(leaf: jax.Array, settings: Settings, seed: jax.Array) -> jax.Array:
        dimension = _dimension(caller, "axis", axis, leaf.ndim + (not tiled))
        if leaf.size == 0 or not sends(settings.groups, knobs.config):
            leaf = vary(leaf, frozenset(settings.groups.axes))
            return jax.lax.all_gather(leaf, settings.groups.axes, axis=dimension, tiled=tiled)
        blocks = bind([leaf.reshape(1, -1)], [seed], settings)[0]
        blocks = jax.numpy.moveaxis(blocks.reshape(settings.groups.size, *leaf.shape), 0, dimension)
        if not tiled:
            return blocks
        shape = leaf.shape
        length = settings.groups.size * shape[dimension]
        return blocks.reshape(*shape[:dimension], length, *shape[dimension + 1 :])

    return _each_leaf(caller, "all_gather", x, axis_name, knobs, one)


def _each_leaf(caller: str, verb: Verb, x: Any, axis_name: Axes, knobs: Knobs, one: Any) -> Any:
    groups = mesh_groups(caller, axis_name)
    check_places(knobs, groups.axes)
    paths_and_leaves, tree = jax.tree_util.tree_flatten_with_path(x)
    seeds = CallSeeds(knobs.key, groups.call_text(verb, knobs.name), groups.axes)
    results = []
    for index, (path, given) in enumerate(paths_and_leaves):
        leaf = checked_leaf(caller, path, given)
        settings = Settings(
            verb, "sum", groups, (knobs.config,), name_of(knobs.name, index, len(paths_and_leaves))
        )  # fmt: skip
        results.append(one(leaf, settings, seeds.of(index, leaf)))
    return jax.tree_util.tree_unflatten(tree, results)


def _dimension(caller: str, name: str, given: int, count: int) -> int:
    """Return a dimension counted from the front."""
    dimension = operator.index(given)
    if not -count <= dimension < count:
        raise ValueError(f"{caller}: {name} is {given}; it must be from {-count} to {count - 1}")
    return dimension % count
