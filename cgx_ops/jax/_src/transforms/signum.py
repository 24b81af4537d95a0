"""signum: SGD by the majority's signs of the devices' momenta, one bit an element.

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
    """The state of signum between steps.

    Attributes:
        step: int32 scalar: the steps done, equal on all devices.
        momentum: each device's own, float32, with an axis of the devices in front, as residuals.
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
    """Return SigNUM with majority vote as an optax optimizer: every device votes with signs.

    Used as `one_bit_adam` is. One bit an element goes each way (16 where several processes have
    several devices of a group each), and all elements step by the learning rate, to where most
    devices' momenta point. A vote has no zero: where as many devices
    vote + as -, and where a momentum is 0, it counts as + in even steps and as - in odd ones, so
    that votes do not drift (the paper's sign(0) is 0; on average this is, too).

    Args:
        axis_name: name of a mesh axis, or a tuple of names.
        learning_rate: a number, or an optax schedule.
        momentum: at least 0 (signSGD) and less than 1.
        weight_decay: at least 0.
        config: as of `psum_q`, of compressor "sign"; None: Config(compressor="sign"). All leaves
          vote, so there are no rules.
        name: of the collective, as of `psum_q`.
        fuse: as of `psum_q`.
        carrier: as of `psum_q`.
        mesh: of the shard_map, as of `average_gradients`.

    Returns:
        An optax.GradientTransformation, the first of whose states is a `SignumState`.

    Raises:
        ImportError, ValueError, NameError, TypeError, JaxRuntimeError: as `one_bit_adam`.
    """
    caller = "signum"
    optax = import_optax(caller)
    require_share(f"{caller}: momentum", momentum)
    config = Config(compressor="sign") if config is None else config
    options = checked_options(caller, config, {}, name=name, fuse=fuse, carrier=carrier)
    if not is_vote(options.config):
        raise ValueError(
            f"{caller}: config is {config!r}; give Config(compressor='sign'), without bits"
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
