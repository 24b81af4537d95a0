"""Helpers of the tests of optimizers with sharded states: meshes, programs, checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax import NamedSharding
from jax.sharding import PartitionSpec as P

from cgx_ops.jax import state_specs
from support.jax_cases import mesh_of, same_bits


def mesh_with(devices: int) -> Any:
    return mesh_of((devices,), ("d",), jax.devices()[:devices])


def program_of(
    optimizer: Any, params: Any, mesh: Any, check_vma: bool = True, applies: bool = False
) -> Any:
    """Return step(params, state, rows), which returns the updates and the new state.

    Gradients are each device's row, independent of the parameters. The old state is donated, except
    if the step `applies` the updates and returns new parameters.
    """
    specs = state_specs(optimizer, params, "d")

    def step(params: Any, state: Any, rows: Any) -> Any:
        updates, state = optimizer.update(jax.tree.map(lambda x: x[0], rows), state, params)
        return optax.apply_updates(params, updates) if applies else updates, state

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), specs, P("d")), out_specs=(P(), specs),
        check_vma=check_vma,
    )  # fmt: skip
    return jax.jit(mapped, donate_argnums=() if applies else 1)


def placed(optimizer: Any, params: Any, mesh: Any) -> Any:
    """Return the initial state, with its sharding."""
    specs = state_specs(optimizer, params, "d")
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    return jax.jit(optimizer.init, out_shardings=shardings)(params)


def copied(state: Any) -> Any:
    """Return a state as numpy arrays, which are not donated."""
    return jax.tree.map(lambda x: np.array(jnp.copy(x)), state)


def restored(state: Any, folder: Path) -> Any:
    """Return a state saved and loaded by orbax, with the sharding of `state`."""
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder / "state", like)


def check_resumed(
    optimizer: Any, params: Any, mesh: Any, rows: Callable[[int], Any], steps: int, folder: Path
) -> Any:
    """Check that a checkpoint after `steps` resumes bit for bit; return the state.

    rows(i): the gradients of step i.
    """
    step, state = program_of(optimizer, params, mesh), placed(optimizer, params, mesh)
    for i in range(steps):
        _, state = step(params, state, rows(i))
    again = restored(state, folder)
    for i in range(steps, 2 * steps):
        want, state = step(params, state, rows(i))
        got, again = step(params, again, rows(i))
        assert all(same_bits(got[name], want[name]) for name in params), i
    return again


def check_none_is_no_leaf(optimizer: Any, params: Any, rows: Any, mesh: Any) -> None:
    """Check two steps of a dict of arrays: None beside them does not change averages."""
    averages = []
    for more in ({}, {"none": None, "pair": (None, None)}):
        weights = params | more
        step, state = program_of(optimizer, weights, mesh), placed(optimizer, weights, mesh)
        _, state = step(weights, state, rows | more)
        got, _ = step(weights, state, rows | more)
        assert jax.tree.structure(got) == jax.tree.structure(weights)
        averages.append(got)
    assert all(same_bits(averages[0][name], averages[1][name]) for name in params)
