"""allreduce_q: compressed sums among processes, without a mesh.

Each process is a rank with a separate JAX, without jax.distributed. Ranks may run different
programs, so their calls match by call order, as in MPI. An ordered effect of JAX keeps that order:
every call takes a token from the previous one, within a program and from launch to launch.

The primitive is the one of psum_q (primitive.py). The end of this file has its lowering for
communicators.
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
from cgx_ops.jax._src.collectives.options import (
    COMPRESS_ALL,
    Carrier,
    checked_options,
    refuse_on_gpus,
)
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

# The name of all calls without one. Python calls without a name (cgx_ops.allreduce) have another
# one, since JAX runs asynchronously to Python.
_UNNAMED = "cgx_ops.jax.allreduce_q"


def allreduce_q(
    x: Any,
    comm: Communicator | None = None,
    *,
    op: Literal["sum", "avg"] = "sum",
    config: Config | None = None,
    key: jax.Array | None = None,
    name: str = "",
    rules: Rules = COMPRESS_ALL,
    fuse: bool | Plan = True,
    carrier: Carrier = "native",
    residual: Any = None,
    **keywords: Unpack[Keywords],
) -> Any:
    """Sum or average a pytree among the processes of a communicator, with quantized messages.

    Use it in programs with one process per rank, inside or outside `jax.jit`. It needs neither a
    mesh nor `cgx_ops.jax.initialize`. All ranks get bit-identical results. Each leaf is quantized
    separately, and so is each example of a `jax.vmap`. Leaves with fewer than
    `max(16, config.minimal_size)` elements are summed exactly.

    Calls run one after another in program order, also inside `scan`, `while_loop` and `cond`. The
    n-th call of a rank on a communicator matches the n-th call of the other ranks, so all ranks
    must make the same calls in the same order. Calls with a `name` match calls of that name
    instead, including those from Python (`Communicator.allreduce`).

    Python threads that launch calls at the same time must name them. On CPUs, use at most as many
    such threads as the process has cores or CPU devices (`jax_num_cpu_devices`). On GPUs, launch
    all calls from one thread.

    The derivative is that of an exact sum over ranks, whose transpose is an exact sum as well. So
    `jax.grad` gives the gradient of the sum of all ranks' losses, and all ranks must differentiate
    in the same way. (In mpi4jax the transpose is the identity: each rank gets the gradient of its
    own loss.) `jax.checkpoint` keeps results, so nothing is communicated twice. To compress
    gradients, apply `allreduce_q` to them.

    Args:
        x: An array or a pytree of arrays of float32, float16 or bfloat16. Structure, shapes and
            dtypes must be equal on all ranks.
        comm: The communicator. None (default) means all processes of mpirun, or of `initialize`.
        op: "sum" (default) or "avg".
        config: How values are sent, as in `psum_q`. None (default) means `Config()`: 4 bits.
        key: A PRNG key for random rounding, another one in every step. Ranks may pass equal or
            different keys, but "randk" needs the same key on all of them. None (default) rounds to
            nearest.
        name: Matches the call with calls of the same name on other ranks. "" (default) matches by
            call order.
        rules: Settings per leaf, by its path. By default all leaves are sent with `config`.
        fuse: True (default): one message for all leaves of a dtype. False: one message per leaf. A
            `cgx_ops.planner.Plan`: one message for each of its groups.
        carrier: Only "native". For "xla" use `psum_q` in a `shard_map`.
        residual: Error feedback: the residual that the last call returned, as in `psum_q`.
        **keywords: `bits`, `bucket_size`, `compressor` and `rounding` override fields of `config`.

    Returns:
        The sums or averages, with the structure, shapes and dtypes of `x`. A single rank gets `x`.
        With `residual`, a pair of them and the new residual, as in `psum_q`.

    Raises:
        TypeError: A leaf has another dtype; a residual has another dtype than its leaf; `comm` is
            not a Communicator; `key` is not a PRNG key; a static argument is traced.
        ValueError: `op` or another argument is invalid, or does not fit, as in `psum_q`.
        NotImplementedError: The call is inside a `shard_map`, or under an explicit mesh of several
            devices: use `psum_q` there. Or the platform is not CPU or CUDA.
        cgx_ops.Closed: The communicator is closed.
        jax.errors.JaxRuntimeError: At run time, a peer is late or lost, or made another call.

    Example:
        >>> import jax
        >>> from cgx_ops.jax import allreduce_q
        >>> @jax.jit
        ... def mean(gradients, key):
        ...     return allreduce_q(gradients, op="avg", key=key)
        >>> mean({"kernel": jax.numpy.ones((2, 2))}, jax.random.key(0))
        {'kernel': Array([[1., 1.],
               [1., 1.]], dtype=float32)}
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
            f"{caller}: carrier='xla' needs one program over all devices, and here each rank runs "
            "its own program: use carrier='native', or psum_q in a jax.shard_map"
        )
    _refuse_meshes()
    found = _checked_communicator(comm)
    options.warn_of_unmatched(x)
    # The user may close `comm`, and then give its name to another group.
    ranks = Ranks(found.name, found.size, sends_alone=comm is not None)
    total, lost = reduce_tree(options, x, residual, ranks, op)
    return total if residual is None else (total, lost)


def _refuse_meshes() -> None:
    mesh = jax.sharding.get_abstract_mesh()
    axes = (*mesh.manual_axes, *mesh.explicit_axes)
    devices = math.prod(mesh.shape[axis] for axis in axes)
    if devices > 1:
        raise NotImplementedError(
            f"allreduce_q inside a shard_map or an explicit mesh of {devices} devices: it reduces "
            f"among processes, with one device each. Use psum_q(x, {axes}) in a jax.shard_map"
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
            f"allreduce_q: the communicator {comm.name!r} is closed: {_why_closed(comm)}. Create "
            "another one, with another name"
        )
    return comm


def _why_closed(comm: Communicator) -> str:
    with contextlib.suppress(Closed):  # the id is no longer valid
        try:
            library.call("cgx_comm_find_lost", comm.id, 0.0)
        except PeerFailed as error:
            return str(error)
    return "close() was called"


# ---- the ranks of a communicator, in order -----------------------------------------------------


class InOrder(compat.Effect):
    """The effect that keeps calls in order. JAX prints it where it cannot keep the order."""

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
    """The `size` ranks of the communicator named `comm`."""

    comm: str
    size: int
    sends_alone: bool = False
    axes: tuple[Hashable, ...] = ()
    effects: ClassVar[set[compat.Effect]] = {_in_order}
    functions: ClassVar[dict[Verb, str]] = {"allreduce": "allreduce_q"}

    def call_text(self, verb: Verb, name: str, *, indices: bool = False) -> str:
        """Return the text that gives calls with one key different seeds.

        It contains the communicator's name, which differs between threads, unless ranks must draw
        the same indices.
        """
        return f"allreduce_q on {'' if indices else self.comm}: {name}"

    def alone(self, leaf: jax.Array) -> jax.Array:
        """Return the sum of a leaf that is not sent: the leaf itself."""
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
        """Apply the exact collective to tangents.

        Zeros are sent too, so that ranks that differentiate different leaves send equal messages.
        """
        settings = replace(settings, configs=(Config(bits=32),) * len(tangents), feedback=False)
        return bind(list(map(ad.instantiate_zeros, tangents)), seeds, settings)

    def transposed(
        self, cotangents: list[Any], leaves: list[Any], seeds: list[Any], settings: Settings
    ) -> list[Any]:
        """Return the cotangents of leaves: an exact sum over ranks."""
        return self.exact(cotangents, seeds, settings)
