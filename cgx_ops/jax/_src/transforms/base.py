"""The base of the optax transformations that average gradients, and of their states.

A state declares, in its method's file, the fields that differ between devices:

    @per_device("residual")
    class AverageGradientsState(NamedTuple):

1. the declaration
2. what follows from it: specs for shard_map, and consolidation for another number of devices
3. what all methods share
4. what optimizers share that average a momentum
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from cgx_ops.jax._src.collectives.mesh_groups import Axes, axes_of, mesh_groups
from cgx_ops.jax._src.collectives.primitive import vary_tree
from cgx_ops.jax._src.collectives.trees import checked_leaf
from cgx_ops.jax._src.runtime import compat

if TYPE_CHECKING:
    import optax

Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh
State = TypeVar("State", bound=NamedTuple)

# ---- 1. the declaration --------------------------------------------------------------------------


class _Declared(NamedTuple):
    """The arguments of per_device() for one class of states."""

    fields: tuple[str, ...]
    where: Mapping[str, str]
    replicated: Sequence[str]
    check: Callable[[Any, Any], None] | None


_declared: dict[type, _Declared] = {}


def per_device(
    *fields: str,
    where: Mapping[str, str] | None = None,
    replicated: Sequence[str] = (),
    check: Callable[[Any, Any], None] | None = None,
) -> Callable[[type[State]], type[State]]:
    """Declare which fields of a state, a NamedTuple, hold values of each device's own.

    Their leaves have an axis of the devices in front: (devices, *shape) outside of shard_map, and
    (1, *shape) inside. All other fields are equal on all devices, except those of a declared state
    inside this one.

    Args:
        *fields: trees like the parameters, with None for leaves without a value.
        where: for a field of which only some leaves are a device's own: the field that is not None
            at these leaves.
        replicated: fields that are trees like the parameters, but are never sharded.
        check: called by state_specs() with the shapes of this state and of the whole optimizer's.
    """

    def declare(state: type[State]) -> type[State]:
        _declared[state] = _Declared(fields, where or {}, replicated, check)
        return state

    return declare


def _is_declared(node: Any) -> bool:
    return type(node) in _declared


def _map_declared(change: Callable[[Any], Any], tree: Any) -> Any:
    """Replace the declared states in a tree."""
    return jax.tree.map(
        lambda node: change(node) if _is_declared(node) else node, tree, is_leaf=_is_declared
    )


def _map_per_device(change: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to the leaves of each device's own in all declared states of a tree."""

    def changed(state: Any) -> Any:
        declared = _declared[type(state)]

        def of(field: str, value: Any) -> Any:
            if field not in declared.fields:
                return _map_per_device(change, value)
            if value is None:
                return None
            return jax.tree.map(
                lambda own, leaf: leaf if own is None else change(leaf),
                getattr(state, declared.where.get(field, field)), value, is_leaf=is_none,
            )  # fmt: skip

        return type(state)(*map(of, state._fields, state))

    return _map_declared(changed, tree)


# ---- 2. specs, consolidation ---------------------------------------------------------------------


def state_specs(
    optimizer: "optax.GradientTransformation",
    params: Any,
    axis_name: Axes,
    param_specs: Any = None,
) -> Any:
    """Return the PartitionSpecs of an optimizer's state, for shard_map or out_shardings.

    Residuals, and momenta of each device's own, are sharded over the axes. Factors of `power_sgd`
    are replicated. Everything else has the spec of its parameter. To make the state on all devices,
    with each array where it belongs:

        specs = state_specs(optimizer, params, "data")
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        state = jax.jit(optimizer.init, out_shardings=shardings)(params)

    Args:
        optimizer: an optax transformation that contains one of cgx_ops.jax's.
        params: the parameters, or their jax.ShapeDtypeStructs.
        axis_name: the axis name of cgx_ops.jax's transformation.
        param_specs: the PartitionSpecs of the parameters, a tree like `params`; None: P() for all.

    Returns:
        A tree like `optimizer.init(params)`, of PartitionSpecs.

    Raises:
        ImportError: optax is not installed.
        ValueError: as `optimizer.init`, outside of shard_map; momentum would be applied twice to
          a leaf: by deep_gradient and by a transformation behind it.
    """
    optax = import_optax("state_specs")
    if param_specs is None:
        param_specs = jax.tree.map(lambda _: jax.P(), params)
    state = jax.eval_shape(optimizer.init, params)
    for node in jax.tree.leaves(state, is_leaf=_is_declared):
        if _is_declared(node) and (check := _declared[type(node)].check):
            check(node, state)

    def replicated(state: Any) -> Any:
        fields = {field: getattr(state, field) for field in _declared[type(state)].replicated}
        return state._replace(**jax.tree.map(lambda _: jax.P(), fields))

    specs = _map_declared(replicated, specs_like_params(optax, optimizer, state, param_specs))
    return _map_per_device(lambda spec: jax.P(axis_name, *spec), specs)


