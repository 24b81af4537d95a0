"""The primitive of psum_q, psum_scatter_q, all_gather_q, all_to_all_q and allreduce_q.

In this order: parameters, binding, abstract evaluation, lowering, batching, differentiation.

Operands are `leaves` of one dtype in canonical shapes, then as many `seeds`, uint32 (batch, 2), and
with feedback as many `residuals`, which are like their leaves. Results are those of the leaves,
then the new residuals:

    verb              leaf               result
    allreduce         (batch, n)         (batch, n)
    reduce_scatter    (size, batch, n)   (batch, n)
    all_gather        (batch, n)         (size, batch, n)
    all_to_all        (size, batch, n)   (size, batch, n)

`size` appears where the core's table of verbs has a block for each rank.

An example of the batch (vmap's) is a segment of the message. It is compressed separately, with a
separate seed, even if vmap passes the same key for all. All leaves of one binding are one message.

`Groups` reduce together: the devices along mesh axes (mesh_groups.py) or the ranks of a
communicator (allreduce.py). Each of the two implements the methods in which they differ.
"""

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from cgx_ops._core import tables
from cgx_ops._core.call import Verb
from cgx_ops.config import Config
from cgx_ops.jax._src.collectives.calls import call_attributes, parted
from cgx_ops.jax._src.collectives.keys import example_seeds
from cgx_ops.jax._src.collectives.options import Carrier
from cgx_ops.jax._src.runtime import compat, handlers
from cgx_ops.planner import Plan

# ---- parameters --------------------------------------------------------------------------------


class Groups(Protocol):
    """The devices or processes that reduce together, equal and hashable by value.

    Attributes:
        axes: The mesh axes along which they lie; () for a communicator.
        size: The number of members of each group.
        sends_alone: Whether a group of one member makes the call, too, so that it fails if the
            communicator is closed.
        effects: JAX's effects of a call.
        functions: The public name of each collective, for errors and targets.
    """

    effects: ClassVar[set[compat.Effect]]
    functions: ClassVar[dict[Verb, str]]

    @property
    def axes(self) -> tuple[Hashable, ...]: ...
    @property
    def size(self) -> int: ...
    @property
    def sends_alone(self) -> bool: ...

    def call_text(self, verb: Verb, name: str, *, indices: bool = False) -> str:
        """Return the text that gives calls with one key different seeds.

        Args:
            verb: The collective.
            name: The user's name of the call.
            indices: Whether the seeds draw indices, which must be equal on all members.
        """
        ...

    def alone(self, leaf: jax.Array) -> jax.Array:
        """Return the sum of a leaf that is not sent."""
        ...

    def lower(
        self, ctx: Any, operands: Sequence[Any], settings: "Settings", platform: handlers.Platform
    ) -> Any:
        """Return the HLO values of the results."""
        ...

    def exact(self, tangents: list[Any], seeds: list[Any], settings: "Settings") -> list[Any]:
        """Apply the exact collective to tangents."""
        ...

    def transposed(
        self, cotangents: list[Any], leaves: list[Any], seeds: list[Any], settings: "Settings"
    ) -> list[Any]:
        """Apply the transpose of the exact collective to cotangents."""
        ...


@dataclass(frozen=True)
class Settings:
    """The static parameters of a call, besides its shapes.

    Attributes:
        verb: The collective.
        op: "sum" or "avg"; collectives that do not reduce ignore it.
        groups: The devices or processes that reduce together.
        configs: The Config of each leaf; the algorithm is the same for all.
        name: The user's; "" to name the call by its position in the program.
        carrier: "native": the core sends messages; "xla": XLA's own collectives do.
        feedback: Whether leaves have residuals; of allreduce only.
        plan: The plan by which these leaves share a message, if there is one.
        overlaps: Whether results are in the leaves' buffers, as overlap.py needs it.
        uses_xla: Whether the caller also adds XLA's own collectives.
    """

    verb: Verb
    op: str
    groups: Groups
    configs: tuple[Config, ...]
    name: str
    carrier: Carrier = "native"
    feedback: bool = False
    plan: Plan | None = None
    overlaps: bool = False
    uses_xla: bool = False

    @property
    def row(self) -> dict[str, Any]:
        """The row of the core's table."""
        return tables.VERBS[self.verb]

    @property
    def batch_axes(self) -> tuple[int, int]:
        """The axis of vmap's examples in a leaf and in its result: after the ranks' blocks."""
        return int(self.row["blocks_in"]), int(self.row["blocks_out"])

    @property
    def function(self) -> str:
        """The public name of this collective."""
        return self.groups.functions[self.verb]


# ---- binding -----------------------------------------------------------------------------------


