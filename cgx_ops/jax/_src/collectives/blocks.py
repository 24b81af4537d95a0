"""Blocks of arrays, one for each device, and calls that send each leaf of a tree separately."""

import operator
from typing import Any

import jax

from cgx_ops.jax._src.collectives.keys import CallSeeds
from cgx_ops.jax._src.collectives.mesh_groups import Axes, mesh_groups
from cgx_ops.jax._src.collectives.options import Options, check_index_key
from cgx_ops.jax._src.collectives.primitive import Settings
from cgx_ops.jax._src.collectives.trees import checked_leaf, name_of


def blocks_of(leaf: jax.Array, dimension: int, size: int) -> jax.Array:
    """Return `size` equal blocks along a dimension, in front."""
    shape = leaf.shape
    cut = (*shape[:dimension], size, shape[dimension] // size, *shape[dimension + 1 :])
    return jax.numpy.moveaxis(leaf.reshape(cut), dimension, 0)


def joined(blocks: jax.Array, dimension: int, *, tiled: bool) -> jax.Array:
    """Move axis 0, the devices', to a dimension; tiled: concatenate the blocks along it."""
    moved = jax.numpy.moveaxis(blocks, 0, dimension)
    if not tiled:
        return moved
    shape = moved.shape
    length = shape[dimension] * shape[dimension + 1]
    return moved.reshape(*shape[:dimension], length, *shape[dimension + 2 :])


def check_split(
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


def each_leaf(options: Options, x: Any, axis_name: Axes, one: Any) -> Any:
    caller, name = options.caller, options.name
    groups = mesh_groups(caller, axis_name)
    paths_and_leaves, tree = jax.tree_util.tree_flatten_with_path(x)
    seeds = CallSeeds(options.key, groups.call_text(options.verb, name), groups.axes)
    results = []
    for index, (path, given) in enumerate(paths_and_leaves):
        leaf, config = checked_leaf(caller, path, given), options.of(path, given)
        check_index_key(caller, options.key, [config], groups.axes)
        called = name_of(name, index, len(paths_and_leaves))
        settings = Settings(
            options.verb, "sum", groups, (config,), called, uses_xla=options.uses_xla
        )
        results.append(one(leaf, settings, seeds.of(index, leaf)))
    return jax.tree_util.tree_unflatten(tree, results)


def dimension_of(caller: str, name: str, given: int, count: int) -> int:
    """Return a dimension as an index from the front; raise ValueError if it does not exist."""
    dimension = operator.index(given)
    if not -count <= dimension < count:
        raise ValueError(f"{caller}: {name} is {given}; it must be from {-count} to {count - 1}")
    return dimension % count
