"""The primitive under psum_q, psum_scatter_q and all_gather_q: one collective over mesh axes.

In this order: parameters, binding, abstract evaluation, lowering, batching, differentiation.

Operands are `leaves` of one dtype in canonical shapes, then as many `seeds`, uint32 (batch, 2):

    verb              leaf               result
    allreduce         (batch, n)         (batch, n); with `errors`, another of them
    reduce_scatter    (size, batch, n)   (batch, n)
    all_gather        (batch, n)         (size, batch, n)

An example of the batch (vmap's) is a segment of the message with a seed of its own (also where vmap
gives all of them one key), compressed as if it were alone. All leaves of one binding are one
message.
"""

import functools
import hashlib
import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import ad, batching, mlir, xla

from cgx_ops import _native
from cgx_ops.config import Config
from cgx_ops.jax import _compat, _runtime, carrier
from cgx_ops.jax._calls import call_attributes, halves
from cgx_ops.jax._keys import example_seeds
from cgx_ops.jax.launching import launcher

Verb = Literal["allreduce", "reduce_scatter", "all_gather"]
Carrier = Literal["native", "xla"]

# By verb: what users call it, and where vmap's examples stand in a leaf and in its result.
NAMES = {"allreduce": "psum_q", "reduce_scatter": "psum_scatter_q", "all_gather": "all_gather_q"}
_BATCH_IN = {"allreduce": 0, "reduce_scatter": 1, "all_gather": 0}
_BATCH_OUT = {"allreduce": 0, "reduce_scatter": 0, "all_gather": 1}


# ---- parameters --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """What is static in a call, besides its shapes.

    Attributes:
        verb: which collective.
        op: "sum" or "avg"; all_gather ignores it.
        axes: names of the mesh axes that form its groups.
        size: devices in a group.
        bits: of each leaf.
        config: every other knob; its `bits` are not used.
        name: the user's; "" to name the call by its place in the program.
        carrier: "native": the core moves the bytes; "xla": XLA's own collectives do.
        errors: whether allreduce also returns what compression lost.
    """

    verb: Verb
    op: str
    axes: tuple[Hashable, ...]
    size: int
    bits: tuple[int, ...]
    config: Config
    name: str
    carrier: Carrier
    errors: bool = False


# ---- binding -----------------------------------------------------------------------------------


def bind(leaves: list[jax.Array], seeds: list[jax.Array], settings: Settings) -> list[jax.Array]:
    """Run one collective; leaves that do not vary over its axes are made to."""
    varying = [
        vary(leaf, frozenset(settings.axes) | _compat.varying_axes(seed))
        for leaf, seed in zip(leaves, seeds, strict=True)
    ]
    return collective_q_p.bind(*varying, *seeds, settings=settings)


def vary(leaf: jax.Array, axes: frozenset[Hashable]) -> jax.Array:
    """Make a leaf's type vary over all of these axes."""
    # With check_vma=False nothing is known to vary, and pcast does nothing.
    missing = axes - _compat.varying_axes(leaf)
    if not missing:
        return leaf
    return jax.lax.pcast(leaf, tuple(sorted(missing, key=str)), to="varying")


collective_q_p = Primitive("cgx_collective_q")
collective_q_p.multiple_results = True
collective_q_p.def_impl(functools.partial(xla.apply_primitive, collective_q_p))


# ---- abstract evaluation -----------------------------------------------------------------------


@collective_q_p.def_abstract_eval
def _abstract_eval(*avals: Any, settings: Settings) -> list[Any]:
    results, errors = [], []
    for leaf, seed in zip(*halves(avals), strict=True):
        shape = {
            "allreduce": leaf.shape,
            "reduce_scatter": leaf.shape[1:],
            "all_gather": (settings.size, *leaf.shape),
        }[settings.verb]
        varying = _compat.varying_axes(leaf) | _compat.varying_axes(seed)
        errors.append(_compat.with_varying_axes(leaf, varying))
        if settings.verb == "allreduce":  # all devices of a group get the same
            varying -= frozenset(settings.axes)
        results.append(_compat.with_varying_axes(leaf.update(shape=shape), varying))
    return results + errors if settings.errors else results


# ---- lowering ----------------------------------------------------------------------------------


# Custom calls take the leaves, then the seeds of all segments in one operand.


def _lower_cpu(ctx: Any, *operands: Any, settings: Settings) -> Any:
    mesh = _compat.mesh_of(ctx)
    groups = _groups(mesh, settings.axes)
    processes = _runtime.processes_of(mesh, settings.carrier)
    if settings.carrier == "xla":
        leaves, seeds = halves(operands)
        return carrier.lower(
            ctx, leaves, seeds, settings=settings, groups=groups, processes=processes
        )
    several = processes is not None and len(set(processes)) < len(processes)
    if processes is not None:
        _check_counts(settings, groups, processes)
    attributes = _attributes(
        ctx, settings, groups=groups, processes=processes, names_suffice=not several
    )
    # XLA tells a handler the device, not which partition of the program it runs.
    partition = (_compat.scalar_u32(), stablehlo.partition_id())
    return _custom_call(ctx, "cpu", operands, [partition], settings, attributes)


