"""one_bit_adam: Adam that sends its momentum in one bit, instead of gradients, after a warm-up.

The arithmetic is that of cgx_ops.torch.optim.

Tang et al.: 1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed,
ICML 2021.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.config import Config, Keywords
from cgx_ops.errors import require_integer, require_share
from cgx_ops.jax._src.collectives.mesh_groups import Axes, mesh_groups
from cgx_ops.jax._src.collectives.options import Carrier, Options, checked_options, is_vote
from cgx_ops.jax._src.collectives.psum import reduce_over
from cgx_ops.jax._src.transforms.base import (
    Mesh,
    checked_gradients,
    followed,
    import_optax,
    own_residual,
    per_device,
    with_rate,
    zero_residuals,
)
from cgx_ops.planner import Plan
from cgx_ops.rules import Rules

if TYPE_CHECKING:
    import optax


@per_device("residual")
class OneBitAdamState(NamedTuple):
    """The state of one_bit_adam between steps.

    Attributes:
        step: int32 scalar: the steps done, equal on all devices.
        mu: momentum, a tree like the parameters, float32, equal on all devices.
        nu: variance, likewise.
        residual: as of AverageGradientsState, but float32.
    """

    step: jax.Array
    mu: Any
    nu: Any
    residual: Any


def one_bit_adam(
    axis_name: Axes,
    learning_rate: Any,
    *,
    warmup_steps: int,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    config: Config | None = None,
    key: jax.Array | None = None,
    name: str = "",
    rules: Rules | None = Rules(),  # noqa: B008  (it cannot be changed)
    fuse: bool | Plan = True,
    carrier: Carrier = "native",
    mesh: Mesh | None = None,
    **keywords: Unpack[Keywords],
) -> "optax.GradientTransformation":
    """Return 1-bit Adam as an optax optimizer, which averages over mesh axes itself.

    Its `update` is called inside `jax.shard_map`, with each device's own gradients, and is used as
    `average_gradients` is, with `state_specs` and `consolidate`; nothing is chained before it that
    averages.

    The first `warmup_steps` steps are Adam's: gradients are averaged exact, mu and nu follow. Then
    nu stays. Each device adds its own gradient to mu, sends that compressed, and all go on with the
    average as mu. The quantization error, of a device's message and of averages that it
    encodes, is its residual, added to its next message. So over all devices momenta and old
    residuals are the average (as a sum) and the new residuals, up to float32 rounding.

    As in the paper's algorithm and in DeepSpeed's code mu and nu are not divided by 1 - b^t: in the
    first steps, while nu is small, steps are up to (1 - b1) / sqrt(1 - b2) = 3.2 times Adam's.
    Begin with a small learning rate. Weight decay is decoupled, as in adamw. Elements whose nu is 0
    when the warm-up ends stay where they are: of one bit they would get what their neighbours have.

    Args:
        axis_name: name of a mesh axis, or a tuple of names.
        learning_rate: a number, or an optax schedule.
        warmup_steps: at least 1; 15 to 25 % of training in the paper. nu must have settled.
        b1: of mu, at least 0 and less than 1.
        b2: of nu, likewise.
        eps: added to the root of nu; more than 0.
        weight_decay: at least 0.
        config: of the momentum, as of `average_gradients`; None: compressor "levels" with 1 bit.
        key: a PRNG key, as of `average_gradients`.
        name: of the collectives, as of `psum_q`.
        rules: as of `average_gradients`, for the momentum.
        fuse: as of `psum_q`.
        carrier: as of `psum_q`.
        mesh: of the shard_map, as of `average_gradients`.
        **keywords: bits, bucket_size, compressor and rounding, which replace those of config.

    Returns:
        An optax.GradientTransformation, the first of whose states is a `OneBitAdamState`.

    Raises:
        ImportError: optax is not installed.
        ValueError: an argument is out of its range; at init, no mesh is known; at update, the
          gradients are equal on all devices already, or do not fit the state.
        NameError, NotImplementedError, TypeError, jax.errors.JaxRuntimeError: as `psum_q`.
    """
    caller = "one_bit_adam"
    optax = import_optax(caller)
    # At least 1, for nu to be more than 0.
    warmup_steps = require_integer(f"{caller}: warmup_steps", warmup_steps, 1)
    require_share(f"{caller}: b1", b1)
    require_share(f"{caller}: b2", b2)
    if not eps > 0:
        raise ValueError(f"{caller}: eps is {eps!r}; it must be more than 0")
    config = Config(compressor="levels", bits=1) if config is None else config
    options = checked_options(
        caller, config, keywords, key=key, name=name, rules=rules, fuse=fuse, carrier=carrier
    )
    exact = replace(options, config=options.config.with_own(bits=EXACT_BITS), rules=None)

    def keeps(path: Any, leaf: Any) -> bool:
        if is_vote(options.of(path, leaf)):
            raise ValueError(f"{caller}: a vote has no magnitude: use cgx_ops.jax.signum")
        return options.keeps(path, leaf)

    def init(params: Any) -> OneBitAdamState:
        mu = jax.tree.map(lambda leaf: jnp.zeros_like(leaf, dtype=jnp.float32), params)
        nu = jax.tree.map(jnp.zeros_like, mu)  # separate arrays: both can be donated
        residual = zero_residuals(caller, params, axis_name, mesh, keeps=keeps)
        return OneBitAdamState(jnp.zeros((), jnp.int32), mu, nu, residual)

    def update(
        updates: Any, state: OneBitAdamState, params: Any = None
    ) -> tuple[Any, OneBitAdamState]:
        del params
        axes = mesh_groups(caller, axis_name).axes
        gradients = checked_gradients(caller, updates, state.mu, axes)
        options.warn_of_unmatched(gradients)

        def own_of(path: Any, g: jax.Array, e: jax.Array | None) -> jax.Array | None:
            decay = options.of(path, g).residual_decay
            return own_residual(caller, path, g, e, keeps=keeps(path, g), decay=decay)

        residual = jax.tree_util.tree_map_with_path(own_of, gradients, state.residual)

        def averaged(how: Options, x: Any, lost: Any, message: str) -> Any:
            how = how.at_step(state.step).of_message(message)
            return reduce_over(how, x, lost, axes, "avg")

        def warming_up(_: Any) -> Any:
            g, _lost = averaged(exact, gradients, None, "exact")
            square = lambda v, x: v * b2 + x * x * (1 - b2)  # noqa: E731
            nu = jax.tree.map(square, state.nu, g)
            return followed(state.mu, g, b1), nu, residual

        def frozen(_: Any) -> Any:
            mu, lost = averaged(options, followed(state.mu, gradients, b1), residual, "momentum")
            return mu, state.nu, lost

        mu, nu, residual = jax.lax.cond(state.step < warmup_steps, warming_up, frozen, None)
        steps = jax.tree.map(
            lambda m, v, x: jnp.where(v == 0, 0, m / (jnp.sqrt(v) + eps)).astype(x.dtype),
            mu, nu, updates,
        )  # fmt: skip
        residual = jax.tree.map(lambda e: e[None], residual)
        return steps, OneBitAdamState(state.step + 1, mu, nu, residual)

    return with_rate(optax, init, update, caller, learning_rate, weight_decay)
