"""Checks that parameters and a state belong to an outer loop, and that its processes agree.

1. shapes, on each process
2. settings and contents, across processes, before anything is sent: with different settings a
   process would wait for messages that no process sends; with different outer parameters the models
   would drift apart without an error
"""

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cgx_ops._core import launchers
from cgx_ops._core.consistency import require_same
from cgx_ops.jax._src.diloco.state import DiLoCoState
from cgx_ops.jax._src.runtime import compat

# ---- 1. shapes -----------------------------------------------------------------------------------


def check_values(caller: str, values: Any, outer_parameters: Any, devices: int) -> None:
    """Require that parameters fit the outer ones and have an axis over the devices.

    Args:
        caller: The public function, for errors.
        values: The parameters that are averaged.
        outer_parameters: Those of the state.
        devices: The number of devices; 1 inside of shard_map.

    Raises:
        ValueError: They do not fit.
    """
    found, known = jax.tree.structure(values), jax.tree.structure(outer_parameters)
    if found != known:
        raise ValueError(
            f"{caller}: the parameters have the structure {found}, and the outer parameters "
            f"{known}: the state belongs to another model"
        )
    for (path, x), outer in zip(
        jax.tree_util.tree_leaves_with_path(values), jax.tree.leaves(outer_parameters), strict=True
    ):
        if jnp.shape(x) != (devices, *jnp.shape(outer)):
            raise ValueError(
                f"{caller}: params{jax.tree_util.keystr(path)} has shape {jnp.shape(x)} here, not "
                f"{(devices, *jnp.shape(outer))}: start with replicate(weights), and give "
                "shard_map the specs of copy_specs() and state_specs()"
            )


def check_state(
    caller: str, state: DiLoCoState, new: dict[str, tuple[int, ...]], values: Any
) -> None:
    """Require that a state has the shapes of a new state of the loop.

    Args:
        caller: The public function, for errors.
        state: The user's state.
        new: shapes_of() a new state.
        values: The parameters that are averaged, (devices, *shape), like residuals.

    Raises:
        ValueError: It has other shapes.
    """
    found = shapes_of(state)
    # A leaf that became exact has no residual in a new state, but still sends its old one.
    old = {
        f"{field}{place}": shape
        for field in (".residual", ".flight.residual")
        for place, shape in shapes_of(values).items()
    }
    for place in {**new, **found}:
        has, wanted = found.get(place), new.get(place, old.get(place))
        if has != wanted:
            raise ValueError(
                f"{caller}: state{place} is {_described(has)}, but {_described(wanted)} in a state "
                "of this loop: it comes from a loop with other settings, or from another number "
                "of devices; for the latter, convert it with cgx_ops.jax.consolidate(state, "
                "devices)"
            )


def shapes_of(tree: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a tree's leaves by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): jnp.shape(leaf) for path, leaf in leaves}


def _described(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"of shape {shape}"


# ---- 2. across processes -------------------------------------------------------------------------

# Counts the exchanges of each outer loop, to make the keys of JAX's store unique.
_exchanges: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


def require_same_processes(
    mesh: jax.sharding.Mesh, name: str, settings: Mapping[str, Any], contents: Mapping[str, Any]
) -> None:
    """Require that all processes of a mesh have the same settings and the same contents.

    All processes of the mesh must call it.

    Args:
        mesh: The mesh of the outer loop.
        name: The name of the outer loop.
        settings: Values by name; compared as texts.
        contents: Bytes or trees of arrays by name; compared as hashes. Of trees, only arrays count
            that are whole on every device.

    Raises:
        jax.errors.JaxRuntimeError: Another process does not call it in time.
        MismatchError: In all processes. It names the first difference, and the values of two
            processes.
    """
    processes = sorted({device.process_index for device in mesh.devices.flat})
    if len(processes) == 1:
        return
    place = f"cgx_ops.jax.diloco/{name}/{','.join(map(str, processes))}"

    def gather(mine: bytes) -> list[bytes]:
        key = f"{place}/{next(_exchanges[place])}"
        try:
            return compat.gather_from_processes(key, mine, launchers.timeout(), processes)
        except jax.errors.JaxRuntimeError as error:
            raise jax.errors.JaxRuntimeError(
                f"diloco {name!r}: not all of the processes {processes} compared their outer "
                "parameters in time, at the first outer() or in skip(). If one has continued "
                f"without the others, restart all processes from the last checkpoint: {error}"
            ) from error

    require_same(
        f"diloco {name!r}",
        {**settings, **{key: f"sha256 {_digest(value)}" for key, value in contents.items()}},
        gather,
        "Give all processes the same settings, the same weights and the same checkpoint",
        members=[f"process {process}" for process in processes],
    )


def _digest(content: Any) -> str:
    digest = hashlib.sha256()
    if isinstance(content, bytes):
        digest.update(content)
        return digest.hexdigest()
    for path, leaf in jax.tree_util.tree_leaves_with_path(content):
        digest.update(f"{jax.tree_util.keystr(path)} {np.shape(leaf)}".encode())
        if not isinstance(leaf, jax.Array):
            digest.update(np.asarray(leaf).tobytes())
        elif leaf.is_fully_replicated:
            digest.update(np.asarray(leaf.addressable_data(0)).tobytes())
    return digest.hexdigest()