def _lower_cuda(ctx: Any, *operands: Any, settings: Settings) -> Any:
    if settings.carrier == "xla":
        raise NotImplementedError(
            f"{NAMES[settings.verb]} with carrier='xla' computes on the CPU, and its operands are "
            "on GPUs: use carrier='native'"
        )
    mesh = _compat.mesh_of(ctx)
    groups = _groups(mesh, settings.axes)
    devices = _runtime.devices_of(mesh)
    processes = _runtime.processes_of(mesh, settings.carrier)
    if processes is not None:
        _check_spread(settings, groups, processes)
    # On a GPU collectives of all names run one after the other.
    attributes = _attributes(
        ctx, settings, groups=groups, processes=processes, names_suffice=False, devices=devices
    )
    return _custom_call(ctx, "cuda", operands, [], settings, attributes)


def _custom_call(
    ctx: Any,
    platform: _runtime.Platform,
    operands: tuple[Any, ...],
    others: list[tuple[Any, Any]],
    settings: Settings,
    attributes: dict[str, Any],
) -> Any:
    """Emit the call; `others` are abstract values and values of operands behind the seeds."""
    (leaves, seeds), (leaf_avals, seed_avals) = halves(operands), halves(ctx.avals_in)
    segments = sum(aval.shape[0] for aval in seed_avals)
    # The side effect is HLO's only: it keeps XLA from merging or dropping calls, on some ranks
    # perhaps. As an effect of JAX it would cost 60 us a launch and forbid remat.
    target = _runtime.target(NAMES[settings.verb], platform)
    rule = jax.ffi.ffi_lowering(target, has_side_effect=True)
    avals = [*leaf_avals, _compat.seed_rows(segments), *(aval for aval, _ in others)]
    rows = _compat.concatenated(seeds)
    return rule(
        ctx.replace(avals_in=avals), *leaves, rows, *(value for _, value in others), **attributes
    )


def _attributes(
    ctx: Any,
    settings: Settings,
    *,
    groups: np.ndarray[Any, np.dtype[np.int64]],
    processes: list[int] | None,
    names_suffice: bool,
    devices: list[int] | None = None,
) -> dict[str, Any]:
    """Return what Site of xla_ffi/site.cc reads.

    Args:
        ctx: of the lowering.
        settings: what is static in the call.
        groups: the partition ids of each group, a row each.
        processes: the process of each partition; None: all are in this one.
        names_suffice: whether threads that launch at the same time may name their calls instead.
        devices: the id of each partition's device, where the handler goes by that.
    """
    batch_axis = _BATCH_IN[settings.verb]
    leaves = halves(ctx.avals_in)[0]
    attributes = {
        **call_attributes(settings.op, settings.config),
        "verb": np.int64(_native.VERBS[settings.verb]),
        "bits": np.asarray(settings.bits, np.int64),
        "batches": np.asarray([leaf.shape[batch_axis] for leaf in leaves], np.int64),
        "errors": np.int64(settings.errors),
        "groups": groups.reshape(-1),
        "group_size": np.int64(groups.shape[1]),
    }
    launched_by = ""
    if devices is not None:
        attributes["devices"] = np.asarray(devices, np.int64)
    if processes is not None:
        attributes["processes"] = np.asarray(processes, np.int64)
        launched_by = launcher(named=bool(settings.name), names_suffice=names_suffice)
    call = settings.name or _call_id(ctx, settings, attributes)
    attributes["call"] = f"{launched_by}/{call}" if launched_by else call
    attributes["named"] = np.int64(bool(settings.name or launched_by))
    return attributes


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


def _check_counts(
    settings: Settings, groups: np.ndarray[Any, np.dtype[np.int64]], processes: list[int]
) -> None:
    """Scatter and gather need as many devices of a group in each of its processes."""
    for group in groups:
        counts = Counter(processes[partition] for partition in group)
        if settings.verb != "allreduce" and len(set(counts.values())) > 1:
            raise NotImplementedError(
                f"{NAMES[settings.verb]} over {settings.axes}: a group of the mesh has "
                f"{sorted(counts.values())} devices in its processes, and needs as many in each. "
                "Choose the devices of the mesh so, or use JAX's own collective"
            )


def _check_spread(
    settings: Settings, groups: np.ndarray[Any, np.dtype[np.int64]], processes: list[int]
) -> None:
    """GPUs of a group are all in one process, or each in one of its own."""
    for group in groups:
        counts = Counter(processes[partition] for partition in group)
        if 1 < len(counts) < len(group):
            raise NotImplementedError(
                f"{NAMES[settings.verb]} over {settings.axes}: a group of the mesh has "
                f"{sorted(counts.values())} GPUs in its {len(counts)} processes; it may have all "
                "of them in one process, or one in each. Start a process for each GPU: under "
                "mpirun cgx_ops.jax.initialize() gives each its own, elsewhere CUDA_VISIBLE_DEVICES"
            )


