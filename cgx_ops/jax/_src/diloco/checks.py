"""Whether parameters and a state are those of an outer loop (_diloco.py), by their shapes."""

from typing import Any

import jax
import jax.numpy as jnp

from cgx_ops.jax._src.diloco.state import DiLoCoState


def check_values(caller: str, values: Any, anchors: Any, devices: int) -> None:
    """Require that parameters are those of anchors, and have an axis for the devices.

    Args:
        caller: for errors.
        values: those that are averaged.
        anchors: of a state.
        devices: how many there are; 1 inside of shard_map.

    Raises:
        ValueError: they are not.
    """
    found, known = jax.tree.structure(values), jax.tree.structure(anchors)
    if found != known:
        raise ValueError(
            f"{caller}: the parameters are {found}, the anchors {known}: the state is another "
            "model's"
        )
    for (path, x), anchor in zip(
        jax.tree_util.tree_leaves_with_path(values), jax.tree.leaves(anchors), strict=True
    ):
        if jnp.shape(x) != (devices, *jnp.shape(anchor)):
            raise ValueError(
                f"{caller}: params{jax.tree_util.keystr(path)} has shape {jnp.shape(x)} here, "
                f"not {(devices, *jnp.shape(anchor))}: begin with replicate(weights), and give "
                "shard_map the specs of copy_specs() and state_specs()"
            )


def check_state(
    caller: str, state: DiLoCoState, new: dict[str, tuple[int, ...]], values: Any
) -> None:
    """Require that a state is like a new one of a loop.

    Args:
        caller: for errors.
        state: what is given.
        new: shapes_of() a new state.
        values: the parameters that are averaged, (devices, *shape), as residuals are.

    Raises:
        ValueError: it is not.
    """
    found = shapes_of(state)
    # Leaves that have become exact, and have no residual in a new state, send what they owe.
    owed = {
        f"{of}{place}": shape
        for of in (".residual", ".flight.lost")
        for place, shape in shapes_of(values).items()
    }
    for place in {**new, **found}:
        has, wanted = found.get(place), new.get(place, owed.get(place))
        if has != wanted:
            raise ValueError(
                f"{caller}: state{place} is {_told(has)}, and {_told(wanted)} in a state of this "
                "loop: it comes from a loop with other settings, or from another number of "
                "devices, for which cgx_ops.jax.consolidate(state, devices) makes it fit"
            )


def shapes_of(tree: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a tree's leaves by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): jnp.shape(leaf) for path, leaf in leaves}


def _told(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"of shape {shape}"
