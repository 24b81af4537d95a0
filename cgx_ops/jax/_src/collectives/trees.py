"""Reduce a tree of arrays.

1. check the leaves
2. assign a config (rules), a seed (key) and a residual to each leaf
3. run one collective for each message (plans.py) and dtype; leaves with residuals have a
   separate message
"""

import functools
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cgx_ops._core import log
from cgx_ops.config import Config
from cgx_ops.jax._src.collectives.keys import CallSeeds
from cgx_ops.jax._src.collectives.options import (
    Options,
    check_feedback,
    check_index_key,
    is_randk,
    is_vote,
)
from cgx_ops.jax._src.collectives.overlap import hold, mark
from cgx_ops.jax._src.collectives.plans import messages_of
from cgx_ops.jax._src.collectives.primitive import Groups, Settings, bind, vary
from cgx_ops.jax._src.runtime import compat, processes
from cgx_ops.planner import Plan

_DTYPES = ("float32", "float16", "bfloat16")
_UNCOMPRESSED = {  # by caller, for error messages
    **dict.fromkeys(
        ("pmean_q", "value_and_grad", "average_gradients", "power_sgd", "deep_gradient"),
        "jax.lax.pmean",
    ),
    "psum_q": "jax.lax.psum",
    "psum_scatter_q": "jax.lax.psum_scatter",
    "all_gather_q": "jax.lax.all_gather",
    "all_to_all_q": "jax.lax.all_to_all",
    "compress_grads": "jax.lax.psum",
}


# ---- 1. checks ---------------------------------------------------------------------------------


def uncompressed(caller: str) -> str:
    """Return the name of JAX's uncompressed equivalent of a caller."""
    return _UNCOMPRESSED.get(caller, "JAX's own collective")


def checked_leaf(caller: str, path: Any, leaf: Any) -> jax.Array:
    """Return a leaf as an array; raise TypeError if its dtype cannot be compressed."""
    dtype = jnp.result_type(leaf)
    if dtype.name not in _DTYPES:
        where = jax.tree_util.keystr(path)
        if dtype.name == "float64":
            remedy = f"cast it to float32, or reduce it exactly with {uncompressed(caller)}"
        elif jnp.issubdtype(dtype, jnp.complexfloating):
            remedy = f"reduce its real and imaginary parts, or use {uncompressed(caller)}"
        else:
            remedy = f"reduce it exactly with {uncompressed(caller)}, or cast it to float32"
        raise TypeError(
            f"{caller}: x{where} has dtype {dtype}, and only {', '.join(_DTYPES)} can be "
            f"compressed: {remedy}"
        )
    return jnp.asarray(leaf, dtype)


def _checked_residuals(caller: str, x: Any, residual: Any) -> list[Any]:
    """Return the residual of each leaf of x, or None; require that `residual` fits x."""
    if residual is None:
        return [None] * len(jax.tree.leaves(x))
    remedy = "begin with jax.tree.map(jnp.zeros_like, x)"
    wanted, given = jax.tree.structure(x), jax.tree.structure(residual)
    try:
        olds = wanted.flatten_up_to(residual)
        matches = jax.tree_util.all_leaves([old for old in olds if old is not None])
    except ValueError:
        olds, matches = [], False
    if not matches:
        raise ValueError(f"{caller}: residual is {given}, and x is {wanted}: {remedy}")
    for (path, leaf), old in zip(jax.tree_util.tree_leaves_with_path(x), olds, strict=True):
        if old is None:
            continue
        where = jax.tree_util.keystr(path)
        for what, of, error in (
            ("shape", jnp.shape, ValueError), ("dtype", jnp.result_type, TypeError)
        ):  # fmt: skip
            if of(old) != of(leaf):
                raise error(
                    f"{caller}: residual{where} has {what} {of(old)}, and x{where} has {of(leaf)}: "
                    f"{remedy}"
                )
    return [None if old is None else jnp.asarray(old) for old in olds]


# ---- 2, 3. leaves and messages -----------------------------------------------------------------


class Leaf(NamedTuple):
    """One array of a tree, its index there, its config and its residual."""

    place: int
    x: jax.Array
    config: Config
    residual: jax.Array | None


