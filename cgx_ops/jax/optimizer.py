"""average_gradients: the mean over a mesh axis as an optax transformation, with error feedback.

Each step, on each device:

  1. reduce compressed, with the residual: what compression lost of this device's gradients before
  2. keep what is lost now as the residual: nothing is lost for good, only late

So few bits converge where they would stall without (1-bit SGD, Seide et al., Interspeech 2014; a
proof in Karimireddy et al., ICML 2019). Both compressions are fed back, that of a contribution and
that of the reduced values, whose error goes to the device that compressed them (DoubleSqueeze, Tang
et al., ICML 2019).
"""

import math
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from cgx_ops.config import Config
from cgx_ops.jax import _compat
from cgx_ops.jax.gradients import vary_tree
from cgx_ops.jax.knobs import check_feedback, checked_knobs, keeps_by_default
from cgx_ops.jax.mesh_groups import Axes, mesh_groups
from cgx_ops.jax.psum import reduce_over

if TYPE_CHECKING:
    import optax

Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh


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


def average_gradients(
    axis_name: Axes,
    *,
    error_feedback: bool | None = None,
    residual_decay: float = 1.0,
    key: jax.Array | None = None,
    name: str = "",
    mesh: Mesh | None = None,
    **knobs: Any,
) -> "optax.GradientTransformation":
    """Return an optax transformation that averages gradients over mesh axes, compressed.

    Chain it before an optimizer, whose `update` is then called inside `jax.shard_map`, with each
    device's own gradients:

        optimizer = optax.chain(average_gradients("data", bits=2, mesh=mesh), optax.adam(1e-3))

        def step(params, state, batch):
            copies = lax.pcast(params, "data", to="varying")  # or JAX sums the gradients itself
            gradients = jax.grad(loss)(copies, batch)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

    `state_specs` gives the specs of the state for that shard_map. `init` works inside it too.

    Args:
        axis_name: name of a mesh axis, or a tuple of names.
        error_feedback: keep what compression loses, and add it to the next step's gradients. It
          takes the memory of one more copy of the parameters on every device, and of "uniform" 2
          bits or more. None: for leaves that travel by "uniform", or by a compressor that does not
          train without: "levels", "onebit", "topk", "threshold", "randk".
        residual_decay: the part of what was lost that is added, more than 0 and at most 1, as of
          `cgx_ops.Config`.
        key: a PRNG key, as of `psum_q`, not traced: the count of steps is folded into it. None
          rounds to nearest, which is the better choice with error feedback: it loses half as much
          in a step, and what it loses always in one direction comes back too.
        name: of the collective, as of `psum_q`.
        mesh: of the shard_map. Only `init` outside of it asks for it, to know how many devices the
          axis has; None: that of `jax.set_mesh`.
        **knobs: every other keyword of `psum_q` but residual, such as bits, compressor="topk" and
          rules={"bias|norm": 32}.

    Returns:
        An optax.GradientTransformation, whose state is an `AverageGradientsState`.

    Raises:
        ImportError: optax is not installed.
        ValueError: at init, no mesh is known; at update, the gradients are equal on all devices
          already, or the state has other shapes than the gradients; a knob is out of its range;
          error_feedback=True with a compressor with which it does not converge.
        NameError, NotImplementedError, TypeError, jax.errors.JaxRuntimeError: as `psum_q`.
    """
    optax = _optax("average_gradients")
    caller = "average_gradients"
    checked = checked_knobs(caller, key=key, name=name, **knobs)
    decay = Config(residual_decay=residual_decay).residual_decay  # which checks it

    def keeps(config: Config) -> bool:
        return keeps_by_default(config) if error_feedback is None else error_feedback

    for config in filter(keeps, checked.configs):
        check_feedback(caller, config)
        if config.compressor == "uniform" and 1 in (config.bits, config.gather_bits):
            raise ValueError(
                f"{caller}: at 1 bit the error may be as large as the gradients, and residuals may "
                "grow without end: give 2 bits or more, or error_feedback=False, or "
                "compressor='levels'"
            )

    def init(params: Any) -> AverageGradientsState:
        step = jnp.zeros((), jnp.int32)
        kept = jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf if keeps(checked.config_of(path)) else None, params
        )
        names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
        if any(_compat.axis_size(axis) is not None for axis in names):
            axes = mesh_groups(caller, axis_name).axes
            zeros = jax.tree.map(lambda leaf: jnp.zeros_like(leaf)[None], kept)
            return AverageGradientsState(step, vary_tree(zeros, axes))
        devices = _devices(names, mesh) if jax.tree.leaves(kept) else 0
        residual = jax.tree.map(
            lambda leaf: jnp.zeros((devices, *jnp.shape(leaf)), jnp.result_type(leaf)), kept
        )
        return AverageGradientsState(step, residual)

    def update(
        updates: Any, state: AverageGradientsState, params: Any = None
    ) -> tuple[Any, AverageGradientsState]:
        del params
        axes = mesh_groups(caller, axis_name).axes
        _check_own(updates, axes)
        noise = None if key is None else jax.random.fold_in(key, state.step)
        residual = state.residual
        own = jax.tree_util.tree_map_with_path(_own_residual, updates, residual)
        if decay != 1:
            own = jax.tree.map(lambda e: e * decay, own)
        mean, lost = reduce_over(caller, updates, own, axes, "avg", key=noise, name=name, **knobs)
        residual = jax.tree.map(lambda e, old: e.astype(old.dtype)[None], lost, residual)
        return mean, AverageGradientsState(state.step + 1, residual)

    return optax.GradientTransformation(init, update)


