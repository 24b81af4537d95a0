"""Groups along mesh axes: how a collective inside shard_map is lowered and differentiated.

1. axes, which must be bound by a shard_map
2. lowering: the group and process of each device, and what identifies the call among them
3. derivatives: those of JAX's own collectives
"""

import functools
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import numpy as np
import numpy.typing as npt
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import ad

from cgx_ops._core import tables
from cgx_ops.jax._src.collectives import carrier
from cgx_ops.jax._src.collectives.calls import parted
from cgx_ops.jax._src.collectives.options import refuse_on_gpus
from cgx_ops.jax._src.collectives.plans import Planned, agree
from cgx_ops.jax._src.collectives.primitive import (
    Settings,
    Verb,
    custom_call,
    message_attributes,
    vary,
)
from cgx_ops.jax._src.collectives.trees import uncompressed
from cgx_ops.jax._src.collectives.votes import lower_by_counts, need_counts
from cgx_ops.jax._src.runtime import compat, handlers
from cgx_ops.jax._src.runtime.launching import launcher
from cgx_ops.jax._src.runtime.processes import devices_of, processes_of, require_company

Axes = Hashable | tuple[Hashable, ...] | list[Hashable]
Rows = npt.NDArray[np.int64]  # the partition ids of each group, a row each, in rank order


# ---- 1. axes -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeshGroups:
    """The groups of `size` devices along some axes of a mesh, in the order of `axes`."""

    axes: tuple[Hashable, ...]
    size: int
    sends_alone: bool = False
    effects: ClassVar[set[compat.Effect]] = set()
    functions: ClassVar[dict[Verb, str]] = {
        "allreduce": "psum_q", "reduce_scatter": "psum_scatter_q", "all_gather": "all_gather_q",
        "all_to_all": "all_to_all_q",
    }  # fmt: skip

    def call_text(self, verb: Verb, name: str, *, indices: bool = False) -> str:
        """Return the text that gives calls with one key different seeds."""
        del indices  # the text is the same on all devices of a group
        return f"{verb} over {','.join(map(str, self.axes))}: {name}"

    def alone(self, leaf: jax.Array) -> jax.Array:
        """Return the sum of a leaf that is not sent."""
        return jax.lax.psum(
            vary(leaf, frozenset(self.axes)), self.axes
        )  # so that the type varies, like a sent leaf's

    def lower(
        self, ctx: Any, operands: Sequence[Any], settings: Settings, platform: handlers.Platform
    ) -> Any:
        """Return the HLO values of the results."""
        return {"cpu": _lower_cpu, "cuda": _lower_cuda}[platform](ctx, operands, settings)

    def exact(self, tangents: list[Any], seeds: list[Any], settings: Settings) -> list[Any]:
        """Apply the exact collective to tangents; zeros stay zeros."""
        return [leaf if type(leaf) is ad.Zero else _exact(leaf, settings) for leaf in tangents]

    def transposed(
        self, cotangents: list[Any], leaves: list[Any], seeds: list[Any], settings: Settings
    ) -> list[Any]:
        """Return the cotangents of leaves, those of the exact collective."""

        def of(cotangent: Any, leaf: Any) -> Any:
            aval = leaf.aval if ad.is_undefined_primal(leaf) else jax.typeof(leaf)
            if type(cotangent) is ad.Zero:
                return ad.Zero(aval)
            return jax.linear_transpose(lambda x: _exact(x, settings), aval)(cotangent)[0]

        return list(map(of, cotangents, leaves))


def axes_of(axis_name: Axes) -> tuple[Hashable, ...]:
    """Return the axes of an axis_name: one name, or, as in jax.lax, a tuple or list of names."""
    return tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)


def mesh_groups(caller: str, axis_name: Axes) -> MeshGroups:
    """Return the groups along one or several axes; require a shard_map that binds them."""
    axes = axes_of(axis_name)
    if len(set(axes)) < len(axes):
        raise ValueError(f"{caller}: an axis is named twice: {axes}")
    size = math.prod(_axis_size(caller, axis) for axis in axes)
    automatic = compat.automatic_axes()
    if automatic:
        raise NotImplementedError(
            f"{caller} over {axes} in a shard_map that leaves {automatic} to the compiler: name "
            "these axes too in its axis_names, or nest a shard_map over them around the call"
        )
    require_company(caller)
    return MeshGroups(axes, size)


