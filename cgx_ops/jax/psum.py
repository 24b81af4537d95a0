"""psum_q: a sum over mesh axes whose operands travel compressed, as a JAX primitive.

In this order: the public functions, abstract evaluation, lowering, batching, differentiation.
"""

import functools
import hashlib
import math
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import ad, batching, mlir, xla

from cgx_ops.config import Algorithm, Config
from cgx_ops.jax import _compat, _runtime

_DTYPES = ("float32", "float16", "bfloat16")
# The numbers of cgx.h.
_OPS = {"sum": 0, "avg": 1}
_ALGORITHMS = {"auto": 0, "one_shot": 1, "sra": 2, "ring": 3}
_ROUNDINGS = {"nearest": 0, "stochastic": 1}


# ---- the public functions ----------------------------------------------------------------------


def psum_q(
    x: Any,
    axis_name: Hashable | tuple[Hashable, ...],
    *,
    bits: int = 4,
    bucket_size: int = 512,
    key: jax.Array | None = None,
    name: str = "",
    algorithm: Algorithm = "auto",
    gather_bits: int | None = None,
    skip_incomplete_buckets: bool = False,
    minimal_size: int = 0,
) -> Any:
    """Sum `x` over mesh axes like `jax.lax.psum`, sending `bits` bits an element.

    Inside `jax.shard_map` only. Every device of a group gets the same bits. Arrays with fewer than
    max(16, minimal_size) elements are summed exactly. Each leaf is a collective of its own, and
    each example of a vmap is compressed by itself, as if it were summed alone.

    The derivative is that of `jax.lax.psum`: tangents and cotangents are summed exactly. To
    compress gradients, apply psum_q to the gradients.

    Args:
        x: an array or a pytree of arrays of float32, float16 or bfloat16, any shape.
        axis_name: name of a mesh axis, or a tuple of names, as for `jax.lax.psum`.
        bits: 1 to 8 bits an element, or 32: exact.
        bucket_size: elements that share one minimum and step, >= 1.
        key: a PRNG key (typed or raw): rounds stochastically, unbiased; the noise of leaf i follows
          from fold_in(key, i). Give another key in every step. Devices may have equal or different
          keys. None: rounds to nearest.
        name: identifies the collective among processes, and is unique among those that run at the
          same time. "": the call's place in the program that is being compiled.
        algorithm: "auto", "one_shot", "sra" or "ring".
        gather_bits: bits of the reduced values on their way back; None: as `bits`.
        skip_incomplete_buckets: send the last bucket exact if it is not full.
        minimal_size: arrays with fewer elements are summed exactly.

    Returns:
        The sums, in the structure, shapes and dtypes of `x`; equal on all devices of a group.

    Raises:
        NameError: an axis name is not bound here.
        NotImplementedError: an axis belongs to a vmap; the shard_map leaves axes to the compiler;
          the mesh has several devices in each of several processes; the platform is not CPU.
        TypeError: a leaf is not float32, float16 or bfloat16; a knob is not a static value.
        ValueError: a knob is out of its range.
        jax.errors.JaxRuntimeError: at run time; a peer is late or dead or called something else.
          The deadline is CGX_TIMEOUT; unless that is set, 300 s among processes, and 20 s among
          the devices of one, because XLA:CPU aborts a process whose own devices wait for 40 s.
    """
    knobs = {
        "bits": bits,
        "bucket_size": bucket_size,
        "algorithm": algorithm,
        "gather_bits": gather_bits,
        "skip_incomplete_buckets": skip_incomplete_buckets,
        "minimal_size": minimal_size,
    }
    return _reduce("psum_q", x, axis_name, key, name, "sum", knobs)


def pmean_q(
    x: Any,
    axis_name: Hashable | tuple[Hashable, ...],
    *,
    bits: int = 4,
    bucket_size: int = 512,
    key: jax.Array | None = None,
    name: str = "",
    algorithm: Algorithm = "auto",
    gather_bits: int | None = None,
    skip_incomplete_buckets: bool = False,
    minimal_size: int = 0,
) -> Any:
    """Average `x` over mesh axes like `jax.lax.pmean`; everything else as in `psum_q`.

    The float32 sum is divided before the reduced values are compressed.
    """
    knobs = {
        "bits": bits,
        "bucket_size": bucket_size,
        "algorithm": algorithm,
        "gather_bits": gather_bits,
        "skip_incomplete_buckets": skip_incomplete_buckets,
        "minimal_size": minimal_size,
    }
    return _reduce("pmean_q", x, axis_name, key, name, "avg", knobs)


