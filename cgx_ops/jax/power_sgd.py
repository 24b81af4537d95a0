"""power_sgd: the mean over a mesh axis as an optax transformation, matrices as thin products.

    P = mean(M) Q, orthogonalized;  Q = mean(M)^T P;  the average is P Q^T

  1. the transformation: which leaves are factored, its state, what a step averages
  2. a step: one message of all P and of the leaves that are not factored, one of all Q
  3. the linear algebra, in float32

Vogels, Karimireddy, Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization, NeurIPS 2019.
"""

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from cgx_ops import low_rank
from cgx_ops.config import Config
from cgx_ops.jax import _compat
from cgx_ops.jax.knobs import Rules, checked_knobs, keeps_by_default
from cgx_ops.jax.mesh_groups import Axes, mesh_groups
from cgx_ops.jax.optimizer_state import (
    Mesh,
    PowerSGDState,
    check_converges,
    check_own,
    import_optax,
    own_residual,
    zero_residuals,
)
from cgx_ops.jax.psum import reduce_over
from cgx_ops.jax.trees import checked_leaf
from cgx_ops.rules import EXACT_BITS

if TYPE_CHECKING:
    import optax

_CALLER = "power_sgd"
# How P and Q travel, by factor_bits, as rules say it: the key says how values are rounded.
_FACTORS: dict[int, Any] = {
    32: EXACT_BITS,
    16: {"compressor": "half"},
    8: {"compressor": "uniform", "bits": 8, "gather_bits": 8, "bucket_size": 512},
}

# ---- 1. the transformation -----------------------------------------------------------------------


