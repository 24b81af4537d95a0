"""signum: SGD by majority vote over the signs of the devices' momenta, one bit per element.

The arithmetic is that of cgx_ops.torch.optim.

Bernstein, Zhao, Azizzadenesheli, Anandkumar: signSGD with Majority Vote is Communication Efficient
and Fault Tolerant, ICLR 2019.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from cgx_ops.config import Config
from cgx_ops.errors import require_share
from cgx_ops.jax._src.collectives.mesh_groups import Axes, mesh_groups
from cgx_ops.jax._src.collectives.options import Carrier, checked_options, is_vote
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

if TYPE_CHECKING:
    import optax


@per_device("momentum")
class SignumState(NamedTuple):
    """The state of `signum` between steps.

    Attributes:
        step: Number of steps done, an int32 scalar, equal on all devices.
        momentum: Each device's own momentum, float32, with an axis over the devices in front, as
            the residual of `AverageGradientsState`.

    Example:
        >>> import jax
        >>> from cgx_ops.jax import signum
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> state = signum("data", 1e-4, mesh=mesh).init(jax.numpy.ones((3, 4)))[0]
        >>> state.momentum.shape
        (1, 3, 4)
    """

    step: jax.Array
    momentum: Any


def signum(
    axis_name: Axes,
    learning_rate: Any,
    *,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    config: Config | None = None,
    name: str = "",
    fuse: bool | Plan = True,
    carrier: Carrier = "native",
    mesh: Mesh | None = None,
) -> "optax.GradientTransformation":
    """Create SigNUM with majority vote as an optax optimizer: every device votes by signs.

    Use it like `compressed_adamw`. Each device sends the signs of its own momentum, and every
    element moves by the learning rate in the direction of the majority. One bit per element is sent
    each way; 16 bits if several processes have several devices of a group each.

    A vote has no zero. Ties, and momenta of 0, count as + in even steps and as - in odd steps, so
    that votes do not drift. (In the paper sign(0) is 0, as here on average.)

    Args:
        axis_name: Name of a mesh axis, or a tuple of names.
        learning_rate: A number or an optax schedule.
        momentum: At least 0 (signSGD) and less than 1. Default 0.9.
        weight_decay: Decoupled weight decay, at least 0. Default 0.
        config: How votes are sent. None (default) means `Config(compressor="sign")`, and the
            compressor must be "sign". All leaves vote, so there are no rules.
        name: Identifies the collective across processes, as in `psum_q`.
        fuse: How leaves share messages, as in `psum_q`.
        carrier: "native" (default) or "xla", as in `psum_q`.
        mesh: The mesh of the `shard_map`, as in `average_gradients`.

    Returns:
        An `optax.GradientTransformation`. The first element of its state is a `SignumState`.

    Raises:
        ImportError: optax is not installed.
        ValueError: An argument is out of range. In `init`: no mesh is known. In `update`: the
            gradients are equal on all devices already, or do not fit the state.
        TypeError: A leaf or static argument has the wrong type, as in `psum_q`.
        NameError: In `update`, an axis name is not bound by a `shard_map` around the call.
        NotImplementedError: The axes or the platform are not supported, as in `psum_q`.
        jax.errors.JaxRuntimeError: At run time, a peer failed, as in `psum_q`.

    Example:
        >>> import jax
        >>> from cgx_ops.jax import signum, state_specs
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> optimizer = signum("data", 1e-4, mesh=mesh)
        >>> state_specs(optimizer, jax.numpy.ones((3, 4)), "data")[0].momentum
        P('data',)
    """
    caller = "signum"
    optax = import_optax(caller)
    require_share(f"{caller}: momentum", momentum)
    config = Config(compressor="sign") if config is None else config
    options = checked_options(caller, config, {}, name=name, fuse=fuse, carrier=carrier)
    if not is_vote(options.config):
        raise ValueError(
            f"{caller}: config is {config!r}; it must be Config(compressor='sign'), without bits"
        )

    def init(params: Any) -> SignumState:
        own = zero_residuals(caller, params, axis_name, mesh)
        return SignumState(jnp.zeros((), jnp.int32), own)

    def update(updates: Any, state: SignumState, params: Any = None) -> tuple[Any, SignumState]:
        del params
        axes = mesh_groups(caller, axis_name).axes
        gradients = checked_gradients(caller, updates, state.momentum, axes)
        own = jax.tree_util.tree_map_with_path(
            lambda path, g, m: own_residual(caller, path, g, m), gradients, state.momentum
        )
        own = followed(own, gradients, momentum)
        side = jnp.where(state.step % 2 == 0, 1.0, -1.0).astype(jnp.float32)
        votes, _lost = reduce_over(
            options, jax.tree.map(lambda m: m * side, own), None, axes, "avg"
        )
        steps = jax.tree.map(lambda vote, x: (vote * side).astype(x.dtype), votes, updates)
        return steps, SignumState(state.step + 1, jax.tree.map(lambda m: m[None], own))

    return with_rate(optax, init, update, caller, learning_rate, weight_decay)