def bind(
    leaves: list[jax.Array],
    seeds: list[jax.Array],
    settings: Settings,
    residuals: Sequence[jax.Array] = (),
) -> list[jax.Array]:
    """Run one collective. Leaves and residuals are made to vary over its axes."""

    def varying(x: jax.Array, seed: jax.Array) -> jax.Array:
        return vary(x, frozenset(settings.groups.axes) | compat.varying_axes(seed))

    leaves = list(map(varying, leaves, seeds))
    residuals = list(map(varying, residuals, seeds))
    return collective_q_p.bind(*leaves, *seeds, *residuals, settings=settings)


def vary(leaf: jax.Array, axes: frozenset[Hashable]) -> jax.Array:
    """Make a leaf's type vary over all of these axes."""
    # With check_vma=False no type varies, and pcast does nothing.
    missing = axes - compat.varying_axes(leaf)
    if not missing:
        return leaf
    return jax.lax.pcast(leaf, tuple(sorted(missing, key=str)), to="varying")


def vary_tree(tree: Any, axes: tuple[Hashable, ...]) -> Any:
    """Make the type of every leaf vary over the axes."""
    return jax.tree.map(lambda leaf: vary(leaf, frozenset(axes)), tree)


collective_q_p = Primitive("cgx_collective_q")
collective_q_p.multiple_results = True
collective_q_p.def_impl(functools.partial(xla.apply_primitive, collective_q_p))


# ---- abstract evaluation -----------------------------------------------------------------------


@collective_q_p.def_effectful_abstract_eval
def _abstract_eval(*avals: Any, settings: Settings) -> tuple[list[Any], set[compat.Effect]]:
    leaves, seeds, residuals = parted(avals, settings.feedback)
    groups, row, results = settings.groups, settings.row, []
    for leaf, seed in zip(leaves, seeds, strict=True):
        shape = leaf.shape[1:] if row["blocks_in"] else leaf.shape
        if row["blocks_out"]:
            shape = (groups.size, *shape)
        varying = compat.varying_axes(leaf) | compat.varying_axes(seed)
        if row["shards"]:  # all devices of a group get the same
            varying -= frozenset(groups.axes)
        results.append(compat.with_varying_axes(leaf.update(shape=shape), varying))
    return results + residuals, groups.effects


# ---- lowering ----------------------------------------------------------------------------------


def _lower(ctx: Any, *operands: Any, settings: Settings, platform: handlers.Platform) -> Any:
    return settings.groups.lower(ctx, operands, settings, platform)


def _lower_elsewhere(ctx: Any, *_: Any, settings: Settings) -> Any:
    raise NotImplementedError(handlers.refusal(settings.function, ctx.module_context.platforms))


# A cached lowering would give equal calls the same id, so errors could not distinguish them.
for _platform in ("cpu", "cuda"):
    mlir.register_lowering(
        collective_q_p, functools.partial(_lower, platform=_platform), platform=_platform,
        cacheable=False,
    )  # fmt: skip
mlir.register_lowering(collective_q_p, _lower_elsewhere)


def message_attributes(ctx: Any, settings: Settings) -> dict[str, Any]:
    """Return the attributes that Signature of xla_ffi/core.h reads."""
    batch_axis, _ = settings.batch_axes
    leaves = parted(ctx.avals_in, settings.feedback)[0]
    return {
        **call_attributes(settings.op, settings.configs),
        "verb": np.int64(settings.row["id"]),
        "function": settings.function,
        "batches": np.asarray([leaf.shape[batch_axis] for leaf in leaves], np.int64),
        "feedback": np.int64(settings.feedback),
    }


def custom_call(
    ctx: Any,
    target: str,
    operands: Sequence[Any],
    settings: Settings,
    attributes: dict[str, Any],
    others: Sequence[tuple[Any, Any]] = (),
    in_order: compat.Effect | None = None,
) -> Any:
    """Emit a custom call: leaves, the seeds of all segments in one operand, residuals in place.

    Args:
        ctx: The lowering context.
        target: XLA's name of the handler.
        operands: The primitive's operands.
        settings: The primitive's parameters.
        attributes: The attributes of the custom call.
        others: The abstract values and the values of further operands.
        in_order: The effect whose token precedes all operands and results, if there is one.
    """
    leaves, seeds, residuals = parted(operands, settings.feedback)
    leaf_avals, seed_avals, residual_avals = parted(ctx.avals_in, settings.feedback)
    segments = sum(aval.shape[0] for aval in seed_avals)
    first = len(leaves) + (in_order is not None)  # index among the results
    in_place = {first + 1 + i: first + i for i in range(len(residuals))}
    if settings.overlaps:
        in_place |= {i: i for i in range(len(leaves))}
    # The side effect exists only in HLO: it keeps XLA from merging or removing calls, perhaps on
    # some ranks only. As an effect of JAX it would cost 60 us per launch and prevent remat.
    rule = jax.ffi.ffi_lowering(
        target,
        has_side_effect=True,
        operand_output_aliases=in_place,
    )
    avals = [*leaf_avals, compat.seed_rows(segments), *residual_avals]
    values = [*leaves, compat.concatenated(seeds), *residuals]
    for aval, value in others:
        avals.append(aval)
        values.append(value)
    if in_order is not None:
        return compat.lower_in_order(ctx, in_order, rule, avals, *values, **attributes)
    return rule(ctx.replace(avals_in=avals), *values, **attributes)


