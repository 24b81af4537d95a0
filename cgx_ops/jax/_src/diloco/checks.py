"""Whether parameters and a state belong to an outer loop, and whether its processes agree.

1. shapes, on each process
2. settings and contents, across processes, before anything is sent: with other settings a process
   would wait for messages that no process sends, and with other outer parameters models would drift
   apart silently
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
    """Require that parameters are like the outer ones, and have an axis for the devices.

    Args:
        caller: for errors.
        values: the parameters that are averaged.
        outer_parameters: of a state.
        devices: how many there are; 1 inside of shard_map.

    Raises:
        ValueError: they are not.
    """
    found, known = jax.tree.structure(values), jax.tree.structure(outer_parameters)
    if found != known:
        raise ValueError(
            f"{caller}: the parameters are {found}, the outer parameters {known}: the state is "
            "another model's"
        )
    for (path, x), outer in zip(
        jax.tree_util.tree_leaves_with_path(values), jax.tree.leaves(outer_parameters), strict=True
    ):
        if jnp.shape(x) != (devices, *jnp.shape(outer)):
            raise ValueError(
                f"{caller}: params{jax.tree_util.keystr(path)} has shape {jnp.shape(x)} here, "
                f"not {(devices, *jnp.shape(outer))}: begin with replicate(weights), and give "
                "shard_map the specs of copy_specs() and state_specs()"
            )


def check_state(
    caller: str, state: DiLoCoState, new: dict[str, tuple[int, ...]], values: Any
) -> None:
    """Require that a state has the shapes of a new one of the loop.

    Args:
        caller: for errors.
        state: what is given.
        new: shapes_of() a new state.
        values: the parameters that are averaged, (devices, *shape), as residuals are.

    Raises:
        ValueError: it has others.
    """
    found = shapes_of(state)
    # A leaf that has become exact has no residual in a new state, and still sends its old one.
    old = {
        f"{field}{place}": shape
        for field in (".residual", ".flight.lost")
        for place, shape in shapes_of(values).items()
    }
    for place in {**new, **found}:
        has, wanted = found.get(place), new.get(place, old.get(place))
        if has != wanted:
            raise ValueError(
                f"{caller}: state{place} is {_described(has)}, and {_described(wanted)} in a state "
                "of this loop: it comes from a loop with other settings, or from another number of "
                "devices, for which cgx_ops.jax.consolidate(state, devices) makes it fit"
            )


def shapes_of(tree: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a tree's leaves by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): jnp.shape(leaf) for path, leaf in leaves}


def _described(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"of shape {shape}"


# ---- 2. across processes -------------------------------------------------------------------------

# The exchanges of each outer loop so far, which make the keys of JAX's store unique.
_exchanges: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


def require_same_processes(
    mesh: jax.sharding.Mesh, name: str, settings: Mapping[str, Any], contents: Mapping[str, Any]
) -> None:
    """Require that all processes of a mesh have the same settings and the same contents.

    Collective among them, if there are several.

    Args:
        mesh: the mesh of the outer loop.
        name: of the outer loop.
        settings: by name; compared as texts.
        contents: by name: bytes, or trees of arrays, of which those count that are whole on every
            device; compared as hashes.

    Raises:
        jax.errors.JaxRuntimeError: another process does not do this in time.
        MismatchError: in all of them; it names the first difference, and what two processes have.
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
                "parameters in time, at the first outer() or in skip(). Where one goes on without "
                f"the others, restart all processes from the last checkpoint: {error}"
            ) from error

    require_same(
        f"diloco {name!r}",
        {**settings, **{key: f"sha256 {_digest(value)}" for key, value in contents.items()}},
        gather,
        "Give all processes the same settings, the same weights and one checkpoint",
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
