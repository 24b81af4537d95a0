"""power_sgd: low-rank averages of gradients over a mesh axis, as an optax transformation.

    P = mean(M) Q, orthogonalized;  Q = mean(M)^T P;  the average is P Q^T

  1. the transformation: which leaves are factored, its state, the averages of a step
  2. matrices: a leaf, or all leaves together
  3. a step: all P are sent with the leaves that are not factored, then all Q
  4. linear algebra, in float32

Vogels, Karimireddy, Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization, NeurIPS 2019.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.config import Config, Keywords
from cgx_ops.errors import require_integer
from cgx_ops.jax._src.collectives.mesh_groups import Axes, mesh_groups
from cgx_ops.jax._src.collectives.options import Carrier, Options, checked_options, name_of_leaf
from cgx_ops.jax._src.collectives.psum import reduce_over
from cgx_ops.jax._src.collectives.trees import checked_leaf
from cgx_ops.jax._src.runtime import compat
from cgx_ops.jax._src.transforms.base import (
    Mesh,
    check_own,
    import_optax,
    own_residual,
    per_device,
    zero_residuals,
)
from cgx_ops.methods import low_rank
from cgx_ops.rules import Rules

if TYPE_CHECKING:
    import optax

_CALLER = "power_sgd"

# ---- 1. the transformation -----------------------------------------------------------------------


@per_device("residual", replicated=["q"])
class PowerSGDState(NamedTuple):
    """The state of `power_sgd` between steps. All arrays but `step` are float32.

    Attributes:
        step: Number of steps done, an int32 scalar, equal on all devices.
        q: The factor Q of each factored leaf, `(columns, rank)`, equal on all devices. None for
            other leaves. A single array with `batched=True`.
        residual: Each device's error, with an axis over the devices in front, as in
            `AverageGradientsState`.

    Example:
        >>> import jax
        >>> from cgx_ops.jax import power_sgd
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> state = power_sgd("data", rank=2, mesh=mesh).init(jax.numpy.ones((30, 40)))
        >>> state.q.shape, state.residual.shape
        ((40, 2), (1, 30, 40))
    """

    step: jax.Array
    q: Any
    residual: Any


def power_sgd(
    axis_name: Axes,
    *,
    rank: int = 1,
    min_compression_rate: float = 2,
    start: int = 0,
    seed: int = 0,
    factor_bits: int = 32,
    batched: bool = False,
    warm_start: bool = True,
    config: Config | None = None,
    key: jax.Array | None = None,
    name: str = "",
    rules: Rules = Rules(),  # noqa: B008  (immutable)
    carrier: Carrier = "native",
    mesh: Mesh | None = None,
    **keywords: Unpack[Keywords],
) -> "optax.GradientTransformation":
    """Create an optax transformation that averages gradients over mesh axes in low rank (PowerSGD).

    Use it like `average_gradients`, with `state_specs` and `consolidate`. A leaf is viewed as a
    matrix M of n rows and m columns and sent as two factors, P `(n, rank)` and Q `(m, rank)`: 4
    rank (n + m) bytes instead of 4 n m. The dimensions are split where n + m is smallest, for
    example `(height * width * in, out)` for a convolution. One message has all P and the leaves
    that are not factored, another one has all Q; large messages are split as in `psum_q`.

    The part of a device's matrix that its factors do not represent is its residual, which is added
    in the next step.

    Parameters must be whole on each device. For parameters that are split over other mesh axes, use
    `average_gradients`, by `optax.partition`.

    Args:
        axis_name: Name of a mesh axis, or a tuple of names.
        rank: Columns of P and Q, at least 1. Default 1.
        min_compression_rate: A leaf is factored if that divides its number of elements by more than
            this, and no rule matches it. Default 2.
        start: Number of first steps that average exactly. Default 0.
        seed: Seed of the first Q; without `warm_start`, of every Q.
        factor_bits: Format of P and Q: 32 (default) exact, 16 bfloat16, 8 quantized. The error of Q
            is part of the residual.
        batched: Whether to factor all leaves together as one nearly square matrix. Rules are
            ignored then. It sends fewer bytes and computes less, but the average is worse.
        warm_start: Whether a step starts from the last Q (default), or from a new random one.
        config: How leaves that are not factored are sent. None (default): exactly.
            `error_feedback=False` disables all residuals. `residual_decay` scales residuals before
            they are added. `algorithm` applies to P and Q too, which are rounded to nearest.
        key: A PRNG key for random rounding, as in `average_gradients`.
        name: Identifies the collectives across processes, as in `psum_q`.
        rules: Settings per leaf, by its path, as in `average_gradients`. A leaf that a rule matches
            is not factored.
        carrier: "native" (default) or "xla", as in `psum_q`.
        mesh: The mesh of the `shard_map`, as in `average_gradients`.
        **keywords: `bits`, `bucket_size`, `compressor` and `rounding` override fields of `config`.

    Returns:
        An `optax.GradientTransformation`, whose state is a `PowerSGDState`.

    Raises:
        ImportError: optax is not installed.
        ValueError: An argument is out of range. In `init`: no mesh is known. In `update`: the
            gradients are equal on all devices already, vary over other axes, or do not fit the
            state.
        TypeError: A leaf, key or static argument has the wrong type, as in `psum_q`.
        NameError: In `update`, an axis name is not bound by a `shard_map` around the call.
        NotImplementedError: The axes or the platform are not supported, as in `psum_q`.
        jax.errors.JaxRuntimeError: At run time, a peer failed, as in `psum_q`.

    Example:
        >>> import jax
        >>> import optax
        >>> from cgx_ops.jax import power_sgd, state_specs
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> optimizer = optax.chain(power_sgd("data", rank=2, mesh=mesh), optax.sgd(0.1))
        >>> specs = state_specs(optimizer, jax.numpy.ones((30, 40)), "data")[0]
        >>> specs.q, specs.residual
        (P(), P('data',))
    """
    optax = import_optax(_CALLER)
    rank = require_integer(f"{_CALLER}: rank", rank, 1)
    start = require_integer(f"{_CALLER}: start", start, 0)
    rate = low_rank.checked_rate(min_compression_rate)
    if config is keywords.get("bits") is keywords.get("compressor") is None:
        keywords["bits"] = EXACT_BITS
    options = checked_options(
        _CALLER, config, keywords, key=key, name=name, rules=rules, carrier=carrier
    )
    how = _factors(options, low_rank.checked_factor_bits(factor_bits))

    def rank_in(path: Any, leaf: Any) -> int:
        """Return the columns of a leaf's own factors; 0: it has none."""
        if batched or rules.match(name_of_leaf(path)):
            return 0
        return low_rank.rank_of(*_matrix_of(jnp.shape(leaf)), rank, rate)

    def is_factored(path: Any, leaf: Any) -> bool:
        return batched or rank_in(path, leaf) > 0

    def keeps(path: Any, leaf: Any) -> bool:
        """Return whether a leaf has a residual: low rank is biased, whatever its encoding."""
        if is_factored(path, leaf):
            return options.config.error_feedback is not False
        return options.keeps(path, leaf)

    def all_in_one(numel: int) -> tuple[int, int]:
        """Return the side of the matrix of all leaves, and the columns of its factors."""
        side = math.isqrt(max(0, numel - 1)) + 1
        return side, min(side, rank)

    def init(params: Any) -> PowerSGDState:

        def first(path: Any, leaf: Any) -> jax.Array | None:
            of_leaf = rank_in(path, leaf)
            if not of_leaf:
                return None
            columns = _matrix_of(jnp.shape(leaf))[1]
            return jnp.asarray(low_rank.first_q(seed, name_of_leaf(path), 0, columns, of_leaf))

        if batched:
            side, columns = all_in_one(sum(map(jnp.size, jax.tree.leaves(params))))
            q: Any = jnp.asarray(low_rank.first_q(seed, "", 0, side, columns))
        else:
            q = jax.tree_util.tree_map_with_path(first, params)
        residual = zero_residuals(_CALLER, params, axis_name, mesh, keeps=keeps)
        return PowerSGDState(jnp.zeros((), jnp.int32), q, residual)

    def planned(tree: Any, leaves: list[_Leaf], qs: Any) -> list[_Matrix]:
        """Return what is factored, with the q of each; `qs` is as the state has it.

        tree: the structure of the gradients, which may have None too.
        """
        if batched:
            side, columns = all_in_one(sum(leaf.x.size for leaf in leaves))
            if getattr(qs, "shape", None) != (side, columns):
                raise ValueError(
                    f"{_CALLER}: all updates together need a q of shape {(side, columns)}, and the "
                    f"state's is {jax.tree.map(jnp.shape, qs)}: it belongs to another model, or "
                    "was made without batched=True"
                )
            return [_Matrix("", leaves, side, side, qs)]
        found = []
        for leaf, q in zip(leaves, tree.flatten_up_to(qs), strict=True):
            rows, columns = _matrix_of(leaf.x.shape)
            expected = rank_in(leaf.path, leaf.x)
            if (None if q is None else q.shape) != ((columns, expected) if expected else None):
                raise ValueError(
                    f"{_CALLER}: updates{jax.tree_util.keystr(leaf.path)} of shape {leaf.x.shape} "
                    f"has rank {expected}, and its q in the state is "
                    f"{None if q is None else q.shape}: the state belongs to another model, or the "
                    "parameter is split over other axes of the mesh"
                )
            if q is not None:
                found.append(_Matrix(leaf.name, [leaf], rows, columns, q))
        return found

    def update(updates: Any, state: PowerSGDState, params: Any = None) -> tuple[Any, PowerSGDState]:
        del params
        axes = mesh_groups(_CALLER, axis_name).axes
        check_own(_CALLER, updates, axes)
        options.warn_of_unmatched(updates)
        for path, leaf in jax.tree_util.tree_leaves_with_path(updates):
            if is_factored(path, leaf):
                _check_whole(path, leaf, axes)
        leaves = _leaves(options, updates, state, keeps)
        if not leaves:  # such as an empty part of a partition
            return updates, state._replace(step=state.step + 1)
        tree = jax.tree.structure(updates)
        matrices = planned(tree, leaves, state.q)
        if not warm_start:
            drawn_from = jax.random.fold_in(jax.random.key(seed), state.step)
            matrices = [m.drawn(jax.random.fold_in(drawn_from, i)) for i, m in enumerate(matrices)]
        own = options.at_step(state.step)

        def averaged(x: dict[str, Any], residual: Any, message: str, configs: Any) -> Any:
            of_message = own.of_message(message)
            if own.key is not None:
                drawn = jax.random.fold_in(own.key, "pq".find(message) + 1)
                of_message = of_message.with_key(drawn)
            return reduce_over(of_message, x, residual, axes, "avg", configs)

        def exact(_: Any) -> Any:
            whole = {leaf.name: leaf.x for leaf in leaves}
            configs = dict.fromkeys(whole, _factors(options, EXACT_BITS))
            means, _lost = averaged(whole, None, "exact", configs)
            kept = [leaf.residual for leaf in leaves]
            return [means[leaf.name] for leaf in leaves], [m.q for m in matrices], kept

        def factored(_: Any) -> Any:
            return _step(leaves, matrices, how, averaged)

        if start:
            means, qs, lost = jax.lax.cond(state.step < start, exact, factored, None)
        else:
            means, qs, lost = factored(None)
        residual = jax.tree.map(lambda e: e[None], tree.unflatten(lost))
        q = jax.tree.unflatten(jax.tree.structure(state.q), qs)
        return tree.unflatten(means), PowerSGDState(state.step + 1, q, residual)

    return optax.GradientTransformation(init, update)


