"""allreduce_q: sums among processes outside shard_map, ordered as the program is.

For programs of which mpirun starts one process a rank, each with a JAX of its own: no mesh, no
jax.distributed. Ranks may run different programs, so calls match in the order in which each rank
makes them, as MPI's do. An ordered effect of JAX keeps that order: every call takes a token from
the one before it, within a program and from launch to launch.

In this order: the public function, parameters, the primitive, abstract evaluation, lowering,
batching, differentiation. Leaves are (batch, n) and seeds uint32 (batch, 2), as in primitive.py.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from cgx_ops.comm import Communicator
from cgx_ops.config import Algorithm, Config
from cgx_ops.errors import Closed
from cgx_ops.jax import _compat, _runtime
from cgx_ops.jax._calls import call_attributes, parted
from cgx_ops.jax._keys import CallSeeds, example_seeds
from cgx_ops.jax.psum import checked_config, checked_leaf, name_of

# Of all calls that the user gave none: a sequence of their own on each communicator. Python calls
# without a name (cgx_ops.allreduce) have another, since JAX runs behind Python.
_UNNAMED = "cgx_ops.jax.allreduce_q"


def allreduce_q(
    x: Any,
    comm: Communicator | None = None,
    *,
    op: Literal["sum", "avg"] = "sum",
    bits: int = 4,
    bucket_size: int = 512,
    key: jax.Array | None = None,
    name: str = "",
    algorithm: Algorithm = "auto",
    gather_bits: int | None = None,
    intra_bits: int | None = None,
    skip_incomplete_buckets: bool = False,
    minimal_size: int = 0,
) -> Any:
    """Reduce `x` over the processes of a communicator, sending `bits` bits an element.

    For process-per-rank programs, inside and outside `jax.jit`; neither a mesh nor
    `cgx_ops.jax.initialize()` is needed. Every rank gets the same bits. Leaves with fewer than
    max(16, minimal_size) elements are summed exactly. Every leaf, and each example of a vmap, is
    compressed by itself, as if it were reduced alone; all leaves of a dtype are one message.

    Calls run one after another, in Python's order and, in a scan, while or cond, in that of
    execution. The n-th call of a rank on a communicator meets the n-th of the others, whatever else
    their programs do: all ranks must make equal calls in equal order. Calls with a `name` meet the
    others' calls of that name instead, also those from Python (`Communicator.allreduce`). Python
    threads that dispatch calls at the same time must name them, and be no more than this process
    has cores or CPU devices (jax_num_cpu_devices): XLA runs no more programs at once. On GPUs calls
    of all names meet in the order of dispatch: one thread dispatches them.

    The derivative is that of an exact sum over ranks, whose transpose is an exact sum over ranks:
    tangents and cotangents travel too, and jax.grad gives the gradient of the sum of all ranks'
    losses. (mpi4jax transposes a sum to the identity: there each rank gets the gradient of its own
    loss alone.) All ranks must differentiate alike. jax.checkpoint keeps results: nothing is
    communicated twice. To compress gradients, apply allreduce_q to the gradients.

    Args:
        x: an array or a pytree of arrays of float32, float16 or bfloat16, any shape; equal in
          structure, shapes and dtypes on all ranks.
        comm: whose ranks reduce; None: all processes, those of mpirun or of
          `cgx_ops.jax.initialize()`.
        op: "sum" or "avg".
        bits: 1 to 8 bits an element, or 32: exact.
        bucket_size: elements that share one minimum and step, >= 1.
        key: a PRNG key (typed or raw): rounds stochastically, unbiased. Give another key in every
          step. Two calls with one key have the same noise if their communicator and name are the
          same; leaves and examples of a vmap have their own. Ranks may have equal or different
          keys. None: rounds to nearest.
        name: identifies the call among ranks; "": its place in the rank's sequence does.
        algorithm: "auto", "one_shot", "sra", "ring" or "hierarchical" (hosts: "auto" picks it).
        gather_bits: bits of the reduced values on their way back; None: as `bits`.
        intra_bits: in "hierarchical", bits of values that their own host sums; None: exact.
        skip_incomplete_buckets: send a leaf's last bucket exact if it is not full.
        minimal_size: leaves with fewer elements are summed exactly.

    Returns:
        The sums or averages, in the structure, shapes and dtypes of `x`. One rank alone gets `x`.

    Raises:
        NotImplementedError: inside a shard_map or an explicit mesh of several devices (psum_q is
          for that), or on a platform other than CPU and CUDA.
        TypeError: a leaf is not float32, float16 or bfloat16; a knob is not a static value; `comm`
          is not a Communicator; `key` is not a key.
        ValueError: a knob is out of its range; or the program is compiled for several devices.
        cgx_ops.Closed: the communicator was closed.
        jax.errors.JaxRuntimeError: at run time; a peer is late or dead or called something else.
          The deadline is the communicator's. Launches that wait behind the failed one fail too. On
          GPUs results are NaN then, and the next call raises.
    """
    knobs: dict[str, Any] = {
        "bits": bits,
        "bucket_size": bucket_size,
        "algorithm": algorithm,
        "gather_bits": gather_bits,
        "intra_bits": intra_bits,
        "skip_incomplete_buckets": skip_incomplete_buckets,
        "minimal_size": minimal_size,
    }
    config = checked_config("allreduce_q", key, name=name, carrier="native", **knobs)
    if op not in ("sum", "avg"):
        raise ValueError(f"allreduce_q: op is {op!r}; it must be 'sum' or 'avg'")
    _refuse_meshes()
    comm = _checked_communicator(comm)
    paths_and_leaves, tree = jax.tree_util.tree_flatten_with_path(x)
    leaves = [checked_leaf("allreduce_q", path, leaf) for path, leaf in paths_and_leaves]
    if comm.size == 1:
        return jax.tree_util.tree_unflatten(tree, leaves)
    seeds = CallSeeds(key, f"allreduce_q on {comm.name}: {name}")
    messages: dict[Any, list[int]] = {}
    for index, leaf in enumerate(leaves):
        messages.setdefault(leaf.dtype, []).append(index)
    for message in messages.values():
        call_name = name_of(name, message[0], len(messages))
        settings = _Settings(comm.name, op, call_name or _UNNAMED, config)
        results = allreduce_q_p.bind(
            *[leaves[index].reshape(1, -1) for index in message],
            *[seeds.of(index, leaves[index]) for index in message],
            settings=settings,
        )
        for index, result in zip(message, results, strict=True):
            leaves[index] = result.reshape(leaves[index].shape)
    return jax.tree_util.tree_unflatten(tree, leaves)


def _refuse_meshes() -> None:
    mesh = jax.sharding.get_abstract_mesh()
    axes = (*mesh.manual_axes, *mesh.explicit_axes)
    devices = math.prod(mesh.shape[axis] for axis in axes)
    if devices > 1:
        raise NotImplementedError(
            f"allreduce_q inside a shard_map or an explicit mesh of {devices} devices: it reduces "
            f"among processes, on one device of each. Use psum_q(x, {axes}) in a jax.shard_map"
        )


def _checked_communicator(comm: Communicator | None) -> Communicator:
    if comm is None:
        return _runtime.world()
    if not isinstance(comm, Communicator):
        raise TypeError(
            f"allreduce_q: comm is {comm!r}; it must be a cgx_ops.Communicator, or None for all "
            "ranks. Communicator.split() and group() make smaller ones"
        )
    if comm.closed:
        raise Closed(
            f"allreduce_q: the communicator {comm.name!r} is closed, by close() or by a failure. "
            "Make another one, of another name"
        )
    return comm


# ---- parameters --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Settings:
    """What is static in a call, besides its shapes: equal in every process of a communicator."""

    comm: str
    op: str
    name: str
    config: Config

    def exact(self) -> "_Settings":
        """Return the settings of tangents and cotangents."""
        return replace(self, config=Config(bits=32))


class InOrder(_compat.Effect):
    """The effect that keeps calls in order; shown by JAX where it cannot."""

    def __repr__(self) -> str:
        return (
            "allreduce_q (for arrays on one device; for arrays on several, psum_q in jax.shard_map)"
        )

    def __eq__(self, other: object) -> bool:
        return type(other) is InOrder

    def __hash__(self) -> int:
        return hash(InOrder)


_in_order = InOrder()
_compat.register_ordered_effect(InOrder)

# ---- the primitive -----------------------------------------------------------------------------

allreduce_q_p = Primitive("cgx_allreduce_q")
allreduce_q_p.multiple_results = True
allreduce_q_p.def_impl(functools.partial(xla.apply_primitive, allreduce_q_p))


# ---- abstract evaluation -----------------------------------------------------------------------


@allreduce_q_p.def_effectful_abstract_eval
def _abstract_eval(*avals: Any, settings: _Settings) -> tuple[list[Any], set[_compat.Effect]]:
    return parted(avals)[0], {_in_order}


# ---- lowering ----------------------------------------------------------------------------------


def _lower(ctx: Any, *operands: Any, settings: _Settings, platform: _runtime.Platform) -> Any:
    attributes = call_attributes(settings.op, settings.config)
    attributes |= {"comm": settings.comm, "name": settings.name}
    leaves, seeds, _ = parted(operands)
    leaf_avals, seed_avals, _ = parted(ctx.avals_in)
    avals_in = [*leaf_avals, _compat.seed_rows(sum(aval.shape[0] for aval in seed_avals))]
    rule = jax.ffi.ffi_lowering(_runtime.target("allreduce_q", platform), has_side_effect=True)
    return _compat.lower_in_order(
        ctx, _in_order, rule, avals_in, *leaves, _compat.concatenated(seeds), **attributes
    )


def _lower_elsewhere(ctx: Any, *_: Any, settings: _Settings) -> Any:
    raise NotImplementedError(_runtime.refusal("allreduce_q", ctx.module_context.platforms))


for _platform in ("cpu", "cuda"):
    mlir.register_lowering(
        allreduce_q_p, functools.partial(_lower, platform=_platform), platform=_platform
    )
mlir.register_lowering(allreduce_q_p, _lower_elsewhere)


# ---- batching ----------------------------------------------------------------------------------


def _batch(
    axis_data: Any, args: tuple[Any, ...], dims: tuple[int | None, ...], *, settings: _Settings
) -> tuple[list[Any], list[int | None]]:
    """Each example becomes a segment of the one message."""
    size, rows = axis_data.size, []  # rows: of an example's leaf; None: the same in all examples
    operands: tuple[list[Any], list[Any]] = [], []
    pairs = zip(*parted(args)[:2], *parted(dims)[:2], strict=True)
    for leaf, seed, leaf_dim, seed_dim in pairs:
        if leaf_dim is None and seed_dim is None:
            rows.append(None)
        else:
            leaf = batching.bdim_at_front(leaf, leaf_dim, size)
            if seed_dim is None and settings.config.rounding != "nearest":
                seed = example_seeds(seed, size)
            else:
                seed = batching.bdim_at_front(seed, seed_dim, size)
            rows.append(leaf.shape[1])
            leaf = leaf.reshape(size * leaf.shape[1], leaf.shape[2])
            seed = seed.reshape(size * seed.shape[1], 2)
        operands[0].append(leaf)
        operands[1].append(seed)
    results = allreduce_q_p.bind(*operands[0], *operands[1], settings=settings)
    results = [
        result if count is None else result.reshape(size, count, result.shape[1])
        for result, count in zip(results, rows, strict=True)
    ]
    return results, [None if count is None else 0 for count in rows]


batching.fancy_primitive_batchers[allreduce_q_p] = _batch


# ---- differentiation ---------------------------------------------------------------------------


def _jvp(
    primals: tuple[jax.Array, ...], tangents: tuple[Any, ...], *, settings: _Settings
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Straight through: the tangent is that of the exact sum.

    Zeros travel too: ranks that differentiate with respect to other leaves send equal messages.
    """
    leaves, seeds = parted(tangents)[0], parted(primals)[1]
    results = allreduce_q_p.bind(*primals, settings=settings)
    leaves = [ad.instantiate_zeros(leaf) for leaf in leaves]
    return results, allreduce_q_p.bind(*leaves, *seeds, settings=settings.exact())


def _transpose(cotangents: list[Any], *operands: Any, settings: _Settings) -> list[Any]:
    """Sum the cotangents exactly, also where one is zero on this rank."""
    leaves, seeds, _ = parted(operands)
    cotangents = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
    sums = allreduce_q_p.bind(*cotangents, *seeds, settings=settings.exact())
    wanted = [ad.is_undefined_primal(leaf) for leaf in leaves]
    sums = [total if is_wanted else None for total, is_wanted in zip(sums, wanted, strict=True)]
    return [*sums, *(None for _ in seeds)]


ad.primitive_jvps[allreduce_q_p] = _jvp
ad.primitive_transposes[allreduce_q_p] = _transpose