def _reduce(
    caller: str,
    x: Any,
    axis_name: Hashable | tuple[Hashable, ...],
    key: jax.Array | None,
    name: str,
    op: str,
    knobs: dict[str, Any],
) -> Any:
    for knob, value in knobs.items():
        if isinstance(value, _compat.Tracer):
            raise TypeError(
                f"{caller}: {knob} must be a static Python value, not {value!r}: it is part of the "
                "compiled program. Pass it by closure, functools.partial or static_argnames"
            )
    config = Config(rounding="nearest" if key is None else "stochastic", **knobs)
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if len(set(axes)) < len(axes):
        raise ValueError(f"{caller}: an axis is named twice: {axes}")
    size = math.prod(_axis_size(caller, axis) for axis in axes)
    paths_and_leaves, tree = jax.tree_util.tree_flatten_with_path(x)
    leaves = [_checked(caller, path, leaf) for path, leaf in paths_and_leaves]
    sums = []
    for index, leaf in enumerate(leaves):
        seed = _seed(key, index)
        leaf_name = f"{name}/{index}" if name and len(leaves) > 1 else name
        sums.append(_reduce_leaf(leaf, seed, axes, size, op, config, leaf_name))
    return jax.tree_util.tree_unflatten(tree, sums)


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
            "there is nothing to send. Use jax.lax.psum for it, or jax.shard_map to spread it"
        )
    return size


def _checked(caller: str, path: Any, leaf: Any) -> jax.Array:
    dtype = jnp.result_type(leaf)
    if dtype.name not in _DTYPES:
        where = jax.tree_util.keystr(path)
        if dtype.name == "float64":
            remedy = "cast it to float32, or sum it exactly with jax.lax.psum"
        elif jnp.issubdtype(dtype, jnp.complexfloating):
            remedy = "reduce its real and imaginary parts, or sum it exactly with jax.lax.psum"
        else:
            remedy = "sum it exactly with jax.lax.psum, or cast it to float32"
        raise TypeError(
            f"{caller}: x{where} has dtype {dtype}, and only {', '.join(_DTYPES)} can be "
            f"compressed: {remedy}"
        )
    return jnp.asarray(leaf, dtype)


def _seed(key: jax.Array | None, index: int) -> jax.Array:
    if key is None:
        return jnp.zeros(2, jnp.uint32)
    return jax.random.bits(jax.random.fold_in(key, index), (2,), jnp.uint32)


def _reduce_leaf(
    x: jax.Array,
    seed: jax.Array,
    axes: tuple[Hashable, ...],
    size: int,
    op: str,
    config: Config,
    name: str,
) -> jax.Array:
    # With check_vma=False nothing is known to vary, and pcast does nothing.
    missing = (frozenset(axes) | _compat.varying_axes(seed)) - _compat.varying_axes(x)
    if missing:
        x = jax.lax.pcast(x, tuple(sorted(missing, key=str)), to="varying")
    if size == 1:
        _runtime.warn_if_alone()
    if size == 1 or x.size == 0:  # nothing to send, but the type changes
        return jax.lax.psum(x, axes)
    return psum_q_p.bind(x, seed, axes=axes, op=op, config=config, name=name, batch=1)


# ---- abstract evaluation -----------------------------------------------------------------------

psum_q_p = Primitive("cgx_psum_q")
psum_q_p.def_impl(functools.partial(xla.apply_primitive, psum_q_p))


@psum_q_p.def_abstract_eval
def _abstract_eval(x: Any, seed: Any, *, axes: tuple[Hashable, ...], **_: Any) -> Any:
    varying = _compat.varying_axes(x) | _compat.varying_axes(seed)
    return _compat.with_varying_axes(x, varying - frozenset(axes))


# ---- lowering ----------------------------------------------------------------------------------


def _lower_cpu(
    ctx: Any,
    x: Any,
    seed: Any,
    *,
    axes: tuple[Hashable, ...],
    op: str,
    config: Config,
    name: str,
    batch: int,
) -> Any:
    automatic = _compat.automatic_axes(ctx)
    if automatic:
        raise NotImplementedError(
            f"psum_q over {axes} in a shard_map that leaves {automatic} to the compiler: name "
            "these axes too in its axis_names, or nest a shard_map over them around the psum_q"
        )
    groups = _groups(_compat.mesh_of(ctx), axes)
    numbers = {
        "bits": config.bits,
        "bucket_size": config.bucket_size,
        "gather_bits": config.gather_bits or 0,
        "minimal_size": config.minimal_size,
        "skip_incomplete_buckets": config.skip_incomplete_buckets,
        "op": _OPS[op],
        "algorithm": _ALGORITHMS[config.algorithm],
        "rounding": _ROUNDINGS[config.rounding],
        "batch": batch,
        "group_size": groups.shape[1],
    }
    attributes: dict[str, Any] = {knob: np.int64(value) for knob, value in numbers.items()}
    attributes["groups"] = groups.reshape(-1)
    processes = _runtime.processes_of(_compat.mesh_of(ctx))
    if processes is not None:
        attributes["processes"] = np.asarray(processes, np.int64)
    attributes["call"] = name or _call_id(ctx, attributes)
    # The side effect is HLO's only: it keeps XLA from merging or dropping calls, on some ranks
    # perhaps. As an effect of JAX it would cost 60 us a launch and forbid remat.
    rule = jax.ffi.ffi_lowering(_runtime.psum_q_target(), has_side_effect=True)
    ctx = ctx.replace(avals_in=[*ctx.avals_in, _compat.scalar_u32()])
    return rule(ctx, x, seed, stablehlo.partition_id(), **attributes)


