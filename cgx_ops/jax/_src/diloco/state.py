"""What an outer loop (_diloco.py) keeps.

1. the state
2. where it lies on the devices
3. what it is worth on another number of them
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from cgx_ops.jax._src.transforms.base import is_none, mean_over, per_device, specs_like_params

# ---- 1. the state --------------------------------------------------------------------------------


@per_device("lost")
class Flight(NamedTuple):
    """What an outer loop has sent and not applied yet.

    Attributes:
        fragment: int32 scalar: of which fragment; -1: of none, whatever else is here.
        average: a tree like the anchors, equal on all devices.
        lost: a tree like the residuals, which it becomes: what the average has lost.
    """

    fragment: jax.Array
    average: Any
    lost: Any


@per_device("residual")
class DiLoCoState(NamedTuple):
    """What an outer loop keeps between steps. All of it is float32, but for counts.

    Attributes:
        step: int32 scalar: the inner steps done, equal on all devices.
        anchor: what parameters were when they were last equal on all devices: a tree like those of
          one device, with None for leaves that are left alone.
        outer: the outer optimizer's state of each fragment, equal on all devices.
        residual: as of AverageGradientsState.
        flight: None without a delay.
    """

    step: jax.Array
    anchor: Any
    outer: tuple[Any, ...]
    residual: Any
    flight: Flight | None


# ---- 2. where it lies ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Where arrays of an outer loop lie.

    Attributes:
        axis_name: the axes over which devices train by themselves.
        mesh: of the devices; None: that of jax.set_mesh.
        param_specs: the PartitionSpecs of one device's parameters; None: P() for all.
    """

    axis_name: Any
    mesh: jax.sharding.Mesh | None
    param_specs: Any

    def shared(self, tree: Any) -> Any:
        """Return the specs of what is equal on all devices: a tree like the weights, or part of it.

        None stays None.
        """
        if self.param_specs is None:
            return jax.tree.map(lambda _: jax.P(), tree)
        return jax.tree.map(
            lambda leaf, spec: None if leaf is None else spec,
            tree, self.param_specs, is_leaf=is_none,
        )  # fmt: skip

    def own(self, tree: Any) -> Any:
        """Return the specs of what each device has of its own, with an axis in front."""
        return jax.tree.map(lambda spec: jax.P(self.axis_name, *spec), self.shared(tree))

    def of_outer(self, optax: Any, optimizer: Any, state: Any, anchor: Any) -> Any:
        """Return the specs of the outer optimizer's state of a fragment."""
        return specs_like_params(optax, optimizer, state, self.shared(anchor))

    def placed(self, function: Callable[..., Any], specs: Any, *args: Any) -> Any:
        """Return what a function makes of its arguments, by these specs."""
        mesh = self.found_mesh()
        shardings = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs)
        return jax.jit(function, out_shardings=shardings)(*args)

    def number(self, value: int) -> jax.Array:
        """Return an int32 scalar that all devices have."""
        sharding = self._everywhere
        return jax.make_array_from_callback((), sharding, lambda _: np.int32(value))

    @functools.cached_property
    def _everywhere(self) -> jax.NamedSharding:
        return jax.NamedSharding(self.found_mesh(), jax.P())

    def found_mesh(self) -> jax.sharding.Mesh:
        """Return the mesh that it was given, or that of jax.set_mesh."""
        return self.mesh or jax.sharding.get_mesh()


# ---- 3. on another number of devices -------------------------------------------------------------


def consolidate_copies(copies: Any, devices: int | None = None) -> Any:
    """Return copies, one a device, that are their mean over the devices, equal on all.

    For what an outer loop's devices have of their own besides its state: the parameters, and the
    state of the optimizer inside. The mean of what they have come to since the anchors stays the
    same, whatever the number of devices.

    Args:
        copies: a tree of arrays (devices, *shape), outside of shard_map.
        devices: for how many; None: for as many as there are.

    Returns:
        A tree like `copies`, of (devices, *shape). Floating-point means are taken in float32; of
        other dtypes all get the first device's.

    Raises:
        ValueError: `devices` is less than 1.
    """
    return jax.tree.map(mean_over("consolidate_copies", devices), copies)
