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
    """The state of `one_bit_adam` between steps. All arrays but `step` are float32.

    Attributes:
        step: Number of steps done, an int32 scalar, equal on all devices.
        mu: The momentum, a tree like the parameters, equal on all devices.
        nu: The variance, a tree like the parameters, equal on all devices.
        residual: Each device's quantization error, with an axis over the devices in front, as in
            `AverageGradientsState`.

    Example:
        >>> import jax
        >>> from cgx_ops.jax import one_bit_adam
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> optimizer = one_bit_adam("data", 1e-3, warmup_steps=100, mesh=mesh)
        >>> state = optimizer.init(jax.numpy.ones((3, 4)))[0]
        >>> state.mu.shape, state.residual.shape
        ((3, 4), (1, 3, 4))
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
    """Create 1-bit Adam as an optax optimizer that averages over mesh axes itself.

    Use it like `average_gradients`, with `state_specs` and `consolidate`: call `update` inside
    `jax.shard_map`, with each device's own gradients. Chain nothing before it that averages.

    The first `warmup_steps` steps are Adam with exact averages of gradients. After them, nu is
    constant. Each device then updates mu with its own gradient and sends mu compressed, and the
    average becomes the new mu. The quantization error is kept as a residual and added to the next
    message.

    As in the paper and in DeepSpeed, mu and nu have no bias correction. So the first steps are up
    to `(1 - b1) / sqrt(1 - b2)` = 3.2 times as long as Adam's: start with a small learning rate.
    Weight decay is decoupled, as in AdamW. Elements whose nu is 0 after the warm-up are not
    updated.

    Args:
        axis_name: Name of a mesh axis, or a tuple of names.
        learning_rate: A number or an optax schedule.
        warmup_steps: Number of exact steps, at least 1. The paper uses 15 to 25 % of training; nu
            must have become stable.
        b1: Decay of mu, at least 0 and less than 1. Default 0.9.
        b2: Decay of nu, at least 0 and less than 1. Default 0.999.
        eps: Added to the square root of nu; more than 0. Default 1e-8.
        weight_decay: At least 0. Default 0.
        config: How the momentum is sent, as in `average_gradients`. None (default) means
            `Config(compressor="levels", bits=1)`.
        key: A PRNG key for random rounding, as in `average_gradients`.
        name: Identifies the collectives across processes, as in `psum_q`.
        rules: Settings per leaf of the momentum, by its path, as in `average_gradients`.
        fuse: How leaves share messages, as in `psum_q`.
        carrier: "native" (default) or "xla", as in `psum_q`.
        mesh: The mesh of the `shard_map`, as in `average_gradients`.
        **keywords: `bits`, `bucket_size`, `compressor` and `rounding` override fields of `config`.

    Returns:
        An `optax.GradientTransformation`. The first element of its state is a `OneBitAdamState`.

    Raises:
        ImportError: optax is not installed.
        ValueError: An argument is out of range. In `init`: no mesh is known. In `update`: the
            gradients are equal on all devices already, or do not fit the state.
        TypeError: A leaf, key or static argument has the wrong type, as in `psum_q`.
        NameError: In `update`, an axis name is not bound by a `shard_map` around the call.
        NotImplementedError: The axes or the platform are not supported, as in `psum_q`.
        jax.errors.JaxRuntimeError: At run time, a peer failed, as in `psum_q`.

    Example:
        >>> import jax
        >>> from cgx_ops.jax import one_bit_adam, state_specs
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> optimizer = one_bit_adam("data", 1e-3, warmup_steps=100, mesh=mesh)
        >>> specs = state_specs(optimizer, jax.numpy.ones((3, 4)), "data")[0]
        >>> specs.mu, specs.residual
        (P(), P('data',))
    """
    caller = "one_bit_adam"
    optax = import_optax(caller)
    # At least 1: nu must become more than 0.
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
            raise ValueError(
                f"{caller}: compressor='sign' has no magnitudes, which Adam needs: use "
                "cgx_ops.jax.signum"
            )
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