def reduce_tree(
    options: Options,
    x: Any,
    residual: Any,
    groups: Groups,
    op: str,
    configs: Any = None,
    *,
    parts: bool = True,
) -> tuple[Any, Any]:
    """Reduce a tree over groups.

    Args:
        options: How leaves are sent.
        x: A pytree of arrays.
        residual: A tree like `x`, or None; or None in place of a leaf.
        groups: The devices or processes that reduce together.
        op: "sum" or "avg".
        configs: The Config of each leaf, a tree like `x`; None: from the options.
        parts: Whether a large tree is several messages, if options.fuse is True.

    Returns:
        The reduced tree, and the new residual (None without one).
    """
    caller = options.caller
    paths_and_leaves, tree = jax.tree_util.tree_flatten_with_path(x)
    # Calls in program order run one after the other, so parts would not help.
    message_of = messages_of(caller, x, options.fuse, parts=parts and not groups.effects)
    residuals = _checked_residuals(caller, x, residual)
    given_configs = [None] * len(residuals) if configs is None else tree.flatten_up_to(configs)
    leaves = []
    for place, (path, given) in enumerate(paths_and_leaves):
        leaf, old = checked_leaf(caller, path, given), residuals[place]
        config = given_configs[place] or options.of(path, leaf)
        if old is not None:  # their sum varies over the axes of both
            leaf, old = (vary(y, compat.varying_axes(z)) for y, z in ((leaf, old), (old, leaf)))
            check_feedback(f"{caller}: x{jax.tree_util.keystr(path)}", config)
        leaves.append(Leaf(place, leaf, config, old))
    check_index_key(caller, options.key, [leaf.config for leaf in leaves], groups.axes)

    @functools.cache
    def seeds(indices: bool) -> CallSeeds:
        text = groups.call_text("allreduce", options.name, indices=indices)
        return CallSeeds(options.key, text, groups.axes)

    messages: dict[tuple[int, Hashable, bool], list[Leaf]] = {}
    sums: list[Any] = []
    for leaf in leaves:
        keeps = leaf.residual is not None
        if leaf.x.size > 0 and sends(groups, leaf.config):
            sums.append(None)
            kind = message_of[leaf.place], leaf.x.dtype, keeps
            messages.setdefault(kind, []).append(leaf)
        else:
            sums.append(groups.alone(leaf.x if leaf.residual is None else leaf.x + leaf.residual))
            residuals[leaf.place] = jnp.zeros_like(leaf.x) if keeps else None
    if messages:
        _report(groups, options, leaves)
    overlaps = len(messages) > 1 and not groups.effects and options.carrier == "native"
    tokens: list[jax.Array] = []
    totals: list[list[jax.Array]] = []
    losses: list[list[jax.Array]] = []
    in_order = sorted(messages.items(), key=lambda entry: entry[0][0])
    for (*_, keeps), message in in_order:
        settings = Settings(
            "allreduce", op, groups, tuple(leaf.config for leaf in message),
            name_of(options.name, message[0].place, len(messages)),
            options.carrier if groups.size > 1 else "native", feedback=keeps,
            plan=options.fuse if isinstance(options.fuse, Plan) else None, overlaps=overlaps,
            uses_xla=options.uses_xla,
        )  # fmt: skip
        xs = [leaf.x.reshape(1, -1) for leaf in message]
        if overlaps:
            xs, token = mark(xs)
            tokens.append(token)
        results = bind(
            xs,
            [seeds(is_randk(leaf.config)).of(leaf.place, leaf.x) for leaf in message],
            settings,
            [leaf.residual.reshape(1, -1) for leaf in message if leaf.residual is not None],
        )
        totals.append(results[: len(message)])
        losses.append(results[len(message) :])
    if overlaps:
        totals = hold(totals, tokens)
    for results_of, given in ((sums, totals), (residuals, losses)):
        for (_, message), results in zip(in_order, given, strict=True):
            for leaf, result in zip(
                message, results, strict=False
            ):  # losses has only leaves with residuals
                results_of[leaf.place] = result.reshape(leaf.x.shape)
    unflatten = jax.tree_util.tree_unflatten
    return unflatten(tree, sums), None if residual is None else unflatten(tree, residuals)


def _report(groups: Groups, options: Options, leaves: list[Leaf]) -> None:
    """Log the start of training on process 0, once per process."""
    here = processes.place()
    if here.rank > 0:
        return
    exact = [leaf.config.is_exact or leaf.config.is_short(leaf.x.size) for leaf in leaves]
    transport = "XLA's collectives" if options.carrier == "xla" else here.transport
    tensors = log.Tensors(len(exact), sum(exact))
    log.started("JAX", "JAX", options.config, groups.size, transport, tensors)


def sends(groups: Groups, config: Config) -> bool:
    """Return whether a leaf goes through the core.

    In a group of one, only votes do, and all leaves on a communicator that the user gave.
    """
    return groups.size > 1 or groups.sends_alone or is_vote(config)


def name_of(name: str, index: int, messages: int) -> str:
    """Return the name of one message of a call: the user's name, numbered if there are several."""
    return f"{name}/{index}" if name and messages > 1 else name