def _factors(options: Options, bits: int) -> Config:
    """Return the Config with which P and Q are sent."""
    return options.config.with_own(**low_rank.FACTORS[bits], error_feedback=None)


def _check_whole(path: Any, leaf: Any, axes: Any) -> None:
    """Refuse a leaf that is split over other axes of the mesh."""
    other = compat.varying_axes(leaf) - frozenset(axes)
    if compat.types_are_checked() and other:
        raise ValueError(
            f"{_CALLER}: updates{jax.tree_util.keystr(path)} varies over {sorted(other, key=str)}: "
            "its parameter is split over them, and only matrices that are whole on each device "
            "can be factored. Use average_gradients for it, by optax.partition"
        )


def _matrix_of(shape: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns of a leaf as a matrix, split where their sum is smallest."""
    ways = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
    return min(ways, key=sum, default=(1, math.prod(shape)))


# ---- 2. matrices ---------------------------------------------------------------------------------


class _Leaf(NamedTuple):
    """A gradient, its Config unless it is factored, and its decayed residual, if it has one."""

    path: Any
    name: str
    x: jax.Array
    config: Config
    residual: jax.Array | None


class _Matrix(NamedTuple):
    """Leaves, concatenated as one matrix, and the Q with which its step starts, (columns, rank)."""

    name: str
    leaves: list[_Leaf]
    rows: int
    columns: int
    q: jax.Array

    def drawn(self, key: jax.Array) -> "_Matrix":
        """Return the matrix with a random Q."""
        return self._replace(q=jax.random.normal(key, self.q.shape, jnp.float32))

    def values(self) -> jax.Array:
        """Return gradients plus residuals, padded with zeros."""
        flats = []
        for leaf in self.leaves:
            x = leaf.x.astype(jnp.float32)
            flats.append((x if leaf.residual is None else x + leaf.residual).ravel())
        flat = jnp.concatenate(flats)
        rest = self.rows * self.columns - flat.size
        return jnp.pad(flat, (0, rest)).reshape(self.rows, self.columns)

    def pieces(self, values: jax.Array) -> list[jax.Array]:
        """Split values of the matrix's shape into one array for each leaf."""
        ends = list(itertools.accumulate(leaf.x.size for leaf in self.leaves))
        flats = jnp.split(values.ravel(), ends)[: len(ends)]
        return [flat.reshape(leaf.x.shape) for flat, leaf in zip(flats, self.leaves, strict=True)]


def _leaves(
    options: Options, updates: Any, state: PowerSGDState, keeps: Callable[[Any, Any], bool]
) -> list[_Leaf]:
    """Return the leaves of a tree of gradients, each with its part of the state."""
    residuals = jax.tree.structure(updates).flatten_up_to(state.residual)
    leaves = []
    paths = jax.tree_util.tree_leaves_with_path(updates)
    for (path, given), kept in zip(paths, residuals, strict=True):
        x = checked_leaf(_CALLER, path, given)
        config = options.of(path, x)
        residual = own_residual(
            _CALLER, path, x, kept, keeps=keeps(path, x), decay=config.residual_decay
        )
        leaves.append(_Leaf(path, name_of_leaf(path), x, config, residual))
    if len({leaf.name for leaf in leaves}) < len(leaves):
        raise ValueError(
            f"{_CALLER}: two leaves have the same path: {[leaf.name for leaf in leaves]}"
        )
    return leaves


# ---- 3. a step -----------------------------------------------------------------------------------


def _step(
    leaves: list[_Leaf], matrices: list[_Matrix], how: Config, averaged: Any
) -> tuple[list[Any], list[Any], list[Any]]:
    """Return each leaf's average, the next Q of each matrix, and the residuals."""
    factored = {leaf.name for matrix in matrices for leaf in matrix.leaves}
    others = {leaf.name: leaf for leaf in leaves if leaf.name not in factored}
    configs = {matrix.name: how for matrix in matrices}
    values = {matrix.name: matrix.values() for matrix in matrices}
    bases = {matrix.name: _orthogonalized(matrix.q) for matrix in matrices}
    message = {name: _product(values[name], basis) for name, basis in bases.items()}
    message |= {name: leaf.x.astype(jnp.float32) for name, leaf in others.items()}
    residuals: Any = None
    if any(leaf.residual is not None for leaf in others.values()):
        # P and exact leaves get zero residuals: leaves without residuals need another message.
        residuals = {name: jnp.zeros_like(message[name]) for name in values}
        for name, leaf in others.items():
            zeros = jnp.zeros_like(message[name]) if leaf.config.is_exact else None
            residuals[name] = zeros if leaf.residual is None else leaf.residual
    first, lost = averaged(
        message, residuals, "p", configs | {name: leaf.config for name, leaf in others.items()}
    )
    ps = {name: _orthogonalized(first[name]) for name in values}
    own = {name: _product(values[name].T, ps[name]) for name in values}
    zeros = None if how.bits == EXACT_BITS else jax.tree.map(jnp.zeros_like, own)
    second, lost_of_q = averaged(own, zeros, "q", configs) if own else ({}, None)

    means, kept, qs = {}, {}, []
    for name, leaf in others.items():
        means[name] = first[name].astype(leaf.x.dtype)
        kept[name] = None if leaf.residual is None else lost[name]
    for matrix in matrices:
        name = matrix.name
        p, q = ps[name], second[name]
        finite = jnp.isfinite(p).all() & jnp.isfinite(q).all()
        share = own[name] if lost_of_q is None else own[name] - lost_of_q[name]
        left = jnp.where(finite, values[name] - _product(p, share.T), 0.0)
        average = matrix.pieces(_product(p, q.T))
        for leaf, mean, rest in zip(matrix.leaves, average, matrix.pieces(left), strict=True):
            means[leaf.name] = mean.astype(leaf.x.dtype)
            kept[leaf.name] = None if leaf.residual is None else rest
        # If Q is zero or not finite, the next step starts from this step's Q again.
        qs.append(jnp.where(finite & (q != 0).any(), q, bases[name]))
    return [means[leaf.name] for leaf in leaves], qs, [kept[leaf.name] for leaf in leaves]


# ---- 4. the linear algebra -----------------------------------------------------------------------


def _orthogonalized(matrix: Any) -> jax.Array:
    """Return orthonormal columns with the same span; arbitrary ones where columns are dependent."""
    return jnp.linalg.qr(matrix)[0]


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiply in float32, on GPUs too."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
