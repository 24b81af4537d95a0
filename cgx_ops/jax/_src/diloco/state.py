"""The state of an outer loop.

1. the state
2. its sharding
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


@per_device("residual")
class Flight(NamedTuple):
    """A fragment that an outer loop has sent and not applied yet.

    Attributes:
        fragment: The index of the fragment, an int32 scalar. -1: there is none, and the other
            fields are ignored.
        average: The average, a tree like the outer parameters, equal on all devices.
        residual: The quantization errors of the average. They become `DiLoCoState.residual`.

    Example:
        >>> import jax
        >>> from cgx_ops.jax import diloco
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> loop = diloco("data", sync_every=4, fragment_sync_delay=1, mesh=mesh)
        >>> int(loop.init(jax.numpy.ones((30, 40))).flight.fragment)
        -1
    """

    fragment: jax.Array
    average: Any
    residual: Any


@per_device("residual")
class DiLoCoState(NamedTuple):
    """The state of an outer loop between steps. All arrays but counts are float32.

    Attributes:
        step: Number of inner steps done, an int32 scalar, equal on all devices.
        outer_parameters: The parameters after the last synchronization, equal on all devices: a
            tree like the parameters of one device, with None for leaves that are not averaged.
        outer: The outer optimizer's state of each fragment, equal on all devices.
        residual: Each device's quantization error, with an axis over the devices in front, as in
            `AverageGradientsState`.
        flight: The fragment in flight. None if the loop has no delay.

    Example:
        >>> import jax
        >>> from cgx_ops.jax import diloco
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> state = diloco("data", sync_every=2, mesh=mesh).init(jax.numpy.ones((30, 40)))
        >>> state.outer_parameters.shape, state.residual.shape
        ((30, 40), (1, 30, 40))
    """

    step: jax.Array
    outer_parameters: Any
    outer: tuple[Any, ...]
    residual: Any
    flight: Flight | None


# ---- 2. where it lies ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """How arrays of an outer loop are sharded.

    Attributes:
        axis_name: The axes over which devices train independently.
        mesh: The mesh of the devices; None: that of jax.set_mesh.
        param_specs: The PartitionSpecs of one device's parameters; None: P() for all.
    """

    axis_name: Any
    mesh: jax.sharding.Mesh | None
    param_specs: Any

    def shared(self, tree: Any) -> Any:
        """Return the specs of a tree like the weights, or part of it, that is equal on all devices.

        None stays None.
        """
        if self.param_specs is None:
            return jax.tree.map(lambda _: jax.P(), tree)
        return jax.tree.map(
            lambda leaf, spec: None if leaf is None else spec,
            tree, self.param_specs, is_leaf=is_none,
        )  # fmt: skip

    def own(self, tree: Any) -> Any:
        """Return the specs of per-device values, with an axis over the devices in front."""
        return jax.tree.map(lambda spec: jax.P(self.axis_name, *spec), self.shared(tree))

    def of_outer(self, optax: Any, optimizer: Any, state: Any, parameters: Any) -> Any:
        """Return the specs of the outer optimizer's state of a fragment."""
        return specs_like_params(optax, optimizer, state, self.shared(parameters))

    def placed(self, function: Callable[..., Any], specs: Any, *args: Any) -> Any:
        """Call a function, with its results sharded by these specs."""
        mesh = self.found_mesh()
        shardings = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs)
        return jax.jit(function, out_shardings=shardings)(*args)

    def number(self, value: int) -> jax.Array:
        """Return an int32 scalar that is replicated on all devices."""
        sharding = self._everywhere
        return jax.make_array_from_callback((), sharding, lambda _: np.int32(value))

    @functools.cached_property
    def _everywhere(self) -> jax.NamedSharding:
        return jax.NamedSharding(self.found_mesh(), jax.P())

    def found_mesh(self) -> jax.sharding.Mesh:
        """Return the given mesh, or that of jax.set_mesh."""
        return self.mesh or jax.sharding.get_mesh()


# ---- 3. copies for another number of devices -----------------------------------------------------


def consolidate_copies(copies: Any, devices: int | None = None) -> Any:
    """Replace each device's copy of a tree by the mean over the devices, for any number of devices.

    Use it, with `consolidate`, to continue an outer loop on another number of devices: for the
    parameters and for the state of the inner optimizer. The mean difference to the outer parameters
    stays the same.

    Args:
        copies: A tree of arrays `(devices, *shape)`, outside of `shard_map`.
        devices: The number of devices of the result. None (default): as in `copies`.

    Returns:
        A tree like `copies`, of arrays `(devices, *shape)`. Means of floating-point leaves are
        computed in float32. Other leaves get the first device's values.

    Raises:
        ValueError: `devices` is less than 1.

    Example:
        >>> import jax.numpy as jnp
        >>> from cgx_ops.jax import consolidate_copies
        >>> consolidate_copies(jnp.array([[1.0], [3.0]]), devices=3)
        Array([[2.],
               [2.],
               [2.]], dtype=float32)
    """
    return jax.tree.map(mean_over("consolidate_copies", devices), copies)