def power_sgd(
    axis_name: Axes,
    *,
    rank: int = 1,
    min_compression_rate: float = 2,
    start: int = 0,
    seed: int = 0,
    factor_bits: int = 32,
    error_feedback: bool = True,
    residual_decay: float = 1.0,
    key: jax.Array | None = None,
    name: str = "",
    mesh: Mesh | None = None,
    bits: int | None = None,
    rules: Rules | None = None,
    **knobs: Any,
) -> "optax.GradientTransformation":
    """Return an optax transformation that averages gradients over mesh axes, in low rank.

    It stands where `average_gradients` stands, and is used in the same way, with `state_specs` and
    `consolidate`. A leaf is a matrix M of n rows and m columns, its dimensions parted where n + m
    is least: (height * width * in, out) of a convolution. It is sent as P (n, rank) and Q
    (m, rank): 4 rank (n + m) bytes in place of 4 n m, in two messages a step for the whole tree.
    What of a device's matrix its own Q does not tell is its residual, added in the next step. So
    over all devices gradients and old residuals are the average (as a sum) and the new residuals,
    but for what float32 and the leaf's dtype round.

    Parameters must be whole on each device: what is split over other axes of the mesh belongs to
    average_gradients, by optax.partition.

    Args:
        axis_name: name of a mesh axis, or a tuple of names.
        rank: columns of P and Q, at least 1.
        min_compression_rate: a leaf is factored if P and Q have more than so many times fewer
          elements than it, and no rule is for it; others travel by the knobs.
        start: so many steps first are averaged exactly.
        seed: of the first Q, which follow from it and the leaves' paths.
        factor_bits: how P and Q travel: 32 exact, 16 as bfloat16, 8 quantized; what is lost of Q
          is in the residuals too.
        error_feedback: whether there are residuals: of what is factored, and of leaves that lose
          something, as average_gradients has them by default.
        residual_decay: the part of residuals that is added, more than 0 and at most 1.
        key: a PRNG key, as of `average_gradients`.
        name: of the collectives, as of `psum_q`.
        mesh: of the shard_map, as of `average_gradients`.
        bits: of leaves that are not factored, as of `psum_q`; None: 32, exact, unless a compressor
          is given.
        rules: as of `psum_q`; what one is for is not factored.
        **knobs: every other keyword of `psum_q` but residual and fuse.

    Returns:
        An optax.GradientTransformation, whose state is a `PowerSGDState`.

    Raises:
        ImportError: optax is not installed.
        ValueError: an argument is out of its range; at init, no mesh is known; at update, the
          gradients are equal on all devices already, vary over other axes, or do not fit the state.
        NameError, NotImplementedError, TypeError, jax.errors.JaxRuntimeError: as `psum_q`.
    """
    optax = import_optax(_CALLER)
    if "fuse" in knobs:
        raise TypeError(f"{_CALLER} has no knob fuse: its messages are those of all leaves")
    rank = low_rank.checked_rank(rank, "rank")
    rate = low_rank.checked_rate(min_compression_rate)
    how = _FACTORS[low_rank.checked_factor_bits(factor_bits)]
    decay = Config(residual_decay=residual_decay).residual_decay  # which checks it
    if start < 0:
        raise ValueError(f"{_CALLER}: start is {start}; it must be at least 0")
    if bits is None:
        bits = Config().bits if "compressor" in knobs else EXACT_BITS
    knobs = {"bits": bits, "key": key, "name": name, **knobs}
    checked = checked_knobs(_CALLER, rules=rules, **knobs)

    def keeps(config: Config) -> bool:
        return error_feedback and config.bits != EXACT_BITS and keeps_by_default(config)

    for config in filter(keeps, checked.configs):
        check_converges(_CALLER, config)

    def rank_in(path: Any, leaf: Any) -> int:
        if any(rule.matches(_name_of(path)) for rule, _ in checked.rules):
            return 0
        return low_rank.rank_of(*_matrix_of(jnp.shape(leaf)), rank, rate)

    def init(params: Any) -> PowerSGDState:
        def first(path: Any, leaf: Any) -> jax.Array | None:
            of_leaf = rank_in(path, leaf)
            if not of_leaf:
                return None
            columns = _matrix_of(jnp.shape(leaf))[1]
            return jnp.asarray(low_rank.first_q(seed, _name_of(path), 0, columns, of_leaf))

        def kept(path: Any, leaf: Any) -> Any:
            keep = error_feedback if rank_in(path, leaf) else keeps(checked.config_of(path))
            return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.float32) if keep else None

        by_path = jax.tree_util.tree_map_with_path
        residual = zero_residuals(_CALLER, by_path(kept, params), axis_name, mesh)
        return PowerSGDState(jnp.zeros((), jnp.int32), by_path(first, params), residual)

    def update(updates: Any, state: PowerSGDState, params: Any = None) -> tuple[Any, PowerSGDState]:
        del params
        axes = mesh_groups(_CALLER, axis_name).axes
        check_own(_CALLER, updates, axes)
        leaves = _leaves(updates, state, decay, axes)
        for leaf in leaves:
            expected = rank_in(leaf.path, leaf.x)
            found = 0 if leaf.q is None else leaf.q.shape[1]
            columns = None if leaf.q is None else leaf.q.shape[0]
            if found != expected or columns not in (None, _matrix_of(leaf.x.shape)[1]):
                raise ValueError(
                    f"{_CALLER}: updates{jax.tree_util.keystr(leaf.path)} of shape {leaf.x.shape} "
                    f"has rank {expected}, and its q in the state is "
                    f"{None if leaf.q is None else leaf.q.shape}: the state is another model's, "
                    "or the parameter is split over other axes of the mesh"
                )
        noise = None if key is None else jax.random.fold_in(key, state.step)

        def averaged(x: dict[str, Any], residual: Any, message: str, own: Rules) -> Any:
            called = f"{name}/{message}" if name else ""
            drawn = None if noise is None else jax.random.fold_in(noise, "pq".find(message) + 1)
            return reduce_over(
                _CALLER, x, residual, axes, "avg",
                **{**knobs, "key": drawn, "name": called, "rules": own},
            )  # fmt: skip

        def exact(_: Any) -> Any:
            whole = {leaf.name: leaf.x for leaf in leaves}
            means, _lost = averaged(whole, None, "exact", {"": EXACT_BITS})
            return [(means[leaf.name], leaf.q, leaf.residual) for leaf in leaves]

        def factored(_: Any) -> Any:
            return _step(leaves, how, dict(rules or {}), averaged)

        if start:
            results = jax.lax.cond(state.step < start, exact, factored, None)
        else:
            results = factored(None)
        tree = jax.tree.structure(updates)
        means, qs, lost = (tree.unflatten(each) for each in zip(*results, strict=True))
        residual = jax.tree.map(lambda e: e[None], lost)
        return means, PowerSGDState(state.step + 1, qs, residual)

    return optax.GradientTransformation(init, update)


def _name_of(path: Any) -> str:
    """Return a leaf's path as rules know it."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _matrix_of(shape: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns of a leaf as a matrix: parted where their sum is least."""
    ways = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
    return min(ways, key=sum, default=(1, math.prod(shape)))


