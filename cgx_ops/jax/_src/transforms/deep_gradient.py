"""deep_gradient: gradients with momentum, the largest of them sent, as an optax transformation.

Each step, on each device:

  1. clip the gradient, and add it to the momentum and to the residual
  2. send the largest values of that; average exactly the leaves that are not sparse
  3. keep the rest as the residual; where a value was sent, momentum is 0 again

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
    """Require that no other state of an optimizer has momentum of a leaf that this one has."""

    # Optax's names of momentum: "trace" of sgd and others, "mu" of adam and others.
    def momentum_of(node: Any) -> Any:
        return getattr(node, "trace", getattr(node, "mu", None))

    def is_other(node: Any) -> bool:
        return isinstance(node, tuple) and momentum_of(node) is not None

    for node in filter(is_other, jax.tree.leaves(whole, is_leaf=is_other)):
        if _paths_of(state.momentum) & _paths_of(momentum_of(node)):
            raise ValueError(
                f"state_specs: deep_gradient has momentum, and so has {type(node).__name__}, which "
                "would apply it twice: chain optax.sgd(rate) behind it, without momentum, or give "
                "deep_gradient momentum=0"
            )


def _paths_of(tree: Any) -> set[Any]:
    return {path for path, _ in jax.tree_util.tree_leaves_with_path(tree)}


@per_device("momentum", "residual", where={"momentum": "residual"}, check=_refuse_momentum_twice)
class DeepGradientState(NamedTuple):
    """The state of deep_gradient between steps. All of it is float32, except the step.

    Attributes:
        step: int32 scalar: the steps done, equal on all devices.
        momentum: u, a tree like the parameters: of sparse leaves a device's own, as residuals are;
          of the others of the leaf's shape, equal on all devices. None without momentum.
        residual: v, what is not sent yet, as of AverageGradientsState, with None for leaves that
          are not sparse.
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
    rules: Rules | None = Rules(),  # noqa: B008  (it cannot be changed)
    carrier: Carrier = "native",
    mesh: Mesh | None = None,
    **keywords: Unpack[Keywords],
) -> "optax.GradientTransformation":
    """Return an optax transformation that averages gradients with momentum, sent sparse.

    It stands where `average_gradients` stands, and is used in the same way, with `state_specs` and
    `consolidate`; behind it an optimizer without momentum: optax.sgd(rate). A device adds its
    gradient g, clipped, to the momentum u and that to v, what it has not sent yet:

        u = m u + g, v = v + u;  with Nesterov's momentum u = m (u + g), v = v + u + g

    and sends the largest values of v; there v and u become 0, or v what the values lost on their
    way. The average of what all devices sent stands for the gradient, momentum included. Leaves of
    at most one dimension, small ones, and those that `rules` send exact, are averaged exactly, and
    the mean of g goes through the momentum.

    Args:
        axis_name: name of a mesh axis, or a tuple of names.
        density: the share of a leaf's values that a device sends, more than 0 and at most 1.
        momentum: m, at least 0 and less than 1.
        nesterov: whether it is Nesterov's.
        clip: before it is added, each device's gradient of a leaf is scaled down to an L2 norm, of
          this leaf's elements, of at most clip / sqrt(W) for W devices; None: it is not.
        warmup_steps: steps with more than `density`: a quarter of them each with 25 %, 6.25 %,
          1.5625 % and 0.390625 %, where that is more. The program has a branch for each.
        dense_axis: axes over which gradients are averaged exactly first, such as that of the
          devices of a host: they have one v and u in common.
        config: as of `psum_q`; None: Config(compressor="topk"). The compressor is "topk", or
          "threshold", which is faster and sends about as many. `value_bits` and `minimal_size`
          count; `density` is the argument, and buckets are whole leaves.
        name: of the collectives, as of `psum_q`.
        rules: as of `average_gradients`: bits 32 (exact), compressor, density and value_bits.
        carrier: as of `psum_q`.
        mesh: of the shard_map, as of `average_gradients`. Where several processes have several
          devices, update needs it too.
        **keywords: bits, bucket_size, compressor and rounding, which replace those of config.

    Returns:
        An optax.GradientTransformation, whose state is a `DeepGradientState`.

    Raises:
        ImportError: optax is not installed.
        ValueError: an argument is out of its range; at init, no mesh is known; at update, the
          gradients are equal on all devices already, or do not fit the state.
        NotImplementedError: several processes have several devices of the axis each, whose
          gradients would be summed before they are sent: name an axis of these in dense_axis.
        NameError, TypeError, jax.errors.JaxRuntimeError: as `psum_q`.
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
            _CALLER, mesh, groups, 'give its name: deep_gradient("hosts", dense_axis="devices")'
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

        us, owed = {}, {}
        for n, leaf in leaves.items():
            g, us[n] = _corrected(method, means.get(n, gradients[n]), leaf.u)
            if leaf.v is None:
                means[n] = g
            else:
                owed[n] = leaf.v + g

        def sent(step: int) -> Any:
            """Return the averages and the new residuals, at the density of a step."""
            own = {}
            for n, c in owed.items():
                knobs = sparse_knobs(method, leaves[n].own, c.size, step, gpu=on_gpu)
                own[n] = replace(leaves[n].own, algorithm="one_shot", **knobs)
            whole = {n for n in owed if own[n].density >= 1}
            own |= {n: own[n].with_own(bits=EXACT_BITS) for n in whole}
            zeros = {n: None if n in whole else jnp.zeros_like(c) for n, c in owed.items()}
            # Little of a large tree is sent: one message.
            got, lost = reduced(owed, zeros, groups.axes, "sparse", own, parts=False)
            return got, {n: jnp.zeros_like(c) if n in whole else lost[n] for n, c in owed.items()}

        got, lost = _at_its_stage(method, state.step, sent)
        means |= got
        for n, c in owed.items():
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
    """A gradient in float32, and its dtype; how it is sent (a Config), u and v, or None."""

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
                f"{_CALLER}: {where} is {'exact' if own is None else 'sparse'} here, and was not "
                "where the state was made: the state is another model's, or of other rules"
            )
        if own is None and u is not None and u.shape != x.shape:
            raise ValueError(
                f"{_CALLER}: {where} has a momentum of shape {u.shape}: the state is another "
                "model's"
            )
        if own is not None:
            u, v = (own_residual(_CALLER, path, x, kept) for kept in (u, v))
        if name in leaves:
            raise ValueError(f"{_CALLER}: two leaves have one path: {name}")
        leaves[name] = _Leaf(x.astype(jnp.float32), x.dtype, own, u, v)
    return leaves


def _clipped(x: jax.Array, limit: float | None) -> jax.Array:
    """Scale a gradient down to an L2 norm of at most `limit`.

    Beside what is not finite nothing is left of it.
    """
    if limit is None or x.size == 0:
        return x
    largest = jnp.abs(x).max()  # squares of large values would overflow
    unit = jnp.where(largest == 0, 1.0, largest)
    norm = unit * jnp.sqrt(jnp.square(x / unit).sum())
    return x * jnp.where(norm <= limit, 1.0, jnp.where(jnp.isfinite(norm), limit / norm, 0.0))


def _corrected(method: Method, x: jax.Array, u: jax.Array | None) -> tuple[jax.Array, Any]:
    """Return what momentum makes of a gradient, and the new momentum."""
    if u is None:
        return x, None
    if method.nesterov:
        u = method.momentum * (u + x)
        return x + u, u
    u = method.momentum * u + x
    return u, u


def _at_its_stage(method: Method, step: jax.Array, sent: Callable[[int], Any]) -> Any:
    """Return sent(first) of the stage of the warm-up that a step is in, and its first step."""
    firsts = [first for first, _ in method.stages()]
    if len(firsts) == 1:
        return sent(firsts[0])
    stage = sum((step >= first).astype(jnp.int32) for first in firsts[1:])
    return jax.lax.switch(stage, [functools.partial(sent, first) for first in firsts])


def _kept(leaf: _Leaf, u: jax.Array) -> jax.Array:
    """Return a momentum for the state: without what is not finite."""
    u = jnp.where(jnp.isfinite(u), u, 0.0)
    return u if leaf.v is None else u[None]


def _platform(mesh: Mesh | None) -> str:
    """Return the platform of the devices of a mesh; of an abstract one, the default."""
    known = isinstance(mesh, jax.sharding.Mesh)
    return mesh.devices.flat[0].platform if known else jax.default_backend()
