"""average_gradients: the mean over a mesh axis as an optax transformation, with error feedback.

Each step, on each device:

  1. reduce compressed, with the residual: the earlier quantization error of this device
  2. keep the new quantization error as the residual, so that errors are only delayed

So few bits converge where they would stall without (1-bit SGD, Seide et al., Interspeech 2014; a
proof in Karimireddy et al., ICML 2019). Both compressions are fed back, that of a contribution and
that of the reduced values, whose error goes to the device that compressed them (DoubleSqueeze, Tang
et al., ICML 2019).
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
    """The state of average_gradients between steps.

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
    config: Config | None = None,
    key: jax.Array | None = None,
    name: str = "",
    rules: Rules | None = Rules(),  # noqa: B008  (it cannot be changed)
    fuse: bool | Plan = True,
    carrier: Carrier = "native",
    mesh: Mesh | None = None,
    **keywords: Unpack[Keywords],
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
        config: as of `psum_q`. Its `error_feedback` decides for each leaf whether what compression
          loses is kept and added to the next step's gradients, which takes the memory of one more
          copy of the parameters on every device. None: where the encoding is biased: "uniform" with
          nearest rounding (2 bits or more), "levels", "onebit", "topk", "threshold" and "randk".
          `residual_decay` is the part of it that is added.
        key: a PRNG key, as of `psum_q`, not traced: the count of steps is folded into it.
        name: of the collective, as of `psum_q`.
        rules: as of `psum_q`. By default leaves of at most one dimension are sent exact; None
          compresses them too.
        fuse: as of `psum_q`.
        carrier: as of `psum_q`.
        mesh: of the shard_map. Only `init` outside of it needs it, for the number of devices that
          the axis has; None: that of `jax.set_mesh`.
        **keywords: bits, bucket_size, compressor and rounding, which replace those of config. With
          error feedback `rounding="nearest"` is better: its error is half as large in a step.

    Returns:
        An optax.GradientTransformation, whose state is an `AverageGradientsState`.

    Raises:
        ImportError: optax is not installed.
        ValueError: a field is out of its range; at init, no mesh is known, error feedback does not
          converge, or all leaves are exact with error_feedback=True; at update, the gradients are
          equal on all devices already, or the state has other shapes than the gradients, or was
          made without error feedback.
        NameError, NotImplementedError, TypeError, jax.errors.JaxRuntimeError: as `psum_q`.

    Example:
        >>> mesh = jax.make_mesh((1,), ("d",))
        >>> state = average_gradients("d", bits=2, mesh=mesh).init(jax.numpy.ones((3, 4)))
        >>> state.residual.shape
        (1, 3, 4)
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
    """Return a residual in another dtype: what is too large for it is its largest number."""
    if residual.dtype == dtype:
        return residual
    largest = jnp.finfo(dtype).max
    return jnp.clip(residual, -largest, largest).astype(dtype)
