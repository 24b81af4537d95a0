"""States of the optax transformations that average gradients: where they lie, what they are worth.

1. the states
2. specs for shard_map, and consolidation for another number of devices
3. what all of them do alike
"""

import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from cgx_ops.jax._src.collectives.mesh_groups import Axes, axes_of, mesh_groups
from cgx_ops.jax._src.collectives.primitive import vary_tree
from cgx_ops.jax._src.diloco.state import DiLoCoState, mean_over
from cgx_ops.jax._src.runtime import compat

if TYPE_CHECKING:
    import optax

Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh

# ---- 1. the states -------------------------------------------------------------------------------


class AverageGradientsState(NamedTuple):
    """What average_gradients keeps between steps.

    Attributes:
        step: int32 scalar: the steps done, equal on all devices.
        residual: a tree like the parameters, with None for leaves without error feedback. A leaf
          has one more axis in front, over the devices of the axis: (devices, *shape) outside of
          shard_map, (1, *shape) inside.
    """

    step: jax.Array
    residual: Any


class PowerSGDState(NamedTuple):
    """What power_sgd keeps between steps.

    Attributes:
        step: int32 scalar: the steps done, equal on all devices.
        q: a tree like the parameters: float32 (columns, rank) of each matrix that is factored,
          equal on all devices; None for other leaves. With batched=True one array.
        residual: as of AverageGradientsState, but float32.
    """

    step: jax.Array
    q: Any
    residual: Any


class DeepGradientState(NamedTuple):
    """What deep_gradient keeps between steps. All of it is float32, but for the step.

    Attributes:
        step: int32 scalar: the steps done, equal on all devices.
        momentum: u, a tree like the parameters: of sparse leaves a device's own, as residuals are;
          of the others of the leaf's shape, equal on all devices. None without momentum.
        residual: v, what is not sent yet, as of AverageGradientsState, with None for leaves that
          are not sparse.
    """

    step: jax.Array
    momentum: Any
    residual: Any


class OneBitAdamState(NamedTuple):
    """What one_bit_adam keeps between steps.

    Attributes:
        step: int32 scalar: the steps done, equal on all devices.
        mu: momentum, a tree like the parameters, float32, equal on all devices.
        nu: variance, alike.
        residual: as of AverageGradientsState, but float32.
    """

    step: jax.Array
    mu: Any
    nu: Any
    residual: Any


class SignumState(NamedTuple):
    """What signum keeps between steps.

    Attributes:
        step: int32 scalar: the steps done, equal on all devices.
        momentum: each device's own, float32, with an axis of the devices in front, as residuals.
    """

    step: jax.Array
    momentum: Any


_States = (
    AverageGradientsState
    | DiLoCoState
    | PowerSGDState
    | DeepGradientState
    | OneBitAdamState
    | SignumState
)

# ---- 2. specs, consolidation ---------------------------------------------------------------------


def state_specs(
    optimizer: "optax.GradientTransformation",
    params: Any,
    axis_name: Axes,
    param_specs: Any = None,
) -> Any:
    """Return the PartitionSpecs of an optimizer's state, for shard_map or out_shardings.

    Residuals of `average_gradients`, `power_sgd`, `deep_gradient` and `one_bit_adam`, momenta of
    `deep_gradient`'s sparse leaves and of `signum` are spread over their axes, q of `power_sgd` are
    whole everywhere, everything else lies like the parameters. To make the state where it belongs,
    at once on all devices:

        specs = state_specs(optimizer, params, "data")
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        state = jax.jit(optimizer.init, out_shardings=shardings)(params)

    Args:
        optimizer: an optax transformation with one of these somewhere in it.
        params: the parameters, or their jax.ShapeDtypeStructs.
        axis_name: theirs.
        param_specs: the PartitionSpecs of the parameters, a tree like `params`; None: P() for all.

    Returns:
        A tree like `optimizer.init(params)`, of PartitionSpecs.

    Raises:
        ImportError: optax is not installed.
        ValueError: as `optimizer.init`, outside of shard_map; momentum would be applied twice to
          a leaf: by deep_gradient and by what is chained behind it.
    """
    optax = import_optax("state_specs")
    if param_specs is None:
        param_specs = jax.tree.map(lambda _: jax.P(), params)
    # What has no residual is no leaf for JAX, but one for the specs.
    masked = lambda node: node is None or isinstance(node, optax.MaskedNode)  # noqa: E731
    state = jax.eval_shape(optimizer.init, params)
    _refuse_momentum_twice(state)
    specs = optax.tree.map_params(
        optimizer,
        lambda leaf, spec: leaf if masked(leaf) else spec,
        state,
        param_specs,
        transform_non_params=lambda _: jax.P(),
        is_leaf=masked,
    )

    def spread(node: Any) -> Any:
        if not isinstance(node, _States):
            return node

        def over_devices(tree: Any) -> Any:
            return jax.tree.map(lambda spec: jax.P(axis_name, *spec), tree)

        if isinstance(node, SignumState):
            return node._replace(momentum=over_devices(node.momentum))
        residual = over_devices(node.residual)
        if isinstance(node, PowerSGDState):
            node = node._replace(q=jax.tree.map(lambda _: jax.P(), node.q))
        if isinstance(node, DeepGradientState):
            node = node._replace(momentum=_of_sparse(lambda _, v: v, node, residual))
        return node._replace(residual=residual)

    return jax.tree.map(spread, specs, is_leaf=lambda node: isinstance(node, _States))


