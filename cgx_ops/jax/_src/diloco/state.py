"""The state of an outer loop.

1. the state
2. where it lies on the devices
3. copies for another number of devices
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
    """A fragment that an outer loop has sent and not applied yet.

    Attributes:
        fragment: int32 scalar: its number; -1: there is none, and the other fields do not count.
        average: a tree like the outer parameters, equal on all devices.
        lost: a tree like the residuals, whose next value it is: the quantization error.
    """

    fragment: jax.Array
    average: Any
    lost: Any


@per_device("residual")
class DiLoCoState(NamedTuple):
    """The state of an outer loop between steps. All of it is float32, except counts.

    Attributes:
        step: int32 scalar: the inner steps done, equal on all devices.
        outer_parameters: the parameters when they were last equal on all devices: a tree like
          those of one device, with None for leaves that are not averaged.
        outer: the outer optimizer's state of each fragment, equal on all devices.
        residual: as of AverageGradientsState.
        flight: None without a delay.
    """

    step: jax.Array
    outer_parameters: Any
    outer: tuple[Any, ...]
    residual: Any
    flight: Flight | None


# ---- 2. where it lies ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Where arrays of an outer loop lie.

    Attributes:
        axis_name: the axes over which devices train independently.
        mesh: of the devices; None: that of jax.set_mesh.
        param_specs: the PartitionSpecs of one device's parameters; None: P() for all.
    """

    axis_name: Any
    mesh: jax.sharding.Mesh | None
    param_specs: Any

    def shared(self, tree: Any) -> Any:
        """Return the specs of values equal on all devices: a tree like the weights, or part of it.

        None stays None.
        """
        if self.param_specs is None:
            return jax.tree.map(lambda _: jax.P(), tree)
        return jax.tree.map(
            lambda leaf, spec: None if leaf is None else spec,
            tree, self.param_specs, is_leaf=is_none,
        )  # fmt: skip

    def own(self, tree: Any) -> Any:
        """Return the specs of values that differ between devices, with an axis in front."""
        return jax.tree.map(lambda spec: jax.P(self.axis_name, *spec), self.shared(tree))

    def of_outer(self, optax: Any, optimizer: Any, state: Any, parameters: Any) -> Any:
        """Return the specs of the outer optimizer's state of a fragment."""
        return specs_like_params(optax, optimizer, state, self.shared(parameters))

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


# ---- 3. copies for another number of devices -----------------------------------------------------


def consolidate_copies(copies: Any, devices: int | None = None) -> Any:
    """Return copies, one a device, that are their mean over the devices, equal on all.

    For the values of each device outside of the outer loop's state: the parameters, and the
    state of the inner optimizer. The mean difference to the outer parameters stays the same for any
    number of devices.

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
