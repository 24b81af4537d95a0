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
import jax.numpy as jnp
import numpy as np

# ---- 1. the state --------------------------------------------------------------------------------


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
            tree, self.param_specs, is_leaf=_is_none,
        )  # fmt: skip

    def own(self, tree: Any) -> Any:
        """Return the specs of what each device has of its own, with an axis in front."""
        return jax.tree.map(lambda spec: jax.P(self.axis_name, *spec), self.shared(tree))

    def of_outer(self, optax: Any, optimizer: Any, state: Any, anchor: Any) -> Any:
        """Return the specs of the outer optimizer's state of a fragment."""
        # What has no residual is no leaf for JAX, but one for the specs.
        masked = lambda node: node is None or isinstance(node, optax.MaskedNode)  # noqa: E731
        return optax.tree.map_params(
            optimizer, lambda leaf, spec: leaf if masked(leaf) else spec, state,
            self.shared(anchor), transform_non_params=lambda _: jax.P(), is_leaf=masked,
        )  # fmt: skip

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


def _is_none(leaf: Any) -> bool:
    return leaf is None


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


def mean_over(caller: str, devices: int | None) -> Callable[[Any], jax.Array]:
    """Return what makes (n, *shape) the mean over n, (devices, *shape)."""
    if devices is not None and devices < 1:
        raise ValueError(f"{caller}: devices is {devices}; it must be at least 1")

    def mean_of(own: Any) -> jax.Array:
        own = jnp.asarray(own)
        is_float = jnp.issubdtype(own.dtype, jnp.floating)
        mean = (
            jnp.mean(own, axis=0, dtype=jnp.float32).astype(own.dtype)
            if is_float
            else first_of(own)
        )
        return jnp.broadcast_to(mean, (devices or len(own), *mean.shape))

    return mean_of


def first_of(own: jax.Array) -> jax.Array:
    """Return own[0]; JAX cuts no axis that its types have sharded (an explicit mesh)."""
    sharding = jax.typeof(own).sharding
    if sharding.spec[0] is not None:
        whole = jax.NamedSharding(sharding.mesh, jax.P(None, *sharding.spec[1:]))
        own = jax.sharding.reshard(own, whole)
    return own[0]