def _axis_size(caller: str, axis: Hashable) -> int:
    size = compat.axis_size(axis)
    if size is None:
        raise NameError(
            f"{caller}: unbound axis name: {axis!r}. Call it inside jax.shard_map over a mesh that "
            "has this axis; in plain jax.jit use cgx_ops.jax.value_and_grad with in_specs, which "
            "adds a shard_map"
        )
    if not compat.is_shard_map_axis(axis):
        raise NotImplementedError(
            f"{caller}: the axis {axis!r} belongs to a vmap, so its elements are on one device and "
            f"there is nothing to send. Use {uncompressed(caller)} for it, or spread it over "
            "devices with jax.shard_map"
        )
    return size


def require_own_messages(
    caller: str,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None,
    groups: MeshGroups,
    remedy: str,
) -> None:
    """Refuse groups with several devices in each of several processes.

    A process sums the values of its devices before it sends them, so a device cannot find out which
    of its values were sent. `remedy`: how to use an axis over a process's devices.
    """
    if jax.process_count() in (1, jax.device_count()):
        return
    if not isinstance(mesh, jax.sharding.Mesh):
        raise ValueError(
            f"{caller}: processes have several devices each, so mesh must be the jax.sharding.Mesh "
            f"of the shard_map, not {mesh!r}"
        )
    dimensions = [mesh.axis_names.index(axis) for axis in groups.axes]
    devices = np.moveaxis(mesh.devices, dimensions, range(-len(dimensions), 0))
    for group in devices.reshape(-1, groups.size):
        counts = Counter(device.process_index for device in group)
        if 1 < len(counts) < len(group):
            raise NotImplementedError(
                f"{caller} over {groups.axes}: a group of the mesh has {sorted(counts.values())} "
                f"devices in its {len(counts)} processes; it may have only one in each process, or "
                "all in one. Create a separate mesh axis over the devices of a process, and "
                f"{remedy}"
            )


# ---- 2. lowering -------------------------------------------------------------------------------


def _lower_cpu(ctx: Any, operands: Sequence[Any], settings: Settings) -> Any:
    mesh = compat.mesh_of(ctx)
    groups = _groups(mesh, settings.groups.axes)
    processes = processes_of(mesh, settings.carrier)
    if need_counts(settings, groups, processes):
        return lower_by_counts(ctx, operands, settings)
    if settings.carrier == "xla":
        return carrier.lower(ctx, operands, settings=settings, groups=groups, processes=processes)
    several = processes is not None and len(set(processes)) < len(processes)
    if processes is not None:
        _check_counts(settings, groups, processes)
    attributes = _attributes(
        ctx, settings, groups=groups, processes=processes, names_suffice=not several
    )
    # XLA passes the device to a handler, but not the partition of the program.
    partition = (compat.scalar_u32(), stablehlo.partition_id())
    target = handlers.target(settings.function)
    return custom_call(ctx, target, operands, settings, attributes, [partition])


def _lower_cuda(ctx: Any, operands: Sequence[Any], settings: Settings) -> Any:
    if settings.carrier == "xla":
        raise NotImplementedError(
            f"{settings.function} with carrier='xla' supports only CPU devices, and its operands "
            "are on GPUs: use carrier='native'"
        )
    refuse_on_gpus(settings.function, settings.configs)
    mesh = compat.mesh_of(ctx)
    groups = _groups(mesh, settings.groups.axes)
    devices = devices_of(mesh)
    processes = processes_of(mesh, settings.carrier)
    if processes is not None:
        _check_spread(settings, groups, processes)
    settings = replace(settings, overlaps=False)  # a stream runs in order
    # On a GPU, collectives run one after the other, whatever their names.
    attributes = _attributes(
        ctx, settings, groups=groups, processes=processes, names_suffice=False, devices=devices
    )
    target = handlers.target(settings.function, "cuda")
    return custom_call(ctx, target, operands, settings, attributes)