# ---- 2. a step -----------------------------------------------------------------------------------


class _Leaf(NamedTuple):
    """A gradient; its q, if it is factored; its residual, decayed, if it has one."""

    path: Any
    name: str
    x: jax.Array
    q: jax.Array | None
    residual: jax.Array | None


def _leaves(updates: Any, state: PowerSGDState, decay: float, axes: Any) -> list[_Leaf]:
    """Return the leaves of a tree of gradients with what the state has of each."""
    tree = jax.tree.structure(updates)
    qs, residuals = (tree.flatten_up_to(each) for each in (state.q, state.residual))
    leaves = []
    paths = jax.tree_util.tree_leaves_with_path(updates)
    for (path, given), q, kept in zip(paths, qs, residuals, strict=True):
        x = checked_leaf(_CALLER, path, given)
        other = _compat.varying_axes(x) - frozenset(axes)
        if q is not None and _compat.types_are_checked() and other:
            raise ValueError(
                f"{_CALLER}: updates{jax.tree_util.keystr(path)} varies over "
                f"{sorted(other, key=str)}: its parameter is split over them, and only matrices "
                "that are whole on each device can be factored. Have average_gradients average it, "
                "by optax.partition"
            )
        residual = own_residual(_CALLER, path, x, kept)
        decayed = residual if residual is None or decay == 1 else residual * decay
        leaves.append(_Leaf(path, _name_of(path), x, q, decayed))
    if len({leaf.name for leaf in leaves}) < len(leaves):
        raise ValueError(f"{_CALLER}: two leaves have one path: {[leaf.name for leaf in leaves]}")
    return leaves


def _step(leaves: list[_Leaf], how: Any, rules: dict[str, Any], averaged: Any) -> list[Any]:
    """Return for each leaf its average, what to begin the next step with, and the new residual."""
    matrices = {leaf.name: leaf for leaf in leaves if leaf.q is not None}
    others = {leaf.name: leaf for leaf in leaves if leaf.q is None}
    rules = {rf"\A{re.escape(name)}\Z": how for name in matrices} | rules
    values, bases, message = {}, {}, {}
    for name, leaf in matrices.items():
        x = leaf.x.astype(jnp.float32)
        x = x if leaf.residual is None else x + leaf.residual
        values[name] = x.reshape(_matrix_of(leaf.x.shape))
        bases[name] = _orthogonalized(leaf.q)
        message[name] = _product(values[name], bases[name])
    message |= {name: leaf.x.astype(jnp.float32) for name, leaf in others.items()}
    residuals = None
    if any(leaf.residual is not None for leaf in others.values()):
        # Residuals for P too, or leaves with residuals would be a message of their own.
        residuals = {name: jnp.zeros_like(message[name]) for name in matrices}
        residuals |= {name: leaf.residual for name, leaf in others.items()}
    first, lost = averaged(message, residuals, "p", rules)
    ps = {name: _orthogonalized(first[name]) for name in matrices}
    own = {name: _product(values[name].T, ps[name]) for name in matrices}
    zeros = None if how == EXACT_BITS else jax.tree.map(jnp.zeros_like, own)
    second, lost_of_q = averaged(own, zeros, "q", rules) if own else ({}, None)

    def of(leaf: _Leaf) -> Any:
        name = leaf.name
        if leaf.q is None:
            residual = None if leaf.residual is None else lost[name]
            return first[name].astype(leaf.x.dtype), None, residual
        p, q = ps[name], second[name]
        finite = jnp.isfinite(p).all() & jnp.isfinite(q).all()
        residual = None
        if leaf.residual is not None:
            share = own[name] if lost_of_q is None else own[name] - lost_of_q[name]
            left = (values[name] - _product(p, share.T)).reshape(leaf.x.shape)
            residual = jnp.where(finite, left, 0.0)
        average = _product(p, q.T).reshape(leaf.x.shape).astype(leaf.x.dtype)
        # A Q of zeros, or that is not finite, tells nothing: the next step begins as this one did.
        return average, jnp.where(finite & (q != 0).any(), q, bases[name]), residual

    return [of(leaf) for leaf in leaves]


# ---- 3. the linear algebra -----------------------------------------------------------------------


def _orthogonalized(matrix: Any) -> jax.Array:
    """Return orthonormal columns that span those of a matrix; any, where these are dependent."""
    return jnp.linalg.qr(matrix)[0]


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiply in float32, on GPUs too."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