def _call_id(ctx: Any, settings: Settings, attributes: dict[str, Any]) -> str:
    """Names the call by its place in the module, the same in every process that compiles it."""
    avals = [(aval.shape, aval.dtype.name) for aval in halves(ctx.avals_in)[0]]
    values = {knob: np.asarray(value).tolist() for knob, value in sorted(attributes.items())}
    digest = hashlib.sha256(repr((avals, settings.axes, values)).encode()).hexdigest()[:8]
    return f"{_compat.module_name(ctx)}/{_compat.next_index(ctx)}:{digest}"


def _lower_elsewhere(ctx: Any, *_: Any, settings: Settings) -> Any:
    raise NotImplementedError(_runtime.refusal(NAMES[settings.verb], ctx.module_context.platforms))


# A cached lowering would give equal calls one id; they are told apart then too, but less clearly.
mlir.register_lowering(collective_q_p, _lower_cpu, platform="cpu", cacheable=False)
mlir.register_lowering(collective_q_p, _lower_cuda, platform="cuda", cacheable=False)
mlir.register_lowering(collective_q_p, _lower_elsewhere)


# ---- batching ----------------------------------------------------------------------------------


def _batch(
    axis_data: Any, args: tuple[Any, ...], dims: tuple[int | None, ...], *, settings: Settings
) -> tuple[list[Any], list[int | None]]:
    """Each example becomes a segment of the one message."""
    if axis_data.name in settings.axes:
        raise NotImplementedError(
            f"{NAMES[settings.verb]} over {settings.axes} inside a vmap of that axis_name: use "
            "JAX's own collective for vmap's axes"
        )
    at, size = _BATCH_IN[settings.verb], axis_data.size
    leaves, seeds, examples = [], [], []
    for leaf, seed, leaf_dim, seed_dim in zip(*halves(args), *halves(dims), strict=True):
        batched = leaf_dim is not None or seed_dim is not None
        if batched:
            leaf = batching.bdim_at_front(leaf, leaf_dim, size)
            if seed_dim is None and settings.config.rounding != "nearest":
                seed = example_seeds(seed, size)
            else:
                seed = batching.bdim_at_front(seed, seed_dim, size)
        examples.append((size, seed.shape[1]) if batched else None)
        leaves.append(_merged(leaf, at) if batched else leaf)
        seeds.append(_merged(seed, 0) if batched else seed)
    results = collective_q_p.bind(*leaves, *seeds, settings=settings)
    # Results of the leaves, then perhaps their errors, which are like the leaves.
    places = [_BATCH_OUT[settings.verb]] * len(leaves) + [at] * (len(results) - len(leaves))
    parted, dims_out = [], []
    for result, place, example in zip(
        results, places, examples * (len(results) // len(leaves)), strict=True
    ):
        parted.append(result if example is None else _parted(result, place, example))
        dims_out.append(None if example is None else place)
    return parted, dims_out


def _merged(x: jax.Array, axis: int) -> jax.Array:
    """Move axis 0, vmap's, to before `axis` of the rest, and merge it with that."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


def _parted(x: jax.Array, axis: int, example: tuple[int, int]) -> jax.Array:
    """Undo the merge; vmap's axis stays at `axis`."""
    return x.reshape(*x.shape[:axis], *example, *x.shape[axis + 1 :])


batching.fancy_primitive_batchers[collective_q_p] = _batch


# ---- differentiation ---------------------------------------------------------------------------


def _jvp(
    primals: tuple[jax.Array, ...], tangents: tuple[Any, ...], *, settings: Settings
) -> tuple[list[jax.Array], list[Any]]:
    """Straight through: the tangent is that of the exact collective, which JAX can transpose."""
    results = collective_q_p.bind(*primals, settings=settings)
    leaves = halves(tangents)[0]
    tangents_out = [
        _compat.zero_tangent(result) if type(leaf) is ad.Zero else _exact(leaf, settings)
        for result, leaf in zip(results, leaves, strict=False)
    ]
    tangents_out += [_compat.zero_tangent(result) for result in results[len(leaves) :]]
    return results, tangents_out


def _exact(leaf: jax.Array, settings: Settings) -> jax.Array:
    axes = settings.axes
    if settings.verb == "all_gather":
        return jax.lax.all_gather(leaf, axes)
    if settings.verb == "allreduce":
        total = jax.lax.psum(leaf, axes)
    else:
        total = jax.lax.psum_scatter(leaf, axes)
    return total / settings.size if settings.op == "avg" else total


def _transpose(cotangents: list[Any], *operands: Any, settings: Settings) -> list[Any]:
    """Transpose the exact collective. Cotangents of errors count for nothing, as their tangents."""
    leaves, seeds = halves(operands)
    exact = functools.partial(_exact, settings=settings)

    def of_leaf(leaf: Any, cotangent: Any) -> Any:
        if not ad.is_undefined_primal(leaf):
            return None
        if type(cotangent) is ad.Zero:
            return ad.Zero(leaf.aval)
        return jax.linear_transpose(exact, leaf.aval)(cotangent)[0]

    transposed = [of_leaf(*pair) for pair in zip(leaves, cotangents, strict=False)]
    return [*transposed, *(None for _ in seeds)]


ad.primitive_jvps[collective_q_p] = _jvp
ad.primitive_transposes[collective_q_p] = _transpose
