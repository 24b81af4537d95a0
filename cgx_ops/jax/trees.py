"""What every collective does with its knobs and its tree.

1. check the knobs and the leaves
2. give every leaf its bits (rules), its seed (key) and its residual
3. one collective for all leaves of a dtype, or one for each leaf
"""

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cgx_ops.config import Config
from cgx_ops.jax import _compat
from cgx_ops.jax._keys import CallSeeds, check_key
from cgx_ops.jax.primitive import Carrier, Groups, Settings, bind, vary
from cgx_ops.rules import Rule, overrides

_DTYPES = ("float32", "float16", "bfloat16")
_EXACT_TWINS = {  # of callers, for error messages
    "psum_q": "jax.lax.psum",
    "pmean_q": "jax.lax.pmean",
    "psum_scatter_q": "jax.lax.psum_scatter",
    "all_gather_q": "jax.lax.all_gather",
    "compress_grads": "jax.lax.psum",
    "value_and_grad": "jax.lax.pmean",
    "average_gradients": "jax.lax.pmean",
}


# ---- 1. checks ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Knobs:
    """How the leaves of a call travel, checked.

    Attributes:
        config: what the core knows.
        key: a PRNG key or None.
        name: the user's, or "".
        rules: bits by leaf, backwards: the last one that is found counts.
        fuse: whether all leaves of a dtype are one message.
        carrier: who moves the bytes.
    """

    config: Config
    key: jax.Array | None
    name: str
    rules: list[Rule]
    fuse: bool
    carrier: Carrier


def checked_knobs(
    caller: str,
    *,
    key: jax.Array | None,
    name: str,
    carrier: Carrier = "native",
    rules: Mapping[str, int] | None = None,
    fuse: bool = True,
    **knobs: Any,
) -> Knobs:
    """Check all that must be static, and the key. `knobs` are those that the core knows."""
    if "residual" in knobs:
        raise TypeError(
            f"{caller} takes no residual: psum_q and pmean_q do; average_gradients keeps its own"
        )
    static = {**knobs, "name": name, "carrier": carrier, "fuse": fuse, **(rules or {})}
    for knob, value in static.items():
        if isinstance(value, _compat.Tracer):
            raise TypeError(
                f"{caller}: {knob} must be a static Python value, not {value!r}: it is part of the "
                "compiled program. Pass it by closure, functools.partial or static_argnames"
            )
    if carrier not in ("native", "xla"):
        raise ValueError(f"{caller}: carrier is {carrier!r}; it must be 'native' or 'xla'")
    if carrier == "xla" and (algorithm := knobs.get("algorithm")) in ("ring", "hierarchical"):
        raise ValueError(
            f"{caller}: in algorithm={algorithm!r} ranks pass messages on, one after the other, "
            "which carrier='xla' cannot: use 'auto', 'one_shot' or 'sra'"
        )
    if not isinstance(name, str):
        raise TypeError(f"{caller}: name is {name!r}; it must be a str")
    check_key(caller, key)
    by_path = _checked_rules(caller, rules)
    config = Config(rounding="nearest" if key is None else "stochastic", **knobs)
    return Knobs(config, key, name, by_path, fuse, carrier)


def _checked_rules(caller: str, rules: Mapping[str, int] | None) -> list[Rule]:
    """Return the rules, backwards: the first that is found counts here, elsewhere the last."""
    checked = []
    for pattern, bits in (rules or {}).items():
        try:
            checked.append(Rule(re.compile(pattern), {"bits": bits}))
        except (re.error, ValueError, TypeError) as error:
            raise ValueError(
                f"{caller}: rules[{pattern!r}] is {bits!r}; rules map regular expressions to bits, "
                f"1 to 8 or 32: {error}"
            ) from None
    return checked[::-1]


def exact_twin(caller: str) -> str:
    """Return the name of JAX's exact function in place of one of ours."""
    return _EXACT_TWINS.get(caller, "JAX's own collective")


def checked_leaf(caller: str, path: Any, leaf: Any) -> jax.Array:
    """Return a leaf as an array, if it can be compressed."""
    dtype = jnp.result_type(leaf)
    if dtype.name not in _DTYPES:
        where = jax.tree_util.keystr(path)
        if dtype.name == "float64":
            remedy = f"cast it to float32, or reduce it exactly with {exact_twin(caller)}"
        elif jnp.issubdtype(dtype, jnp.complexfloating):
            remedy = f"reduce its real and imaginary parts, or use {exact_twin(caller)}"
        else:
            remedy = f"reduce it exactly with {exact_twin(caller)}, or cast it to float32"
        raise TypeError(
            f"{caller}: x{where} has dtype {dtype}, and only {', '.join(_DTYPES)} can be "
            f"compressed: {remedy}"
        )
    return jnp.asarray(leaf, dtype)