def _of_sparse(change: Any, node: DeepGradientState, *others: Any) -> Any:
    """Return the momenta of a state, those of sparse leaves changed; `others`: like residuals."""
    if node.momentum is None:
        return None
    return jax.tree.map(
        lambda v, u, *rest: u if v is None else change(u, *rest),
        node.residual, node.momentum, *others, is_leaf=lambda leaf: leaf is None,
    )  # fmt: skip


def _refuse_momentum_twice(state: Any) -> None:
    """Require that nothing else has momentum of a leaf of which deep_gradient has."""

    # What optax calls momentum: of sgd and others, of adam and its like.
    def has_own(node: Any) -> bool:
        return isinstance(node, tuple) and (hasattr(node, "trace") or hasattr(node, "mu"))

    is_node = lambda node: isinstance(node, _States) or has_own(node)  # noqa: E731
    nodes = jax.tree.leaves(state, is_leaf=is_node)
    ours = _paths_of([node.momentum for node in nodes if isinstance(node, DeepGradientState)])
    for node in filter(has_own, nodes):
        if ours & _paths_of([node.trace if hasattr(node, "trace") else node.mu]):
            raise ValueError(
                f"state_specs: deep_gradient has momentum, and so has {type(node).__name__}, which "
                "would apply it twice: chain optax.sgd(rate) behind it, without momentum, or give "
                "deep_gradient momentum=0"
            )


def _paths_of(trees: Sequence[Any]) -> set[Any]:
    """Return the paths of the leaves of trees that are all like the parameters."""
    return {path for tree in trees for path, _ in jax.tree_util.tree_leaves_with_path(tree)}


def consolidate(state: Any, devices: int | None = None) -> Any:
    """Return an optimizer's state whose residuals are their mean over devices, equal on all.

    So are momenta of `deep_gradient`'s sparse leaves, and of `signum`, and what an outer loop
    (`diloco`) has in flight.

    What is owed to the average, which is the mean of the residuals, stays the same, whatever the
    number of devices. So a run of another number can take the state over:

        saved = consolidate(state, devices=1)                # in the old run, before it is saved
        state = consolidate(restored, devices=jax.device_count())               # in the new one

    Residuals per device, as `state` has them, give the same bits where their number stays.

    Args:
        state: of an outer loop, or of an optax transformation with one of those that `state_specs`
          names somewhere in it, outside of shard_map. In jax.jit, out_shardings from `state_specs`
          put the result where it belongs.
        devices: for how many; None: for as many as `state` is.

    Returns:
        A state like `state`; what is a device's own is (devices, *shape). The mean is taken in
        float32.

    Raises:
        ValueError: there is no state of one of them in `state`; `devices` is less than 1.
    """
    mean_of = mean_over("consolidate", devices)
    is_ours = lambda node: isinstance(node, _States)  # noqa: E731
    nodes, tree = jax.tree.flatten(state, is_leaf=is_ours)
    if not any(map(is_ours, nodes)):
        raise ValueError(
            "consolidate: there is no AverageGradientsState in the state, nor a PowerSGDState, "
            "DeepGradientState, DiLoCoState, OneBitAdamState or SignumState"
        )

    def consolidated(node: Any) -> Any:
        if isinstance(node, SignumState):
            return node._replace(momentum=jax.tree.map(mean_of, node.momentum))
        if isinstance(node, DeepGradientState):
            node = node._replace(momentum=_of_sparse(mean_of, node))
        if isinstance(node, DiLoCoState) and node.flight is not None:
            lost = jax.tree.map(mean_of, node.flight.lost)
            node = node._replace(flight=node.flight._replace(lost=lost))
        return node._replace(residual=jax.tree.map(mean_of, node.residual))

    return tree.unflatten(consolidated(node) if is_ours(node) else node for node in nodes)


# ---- 3. what all do -----------------------------------------------------------------------------


def import_optax(caller: str) -> Any:
    """Import optax, which nothing else here needs."""
    try:
        import optax
    except ImportError:
        raise ImportError(f"cgx_ops.jax.{caller} needs optax: pip install optax") from None
    return optax


def zero_residuals(caller: str, kept: Any, axis_name: Axes, mesh: Mesh | None) -> Any:
    """Return residuals for a tree of parameters, with None for leaves without one.

    Inside of shard_map each has an axis of one in front, outside one of the devices.
    """
    names = axes_of(axis_name)
    if any(compat.axis_size(axis) is not None for axis in names):
        axes = mesh_groups(caller, axis_name).axes
        return vary_tree(jax.tree.map(lambda leaf: jnp.zeros_like(leaf)[None], kept), axes)
    devices = devices_of(caller, names, mesh) if jax.tree.leaves(kept) else 0
    return jax.tree.map(
        lambda leaf: jnp.zeros((devices, *jnp.shape(leaf)), jnp.result_type(leaf)), kept
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
    """Require that gradients are each device's own, where types tell."""
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