def state_specs(
    optimizer: "optax.GradientTransformation",
    params: Any,
    axis_name: Axes,
    param_specs: Any = None,
) -> Any:
    """Return the PartitionSpecs of an optimizer's state, for shard_map or out_shardings.

    Residuals of `average_gradients` are spread over its axes, everything else lies like the
    parameters. To make the state where it belongs, at once on all devices:

        specs = state_specs(optimizer, params, "data")
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        state = jax.jit(optimizer.init, out_shardings=shardings)(params)

    Args:
        optimizer: an optax transformation with average_gradients somewhere in it.
        params: the parameters, or their jax.ShapeDtypeStructs.
        axis_name: that of average_gradients.
        param_specs: the PartitionSpecs of the parameters, a tree like `params`; None: P() for all.

    Returns:
        A tree like `optimizer.init(params)`, of PartitionSpecs.

    Raises:
        ImportError: optax is not installed.
        ValueError: as `optimizer.init`, outside of shard_map.
    """
    optax = _optax("state_specs")
    if param_specs is None:
        param_specs = jax.tree.map(lambda _: jax.P(), params)
    # What has no residual is no leaf for JAX, but one for the specs.
    masked = lambda node: node is None or isinstance(node, optax.MaskedNode)  # noqa: E731
    specs = optax.tree.map_params(
        optimizer,
        lambda leaf, spec: leaf if masked(leaf) else spec,
        jax.eval_shape(optimizer.init, params),
        param_specs,
        transform_non_params=lambda _: jax.P(),
        is_leaf=masked,
    )

    def spread(node: Any) -> Any:
        if not isinstance(node, AverageGradientsState):
            return node
        residual = jax.tree.map(lambda spec: jax.P(axis_name, *spec), node.residual)
        return node._replace(residual=residual)

    return jax.tree.map(spread, specs, is_leaf=lambda node: isinstance(node, AverageGradientsState))


def consolidate(state: Any, devices: int | None = None) -> Any:
    """Return an optimizer's state whose residuals are their mean over devices, equal on all.

    What is owed to the average, which is the mean of the residuals, stays the same, whatever the
    number of devices. So a run of another number can take the state over:

        saved = consolidate(state, devices=1)                # in the old run, before it is saved
        state = consolidate(restored, devices=jax.device_count())               # in the new one

    Residuals per device, as `state` has them, give the same bits where their number stays.

    Args:
        state: of an optax transformation with average_gradients somewhere in it, outside of
          shard_map. In jax.jit, out_shardings from `state_specs` put the result where it belongs.
        devices: for how many; None: for as many as `state` is.

    Returns:
        A state like `state`; residuals are (devices, *shape). Their mean is taken in float32.

    Raises:
        ValueError: there is no state of average_gradients in `state`; `devices` is less than 1.
    """
    if devices is not None and devices < 1:
        raise ValueError(f"consolidate: devices is {devices}; it must be at least 1")

    def mean_of(residual: jax.Array) -> jax.Array:
        mean = jnp.mean(residual, axis=0, dtype=jnp.float32).astype(residual.dtype)
        return jnp.broadcast_to(mean, (devices or len(residual), *mean.shape))

    is_ours = lambda node: isinstance(node, AverageGradientsState)  # noqa: E731
    nodes, tree = jax.tree.flatten(state, is_leaf=is_ours)
    if not any(map(is_ours, nodes)):
        raise ValueError("consolidate: there is no AverageGradientsState in the state")
    return tree.unflatten(
        node._replace(residual=jax.tree.map(mean_of, node.residual)) if is_ours(node) else node
        for node in nodes
    )


def _optax(caller: str) -> Any:
    """Import optax, which nothing else here needs."""
    try:
        import optax
    except ImportError:
        raise ImportError(f"cgx_ops.jax.{caller} needs optax: pip install optax") from None
    return optax


def _devices(axes: tuple[Hashable, ...], mesh: Mesh | None) -> int:
    """Return how many devices a group has, outside of shard_map."""
    sizes = dict((mesh or jax.sharding.get_abstract_mesh()).shape)
    unknown = [axis for axis in axes if axis not in sizes]
    if unknown:
        raise ValueError(
            f"average_gradients: init outside of shard_map needs the sizes of the axes {unknown}, "
            f"and the mesh here has {list(sizes)}: give average_gradients the mesh of the "
            "shard_map, or call jax.set_mesh"
        )
    return math.prod(sizes[axis] for axis in axes)


def _check_own(updates: Any, axes: tuple[Hashable, ...]) -> None:
    """Require that gradients are each device's own, where types tell."""
    if not _compat.types_are_checked():
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(updates):
        same = frozenset(axes) - _compat.varying_axes(leaf)
        if same:
            raise ValueError(
                f"average_gradients: updates{jax.tree_util.keystr(path)} is the same on all "
                f"devices of {sorted(same, key=str)}: JAX has summed this gradient already, "
                "exactly, and it is N times too large for an average. Differentiate "
                'jax.lax.pcast(params, axis_name, to="varying") instead of params'
            )


def _own_residual(path: Any, update: jax.Array, residual: jax.Array | None) -> jax.Array | None:
    """Return this device's part of a residual, if the leaf has one."""
    if residual is None:
        return None
    if residual.shape != (1, *update.shape):
        raise ValueError(
            f"average_gradients: the residual of updates{jax.tree_util.keystr(path)} has shape "
            f"{residual.shape} here, not {(1, *update.shape)}: give shard_map the state with the "
            "in_specs and out_specs of cgx_ops.jax.state_specs"
        )
    return residual[0].astype(update.dtype)
