"""carrier="xla": an allreduce whose messages XLA's own collectives send, without MPI.

A rank is a device. Where a process has several devices of a group, a rank is that process: its
devices first sum their values exactly, in float32, and then share its messages, so that nothing is
sent twice.

    1. routes: the ranks of each group, senders and receivers
    2. the plan: the algorithm, and the lengths of its messages
    3. the program: sum? -> encode -> all-to-all -> reduce -> all-gather -> decode; one_shot has
       no all-to-all and no reduce
    4. XLA's collectives over groups of partition ids

The steps between the exchanges are FFI calls, pure functions of their operands
(xla_ffi/carried.cc). Bits and bytes are those of the native carrier, except that messages are
padded to the longest.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from ctypes import byref, c_int32, c_int64, pointer
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from cgx_ops._core import library, structs, tables
from cgx_ops._core.call import build
from cgx_ops.config import Algorithm, Config
from cgx_ops.jax._src.collectives.calls import call_attributes, parted
from cgx_ops.jax._src.runtime import compat, handlers

if TYPE_CHECKING:
    from cgx_ops.jax._src.collectives.primitive import Settings

Int64s = npt.NDArray[np.int64]
Groups = tuple[tuple[int, ...], ...]  # partition ids, a tuple for each group, in order


def lower(
    ctx: Any,
    operands: Sequence[Any],
    *,
    settings: "Settings",
    groups: Int64s,
    processes: Sequence[int] | None,
) -> Any:
    """Lower an allreduce to the program.

    Args:
        ctx: The lowering context.
        operands: The primitive's operands, as HLO values.
        settings: The static parameters of the call.
        groups: The partition ids of each group, a row each.
        processes: The process of each partition; None: all are in this one.

    Returns:
        The primitive's results, as HLO values.

    Raises:
        NotImplementedError: The processes of a group have different numbers of its devices.
    """
    route = _route(groups, processes or [0] * groups.size)
    avals = [compat.plain(aval) for aval in ctx.avals_in]
    ctx = ctx.replace(avals_in=[compat.scalar_u32(), *avals])
    program = functools.partial(_allreduce, settings=settings, route=route)
    return mlir.lower_fun(program)(ctx, stablehlo.partition_id(), *operands)


# ---- 1. routes -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Route:
    """Senders and receivers.

    Attributes:
        across: One device of each rank, in rank order: the devices that exchange messages.
        within: The devices of each rank.
        rank_of: The rank of each partition in its group.
        share_of: The index of each partition among the devices of its rank.
    """

    across: Groups
    within: Groups
    rank_of: Int64s
    share_of: Int64s

    @property
    def ranks(self) -> int:
        return len(self.across[0])

    @property
    def devices(self) -> int:
        """The number of devices of each rank."""
        return len(self.within[0])


def _route(groups: Int64s, processes: Sequence[int]) -> _Route:
    ranks = [_ranks_of(group.tolist(), processes) for group in groups]
    shapes = {tuple(map(len, of_group)) for of_group in ranks}
    if len(shapes) > 1 or len(set(next(iter(shapes)))) > 1:
        held = {tuple(Counter(processes[i] for i in group).values()) for group in groups}
        raise NotImplementedError(
            f"psum_q with carrier='xla': the processes of a group hold {_listed(held)} of its "
            "devices; the numbers must be equal, and the same in all groups. Use "
            "carrier='native', or a mesh that is spread evenly over the processes"
        )
    table = np.asarray(ranks)  # (groups, ranks, devices)
    rank_of, share_of = np.zeros((2, groups.size), np.int64)
    _, rank_of[table], share_of[table] = np.indices(table.shape)
    across = table.swapaxes(1, 2).reshape(-1, table.shape[1])
    within = table.reshape(-1, table.shape[2])
    return _Route(_tuples(across), _tuples(within), rank_of, share_of)


def _ranks_of(group: list[int], processes: Sequence[int]) -> list[list[int]]:
    """Return the devices of each rank: a process, or a device if there is only one process."""
    by_process: dict[int, list[int]] = {}
    for device in group:
        by_process.setdefault(processes[device], []).append(device)
    if len(by_process) == 1:
        return [[device] for device in group]
    return list(by_process.values())


def _listed(held: set[tuple[int, ...]]) -> str:
    """Return device counts as text, such as "1+1 or 2+2"."""
    return " or ".join("+".join(map(str, counts)) for counts in sorted(held))


def _tuples(rows: Int64s) -> Groups:
    return tuple(map(tuple, rows.tolist()))


# ---- 2. the plan ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    """The core's plan of a call.

    Attributes:
        algorithm: "one_shot" or "sra".
        scatter_bytes: The bytes that each rank receives from each other rank.
        gather_bytes: The bytes that each rank sends to all others.
    """

    algorithm: Algorithm
    scatter_bytes: list[int]
    gather_bytes: list[int]


def _plan(leaves: list[jax.ShapeDtypeStruct], ranks: int, settings: "Settings") -> _Plan:
    """Plan a call for leaves (batch, n). "auto" chooses by the size of one example."""
    segments: list[tuple[int, int, Config]] = []
    examples: list[int] = []
    end = 0
    for leaf, config in zip(leaves, settings.configs, strict=True):
        for example in range(leaf.shape[0]):
            segments.append((end, leaf.shape[1], config))
            examples.append(example)
            end += leaf.shape[1]
    dtype = tables.DTYPES[leaves[0].dtype.name]
    call = build("allreduce", settings.op, settings.configs[0], segments, dtype=dtype)
    for i, example in enumerate(examples):
        call.segments[i].example = example
    carried = structs.Carried(rank=0, size=ranks, call=pointer(call))
    resolved, scatter, gather = c_int32(), (c_int64 * ranks)(), (c_int64 * ranks)()
    library.call("cgx_carried_plan", byref(carried), byref(resolved), scatter, gather)
    names: dict[int, Any] = {number: name for name, number in tables.ALGORITHMS.items()}
    return _Plan(names[resolved.value], list(scatter), list(gather))


# ---- 3. the program ------------------------------------------------------------------------------


def _allreduce(
    partition: jax.Array, *operands: jax.Array, settings: "Settings", route: _Route
) -> list[jax.Array]:
    leaves, seeds, residuals = parted(operands, settings.feedback)
    count, dtype = len(leaves), leaves[0].dtype
    seed = jnp.concatenate(seeds)  # a row for each segment
    if route.devices > 1:
        sums = _sum_within([*leaves, *residuals], route)
        leaves, residuals = sums[:count], sums[count:]
        seed = _all_gather(seed, route.within)[0]  # all use the first device's
    like = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]

    plan = _plan(like, route.ranks, settings)
    rank = _look_up(route.rank_of, partition)
    attributes = _attributes(settings, plan, route)
    exchange = functools.partial(_exchange, partition=partition, route=route)

    def step(
        name: str, results: list[Any], *inputs: jax.Array, residuals: Sequence[jax.Array] = ()
    ) -> list[jax.Array]:
        # Residuals are read and written in place, behind the results. The rank is operand 0.
        in_place = {1 + len(inputs) + i: len(results) + i for i in range(len(residuals))}
        call = jax.ffi.ffi_call(
            handlers.target(f"carried_{name}"), [*results, *like[: len(residuals)]],
            input_output_aliases=in_place,
        )  # fmt: skip
        return list(call(rank, *inputs, *residuals, **attributes))

    message = _bytes(_row_length(plan.gather_bytes, route))
    if plan.algorithm == "one_shot":
        mine, *residuals = step("encode", [message], seed, *leaves, residuals=residuals)
    else:
        rows = _bytes(route.ranks, _row_length(plan.scatter_bytes, route))
        rows, *residuals = step("encode", [rows], seed, *leaves, residuals=residuals)
        arrived = exchange(_all_to_all, rows)
        mine, *residuals = step("reduce", [message], seed, arrived, *leaves, residuals=residuals)
    results = step("decode", like, seed, exchange(_all_gather, mine))
    if route.devices > 1:
        # The first device of a rank holds the residual of all of them.
        is_first = _look_up(route.share_of, partition) == 0
        residuals = [jnp.where(is_first, residual, 0) for residual in residuals]
    kept = [_rounded(residual, dtype, "carried_round_residual") for residual in residuals]
    return [_rounded(result, dtype, "carried_round") for result in results] + kept


def _sum_within(leaves: Sequence[jax.Array], route: _Route) -> list[jax.Array]:
    """Sum in float32 over the devices of each rank.

    Each device sums a part of the elements and sends it to the others.
    """
    flat = _padded(jnp.concatenate([leaf.reshape(-1) for leaf in leaves]), route.devices)
    rows = _all_to_all(flat.reshape(route.devices, -1), route.within)
    part = jax.ShapeDtypeStruct(rows.shape[1:], jnp.float32)
    total = jax.ffi.ffi_call(handlers.target("carried_sum"), part)(rows)
    total = _all_gather(total, route.within).reshape(-1)
    sizes = [leaf.size for leaf in leaves]
    parts = jnp.split(total[: sum(sizes)], np.cumsum(sizes)[:-1])
    return [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]


def _rounded(x: jax.Array, dtype: Any, target: str) -> jax.Array:
    """Round as the core does, whatever XLA does with subnormals and NaNs."""
    if x.dtype == dtype:
        return x
    result = jax.ShapeDtypeStruct(x.shape, dtype)
    return jax.ffi.ffi_call(handlers.target(target), result)(x)


def _exchange(
    collective: Callable[[jax.Array, Groups], jax.Array],
    messages: jax.Array,
    *,
    partition: jax.Array,
    route: _Route,
) -> jax.Array:
    """Exchange rows between ranks. Each device of a rank sends and receives a share of each row."""
    if route.devices == 1:
        return collective(messages, route.across)
    shares = messages.reshape(*messages.shape[:-1], route.devices, -1)
    share = _look_up(route.share_of, partition)
    mine = jax.lax.dynamic_index_in_dim(shares, share, axis=-2, keepdims=False)
    arrived = _all_gather(collective(mine, route.across), route.within)
    return jnp.moveaxis(arrived, 0, 1).reshape(route.ranks, -1)


def _attributes(settings: "Settings", plan: _Plan, route: _Route) -> dict[str, Any]:
    """Return the attributes that CarriedCall of xla_ffi/carried.cc reads."""
    resolved = {c: replace(c, algorithm=plan.algorithm) for c in set(settings.configs)}
    return {
        **call_attributes(settings.op, [resolved[config] for config in settings.configs]),
        "size": np.int64(route.ranks),
        "divisor": np.int64(route.ranks * route.devices),
    }


def _row_length(message_bytes: list[int], route: _Route) -> int:
    """Return the length of rows that hold the longest message, in equal shares."""
    return math.ceil(max(message_bytes) / route.devices) * route.devices


def _bytes(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.uint8)


def _padded(flat: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(flat, (0, -flat.size % multiple))


def _look_up(table: Int64s, partition: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(table.astype(np.uint32), partition, keepdims=False)


# ---- 4. XLA's collectives over groups of partition ids -------------------------------------------
#
# Those of jax.lax run over mesh axes, and the devices of one process may not form an axis.


def _all_to_all(x: jax.Array, groups: Groups) -> jax.Array:
    """Send row i to member i of the group: (members, ...) to the same."""
    return _all_to_all_p.bind(x, groups=groups)


def _all_gather(x: jax.Array, groups: Groups) -> jax.Array:
    """Stack the values of the members of the group: (...) to (members, ...)."""
    return _all_gather_p.bind(x[None], groups=groups)


_all_to_all_p = Primitive("cgx_all_to_all")
_all_gather_p = Primitive("cgx_all_gather")  # along axis 0


@_all_to_all_p.def_abstract_eval
def _all_to_all_abstract_eval(x: Any, *, groups: Groups) -> Any:
    return x


@_all_gather_p.def_abstract_eval
def _all_gather_abstract_eval(x: Any, *, groups: Groups) -> Any:
    return x.update(shape=(len(groups[0]) * x.shape[0], *x.shape[1:]))


def _lower_all_to_all(ctx: Any, x: Any, *, groups: Groups) -> Any:
    return stablehlo.AllToAllOp(
        [x],
        split_dimension=mlir.i64_attr(0),
        concat_dimension=mlir.i64_attr(0),
        split_count=mlir.i64_attr(len(groups[0])),
        replica_groups=mlir.dense_int_elements(groups),
        channel_handle=compat.collective_channel(),
    ).results


def _lower_all_gather(ctx: Any, x: Any, *, groups: Groups) -> Any:
    return stablehlo.AllGatherOp(
        [mlir.aval_to_ir_type(ctx.module_context, ctx.avals_out[0])],
        [x],
        all_gather_dim=mlir.i64_attr(0),
        replica_groups=mlir.dense_int_elements(groups),
        channel_handle=compat.collective_channel(),
        use_global_device_ids=True,
    ).results


mlir.register_lowering(_all_to_all_p, _lower_all_to_all)
mlir.register_lowering(_all_gather_p, _lower_all_gather)
