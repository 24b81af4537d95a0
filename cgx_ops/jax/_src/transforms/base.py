"""The base of the optax transformations that average gradients, and of their states.

A state declares, in its method's file, the fields that differ between devices:

    @per_device("residual")
    class AverageGradientsState(NamedTuple):

1. the declaration
2. derived from it: specs for shard_map, and consolidation for another number of devices
3. shared by all methods
4. shared by optimizers that average a momentum
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
    """Declare which fields of a state, a NamedTuple, hold values that differ between devices.

    Their leaves have an axis over the devices in front: (devices, *shape) outside of shard_map and
    (1, *shape) inside. All other fields are equal on all devices, except fields that contain
    another declared state.

    Args:
        *fields: Trees like the parameters, with None for leaves without a value.
        where: For a field of which only some leaves differ between devices: the name of the field
            that is not None at these leaves.
        replicated: Fields that are trees like the parameters, but are never sharded.
        check: Called by state_specs() with the shapes of this state and of the whole optimizer
            state.
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
    """Apply a function to the per-device leaves of all declared states of a tree."""

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
    """Return the PartitionSpecs of an optimizer's state, for `shard_map` or `out_shardings`.

    Values that differ between devices, such as residuals, are sharded over the axes. Factors of
    `power_sgd` are replicated. All other leaves have the spec of their parameter. To create a state
    with each array on its devices::

        specs = state_specs(optimizer, weights, "data")
        shardings = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs)
        state = jax.jit(optimizer.init, out_shardings=shardings)(weights)

    Args:
        optimizer: An optax transformation that contains one of `cgx_ops.jax`.
        params: The parameters, or their `jax.ShapeDtypeStruct`.
        axis_name: The `axis_name` of the transformation of `cgx_ops.jax`.
        param_specs: The PartitionSpecs of the parameters, a tree like `params`. None (default)
            means `P()` for all of them.

    Returns:
        A tree of PartitionSpecs, like `optimizer.init(params)`.

    Raises:
        ImportError: optax is not installed.
        ValueError: As `optimizer.init` outside of a `shard_map`; or `deep_gradient` and another
            transformation would both apply momentum to a leaf.

    Example:
        >>> import jax
        >>> from cgx_ops.jax import average_gradients, state_specs
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> optimizer = average_gradients("data", bits=2, mesh=mesh)
        >>> state_specs(optimizer, jax.numpy.ones((4, 4)), "data")
        AverageGradientsState(step=P(), residual=P('data',))
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
    # None (a leaf without a residual) is not a leaf in JAX, but needs a spec.
    masked = lambda node: node is None or isinstance(node, optax.MaskedNode)  # noqa: E731
    return optax.tree.map_params(
        optimizer, lambda leaf, spec: leaf if masked(leaf) else spec, state, param_specs,
        transform_non_params=lambda _: jax.P(), is_leaf=masked,
    )  # fmt: skip


def consolidate(state: Any, devices: int | None = None) -> Any:
    """Replace the per-device values of an optimizer state by their mean, for any number of devices.

    Use it to continue a run on another number of devices. Per-device values are residuals, the
    momenta of `signum` and of the sparse leaves of `deep_gradient`, and a `Flight` of `diloco`.
    Their mean, which is all that matters for averages, stays the same::

        saved = consolidate(state, devices=1)                          # in the old run
        state = consolidate(restored, devices=jax.device_count())      # in the new run

    On the same number of devices, save the state itself: then a run continues with the same bits.

    Args:
        state: The state of an optax transformation that contains one of `cgx_ops.jax`, or of a
            `DiLoCo` loop, outside of `shard_map`. In `jax.jit`, set `out_shardings` from
            `state_specs`.
        devices: The number of devices of the result. None (default): as in `state`.

    Returns:
        A state like `state`, with per-device values of shape `(devices, *shape)`. Means are
        computed in float32.

    Raises:
        ValueError: `state` contains no state of `cgx_ops.jax`; `devices` is less than 1.

    Example:
        >>> import jax
        >>> from cgx_ops.jax import average_gradients, consolidate
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> state = average_gradients("data", bits=2, mesh=mesh).init(jax.numpy.ones((3, 4)))
        >>> consolidate(state, devices=8).residual.shape
        (8, 3, 4)
    """
    mean_of = mean_over("consolidate", devices)
    if not any(map(_is_declared, jax.tree.leaves(state, is_leaf=_is_declared))):
        raise ValueError(
            "consolidate: the state contains no state of cgx_ops.jax: pass the state of an "
            "optimizer with one of its transformations, or of an outer loop"
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
    """Return zero residuals for a tree of parameters, with an axis over the devices.

    Args:
        caller: The public function, for errors.
        params: The parameters, without an axis over the devices.
        axis_name: The axes of the devices.
        mesh: The mesh of the devices; None: that of jax.set_mesh.
        keeps: Whether the leaf at a path has a residual; other leaves get None.
        dtype: The dtype of the zeros; None: that of each leaf.

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
    """Return the number of devices of a group, outside of shard_map."""
    sizes = dict((mesh or jax.sharding.get_abstract_mesh()).shape)
    unknown = [axis for axis in axes if axis not in sizes]
    if unknown:
        raise ValueError(
            f"{caller}: init outside of shard_map needs the sizes of the axes {unknown}, and the "
            f"mesh here has {list(sizes)}: pass the mesh of the shard_map to {caller}, or call "
            "jax.set_mesh"
        )
    return math.prod(sizes[axis] for axis in axes)


def check_own(caller: str, updates: Any, axes: tuple[Hashable, ...]) -> None:
    """Require that gradients differ between devices, as far as checked types show it."""
    if not compat.types_are_checked():
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(updates):
        same = frozenset(axes) - compat.varying_axes(leaf)
        if same:
            raise ValueError(
                f"{caller}: updates{jax.tree_util.keystr(path)} is the same on all devices of "
                f"{sorted(same, key=str)}: JAX has already summed this gradient, exactly, and it "
                "is N times too large for an average. Differentiate jax.lax.pcast(params, "
                'axis_name, to="varying") instead of params'
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
    """Return this device's residual of a leaf, scaled by `decay`, or None.

    `keeps`: whether the leaf must have one.
    """
    where = f"updates{jax.tree_util.keystr(path)}"
    if residual is None and keeps:
        raise ValueError(
            f"{caller}: {where} has error feedback, and the state has no residual for it: the "
            "state was made without error feedback, or with other settings. Create it by init, "
            "with the current settings"
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
    """Return a device's own gradients in float32; require that they fit the state."""
    check_own(caller, updates, axes)
    found, known = jax.tree.structure(updates), jax.tree.structure(state)
    if found != known:
        raise ValueError(
            f"{caller}: the gradients have the structure {found}, and the state {known}: the state "
            "belongs to another model"
        )
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(updates), jax.tree.leaves(state), strict=True
    ):
        if jnp.shape(x) != jnp.shape(y)[jnp.ndim(y) - jnp.ndim(x) :]:
            raise ValueError(
                f"{caller}: updates{jax.tree_util.keystr(path)} has shape {jnp.shape(x)}, and the "
                f"state {jnp.shape(y)}: the state belongs to another model"
            )
    return jax.tree_util.tree_map_with_path(
        lambda path, x: checked_leaf(caller, path, x).astype(jnp.float32), updates
    )


def followed(momenta: Any, gradients: Any, beta: float) -> Any:
    """Return the exponential moving averages (momenta) after a step."""
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
