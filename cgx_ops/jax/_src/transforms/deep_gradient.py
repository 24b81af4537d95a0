"""deep_gradient: sparse gradients with momentum correction, as an optax transformation.

In each step, each device:

  1. clips the gradient, and adds it to the momentum and to the residual
  2. sends the largest values of the residual; leaves that are not sparse are averaged exactly
  3. keeps the rest as the residual; the momentum becomes 0 where a value was sent

Lin, Han, Mao, Wang, Dally: Deep Gradient Compression: Reducing the Communication Bandwidth for
Distributed Training, ICLR 2018.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.config import Config, Keywords
from cgx_ops.jax._src.collectives.mesh_groups import Axes, mesh_groups, require_own_messages
from cgx_ops.jax._src.collectives.options import Carrier, checked_options, name_of_leaf
from cgx_ops.jax._src.collectives.psum import reduce_over
from cgx_ops.jax._src.collectives.trees import checked_leaf
from cgx_ops.jax._src.transforms.base import (
    Mesh,
    check_own,
    import_optax,
    own_residual,
    per_device,
    zero_residuals,
)
from cgx_ops.methods.deep_gradient import Method, checked_config, is_sparse, sparse_knobs
from cgx_ops.rules import Rules

if TYPE_CHECKING:
    import optax

_CALLER = "deep_gradient"


def _refuse_momentum_twice(state: "DeepGradientState", whole: Any) -> None:
    """Require that no other state of an optimizer has a momentum for a leaf that has one here."""

    # Optax's names of momentum: "trace" in sgd and others, "mu" in adam and others.
    def momentum_of(node: Any) -> Any:
        return getattr(node, "trace", getattr(node, "mu", None))

    def is_other(node: Any) -> bool:
        return isinstance(node, tuple) and momentum_of(node) is not None

    for node in filter(is_other, jax.tree.leaves(whole, is_leaf=is_other)):
        if _paths_of(state.momentum) & _paths_of(momentum_of(node)):
            raise ValueError(
                f"state_specs: deep_gradient has momentum, and so has {type(node).__name__}, which "
                "would apply it twice: chain optax.sgd(rate) behind it, without momentum, or pass "
                "momentum=0 to deep_gradient"
            )


def _paths_of(tree: Any) -> set[Any]:
    return {path for path, _ in jax.tree_util.tree_leaves_with_path(tree)}


@per_device("momentum", "residual", where={"momentum": "residual"}, check=_refuse_momentum_twice)
class DeepGradientState(NamedTuple):
    """The state of `deep_gradient` between steps. All arrays but `step` are float32.

    Attributes:
        step: Number of steps done, an int32 scalar, equal on all devices.
        momentum: The momentum u, a tree like the parameters. For sparse leaves it is each device's
            own, with an axis over the devices in front. For other leaves it has the leaf's shape.
            None without momentum.
        residual: The accumulated values v that were not sent yet. Each leaf has an axis over the
            devices in front. None for leaves that are not sparse.

    Example:
        >>> import jax
        >>> from cgx_ops.jax import deep_gradient
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> state = deep_gradient("data", mesh=mesh).init(jax.numpy.ones((30, 40)))
        >>> state.momentum.shape, state.residual.shape
        ((1, 30, 40), (1, 30, 40))
    """

    step: jax.Array
    momentum: Any
    residual: Any


def deep_gradient(
    axis_name: Axes,
    *,
    density: float = 0.001,
    momentum: float = 0.9,
    nesterov: bool = False,
    clip: float | None = None,
    warmup_steps: int = 0,
    dense_axis: Axes | None = None,
    config: Config | None = None,
    name: str = "",
    rules: Rules = Rules(),  # noqa: B008  (immutable)
    carrier: Carrier = "native",
    mesh: Mesh | None = None,
    **keywords: Unpack[Keywords],
) -> "optax.GradientTransformation":
    """Create an optax transformation that averages sparse gradients with momentum correction (DGC).

    Use it like `average_gradients`, with `state_specs` and `consolidate`. Chain an optimizer
    without momentum behind it, such as `optax.sgd(rate)`. Each device adds its clipped gradient g
    to a momentum u, and that to a residual v::

        u = m * u + g;    v = v + u                  # by default
        u = m * (u + g);  v = v + u + g              # with Nesterov's momentum

    It sends the largest values of v. There u becomes 0, and v becomes the error of the sent value.
    The average over all devices replaces the gradient and includes the momentum. Leaves of at most
    one dimension, small leaves and leaves that `rules` set to 32 bits are averaged exactly. For
    these, the momentum is applied to the average.

    Args:
        axis_name: Name of a mesh axis, or a tuple of names.
        density: The fraction of a leaf's values that each device sends, more than 0 and at most 1.
            Default 0.001.
        momentum: m, at least 0 and less than 1. Default 0.9.
        nesterov: Whether to use Nesterov's momentum.
        clip: Limits the L2 norm of each leaf's gradient on each device to `clip / sqrt(devices)`.
            None (default): no clipping.
        warmup_steps: Number of first steps with higher density: four equal stages with at least 25
            %, 6.25 %, 1.5625 % and 0.390625 %. The program has one branch per stage. Default 0.
        dense_axis: Axes over which gradients are averaged exactly first, such as the devices of a
            host. These devices share u and v. None (default): no such axes.
        config: How sparse leaves are sent. None (default) means `Config(compressor="topk")`, the
            only supported compressor. `value_bits` and `minimal_size` apply; buckets are whole
            leaves.
        name: Identifies the collectives across processes, as in `psum_q`.
        rules: Settings per leaf, by its path: `bits=32` (exact), `density` and `value_bits`.
        carrier: "native" (default) or "xla", as in `psum_q`.
        mesh: The mesh of the `shard_map`, as in `average_gradients`. If several processes have
            several devices each, `update` needs it as well.
        **keywords: `bits`, `bucket_size`, `compressor` and `rounding` override fields of `config`.

    Returns:
        An `optax.GradientTransformation`, whose state is a `DeepGradientState`.

    Raises:
        ImportError: optax is not installed.
        ValueError: An argument is out of range. In `init`: no mesh is known. In `update`: the
            gradients are equal on all devices already, or do not fit the state.
        NotImplementedError: Several processes have several devices of the axis each. Name an axis
            over the devices of a process in `dense_axis`.
        TypeError: A leaf or static argument has the wrong type, as in `psum_q`.
        NameError: In `update`, an axis name is not bound by a `shard_map` around the call.
        jax.errors.JaxRuntimeError: At run time, a peer failed, as in `psum_q`.

    Example:
        >>> import jax
        >>> import optax
        >>> from cgx_ops.jax import deep_gradient, state_specs
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> optimizer = optax.chain(deep_gradient("data", density=0.01, mesh=mesh), optax.sgd(0.1))
        >>> state_specs(optimizer, jax.numpy.ones((30, 40)), "data")[0].residual
        P('data',)
    """
    optax = import_optax(_CALLER)
    method = Method(density, momentum, nesterov, clip, warmup_steps)
    config = Config(compressor="topk") if config is None else config
    options = checked_options(_CALLER, config, keywords, name=name, rules=rules, carrier=carrier)
    checked_config(options.config)

    def own_of(path: Any, leaf: Any) -> Config | None:
        """Return how a leaf is sent; None: exact."""
        own, numel = options.of(path, leaf), int(np.prod(jnp.shape(leaf)))
        return own if is_sparse(name_of_leaf(path), own, numel) else None

    def init(params: Any) -> DeepGradientState:
        is_own = lambda path, leaf: own_of(path, leaf) is not None  # noqa: E731
        zeros = functools.partial(zero_residuals, _CALLER, params, axis_name, mesh, keeps=is_own)
        u = None
        if momentum:
            u = jax.tree.map(
                lambda leaf, own: jnp.zeros(jnp.shape(leaf), jnp.float32) if own is None else own,
                params, zeros(),
            )  # fmt: skip
        return DeepGradientState(jnp.zeros((), jnp.int32), u, zeros())

    def update(
        updates: Any, state: DeepGradientState, params: Any = None
    ) -> tuple[Any, DeepGradientState]:
        del params
        groups = mesh_groups(_CALLER, axis_name)
        dense = () if dense_axis is None else mesh_groups(_CALLER, dense_axis).axes
        require_own_messages(
            _CALLER, mesh, groups, 'pass its name: deep_gradient("hosts", dense_axis="devices")'
        )
        check_own(_CALLER, updates, groups.axes + dense)
        options.warn_of_unmatched(updates)
        on_gpu = _platform(mesh) != "cpu"

        def reduced(
            x: dict[str, Any], lost: Any, axes: Any, message: str, configs: Any = None, **more: Any
        ) -> Any:
            if configs is None:
                configs = dict.fromkeys(x, Config(bits=EXACT_BITS))
            how = options.of_message(message)
            return reduce_over(how, x, lost, axes, "avg", configs, **more) if x else ({}, {})

        leaves = _leaves(updates, state, own_of)
        ranks = groups.size * (mesh_groups(_CALLER, dense).size if dense else 1)
        gradients = {n: _clipped(leaf.x, method.limit(ranks)) for n, leaf in leaves.items()}
        if dense:
            gradients, _ = reduced(gradients, None, dense, "dense")
        exact = {n: g for n, g in gradients.items() if leaves[n].v is None}
        means, _ = reduced(exact, None, groups.axes, "exact")

        us, unsent = {}, {}
        for n, leaf in leaves.items():
            g, us[n] = _corrected(method, means.get(n, gradients[n]), leaf.u)
            if leaf.v is None:
                means[n] = g
            else:
                unsent[n] = leaf.v + g

        def sent(step: int) -> Any:
            """Return the averages and the new residuals, at the density of a step."""
            own = {}
            for n, c in unsent.items():
                knobs = sparse_knobs(method, leaves[n].own, c.size, step, gpu=on_gpu)
                own[n] = replace(leaves[n].own, algorithm="one_shot", **knobs)
            whole = {n for n in unsent if own[n].density >= 1}
            own |= {n: own[n].with_own(bits=EXACT_BITS) for n in whole}
            zeros = {n: None if n in whole else jnp.zeros_like(c) for n, c in unsent.items()}
            # Few values are sent even of a large tree, so it is one message.
            got, lost = reduced(unsent, zeros, groups.axes, "sparse", own, parts=False)
            return got, {n: jnp.zeros_like(c) if n in whole else lost[n] for n, c in unsent.items()}

        got, lost = _at_its_stage(method, state.step, sent)
        means |= got
        for n, c in unsent.items():
            whole = groups.size == 1 or (leaves[n].own.density or density) >= 1
            if us[n] is not None and not whole:
                us[n] = jnp.where(lost[n] != c, 0.0, us[n])

        tree = jax.tree.structure(updates)
        unflattened = lambda values: tree.unflatten([values(n) for n in leaves])  # noqa: E731
        u = unflattened(lambda n: _kept(leaves[n], us[n])) if momentum else None
        residual = unflattened(lambda n: lost[n][None] if n in lost else None)
        averages = unflattened(lambda n: means[n].astype(leaves[n].dtype))
        return averages, DeepGradientState(state.step + 1, u, residual)

    return optax.GradientTransformation(init, update)


class _Leaf(NamedTuple):
    """A float32 gradient, its original dtype, its Config if it is sparse, and its u and v."""

    x: jax.Array
    dtype: Any
    own: Any
    u: jax.Array | None
    v: jax.Array | None


def _leaves(updates: Any, state: DeepGradientState, own_of: Any) -> dict[str, _Leaf]:
    """Return the leaves of a tree of gradients by name, each with its part of the state."""
    tree = jax.tree.structure(updates)
    vs = tree.flatten_up_to(state.residual)
    us = [None] * len(vs) if state.momentum is None else tree.flatten_up_to(state.momentum)
    leaves: dict[str, _Leaf] = {}
    paths = jax.tree_util.tree_leaves_with_path(updates)
    for (path, given), u, v in zip(paths, us, vs, strict=True):
        x, own, name = checked_leaf(_CALLER, path, given), own_of(path, given), name_of_leaf(path)
        where = f"updates{jax.tree_util.keystr(path)} of shape {x.shape}"
        if (own is None) != (v is None):
            raise ValueError(
                f"{_CALLER}: {where} is {'exact' if own is None else 'sparse'} here, but was not "
                "when the state was made: the state belongs to another model, or to other rules"
            )
        if own is None and u is not None and u.shape != x.shape:
            raise ValueError(
                f"{_CALLER}: {where} has a momentum of shape {u.shape}: the state belongs to "
                "another model"
            )
        if own is not None:
            u, v = (own_residual(_CALLER, path, x, kept) for kept in (u, v))
        if name in leaves:
            raise ValueError(f"{_CALLER}: two leaves have the same path: {name}")
        leaves[name] = _Leaf(x.astype(jnp.float32), x.dtype, own, u, v)
    return leaves


def _clipped(x: jax.Array, limit: float | None) -> jax.Array:
    """Scale a gradient down to an L2 norm of at most `limit`.

    If a value is not finite, all finite values become 0.
    """
    if limit is None or x.size == 0:
        return x
    largest = jnp.abs(x).max()  # squares of large values would overflow
    unit = jnp.where(largest == 0, 1.0, largest)
    norm = unit * jnp.sqrt(jnp.square(x / unit).sum())
    return x * jnp.where(norm <= limit, 1.0, jnp.where(jnp.isfinite(norm), limit / norm, 0.0))


def _corrected(method: Method, x: jax.Array, u: jax.Array | None) -> tuple[jax.Array, Any]:
    """Return a gradient after momentum, and the new momentum."""
    if u is None:
        return x, None
    if method.nesterov:
        u = method.momentum * (u + x)
        return x + u, u
    u = method.momentum * u + x
    return u, u


def _at_its_stage(method: Method, step: jax.Array, sent: Callable[[int], Any]) -> Any:
    """Return sent(first), where `first` is the first step of the current stage of the warm-up."""
    firsts = [first for first, _ in method.stages()]
    if len(firsts) == 1:
        return sent(firsts[0])
    stage = sum((step >= first).astype(jnp.int32) for first in firsts[1:])
    return jax.lax.switch(stage, [functools.partial(sent, first) for first in firsts])


def _kept(leaf: _Leaf, u: jax.Array) -> jax.Array:
    """Return a momentum for the state, with zeros in place of values that are not finite."""
    u = jnp.where(jnp.isfinite(u), u, 0.0)
    return u if leaf.v is None else u[None]


def _platform(mesh: Mesh | None) -> str:
    """Return the platform of a mesh's devices; for an abstract mesh, the default platform."""
    known = isinstance(mesh, jax.sharding.Mesh)
    return mesh.devices.flat[0].platform if known else jax.default_backend()