def specs_like_params(optax: Any, optimizer: Any, state: Any, param_specs: Any) -> Any:
    """Return the specs of an optax state: those of the parameters for trees like them, else P()."""
    # A leaf without a residual is no leaf for JAX, but one for the specs.
    masked = lambda node: node is None or isinstance(node, optax.MaskedNode)  # noqa: E731
    return optax.tree.map_params(
        optimizer, lambda leaf, spec: leaf if masked(leaf) else spec, state, param_specs,
        transform_non_params=lambda _: jax.P(), is_leaf=masked,
    )  # fmt: skip


def consolidate(state: Any, devices: int | None = None) -> Any:
    """Return an optimizer's state with each device's own values replaced by their mean.

    These are residuals, momenta of `deep_gradient`'s sparse leaves and of `signum`, and the flight
    of an outer loop (`diloco`). The average needs only the mean of the residuals, which
    stays the same for any number of devices. So a run on another number can continue from the
    state:

        saved = consolidate(state, devices=1)                # in the old run, before it is saved
        state = consolidate(restored, devices=jax.device_count())               # in the new one

    On the same number of devices, a state that was not consolidated gives the same bits.

    Args:
        state: of an outer loop, or of an optax transformation that contains one of cgx_ops.jax's,
          outside of shard_map. In jax.jit, out_shardings from `state_specs` put the result where
          it belongs.
        devices: how many the result is for; None: as many as `state` is for.

    Returns:
        A state like `state`, whose values of each device's own are (devices, *shape). The mean is
        computed in float32.

    Raises:
        ValueError: `state` contains no state of cgx_ops.jax; `devices` is less than 1.
    """
    mean_of = mean_over("consolidate", devices)
    if not any(map(_is_declared, jax.tree.leaves(state, is_leaf=_is_declared))):
        raise ValueError(
            "consolidate: the state contains no state of cgx_ops.jax: give it that of an optimizer "
            "with one of its transformations, or that of an outer loop"
        )
    return _map_per_device(mean_of, state)


def mean_over(caller: str, devices: int | None) -> Callable[[Any], jax.Array]:
    """Return a function that replaces (n, *shape) by the mean over n, as (devices, *shape)."""
    if devices is not None and devices < 1:
        raise ValueError(f"{caller}: devices is {devices}; it must be at least 1")

    def mean_of(own: Any) -> jax.Array:
        own = jnp.asarray(own)
        if jnp.issubdtype(own.dtype, jnp.floating):
            mean = jnp.mean(own, axis=0, dtype=jnp.float32).astype(own.dtype)
        else:
            mean = first_of(own)
        return jnp.broadcast_to(mean, (devices or len(own), *mean.shape))

    return mean_of


def first_of(own: jax.Array) -> jax.Array:
    """Return own[0]; JAX cuts no axis that its types have sharded (an explicit mesh)."""
    sharding = jax.typeof(own).sharding
    if sharding.spec[0] is not None:
        whole = jax.NamedSharding(sharding.mesh, jax.P(None, *sharding.spec[1:]))
        own = jax.sharding.reshard(own, whole)
    return own[0]


# ---- 3. what all methods share -------------------------------------------------------------------


def import_optax(caller: str) -> Any:
    """Import optax, which nothing else here needs."""
    try:
        import optax
    except ImportError:
        raise ImportError(f"cgx_ops.jax.{caller} needs optax: pip install optax") from None
    return optax


def is_none(leaf: Any) -> bool:
    """Return whether a leaf is None, as is_leaf of jax.tree.map()."""
    return leaf is None


def zero_residuals(
    caller: str,
    params: Any,
    axis_name: Axes,
    mesh: Mesh | None,
    *,
    keeps: Callable[[Any, Any], bool] = lambda path, leaf: True,
    dtype: Any = jnp.float32,
) -> Any:
    """Return zeros for a tree of parameters, an array for each device.

    Args:
        caller: for errors.
        params: the parameters, without an axis for the devices.
        axis_name: the axes of the devices.
        mesh: of the devices; None: that of jax.set_mesh.
        keeps: whether a leaf, by its path, has a residual; else there is None for it.
        dtype: of the zeros; None: that of each leaf.

    Returns:
        A tree like `params`, of arrays (1, *shape) inside of shard_map and (devices, *shape)
        outside.
    """
    kept = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if keeps(path, leaf) else None, params
    )
    names = axes_of(axis_name)
    if any(compat.axis_size(axis) is not None for axis in names):
        axes = mesh_groups(caller, axis_name).axes
        return vary_tree(jax.tree.map(lambda x: jnp.zeros_like(x, dtype=dtype)[None], kept), axes)
    devices = devices_of(caller, names, mesh) if jax.tree.leaves(kept) else 0
    return jax.tree.map(
        lambda x: jnp.zeros((devices, *jnp.shape(x)), dtype or jnp.result_type(x)), kept
    )


