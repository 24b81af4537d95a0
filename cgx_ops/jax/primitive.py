"""The primitive under psum_q, psum_scatter_q and all_gather_q: one collective over mesh axes.

In this order: parameters, binding, abstract evaluation, lowering, batching, differentiation.

Operands are `leaves` of one dtype in canonical shapes, then as many `seeds`, uint32 (batch, 2),
and with feedback as many `residuals`, which are like their leaves; results are those of the leaves,
then the new residuals:

    verb              leaf               result
    allreduce         (batch, n)         (batch, n)
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
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
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
from cgx_ops.jax._calls import call_attributes, parted
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
        feedback: whether leaves have residuals; of allreduce only.
    """

    verb: Verb
    op: str
    axes: tuple[Hashable, ...]
    size: int
    bits: tuple[int, ...]
    config: Config
    name: str
    carrier: Carrier
    feedback: bool = False


# ---- binding -----------------------------------------------------------------------------------


def bind(
    leaves: list[jax.Array],
    seeds: list[jax.Array],
    settings: Settings,
    residuals: Sequence[jax.Array] = (),
) -> list[jax.Array]:
    """Run one collective; leaves and residuals that do not vary over its axes are made to."""

    def varying(x: jax.Array, seed: jax.Array) -> jax.Array:
        return vary(x, frozenset(settings.axes) | _compat.varying_axes(seed))

    leaves = list(map(varying, leaves, seeds))
    residuals = list(map(varying, residuals, seeds))
    return collective_q_p.bind(*leaves, *seeds, *residuals, settings=settings)


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
    leaves, seeds, residuals = parted(avals, settings.feedback)
    results = []
    for leaf, seed in zip(leaves, seeds, strict=True):
        shape = {
            "allreduce": leaf.shape,
            "reduce_scatter": leaf.shape[1:],
            "all_gather": (settings.size, *leaf.shape),
        }[settings.verb]
        varying = _compat.varying_axes(leaf) | _compat.varying_axes(seed)
        if settings.verb == "allreduce":  # all devices of a group get the same
            varying -= frozenset(settings.axes)
        results.append(_compat.with_varying_axes(leaf.update(shape=shape), varying))
    return results + residuals


# ---- lowering ----------------------------------------------------------------------------------


# Custom calls take the seeds of all segments in one operand.


def _lower_cpu(ctx: Any, *operands: Any, settings: Settings) -> Any:
    mesh = _compat.mesh_of(ctx)
    groups = _groups(mesh, settings.axes)
    processes = _runtime.processes_of(mesh, settings.carrier)
    if settings.carrier == "xla":
        return carrier.lower(ctx, operands, settings=settings, groups=groups, processes=processes)
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
    """Emit the call; `others` are abstract values and values of its last operands."""
    leaves, seeds, residuals = parted(operands, settings.feedback)
    leaf_avals, seed_avals, residual_avals = parted(ctx.avals_in, settings.feedback)
    segments = sum(aval.shape[0] for aval in seed_avals)
    count = len(leaves)
    in_place = {count + 1 + i: count + i for i in range(len(residuals))}
    # The side effect is HLO's only: it keeps XLA from merging or dropping calls, on some ranks
    # perhaps. As an effect of JAX it would cost 60 us a launch and forbid remat.
    target = _runtime.target(NAMES[settings.verb], platform)
    rule = jax.ffi.ffi_lowering(target, has_side_effect=True, operand_output_aliases=in_place)
    other_avals, other_values = zip(*others, strict=True) if others else ((), ())
    avals = [*leaf_avals, _compat.seed_rows(segments), *residual_avals, *other_avals]
    values = [*leaves, _compat.concatenated(seeds), *residuals, *other_values]
    return rule(ctx.replace(avals_in=avals), *values, **attributes)


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
    leaves = parted(ctx.avals_in, settings.feedback)[0]
    attributes = {
        **call_attributes(settings.op, settings.config),
        "verb": np.int64(_native.VERBS[settings.verb]),
        "bits": np.asarray(settings.bits, np.int64),
        "batches": np.asarray([leaf.shape[batch_axis] for leaf in leaves], np.int64),
        "feedback": np.int64(settings.feedback),
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
    avals = [(aval.shape, aval.dtype.name) for aval in parted(ctx.avals_in, settings.feedback)[0]]
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
    operands, places = parted(args, settings.feedback), parted(dims, settings.feedback)
    examples: list[tuple[int, int] | None] = []  # of each leaf: vmap's, and those it had before
    for i, of_leaf in enumerate(zip(*filter(None, places), strict=True)):
        if all(dim is None for dim in of_leaf):
            examples.append(None)
            continue
        if places[1][i] is None and settings.config.rounding != "nearest":
            operands[1][i], places[1][i] = example_seeds(operands[1][i], size), 0
        for kind, dims_of_kind, axis in zip(operands, places, (at, 0, at), strict=True):
            if kind:
                kind[i] = _merged(batching.bdim_at_front(kind[i], dims_of_kind[i], size), axis)
        examples.append((size, operands[1][i].shape[0] // size))
    results = collective_q_p.bind(*chain(*operands), settings=settings)
    axes = [_BATCH_OUT[settings.verb]] * len(examples) + [at] * len(operands[2])
    examples *= len(results) // len(examples)
    dims_out = [
        None if example is None else axis for axis, example in zip(axes, examples, strict=True)
    ]
    return list(map(_unmerged, results, axes, examples)), dims_out


def _merged(x: jax.Array, axis: int) -> jax.Array:
    """Move axis 0, vmap's, to before `axis` of the rest, and merge it with that."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


def _unmerged(x: jax.Array, axis: int, examples: tuple[int, int] | None) -> jax.Array:
    """Undo the merge; vmap's axis stays at `axis`. None: there was none."""
    return x if examples is None else x.reshape(*x.shape[:axis], *examples, *x.shape[axis + 1 :])


batching.fancy_primitive_batchers[collective_q_p] = _batch


# ---- differentiation ---------------------------------------------------------------------------


def _jvp(
    primals: tuple[jax.Array, ...], tangents: tuple[Any, ...], *, settings: Settings
) -> tuple[list[jax.Array], list[Any]]:
    """Straight through: the tangent is that of the exact collective, which JAX can transpose.

    Residuals count as what they are added to; what is lost is constant.
    """
    results = collective_q_p.bind(*primals, settings=settings)
    tangents_out = list(map(_compat.zero_tangent, results))
    leaves, _, residuals = parted(tangents, settings.feedback)
    for i, leaf in enumerate(leaves):
        total = ad.add_tangents(leaf, residuals[i]) if residuals else leaf
        if type(total) is not ad.Zero:
            tangents_out[i] = _exact(total, settings)
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
    """Transpose the exact collective; cotangents of new residuals count for nothing."""
    leaves, seeds, residuals = parted(operands, settings.feedback)
    exact = functools.partial(_exact, settings=settings)

    def of(operand: Any, cotangent: Any) -> Any:
        if not ad.is_undefined_primal(operand):
            return None
        if type(cotangent) is ad.Zero:
            return ad.Zero(operand.aval)
        return jax.linear_transpose(exact, operand.aval)(cotangent)[0]

    cotangents = cotangents[: len(leaves)]
    return [*map(of, leaves, cotangents), *(None for _ in seeds), *map(of, residuals, cotangents)]


ad.primitive_jvps[collective_q_p] = _jvp
ad.primitive_transposes[collective_q_p] = _transpose
