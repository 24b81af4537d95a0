"""average_gradients: the mean over a mesh axis as an optax transformation, with error feedback.

In each step, each device:

  1. reduces its gradients compressed, together with its residual
  2. keeps the new quantization error as the next residual, so that errors are only delayed

With it, few bits converge where they would stall without (1-bit SGD, Seide et al., Interspeech
2014; a proof in Karimireddy et al., ICML 2019). Both compressions are fed back: that of a device's
message, and that of the reduced values, whose error goes to the device that compressed them
(DoubleSqueeze, Tang et al., ICML 2019).
"""

from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from cgx_ops.config import Config, Keywords
from cgx_ops.jax._src.collectives.mesh_groups import Axes, mesh_groups
from cgx_ops.jax._src.collectives.options import Carrier, checked_options
from cgx_ops.jax._src.collectives.psum import reduce_over
from cgx_ops.jax._src.transforms.base import (
    Mesh,
    check_own,
    import_optax,
    own_residual,
    per_device,
    zero_residuals,
)
from cgx_ops.planner import Plan
from cgx_ops.rules import Rules

if TYPE_CHECKING:
    import optax


@per_device("residual")
class AverageGradientsState(NamedTuple):
    """The state of `average_gradients` between steps.

    Attributes:
        step: Number of steps done, an int32 scalar, equal on all devices.
        residual: Each device's quantization error: a tree like the parameters, in their dtypes.
            Each leaf has one more axis in front, over the devices: `(devices, *shape)` outside of
            `shard_map` and `(1, *shape)` inside. None for leaves without error feedback.

    Example:
        >>> import jax
        >>> from cgx_ops.jax import average_gradients
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> state = average_gradients("data", bits=2, mesh=mesh).init(jax.numpy.ones((3, 4)))
        >>> int(state.step), state.residual.shape
        (0, (1, 3, 4))
    """

    step: jax.Array
    residual: Any


