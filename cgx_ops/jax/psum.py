"""psum_q and pmean_q: sums and means over mesh axes whose operands travel compressed.

1. check the knobs, the axes and the leaves
2. give every leaf its bits (rules) and its seed (key)
3. one collective for all leaves of a dtype, or one for each leaf
"""

import math
import re
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cgx_ops.config import Algorithm, Config
from cgx_ops.jax import _compat, _runtime
from cgx_ops.jax._keys import CallSeeds, check_key
from cgx_ops.jax.primitive import Carrier, Settings, Verb, bind, vary
from cgx_ops.rules import Rule, overrides

Axes = Hashable | tuple[Hashable, ...]

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


def psum_q(
    x: Any,
    axis_name: Axes,
    *,
    bits: int = 4,
    bucket_size: int = 512,
    key: jax.Array | None = None,
    name: str = "",
    algorithm: Algorithm = "auto",
    gather_bits: int | None = None,
    intra_bits: int | None = None,
    skip_incomplete_buckets: bool = False,
    minimal_size: int = 0,
    rules: Mapping[str, int] | None = None,
    fuse: bool = True,
    carrier: Carrier = "native",
    residual: Any = None,
) -> Any:
    """Sum `x` over mesh axes like `jax.lax.psum`, sending `bits` bits an element.

    Inside `jax.shard_map` only. Every device of a group gets the same bits. Leaves with fewer than
    max(16, minimal_size) elements are summed exactly. Every leaf, and each example of a vmap, is
    compressed by itself, as if it were summed alone.

    Where a group has several devices in each of several processes, the devices of a process are
    summed first, exactly, and processes send compressed sums to each other.

    The derivative is that of `jax.lax.psum`: tangents and cotangents are summed exactly. To
    compress gradients, apply psum_q to the gradients.

    Args:
        x: an array or a pytree of arrays of float32, float16 or bfloat16, any shape.
        axis_name: name of a mesh axis, or a tuple of names, as for `jax.lax.psum`.
        bits: 1 to 8 bits an element, or 32: exact.
        bucket_size: elements that share one minimum and step, >= 1.
        key: a PRNG key (typed or raw): rounds stochastically, unbiased. Give another key in every
          step. Two calls with one key have the same noise if their verb, axes and name are the
          same; leaves, examples of a vmap, devices, and groups whose values vary over other axes
          (if types are checked) have noise of their own. Devices may have equal or different keys.
          None: rounds to nearest.
        name: identifies the collective among processes, and is unique among those that run at the
          same time. "": the call's place in the program that is being compiled.
        algorithm: "auto", "one_shot", "sra", "ring" or "hierarchical" (hosts: "auto" picks it).
        gather_bits: bits of the reduced values on their way back; None: as `bits`.
        intra_bits: in "hierarchical", bits of values that their own host sums; None: exact.
        skip_incomplete_buckets: send a leaf's last bucket exact if it is not full.
        minimal_size: leaves with fewer elements are summed exactly.
        rules: bits by leaf: the first of these regular expressions that is found in the leaf's
          path, such as "layers/0/bias", gives its bits. {"bias|norm|scale": 32} keeps those exact.
        fuse: one message for all leaves of a dtype. False: one for each leaf, so that XLA can start
          it when that leaf is computed, while others are not.
        carrier: "native": cgx moves the bytes, through memory and MPI. "xla": XLA's own collectives
          do, wherever those work, with or without MPI; the bits of the result are those of the same
          algorithm. Not for "ring" and "hierarchical", nor for groups with more devices in one
          process than in another.
        residual: error feedback: what compression lost before, a tree like `x`, added to it in
          float32. None: nothing is added, and what is lost now is not returned.

    Returns:
        The sums, in the structure, shapes and dtypes of `x`; equal on all devices of a group. With
        `residual` a pair of them and the new residual, a tree like `x` too, which varies over the
        axes: over all devices, `x` and the old residuals add up to the result (as a sum) and the
        new residuals, but for what float32 sums and the dtype round. Given to the next call, it
        makes sure that nothing is lost for good. Where devices of a process are summed first, the
        first of them has what all of them lost. A loss that is not finite becomes 0.

    Raises:
        NameError: an axis name is not bound here.
        NotImplementedError: an axis belongs to a vmap; the shard_map leaves axes to the compiler;
          the platform is neither CPU nor CUDA. On CUDA: carrier="xla"; a group has several GPUs in
          each of several processes.
        TypeError: a leaf is not float32, float16 or bfloat16; a residual has another dtype than its
          leaf; a knob is not a static value; `key` is not a key.
        ValueError: a knob is out of its range; `residual` has another structure or shape than `x`.
        RuntimeError: processes of the mesh cannot reach each other natively; the shard_map has no
          jax.sharding.Mesh, of several processes or GPUs.
        jax.errors.JaxRuntimeError: at run time; a peer is late or dead or called something else.
          The deadline is CGX_TIMEOUT; unless that is set, 300 s where each process has one device,
          and 20 s otherwise, because XLA:CPU aborts a process whose own devices wait for 40 s. On
          GPUs the results are NaN then, and the next call raises.
    """
    knobs = {
        "bits": bits,
        "bucket_size": bucket_size,
        "algorithm": algorithm,
        "gather_bits": gather_bits,
        "intra_bits": intra_bits,
        "skip_incomplete_buckets": skip_incomplete_buckets,
        "minimal_size": minimal_size,
        "rules": rules,
        "fuse": fuse,
        "carrier": carrier,
    }
    pair = reduce_tree("psum_q", x, residual, axis_name, "sum", key=key, name=name, **knobs)
    return pair[0] if residual is None else pair