def _groups(
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, axes: tuple[Hashable, ...]
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return a row for each group: the partition ids of its ranks, in order.

    Partition ids count the places of the mesh, whichever devices are there.
    """
    places = np.arange(mesh.size, dtype=np.int64).reshape(mesh.axis_sizes)
    last = range(-len(axes), 0)
    places = np.moveaxis(places, [mesh.axis_names.index(axis) for axis in axes], last)
    return places.reshape(-1, math.prod(mesh.shape[axis] for axis in axes))


def _call_id(ctx: Any, attributes: dict[str, Any]) -> str:
    """Names the call by its place in the module, the same in every process that compiles it."""
    aval = ctx.avals_in[0]
    values = {knob: np.asarray(value).tolist() for knob, value in sorted(attributes.items())}
    what = repr((aval.shape, aval.dtype.name, values))
    digest = hashlib.sha256(what.encode()).hexdigest()[:8]
    return f"{_compat.module_name(ctx)}/{_compat.next_index(ctx)}:{digest}"


def _lower_elsewhere(ctx: Any, *_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        f"psum_q runs on CPU devices only, not on {'/'.join(ctx.module_context.platforms)}: set "
        "JAX_PLATFORMS=cpu, or use jax.lax.psum"
    )


# A cached lowering would give equal calls one id; they are told apart then too, but less clearly.
mlir.register_lowering(psum_q_p, _lower_cpu, platform="cpu", cacheable=False)
mlir.register_lowering(psum_q_p, _lower_elsewhere)


# ---- batching ----------------------------------------------------------------------------------


def _batch(
    axis_data: Any,
    args: tuple[jax.Array, jax.Array],
    dims: tuple[int | None, int | None],
    *,
    axes: tuple[Hashable, ...],
    batch: int,
    **params: Any,
) -> tuple[jax.Array, int | None]:
    """Each example becomes a segment of one collective, compressed as if it were alone."""
    (x, seed), (x_dim, seed_dim) = args, dims
    if axis_data.name in axes:
        raise NotImplementedError(
            f"psum_q over {axes} inside a vmap of that axis_name: use jax.lax.psum for vmap's axes"
        )
    if seed_dim is not None:  # a collective has one seed
        seed = jnp.moveaxis(seed, seed_dim, 0)
        bind = functools.partial(psum_q_p.bind, axes=axes, batch=batch, **params)
        if x_dim is None:
            return jax.lax.map(lambda one: bind(x, one), seed), 0
        return jax.lax.map(lambda both: bind(*both), (jnp.moveaxis(x, x_dim, 0), seed)), 0
    if x_dim is None:  # not batched at all, as JAX may ask too
        return psum_q_p.bind(x, seed, axes=axes, batch=batch, **params), None
    x = jnp.moveaxis(x, x_dim, 0)
    return psum_q_p.bind(x, seed, axes=axes, batch=batch * x.shape[0], **params), 0


batching.fancy_primitive_batchers[psum_q_p] = _batch


# ---- differentiation ---------------------------------------------------------------------------


def _jvp(
    primals: tuple[jax.Array, jax.Array],
    tangents: tuple[Any, Any],
    *,
    axes: tuple[Hashable, ...],
    op: str,
    **params: Any,
) -> tuple[jax.Array, Any]:
    """Straight through: the tangent is that of the exact sum, which JAX can transpose."""
    y = psum_q_p.bind(*primals, axes=axes, op=op, **params)
    tangent = tangents[0]
    if type(tangent) is ad.Zero:
        return y, _compat.zero_tangent(y)
    return y, (jax.lax.psum if op == "sum" else jax.lax.pmean)(tangent, axes)


ad.primitive_jvps[psum_q_p] = _jvp
