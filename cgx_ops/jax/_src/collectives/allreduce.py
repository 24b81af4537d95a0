"""allreduce_q: sums among processes outside shard_map, ordered as the program is.

For programs with one process for each rank, each with a separate JAX: no mesh, no jax.distributed.
Ranks may run different programs, so calls match in the order in which each rank makes them, as
MPI's do. An ordered effect of JAX keeps that order: every call takes a token from the one before
it, within a program and from launch to launch.

The primitive is psum_q's (primitive.py); what a communicator makes different is at the end of this
file.
"""

import contextlib
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Unpack

import jax
from jax.interpreters import ad

from cgx_ops._core import library
from cgx_ops.communicator import Communicator
from cgx_ops.config import Config, Keywords
from cgx_ops.errors import Closed, PeerFailed
from cgx_ops.jax._src.collectives.options import Carrier, checked_options, refuse_on_gpus
from cgx_ops.jax._src.collectives.primitive import (
    Settings,
    Verb,
    bind,
    custom_call,
    message_attributes,
)
from cgx_ops.jax._src.collectives.trees import reduce_tree
from cgx_ops.jax._src.runtime import compat, handlers
from cgx_ops.jax._src.runtime.processes import world
from cgx_ops.planner import Plan
from cgx_ops.rules import Rules

# The name of all calls without one: a separate sequence on each communicator. Python calls without
# a name (cgx_ops.allreduce) have another name, since JAX runs behind Python.
_UNNAMED = "cgx_ops.jax.allreduce_q"


def allreduce_q(
    x: Any,
    comm: Communicator | None = None,
    *,
    op: Literal["sum", "avg"] = "sum",
    config: Config | None = None,
    key: jax.Array | None = None,
    name: str = "",
    rules: Rules | None = None,
    fuse: bool | Plan = True,
    carrier: Carrier = "native",
    residual: Any = None,
    **keywords: Unpack[Keywords],
) -> Any:
    """Reduce `x` over the processes of a communicator, compressed: 4 bits an element by default.

    For process-per-rank programs, inside and outside `jax.jit`; neither a mesh nor
    `cgx_ops.jax.initialize()` is needed. Every rank gets the same bits. Leaves with fewer than
    max(16, config.minimal_size) elements are summed exactly. Every leaf, and each example of a
    vmap, is compressed separately; all leaves of a dtype are one
    message.

    Calls run one after another, in Python's order and, in a scan, while or cond, in that of
    execution. The n-th call of a rank on a communicator matches the n-th of the others: all ranks
    must make equal calls in equal order. Calls with a `name` match the others' calls of that name
    instead, also those from Python (`Communicator.allreduce`). Python threads that dispatch calls
    at the same time must name them, and be no more than this process has cores or CPU devices
    (jax_num_cpu_devices), because XLA runs no more programs in parallel. On GPUs calls of all names
    match in the order of dispatch: one thread dispatches them.

    The derivative is that of an exact sum over ranks, whose transpose is an exact sum over ranks:
    tangents and cotangents travel too, and jax.grad gives the gradient of the sum of all ranks'
    losses. (mpi4jax transposes a sum to the identity: there each rank gets the gradient of its loss
    alone.) All ranks must differentiate in the same way. jax.checkpoint keeps results: nothing is
    communicated twice. To compress gradients, apply allreduce_q to the gradients.

    Args:
        x: an array or a pytree of arrays of float32, float16 or bfloat16, any shape; equal in
          structure, shapes and dtypes on all ranks.
        comm: whose ranks reduce; None: all processes, those of mpirun or of
          `cgx_ops.jax.initialize()`.
        op: "sum" or "avg".
        config: as in `psum_q`.
        key: a PRNG key (typed or raw), as in `psum_q`. Give another key in every step. Two calls
          with one key have the same noise if their communicator and name are the same; leaves and
          examples of a vmap have their own. Ranks may have equal or different keys;
          "randk" needs equal ones.
        name: identifies the call among ranks; "": its place in the rank's sequence does.
        rules: settings of leaves by their paths, as in `psum_q`.
        fuse: one message for all leaves of a dtype. False: one for each leaf. A
          cgx_ops.planner.Plan: one for each of its groups.
        carrier: "native"; "xla" needs a mesh.
        residual: what compression lost before, as in `psum_q`.
        **keywords: bits, bucket_size, compressor and rounding, which replace those of config.

    Returns:
        The sums or averages, in the structure, shapes and dtypes of `x`. One rank alone gets `x`.
        With `residual` a pair of them and the new residual, as from `psum_q`.

    Raises:
        NotImplementedError: inside a shard_map or an explicit mesh of several devices (psum_q is
          for that), or on a platform other than CPU and CUDA.
        TypeError: a leaf is not float32, float16 or bfloat16; a residual has another dtype than its
          leaf; an argument is not a static value; `comm` is not a Communicator; `key` is not a key.
        ValueError: a field is out of its range, or does not belong to the compressor; the config is
          random and there is no key; error feedback would not converge, or bits=32 leaves it
          nothing; `residual` has another structure or shape than `x`; carrier="xla"; or the program
          is compiled for several devices.
        cgx_ops.Closed: the communicator was closed.
        jax.errors.JaxRuntimeError: at run time; a peer is late or dead or called something else.
          The deadline is the communicator's. Launches that wait behind the failed one fail too. On
          GPUs results are NaN then, and the next call raises.

    Example:
        >>> (comm,) = Communicator.local(1)
        >>> allreduce_q(jax.numpy.ones(4), comm, bits=8)
        Array([1., 1., 1., 1.], dtype=float32)
    """
    caller = "allreduce_q"
    options = checked_options(
        caller, config, keywords, key=key, name=name, rules=rules, fuse=fuse, carrier=carrier
    )
    options.refuse_idle_residual(residual)
    if op not in ("sum", "avg"):
        raise ValueError(f"{caller}: op is {op!r}; it must be 'sum' or 'avg'")
    if carrier == "xla":
        raise ValueError(
            f"{caller}: XLA's collectives are among the devices of one program, and here each rank "
            "runs its own: use carrier='native', or psum_q in a jax.shard_map"
        )
    _refuse_meshes()
    comm = _checked_communicator(comm)
    options.warn_of_unmatched(x)
    total, lost = reduce_tree(options, x, residual, Ranks(comm.name, comm.size), op)
    return total if residual is None else (total, lost)


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
        return world()
    if not isinstance(comm, Communicator):
        raise TypeError(
            f"allreduce_q: comm is {comm!r}; it must be a cgx_ops.Communicator, or None for all "
            "ranks. Communicator.split() and group() make smaller ones"
        )
    if comm.closed:
        raise Closed(
            f"allreduce_q: the communicator {comm.name!r} is closed: {_why_closed(comm)}. Make "
            "another one, of another name"
        )
    return comm


