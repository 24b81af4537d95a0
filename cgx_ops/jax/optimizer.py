"""average_gradients: the mean over a mesh axis as an optax transformation, with error feedback.

Each step, on each device:

  1. reduce compressed, with the residual: what compression lost of this device's gradients before
  2. keep what is lost now as the residual: nothing is lost for good, only late

So few bits converge where they would stall without (1-bit SGD, Seide et al., Interspeech 2014; a
proof in Karimireddy et al., ICML 2019). Both compressions are fed back, that of a contribution and
that of the reduced values, whose error goes to the device that compressed them (DoubleSqueeze, Tang
et al., ICML 2019).
"""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from cgx_ops.config import Config
from cgx_ops.jax.knobs import (
    check_feedback,
    checked_knobs,
    keeps_by_default,
    refuse_idle_feedback,
)
from cgx_ops.jax.mesh_groups import Axes, mesh_groups
from cgx_ops.jax.optimizer_state import (
    AverageGradientsState,
    Mesh,
    check_own,
    import_optax,
    own_residual,
    zero_residuals,
)
from cgx_ops.jax.psum import reduce_over
from cgx_ops.rules import EXACT_BITS

if TYPE_CHECKING:
    import optax


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
          rules=Rules([("bias|norm", 32)]).

    Returns:
        An optax.GradientTransformation, whose state is an `AverageGradientsState`.

    Raises:
        ImportError: optax is not installed.
        ValueError: at init, no mesh is known; at update, the gradients are equal on all devices
          already, or the state has other shapes than the gradients, or was made without error
          feedback; a knob is out of its range;
          error_feedback=True with a compressor with which it does not converge, or where all is
          exact.
        NameError, NotImplementedError, TypeError, jax.errors.JaxRuntimeError: as `psum_q`.
    """
    caller = "average_gradients"
    optax = import_optax(caller)
    checked = checked_knobs(caller, key=key, name=name, **knobs)
    decay = Config(residual_decay=residual_decay).residual_decay  # which checks it

    def keeps(config: Config) -> bool:
        return keeps_by_default(config) if error_feedback is None else error_feedback

    if error_feedback:
        refuse_idle_feedback(caller, checked.configs)
    for config in filter(keeps, checked.configs):
        check_feedback(caller, config)

    def init(params: Any) -> AverageGradientsState:
        step = jnp.zeros((), jnp.int32)
        kept = jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf if keeps(checked.config_of(path, leaf)) else None, params
        )
        return AverageGradientsState(step, zero_residuals(caller, kept, axis_name, mesh))

    def update(
        updates: Any, state: AverageGradientsState, params: Any = None
    ) -> tuple[Any, AverageGradientsState]:
        del params
        axes = mesh_groups(caller, axis_name).axes
        check_own(caller, updates, axes)
        checked.warn_of_unmatched(updates)
        noise = None if key is None else jax.random.fold_in(key, state.step)
        residual = state.residual

        def own_of(path: Any, update: jax.Array, old: jax.Array | None) -> jax.Array | None:
            config = checked.config_of(path, update)
            must = keeps(config) and config.bits != EXACT_BITS
            own = own_residual(caller, path, update, old, keeps=must)
            return None if own is None else _kept_in(update.dtype, own)

        own = jax.tree_util.tree_map_with_path(own_of, updates, residual)
        if decay != 1:
            own = jax.tree.map(lambda e: e * decay, own)
        mean, lost = reduce_over(caller, updates, own, axes, "avg", key=noise, name=name, **knobs)
        residual = jax.tree.map(lambda e, old: _kept_in(old.dtype, e)[None], lost, residual)
        return mean, AverageGradientsState(state.step + 1, residual)

    return optax.GradientTransformation(init, update)


def _kept_in(dtype: Any, residual: jax.Array) -> jax.Array:
    """Return a residual in another dtype: what is too large for it is its largest number."""
    if residual.dtype == dtype:
        return residual
    largest = jnp.finfo(dtype).max
    return jnp.clip(residual, -largest, largest).astype(dtype)
