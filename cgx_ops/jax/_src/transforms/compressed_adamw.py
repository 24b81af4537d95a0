"""compressed_adamw: AdamW that sends its momentum compressed, and its variance rarely.

The arithmetic is that of cgx_ops.torch.optim.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import lax

from cgx_ops._core.adam import (
    FIRST_CHECK,
    MOMENTUM,
    STEPS_OF_OCTAVE,
    WarmupSteps,
    checked_warmup_config,
    checked_warmup_steps,
    config_of_gradients,
    kept_by_interval,
    longest_update,
)
from cgx_ops.config import Config, Keywords
from cgx_ops.errors import require_integer, require_share
from cgx_ops.jax._src.collectives.mesh_groups import Axes, mesh_groups
from cgx_ops.jax._src.collectives.options import (
    COMPRESS_ALL,
    Carrier,
    Options,
    checked_options,
    is_vote,
)
from cgx_ops.jax._src.collectives.psum import reduce_over
from cgx_ops.jax._src.runtime import compat
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


class VarianceSchedule(NamedTuple):
    """When the next gradients are averaged, to update nu. All are int32 scalars.

    Attributes:
        due: The step of the next update of nu, from 0; -1 for none.
        interval: Steps between updates; 0 in the warm-up, which updates nu in each step.
        done: Updates with this interval so far.
        high: With `warmup_steps="auto"`: the logarithm of nu at the last check, summed over all
            elements, in units of 256 octaves; -1 before the first check.
        low: The rest of this sum, in 1/16 octaves.
    """

    due: jax.Array
    interval: jax.Array
    done: jax.Array
    high: jax.Array
    low: jax.Array


@per_device("residual")
class CompressedAdamWState(NamedTuple):
    """The state of `compressed_adamw` between steps.

    Attributes:
        step: Number of steps done, an int32 scalar, equal on all devices.
        mu: The momentum, a tree like the parameters, float32, equal on all devices.
        nu: The variance, a tree like the parameters, float32, equal on all devices.
        weight: The bias correction of nu, a float32 scalar.
        schedule: When the next gradients are averaged, a tuple of int32 scalars. `due` is the step
            of the next variance step, and `interval` is 0 in the warm-up.
        residual: Each device's quantization error, float32, with an axis over the devices in front,
            as in `AverageGradientsState`.

    Example:
        >>> import jax
        >>> from cgx_ops.jax import compressed_adamw
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> optimizer = compressed_adamw("data", 1e-3, mesh=mesh)
        >>> state = optimizer.init(jax.numpy.ones((3, 4)))[0]
        >>> state.mu.shape, state.residual.shape
        ((3, 4), (1, 3, 4))
    """

    step: jax.Array
    mu: Any
    nu: Any
    weight: jax.Array
    schedule: VarianceSchedule
    residual: Any


def compressed_adamw(
    axis_name: Axes,
    learning_rate: Any,
    *,
    warmup_steps: WarmupSteps = "auto",
    refreshes: int = 4,
    warmup_config: Config | None = None,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    config: Config | None = None,
    key: jax.Array | None = None,
    name: str = "",
    rules: Rules = Rules(),  # noqa: B008  (immutable)
    fuse: bool | Plan = True,
    carrier: Carrier = "native",
    mesh: Mesh | None = None,
    **keywords: Unpack[Keywords],
) -> "optax.GradientTransformation":
    """Create AdamW with a compressed momentum, as an optax optimizer that averages itself.

    Use it like `average_gradients`, with `state_specs` and `consolidate`: call `update` inside
    `jax.shard_map`, with each device's own gradients. Chain nothing before it that averages.

    A variance step is a step of AdamW with the average of gradients, which are sent in 8 bits. A
    momentum step leaves nu unchanged: each device adds its gradient to mu, and sends the update
    mu / (sqrt(nu) + eps) in 1 bit. The average determines the new mu. The quantization error is
    kept as a residual and added to the next message.

    The first `warmup_steps` steps are variance steps. After them come `refreshes` variance steps at
    an interval of 1 step, then as many at intervals of 2, 4, 8, ... steps. A refresh counts in nu
    like the steps since the last one, at most by a quarter.

    Updates of momentum steps are clipped to the largest ones that AdamW makes with any gradients,
    so that training does not diverge where nu is tiny. Tang et al.: 1-bit Adam, ICML 2021. Lu et
    al.: 0/1 Adam, ICLR 2023.

    Args:
        axis_name: Name of a mesh axis, or a tuple of names.
        learning_rate: A number or an optax schedule.
        warmup_steps: Number of first steps that are variance steps, at least 1. "auto" (default): a
            power of two, at least 8. The warm-up ends when nu has changed by less than a factor of
            two, in the mean of its logarithm, while the number of steps doubled.
        refreshes: Variance steps after the warm-up at each interval, before it doubles. 0: nu stays
            fixed after the warm-up, as in 1-bit Adam. Default 4.
        warmup_config: How gradients are sent in variance steps, without error feedback. None
            (default): 8 bits. `Config(bits=32)`: exact.
        b1: Decay of mu, at least 0 and less than 1. Default 0.9.
        b2: Decay of nu, at least 0 and less than 1. Default 0.999.
        eps: Added to the square root of nu; more than 0. Default 1e-8.
        weight_decay: Decoupled weight decay, at least 0. Default 0.01.
        config: How the momentum is sent, as in `average_gradients`. None (default) means
            `Config(compressor="levels", bits=1, rotation=32)`.
        key: A PRNG key for random rounding, as in `average_gradients`.
        name: Identifies the collectives across processes, as in `psum_q`.
        rules: Settings per leaf of the momentum, by its path, as in `average_gradients`. Leaves
            that they make exact are exact in variance steps, too.
        fuse: How leaves share messages, as in `psum_q`.
        carrier: "native" (default) or "xla", as in `psum_q`.
        mesh: The mesh of the `shard_map`, as in `average_gradients`.
        **keywords: `bits`, `bucket_size`, `compressor` and `rounding` override fields of `config`.

    Returns:
        An `optax.GradientTransformation`. The first element of its state is a
        `CompressedAdamWState`.

    Raises:
        ImportError: optax is not installed.
        ValueError: An argument is out of range, or `warmup_config` has error feedback. In `init`:
            no mesh is known. In `update`: the gradients are equal on all devices already, or do not
            fit the state; or `warmup_steps` is "auto" and the parameters are split over an axis.
        TypeError: A leaf, key or static argument has the wrong type, as in `psum_q`.
        NameError: In `update`, an axis name is not bound by a `shard_map` around the call.
        NotImplementedError: The axes or the platform are not supported, as in `psum_q`.
        jax.errors.JaxRuntimeError: At run time, a peer failed, as in `psum_q`.

    Example:
        >>> import jax
        >>> from cgx_ops.jax import compressed_adamw, state_specs
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> optimizer = compressed_adamw("data", 1e-3, warmup_steps=100, mesh=mesh)
        >>> specs = state_specs(optimizer, jax.numpy.ones((3, 4)), "data")[0]
        >>> specs.mu, specs.residual
        (P(), P('data',))
    """
    caller = "compressed_adamw"
    optax = import_optax(caller)
    warmup_steps = checked_warmup_steps(caller, warmup_steps)
    refreshes = require_integer(f"{caller}: refreshes", refreshes, 0)
    require_share(f"{caller}: b1", b1)
    require_share(f"{caller}: b2", b2)
    if not eps > 0:
        raise ValueError(f"{caller}: eps is {eps!r}; it must be more than 0")
    config = MOMENTUM if config is None else config
    options = checked_options(
        caller, config, keywords, key=key, name=name, rules=rules, fuse=fuse, carrier=carrier
    )
    warmup_config = checked_warmup_config(caller, warmup_config, options.config)
    checked_options(caller, warmup_config, {}, key=key, carrier=carrier)
    of_gradients = _VarianceOptions(
        caller, warmup_config, key, name, rules, fuse, carrier, options.verb, options
    )
    most = longest_update(b1, b2)
    kept_of = kept_by_interval(b2)

    def keeps(path: Any, leaf: Any) -> bool:
        if is_vote(options.of(path, leaf)):
            raise ValueError(
                f"{caller}: compressor='sign' has no magnitudes, which Adam needs: use "
                "cgx_ops.jax.signum"
            )
        return options.keeps(path, leaf)

    def init(params: Any) -> CompressedAdamWState:
        mu = jax.tree.map(lambda leaf: jnp.zeros_like(leaf, dtype=jnp.float32), params)
        nu = jax.tree.map(jnp.zeros_like, mu)  # separate arrays: both can be donated
        residual = zero_residuals(caller, params, axis_name, mesh, keeps=keeps)
        step, *rest = (jnp.full((), value, jnp.int32) for value in (0, 0, 0, 0, -1, 0))
        weight = jnp.zeros((), jnp.float32)
        return CompressedAdamWState(step, mu, nu, weight, VarianceSchedule(*rest), residual)

    def update(
        updates: Any, state: CompressedAdamWState, params: Any = None
    ) -> tuple[Any, CompressedAdamWState]:
        del params
        groups = mesh_groups(caller, axis_name)
        gradients = checked_gradients(caller, updates, state.mu, groups.axes)
        options.warn_of_unmatched(gradients)
        root = math.sqrt(groups.size)
        factors = jnp.array([kept_of, [1 - kept for kept in kept_of]], jnp.float32)

        def residual_of(path: Any, g: jax.Array, e: jax.Array | None) -> jax.Array | None:
            return own_residual(caller, path, g, e, keeps=keeps(path, g))

        def decayed(path: Any, g: jax.Array, e: jax.Array | None) -> jax.Array | None:
            return None if e is None else e * options.of(path, g).residual_decay

        residual = jax.tree_util.tree_map_with_path(residual_of, gradients, state.residual)

        def averaged(how: Options, x: Any, lost: Any, message: str) -> Any:
            how = how.at_step(state.step).of_message(message)
            return reduce_over(how, x, lost, groups.axes, "avg")

        def denominators(nu: Any, weight: jax.Array) -> Any:
            return jax.tree.map(lambda v: jnp.sqrt(v / weight) + eps, nu)

        def variance_step(_: Any) -> Any:
            g, _lost = averaged(of_gradients, gradients, None, "gradients")
            # log2 of the interval, which is a power of two, or 0 in the warm-up
            power = 31 - lax.clz(jnp.maximum(state.schedule.interval, 1))
            kept, new = factors[:, jnp.minimum(power, factors.shape[1] - 1)]
            weight = state.weight * kept + new
            nu = jax.tree.map(lambda v, x: v * kept + x * x * new, state.nu, g)
            mu = followed(state.mu, g, b1)
            schedule = _advanced(caller, state, nu, weight, warmup_steps, refreshes)
            steps = jax.tree.map(jnp.divide, mu, denominators(nu, weight))
            return steps, mu, nu, weight, schedule, residual

        def momentum_step(_: Any) -> Any:
            below = denominators(state.nu, state.weight)

            def own_of(m: jax.Array, d: jax.Array) -> jax.Array:
                u = m / d
                # An infinity becomes NaN, because clip() would hide it.
                return jnp.clip(u, -root * most, root * most) + (u - u)

            own = jax.tree.map(own_of, followed(state.mu, gradients, b1), below)
            kept = jax.tree_util.tree_map_with_path(decayed, gradients, residual)
            mean, lost = averaged(options, own, kept, "momentum")
            steps = jax.tree.map(lambda u: jnp.clip(u, -most, most), mean)
            mu = jax.tree.map(jnp.multiply, steps, below)
            return steps, mu, state.nu, state.weight, state.schedule, lost

        due = state.step == state.schedule.due
        steps, mu, nu, weight, schedule, residual = lax.cond(
            due, variance_step, momentum_step, None
        )
        step = state.step + 1
        correction = 1 - jnp.float32(b1) ** step.astype(jnp.float32)
        steps = jax.tree.map(lambda u, x: (u / correction).astype(x.dtype), steps, updates)
        residual = jax.tree.map(lambda e: e[None], residual)
        return steps, CompressedAdamWState(step, mu, nu, weight, schedule, residual)

    return with_rate(optax, init, update, caller, learning_rate, weight_decay)


@dataclass(frozen=True)
class _VarianceOptions(Options):
    """How gradients are sent in variance steps: leaves that are exact in the momentum are exact."""

    momentum: Options

    def of(self, path: Any, leaf: Any) -> Config:
        """Return the Config of a leaf."""
        config = config_of_gradients(self.config, self.momentum.of(path, leaf))
        return replace(self.momentum, config=config, rules=COMPRESS_ALL).of(path, leaf)

    def with_key(self, key: jax.Array | None) -> "Options":
        """Return these options with another key."""
        return replace(self, key=key, momentum=self.momentum.with_key(key))


# ---- the schedule of the variance ----------------------------------------------------------------


def _advanced(
    caller: str,
    state: CompressedAdamWState,
    nu: Any,
    weight: jax.Array,
    warmup_steps: WarmupSteps,
    refreshes: int,
) -> VarianceSchedule:
    """Return the schedule after a variance step, as VarianceSchedule.advanced() of cgx_ops._core.

    `nu` and `weight` are those after the step.
    """
    now, step = state.schedule, state.step
    high, low = now.high, now.low
    if warmup_steps == "auto":
        count = step + 1
        check = (count >= FIRST_CHECK // 2) & (count & (count - 1) == 0) & (now.interval == 0)
        logs = level(nu, weight)
        if any(compat.varying_axes(x) for x in logs) and compat.types_are_checked():
            raise ValueError(
                f"{caller}: warmup_steps='auto' needs whole parameters on each device, and they "
                "are split over a mesh axis: pass a number of steps"
            )
        numel = sum(v.size for v in jax.tree.leaves(nu))
        ends = check & has_settled(logs, (high, low), numel) & (high >= 0)
        high, low = (jnp.where(check, x, y) for x, y in zip(logs, (high, low), strict=True))
    else:
        ends = step + 1 >= warmup_steps
    warm = now.interval == 0
    doubles = now.done + 1 >= refreshes
    interval = jnp.where(doubles, 2 * now.interval, now.interval)
    first = step + 1 if refreshes else jnp.full_like(step, -1)
    due = jnp.where(warm, jnp.where(ends, first, step + 1), step + interval)
    interval = jnp.where(warm, jnp.where(ends, 1, 0), interval)
    done = jnp.where(warm | doubles, 0, now.done + 1)
    return VarianceSchedule(*(x.astype(jnp.int32) for x in (due, interval, done, high, low)))


Level = tuple[jax.Array, jax.Array]  # high * 2^12 + low, where 0 <= low < 2^12


def has_settled(now: Level, before: Level, numel: int) -> jax.Array:
    """Return whether nu changed by less than a factor of two since the last check.

    The rule is that of cgx_ops._core. The result is exact for all levels whose `high` fits int32. A
    value adds at most 255 * 16 to a level, so `high` is less than `numel` and fits for up to 2^31
    values.

    Args:
        now: The level(), a pair of int32 scalars.
        before: That of the last check.
        numel: Number of values, at most 2^31.
    """
    high, low = now[0] - before[0], now[1] - before[1]
    overflows = ((now[0] ^ before[0]) & (now[0] ^ high)) < 0
    high, low = high + (low >> 12), low & 0xFFF  # borrows if low is negative

    def is_less(x: tuple[Any, Any], y: tuple[Any, Any]) -> jax.Array:
        return (x[0] < y[0]) | ((x[0] == y[0]) & (x[1] < y[1]))

    most = STEPS_OF_OCTAVE * numel
    change = high, low
    inside = is_less(divmod(-most, 2**12), change) & is_less(change, divmod(most, 2**12))
    return inside & ~overflows


def level(nu: Any, weight: jax.Array) -> Level:
    """Return the sum of the logarithms of nu in 1/16 octaves, as high * 2^12 + low.

    The exponent and four leading bits of a float are its logarithm. A sum of integers is the same
    on every device, whatever the order of the additions.
    """

    def of(v: jax.Array) -> tuple[jax.Array, jax.Array]:
        bits = (lax.bitcast_convert_type(v / weight, jnp.int32) >> 19).ravel()
        rows = jnp.pad(bits, (0, -bits.size % 2**15)).reshape(-1, 2**15)
        sums = jnp.sum(rows, 1, dtype=jnp.int32)
        return (
            jnp.sum(sums >> 12, dtype=jnp.int32),
            jnp.sum(sums & 0xFFF, dtype=jnp.int32),
        )

    found = [of(v) for v in jax.tree.leaves(nu)]
    zero = jnp.zeros((), jnp.int32)
    high, low = (sum((parts[i] for parts in found), zero) for i in (0, 1))
    return high + (low >> 12), low & 0xFFF