def pmean_q(
    x: Any,
    axis_name: Axes,
    *,
    bits: int = 4,
    bucket_size: int = 512,
    key: jax.Array | None = None,
    name: str = "",
    algorithm: Algorithm = "auto",
    gather_bits: int | None = None,
    intra_bits: int | None = None,
    skip_incomplete_buckets: bool = False,
    minimal_size: int = 0,
    rules: Mapping[str, int] | None = None,
    fuse: bool = True,
    carrier: Carrier = "native",
    residual: Any = None,
) -> Any:
    """Average `x` over mesh axes like `jax.lax.pmean`; everything else as in `psum_q`.

    The float32 sum is divided before the reduced values are compressed. Residuals are in the units
    of `x`, as in `psum_q`: that of the average is multiplied again.
    """
    knobs = {
        "bits": bits,
        "bucket_size": bucket_size,
        "algorithm": algorithm,
        "gather_bits": gather_bits,
        "intra_bits": intra_bits,
        "skip_incomplete_buckets": skip_incomplete_buckets,
        "minimal_size": minimal_size,
        "rules": rules,
        "fuse": fuse,
        "carrier": carrier,
    }
    pair = reduce_tree("pmean_q", x, residual, axis_name, "avg", key=key, name=name, **knobs)
    return pair[0] if residual is None else pair


# ---- shared by all collectives here ------------------------------------------------------------


def reduce_tree(
    caller: str,
    x: Any,
    residual: Any,
    axis_name: Axes,
    op: str,
    /,
    *,
    key: jax.Array | None,
    name: str,
    rules: Mapping[str, int] | None = None,
    fuse: bool = True,
    carrier: Carrier = "native",
    **knobs: Any,
) -> tuple[Any, Any]:
    """Reduce a tree as psum_q (op "sum") or pmean_q ("avg") do.

    Returns:
        The reduced tree, and the new residual (None without one).
    """
    config = checked_config(
        caller, key, name=name, carrier=carrier, rules=rules, fuse=fuse, **knobs
    )
    by_name = checked_rules(caller, rules)
    axes, size = checked_axes(caller, axis_name)
    paths_and_leaves, tree = jax.tree_util.tree_flatten_with_path(x)
    feedback, leaves = residual is not None, []
    residuals = checked_residuals(caller, x, residual)
    for index, (path, given) in enumerate(paths_and_leaves):
        leaf, old = checked_leaf(caller, path, given), residuals[index]
        if old is not None:  # the sum of both varies over the axes of both
            leaf, old = (vary(y, _compat.varying_axes(z)) for y, z in ((leaf, old), (old, leaf)))
        leaves.append(Leaf(index, leaf, bits_of(path, config, by_name), old))
    seeds = CallSeeds(key, call_text("allreduce", axes, name), axes)
    messages: dict[Hashable, list[Leaf]] = {}
    for leaf in leaves:
        if leaf.x.size > 0 and size > 1:
            messages.setdefault(leaf.x.dtype if fuse else leaf.place, []).append(leaf)
    sums: list[Any] = [None] * len(leaves)
    for message in messages.values():
        settings = Settings(
            "allreduce", op, axes, size, tuple(leaf.bits for leaf in message), config,
            name_of(name, message[0].place, len(messages)), carrier, feedback,
        )  # fmt: skip
        results = bind(
            [leaf.x.reshape(1, -1) for leaf in message],
            [seeds.of(leaf.place, leaf.x) for leaf in message],
            settings,
            [leaf.residual.reshape(1, -1) for leaf in message if leaf.residual is not None],
        )
        for leaf, result in zip(message, results, strict=False):
            sums[leaf.place] = result.reshape(leaf.x.shape)
        for leaf, result in zip(message, results[len(message) :], strict=False):
            residuals[leaf.place] = result.reshape(leaf.x.shape)
    for place, given, _, old in leaves:
        if sums[place] is None:  # nothing to send, but the type changes
            alone = vary(given if old is None else given + old, frozenset(axes))
            sums[place], residuals[place] = jax.lax.psum(alone, axes), jnp.zeros_like(alone)
    if size == 1:
        _runtime.warn_if_alone()
    unflatten = jax.tree_util.tree_unflatten
    return unflatten(tree, sums), unflatten(tree, residuals) if feedback else None