def devices_of(caller: str, axes: tuple[Hashable, ...], mesh: Mesh | None) -> int:
    """Return how many devices a group has, outside of shard_map."""
    sizes = dict((mesh or jax.sharding.get_abstract_mesh()).shape)
    unknown = [axis for axis in axes if axis not in sizes]
    if unknown:
        raise ValueError(
            f"{caller}: init outside of shard_map needs the sizes of the axes {unknown}, "
            f"and the mesh here has {list(sizes)}: give {caller} the mesh of the "
            "shard_map, or call jax.set_mesh"
        )
    return math.prod(sizes[axis] for axis in axes)


def check_own(caller: str, updates: Any, axes: tuple[Hashable, ...]) -> None:
    """Require that gradients are each device's own, where types show it."""
    if not compat.types_are_checked():
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(updates):
        same = frozenset(axes) - compat.varying_axes(leaf)
        if same:
            raise ValueError(
                f"{caller}: updates{jax.tree_util.keystr(path)} is the same on all "
                f"devices of {sorted(same, key=str)}: JAX has summed this gradient already, "
                "exactly, and it is N times too large for an average. Differentiate "
                'jax.lax.pcast(params, axis_name, to="varying") instead of params'
            )


def own_residual(
    caller: str,
    path: Any,
    update: jax.Array,
    residual: jax.Array | None,
    *,
    keeps: bool = False,
    decay: float = 1.0,
) -> jax.Array | None:
    """Return this device's part of a residual, decayed, if the leaf has one; it must if `keeps`."""
    where = f"updates{jax.tree_util.keystr(path)}"
    if residual is None and keeps:
        raise ValueError(
            f"{caller}: {where} has error feedback, and the state has no residual for it: the "
            "state was made without error feedback, or with other settings. Make it by init, with "
            "these"
        )
    if residual is None:
        return None
    if residual.shape != (1, *update.shape):
        raise ValueError(
            f"{caller}: the residual of {where} has shape {residual.shape} here, not "
            f"{(1, *update.shape)}: give shard_map the state with the in_specs and out_specs of "
            "cgx_ops.jax.state_specs"
        )
    return residual[0] if decay == 1 else residual[0] * decay


# ---- 4. optimizers that average a momentum ------------------------------------------------------


def checked_gradients(caller: str, updates: Any, state: Any, axes: Any) -> Any:
    """Return a device's own gradients in float32, which must be like the state."""
    check_own(caller, updates, axes)
    found, known = jax.tree.structure(updates), jax.tree.structure(state)
    if found != known:
        raise ValueError(
            f"{caller}: the gradients are {found}, the state {known}: it is another model's"
        )
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(updates), jax.tree.leaves(state), strict=True
    ):
        if jnp.shape(x) != jnp.shape(y)[jnp.ndim(y) - jnp.ndim(x) :]:
            raise ValueError(
                f"{caller}: updates{jax.tree_util.keystr(path)} has shape {jnp.shape(x)}, and the "
                f"state {jnp.shape(y)}: it is another model's"
            )
    return jax.tree_util.tree_map_with_path(
        lambda path, x: checked_leaf(caller, path, x).astype(jnp.float32), updates
    )


def followed(momenta: Any, gradients: Any, beta: float) -> Any:
    """Return momenta after a step: exponential moving averages of gradients."""
    return jax.tree.map(lambda m, g: m * beta + g * (1 - beta), momenta, gradients)


def with_rate(
    optax: Any, init: Any, update: Any, caller: str, learning_rate: Any, weight_decay: float
) -> "optax.GradientTransformation":
    """Return an optimizer that scales the updates of a transformation by the learning rate."""
    if not weight_decay >= 0:
        raise ValueError(f"{caller}: weight_decay is {weight_decay!r}; it must be at least 0")
    return optax.chain(
        optax.GradientTransformation(init, update),
        optax.add_decayed_weights(weight_decay) if weight_decay else optax.identity(),
        optax.scale_by_learning_rate(learning_rate),
    )