def average_gradients(
    axis_name: Axes,
    *,
    config: Config | None = None,
    key: jax.Array | None = None,
    name: str = "",
    rules: Rules = Rules(),  # noqa: B008  (immutable)
    fuse: bool | Plan = True,
    carrier: Carrier = "native",
    mesh: Mesh | None = None,
    **keywords: Unpack[Keywords],
) -> "optax.GradientTransformation":
    """Create an optax transformation that averages gradients over mesh axes, with error feedback.

    Chain it before an optimizer. Call `update` inside `jax.shard_map`, with each device's own
    gradients. `jax.lax.pcast` keeps JAX from summing them itself::

        optimizer = optax.chain(average_gradients("data", bits=2, mesh=mesh), optax.adam(1e-3))

        def step(weights, state, batch):
            own = jax.lax.pcast(weights, "data", to="varying")
            gradients = jax.grad(loss_of)(own, batch)
            updates, state = optimizer.update(gradients, state, weights)
            return optax.apply_updates(weights, updates), state

    `state_specs` returns the specs of the state for the `shard_map`. `consolidate` prepares a state
    for another number of devices.

    Args:
        axis_name: Name of a mesh axis, or a tuple of names.
        config: How values are sent, as in `psum_q`. `error_feedback` selects the leaves that keep a
            residual, which takes the memory of one more copy of these parameters on each device.
            None (default): leaves whose encoding is biased, which are "uniform" with nearest
            rounding (2 bits or more), "levels", "onebit", "topk", "randk", and "entropy", "mxfp8",
            "mxfp8_e5m2", "mxfp4" and "nvfp4" with nearest rounding.
            `residual_decay` scales the residual before it is added.
        key: A PRNG key for random rounding. It must not be traced; the step count is folded into
            it. None (default) rounds to nearest, which is better with error feedback.
        name: Identifies the collective across processes, as in `psum_q`.
        rules: Settings per leaf, by its path. `Rules()` (default) sends biases and other leaves of
            at most one dimension exactly; `Rules(exact_vectors=False)` compresses them too.
        fuse: How leaves share messages, as in `psum_q`.
        carrier: "native" (default) or "xla", as in `psum_q`.
        mesh: The mesh of the `shard_map`. `init` outside of it needs the number of devices. None
            (default) is the mesh of `jax.set_mesh`.
        **keywords: `bits`, `bucket_size`, `compressor` and `rounding` override fields of `config`.

    Returns:
        An `optax.GradientTransformation`, whose state is an `AverageGradientsState`.

    Raises:
        ImportError: optax is not installed.
        ValueError: A setting is out of range. In `init`: no mesh is known; error feedback would not
            converge; `error_feedback=True`, and all leaves are exact. In `update`: the gradients
            are equal on all devices already; the state does not fit them or was made without error
            feedback.
        TypeError: A leaf, key or static argument has the wrong type, as in `psum_q`.
        NameError: In `update`, an axis name is not bound by a `shard_map` around the call.
        NotImplementedError: The axes or the platform are not supported, as in `psum_q`.
        jax.errors.JaxRuntimeError: At run time, a peer failed, as in `psum_q`.

    Example:
        >>> import jax
        >>> import optax
        >>> from cgx_ops.jax import average_gradients, state_specs
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> optimizer = optax.chain(average_gradients("data", bits=2, mesh=mesh), optax.sgd(0.5))
        >>> weights = jax.numpy.zeros((4, 4))
        >>> specs = state_specs(optimizer, weights, "data")
        >>> @jax.jit
        ... @jax.shard_map(mesh=mesh, in_specs=(jax.P(), specs), out_specs=(jax.P(), specs))
        ... def step(weights, state):
        ...     own = jax.lax.pcast(weights, "data", to="varying")
        ...     gradients = jax.grad(lambda w: w.sum())(own)
        ...     updates, state = optimizer.update(gradients, state, weights)
        ...     return optax.apply_updates(weights, updates), state
        >>> with jax.set_mesh(mesh):
        ...     shardings = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs)
        ...     state = jax.jit(optimizer.init, out_shardings=shardings)(weights)
        ...     weights, state = step(weights, state)
        >>> float(weights[0, 0]), int(state[0].step)
        (-0.5, 1)
    """
    caller = "average_gradients"
    optax = import_optax(caller)
    options = checked_options(
        caller, config, keywords, key=key, name=name, rules=rules, fuse=fuse, carrier=carrier
    )

    def init(params: Any) -> AverageGradientsState:
        options.refuse_idle_feedback(params)
        residual = zero_residuals(caller, params, axis_name, mesh, keeps=options.keeps, dtype=None)
        return AverageGradientsState(jnp.zeros((), jnp.int32), residual)

    def update(
        updates: Any, state: AverageGradientsState, params: Any = None
    ) -> tuple[Any, AverageGradientsState]:
        del params
        axes = mesh_groups(caller, axis_name).axes
        check_own(caller, updates, axes)
        options.warn_of_unmatched(updates)

        def own_of(path: Any, update: jax.Array, old: jax.Array | None) -> jax.Array | None:
            config = options.of(path, update)
            own = own_residual(
                caller, path, update, old,
                keeps=config.keeps_residuals, decay=config.residual_decay,
            )  # fmt: skip
            return None if own is None else _kept_in(update.dtype, own)

        own = jax.tree_util.tree_map_with_path(own_of, updates, state.residual)
        mean, lost = reduce_over(options.at_step(state.step), updates, own, axes, "avg")
        residual = jax.tree.map(lambda e, old: _kept_in(old.dtype, e)[None], lost, state.residual)
        return mean, AverageGradientsState(state.step + 1, residual)

    return optax.GradientTransformation(init, update)


def _kept_in(dtype: Any, residual: jax.Array) -> jax.Array:
    """Return a residual in another dtype. Values that are too large become its largest number."""
    if residual.dtype == dtype:
        return residual
    largest = jnp.finfo(dtype).max
    return jnp.clip(residual, -largest, largest).astype(dtype)