class Leaf(NamedTuple):
    """One array of a tree, its place there, its bits and what was lost of it before."""

    place: int
    x: jax.Array
    bits: int
    residual: jax.Array | None


def checked_config(
    caller: str,
    key: jax.Array | None,
    *,
    name: str,
    carrier: str,
    rules: Mapping[str, int] | None = None,
    fuse: bool = True,
    **knobs: Any,
) -> Config:
    """Check all that must be static, and the key; return the knobs that the core knows."""
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
    checked_rules(caller, rules)
    return Config(rounding="nearest" if key is None else "stochastic", **knobs)


def checked_rules(caller: str, rules: Mapping[str, int] | None) -> list[Rule]:
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


def checked_axes(caller: str, axis_name: Axes) -> tuple[tuple[Hashable, ...], int]:
    """Return the axes as a tuple, and how many devices a group of them has."""
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if len(set(axes)) < len(axes):
        raise ValueError(f"{caller}: an axis is named twice: {axes}")
    size = math.prod(_axis_size(caller, axis) for axis in axes)
    automatic = _compat.automatic_axes()
    if automatic:
        raise NotImplementedError(
            f"{caller} over {axes} in a shard_map that leaves {automatic} to the compiler: name "
            "these axes too in its axis_names, or nest a shard_map over them around the call"
        )
    return axes, size


def _axis_size(caller: str, axis: Hashable) -> int:
    size = _compat.axis_size(axis)
    if size is None:
        raise NameError(
            f"{caller}: unbound axis name: {axis!r}. Call it inside jax.shard_map over a mesh that "
            "has this axis"
        )
    if not _compat.is_shard_map_axis(axis):
        raise NotImplementedError(
            f"{caller}: the axis {axis!r} belongs to a vmap, so its elements are in one device and "
            f"there is nothing to send. Use {exact_twin(caller)} for it, or jax.shard_map to "
            "spread it"
        )
    return size


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


def checked_residuals(caller: str, x: Any, residual: Any) -> list[Any]:
    """Return the residual of each leaf of x, if it is a tree like x; or None for each."""
    if residual is None:
        return [None] * len(jax.tree.leaves(x))
    remedy = "begin with jax.tree.map(jnp.zeros_like, x)"
    wanted, given = jax.tree.structure(x), jax.tree.structure(residual)
    if given != wanted:
        raise ValueError(f"{caller}: residual is {given}, and x is {wanted}: {remedy}")
    checked = []
    for (path, leaf), old in zip(
        jax.tree_util.tree_leaves_with_path(x), jax.tree.leaves(residual), strict=True
    ):
        where = jax.tree_util.keystr(path)
        if jnp.shape(old) != jnp.shape(leaf):
            raise ValueError(
                f"{caller}: residual{where} has shape {jnp.shape(old)}, and x{where} has "
                f"{jnp.shape(leaf)}: {remedy}"
            )
        if jnp.result_type(old) != jnp.result_type(leaf):
            raise TypeError(
                f"{caller}: residual{where} has dtype {jnp.result_type(old)}, and x{where} has "
                f"{jnp.result_type(leaf)}: {remedy}"
            )
        checked.append(jnp.asarray(old))
    return checked


def bits_of(path: Any, config: Config, rules: list[Rule]) -> int:
    """Return the bits of the leaf at a path."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return overrides(rules, name).get("bits", config.bits)


def call_text(verb: Verb, axes: tuple[Hashable, ...], name: str) -> str:
    """Return what tells the noise of calls apart that have one key."""
    return f"{verb} over {','.join(map(str, axes))}: {name}"


def name_of(name: str, index: int, messages: int) -> str:
    """Return the name of one of several messages of a call: the user's, numbered."""
    return f"{name}/{index}" if name and messages > 1 else name