def _why_closed(comm: Communicator) -> str:
    with contextlib.suppress(Closed):  # its id is gone
        try:
            library.call("cgx_comm_find_lost", comm.id, 0.0)
        except PeerFailed as error:
            return str(error)
    return "close() was called"


# ---- the ranks of a communicator, in order -----------------------------------------------------


class InOrder(compat.Effect):
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
compat.register_ordered_effect(InOrder)


@dataclass(frozen=True)
class Ranks:
    """All ranks, `size`, of the communicator of the name `comm`."""

    comm: str
    size: int
    axes: tuple[Hashable, ...] = ()
    effects: ClassVar[set[compat.Effect]] = {_in_order}
    functions: ClassVar[dict[Verb, str]] = {"allreduce": "allreduce_q"}

    def call_text(self, verb: Verb, name: str, *, places: bool = False) -> str:
        """Return the text that separates the seeds of calls with one key.

        It has the communicator's name, which differs between threads, unless ranks share indices.
        """
        return f"allreduce_q on {'' if places else self.comm}: {name}"

    def alone(self, leaf: jax.Array) -> jax.Array:
        """Return the sum of a leaf that is not sent."""
        return leaf

    def lower(
        self, ctx: Any, operands: Sequence[Any], settings: Settings, platform: handlers.Platform
    ) -> Any:
        """Return the HLO values of the results."""
        if platform == "cuda":
            refuse_on_gpus(settings.function, settings.configs)
        attributes = message_attributes(ctx, settings)
        attributes |= {"comm": self.comm, "name": settings.name or _UNNAMED}
        target = handlers.target("allreduce_q", platform)
        return custom_call(ctx, target, operands, settings, attributes, in_order=_in_order)

    def exact(self, tangents: list[Any], seeds: list[Any], settings: Settings) -> list[Any]:
        """Return what an exact collective makes of tangents.

        Zeros travel too: ranks that differentiate with respect to other leaves send equal messages.
        """
        settings = replace(settings, configs=(Config(bits=32),) * len(tangents), feedback=False)
        return bind(list(map(ad.instantiate_zeros, tangents)), seeds, settings)

    def transposed(
        self, cotangents: list[Any], leaves: list[Any], seeds: list[Any], settings: Settings
    ) -> list[Any]:
        """Return the cotangents of leaves, those of an exact collective."""
        return self.exact(cotangents, seeds, settings)