def _attributes(
    ctx: Any,
    settings: Settings,
    *,
    groups: Rows,
    processes: list[int] | None,
    names_suffice: bool,
    devices: list[int] | None = None,
) -> dict[str, Any]:
    """Return the attributes that Site of xla_ffi/site.cc reads.

    Args:
        ctx: The lowering context.
        settings: The static parameters of the call.
        groups: The partition ids of each group, a row each.
        processes: The process of each partition; None: all are in this one.
        names_suffice: Whether threads that launch at the same time may name their calls instead.
        devices: The device id of each partition, if the handler identifies devices by it.
    """
    attributes = {
        **message_attributes(ctx, settings),
        "groups": groups.reshape(-1),
        "group_size": np.int64(groups.shape[1]),
    }
    launched_by = ""
    if devices is not None:
        attributes["devices"] = np.asarray(devices, np.int64)
    if processes is not None:
        attributes["processes"] = np.asarray(processes, np.int64)
        if settings.plan is not None:
            planned = Planned(settings.plan, tuple(sorted(set(processes))))
            handlers.check_before_compilation(compat.module_name(ctx), agree, planned)
        launched_by = launcher(
            named=bool(settings.name), names_suffice=names_suffice and not settings.uses_xla
        )
    call = settings.name or _call_id(ctx, settings, attributes)
    attributes["call"] = f"{launched_by}/{call}" if launched_by else call
    attributes["named"] = np.int64(bool(settings.name or launched_by))
    return attributes


def _groups(
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, axes: tuple[Hashable, ...]
) -> Rows:
    """Return a row for each group: the partition ids of its ranks, in order.

    Partition ids are positions in the mesh, independent of the devices there.
    """
    ids = np.arange(mesh.size, dtype=np.int64).reshape(mesh.axis_sizes)
    last = range(-len(axes), 0)
    ids = np.moveaxis(ids, [mesh.axis_names.index(axis) for axis in axes], last)
    return ids.reshape(-1, math.prod(mesh.shape[axis] for axis in axes))


def _check_counts(settings: Settings, groups: Rows, processes: list[int]) -> None:
    """Require equal numbers of devices in each process of a group, for scatter and gather."""
    if settings.row["shards"]:
        return
    for group in groups:
        counts = Counter(processes[partition] for partition in group)
        if len(set(counts.values())) > 1:
            raise NotImplementedError(
                f"{settings.function} over {settings.groups.axes}: a group of the mesh has "
                f"{sorted(counts.values())} devices in its processes; the numbers must be equal. "
                "Choose the devices of the mesh accordingly, or use JAX's own collective"
            )


def _check_spread(settings: Settings, groups: Rows, processes: list[int]) -> None:
    """Require that the GPUs of a group are all in one process, or each in a separate one."""
    for group in groups:
        counts = Counter(processes[partition] for partition in group)
        if 1 < len(counts) < len(group):
            raise NotImplementedError(
                f"{settings.function} over {settings.groups.axes}: a group of the mesh has "
                f"{sorted(counts.values())} GPUs in its {len(counts)} processes; it may have all "
                "of them in one process, or one in each. Start a process for each GPU: under "
                "mpirun cgx_ops.jax.initialize() gives each its own, elsewhere CUDA_VISIBLE_DEVICES"
            )


def _call_id(ctx: Any, settings: Settings, attributes: dict[str, Any]) -> str:
    """Name the call by its position in the module, equal in every process that compiles it."""
    avals = [(aval.shape, aval.dtype.name) for aval in parted(ctx.avals_in, settings.feedback)[0]]
    values = {knob: np.asarray(value).tolist() for knob, value in sorted(attributes.items())}
    digest = hashlib.sha256(repr((avals, settings.groups.axes, values)).encode()).hexdigest()[:8]
    return f"{compat.module_name(ctx)}/{compat.next_index(ctx)}:{digest}"


# ---- 3. derivatives ----------------------------------------------------------------------------


_EXACT: dict[Verb, Callable[..., jax.Array]] = {
    "allreduce": jax.lax.psum,
    "reduce_scatter": jax.lax.psum_scatter,
    "all_gather": jax.lax.all_gather,
    "all_to_all": functools.partial(jax.lax.all_to_all, split_axis=0, concat_axis=0, tiled=True),
}


def _exact(leaf: jax.Array, settings: Settings) -> jax.Array:
    result = _EXACT[settings.verb](leaf, settings.groups.axes)
    mean = settings.op == "avg" and tables.VERBS[settings.verb]["reduces"]
    return result / settings.groups.size if mean else result