# ---- batching ----------------------------------------------------------------------------------


def _batch(
    axis_data: Any, args: tuple[Any, ...], dims: tuple[int | None, ...], *, settings: Settings
) -> tuple[list[Any], list[int | None]]:
    """Turn each example into a segment of the one message."""
    if axis_data.name in settings.groups.axes:
        raise NotImplementedError(
            f"{settings.function} over {settings.groups.axes} inside a vmap of that axis_name: use "
            "JAX's own collective for vmap's axes"
        )
    (at, at_result), size = settings.batch_axes, axis_data.size
    operands, axes_of = parted(args, settings.feedback), parted(dims, settings.feedback)
    examples: list[tuple[int, int] | None] = []  # per leaf: vmap's examples, and those before it
    for i, of_leaf in enumerate(zip(*filter(None, axes_of), strict=True)):
        if all(dim is None for dim in of_leaf):
            examples.append(None)
            continue
        before = 0
        if axes_of[1][i] is None and settings.configs[i].is_random:
            seeds = example_seeds(operands[1][i], size, axis_data.spmd_name)
            operands[1][i], axes_of[1][i] = seeds, 0
        for kind, dims_of_kind, axis in zip(operands, axes_of, (at, 0, at), strict=True):
            if kind:
                front = batching.bdim_at_front(kind[i], dims_of_kind[i], size)
                kind[i], before = _merged(front, axis), front.shape[1 + axis]
        examples.append((size, before))
    results = collective_q_p.bind(*chain(*operands), settings=settings)
    axes = [at_result] * len(examples) + [at] * len(operands[2])
    examples *= len(results) // len(examples)
    dims_out = [
        None if example is None else axis for axis, example in zip(axes, examples, strict=True)
    ]
    return list(map(_unmerged, results, axes, examples)), dims_out


def _merged(x: jax.Array, axis: int) -> jax.Array:
    """Move axis 0, which is vmap's, in front of `axis` of the rest, and merge the two."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


def _unmerged(x: jax.Array, axis: int, examples: tuple[int, int] | None) -> jax.Array:
    """Undo _merged(), but leave vmap's axis at `axis`. None: nothing was merged."""
    return x if examples is None else x.reshape(*x.shape[:axis], *examples, *x.shape[axis + 1 :])


batching.fancy_primitive_batchers[collective_q_p] = _batch


# ---- differentiation ---------------------------------------------------------------------------


def _jvp(
    primals: tuple[jax.Array, ...], tangents: tuple[Any, ...], *, settings: Settings
) -> tuple[list[jax.Array], list[Any]]:
    """Return the tangents of the exact collective, which JAX can transpose.

    Residuals count as part of their leaves; quantization errors are constant.
    """
    results = collective_q_p.bind(*primals, settings=settings)
    sums, _, residuals = parted(tangents, settings.feedback)
    if residuals:
        sums = list(map(ad.add_tangents, sums, residuals))
    seeds = parted(primals, settings.feedback)[1]
    sums = settings.groups.exact(sums, seeds, settings)
    tangents_out = list(map(compat.zero_tangent, results))
    for i, tangent in enumerate(sums):
        if type(tangent) is not ad.Zero:
            tangents_out[i] = tangent
    return results, tangents_out


def _transpose(cotangents: list[Any], *operands: Any, settings: Settings) -> list[Any]:
    """Transpose the exact collective; cotangents of new residuals are ignored."""
    leaves, seeds, residuals = parted(operands, settings.feedback)
    cotangents = settings.groups.transposed(cotangents[: len(leaves)], leaves, seeds, settings)

    def wanted(operand: Any, cotangent: Any) -> Any:
        return cotangent if ad.is_undefined_primal(operand) else None

    of_leaves, of_residuals = (list(map(wanted, kind, cotangents)) for kind in (leaves, residuals))
    return [*of_leaves, *(None for _ in seeds), *of_residuals]


ad.primitive_jvps[collective_q_p] = _jvp
ad.primitive_transposes[collective_q_p] = _transpose