def _checked_residuals(caller: str, x: Any, residual: Any) -> list[Any]:
    """Return the residual of each leaf of x, if it is a tree like x; or None for each."""
    if residual is None:
        return [None] * len(jax.tree.leaves(x))
    remedy = "begin with jax.tree.map(jnp.zeros_like, x)"
    wanted, given = jax.tree.structure(x), jax.tree.structure(residual)
    if given != wanted:
        raise ValueError(f"{caller}: residual is {given}, and x is {wanted}: {remedy}")
    for (path, leaf), old in zip(
        jax.tree_util.tree_leaves_with_path(x), jax.tree.leaves(residual), strict=True
    ):
        where = jax.tree_util.keystr(path)
        for what, of, error in (
            ("shape", jnp.shape, ValueError), ("dtype", jnp.result_type, TypeError)
        ):  # fmt: skip
            if of(old) != of(leaf):
                raise error(
                    f"{caller}: residual{where} has {what} {of(old)}, and x{where} has {of(leaf)}: "
                    f"{remedy}"
                )
    return list(map(jnp.asarray, jax.tree.leaves(residual)))


# ---- 2, 3. leaves and messages -----------------------------------------------------------------


class Leaf(NamedTuple):
    """One array of a tree, its place there, its bits and what was lost of it before."""

    place: int
    x: jax.Array
    bits: int
    residual: jax.Array | None


def reduce_tree(
    caller: str, x: Any, residual: Any, groups: Groups, op: str, knobs: Knobs
) -> tuple[Any, Any]:
    """Reduce a tree over groups.

    Args:
        caller: for errors.
        x: a pytree of arrays.
        residual: a tree like `x`, or None.
        groups: who reduces together.
        op: "sum" or "avg".
        knobs: how leaves travel.

    Returns:
        The reduced tree, and the new residual (None without one).
    """
    paths_and_leaves, tree = jax.tree_util.tree_flatten_with_path(x)
    residuals = _checked_residuals(caller, x, residual)
    leaves = []
    for place, (path, given) in enumerate(paths_and_leaves):
        leaf, old = checked_leaf(caller, path, given), residuals[place]
        if old is not None:  # the sum of both varies over the axes of both
            leaf, old = (vary(y, _compat.varying_axes(z)) for y, z in ((leaf, old), (old, leaf)))
        leaves.append(Leaf(place, leaf, _bits_of(path, knobs), old))
    seeds = CallSeeds(knobs.key, groups.call_text("allreduce", knobs.name), groups.axes)
    messages: dict[Hashable, list[Leaf]] = {}
    sums: list[Any] = []
    for leaf in leaves:
        if leaf.x.size > 0 and groups.size > 1:
            sums.append(None)
            messages.setdefault(leaf.x.dtype if knobs.fuse else leaf.place, []).append(leaf)
        else:
            sums.append(groups.alone(leaf.x if leaf.residual is None else leaf.x + leaf.residual))
            residuals[leaf.place] = jnp.zeros_like(leaf.x)
    for message in messages.values():
        settings = Settings(
            "allreduce", op, groups, tuple(leaf.bits for leaf in message), knobs.config,
            name_of(knobs.name, message[0].place, len(messages)), knobs.carrier,
            feedback=residual is not None,
        )  # fmt: skip
        results = bind(
            [leaf.x.reshape(1, -1) for leaf in message],
            [seeds.of(leaf.place, leaf.x) for leaf in message],
            settings,
            [leaf.residual.reshape(1, -1) for leaf in message if leaf.residual is not None],
        )
        for results_of in (sums, residuals):
            for leaf, result in zip(message, results, strict=False):
                results_of[leaf.place] = result.reshape(leaf.x.shape)
            results = results[len(message) :]
    unflatten = jax.tree_util.tree_unflatten
    return unflatten(tree, sums), None if residual is None else unflatten(tree, residuals)


def _bits_of(path: Any, knobs: Knobs) -> int:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return overrides(knobs.rules, name).get("bits", knobs.config.bits)


def name_of(name: str, index: int, messages: int) -> str:
    """Return the name of one of several messages of a call: the user's, numbered."""
    return f"{name}/{index}" if name and messages > 1 else name
