"""Send the messages of a tree while XLA:CPU computes the rest of it.

XLA:CPU runs operations in parallel when their operands are ready. But it assigns buffers as if the
program ran line by line: after the last read of a buffer, the next operation gets it, and has to
wait for that read. A message reads gradients, and the user reads its sums, so the backward pass
would wait for every message. Two gates, which do nothing at run time, prevent it:

    1. mark    before a message: a token depends on its leaves; its sums will be in their buffers
    2. hold    after it: releases the sums when the leaves of later messages are computed, so that
               the next operation gets the buffers of an earlier message

Besides the message being sent, the leaves of AHEAD messages are in memory.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from cgx_ops.jax._src.runtime import compat, handlers

# Two keep the link busy. With more, a step took longer on two cores: docs/guides/planner.md.
AHEAD = 2


def mark(leaves: Sequence[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
    """Return the leaves of a message, and a token that is ready when they are."""
    *same, token = gate_p.bind(*leaves, taken=0, made=1)
    return same, token


def hold(messages: Sequence[list[jax.Array]], tokens: Sequence[jax.Array]) -> list[list[jax.Array]]:
    """Return each message's sums, usable when the leaves of AHEAD later messages are computed.

    Args:
        messages: Their sums, in the order in which leaves are computed.
        tokens: The tokens of their leaves.
    """
    last = len(messages) - 1
    held = [
        gate_p.bind(*sums, tokens[min(number + AHEAD, last)], taken=1, made=0)
        for number, sums in enumerate(messages[:last])
    ]
    return [*held, messages[last]]


# Results are the operands, except the tokens, which come last: `taken` ones and `made` ones.
gate_p = Primitive("cgx_gate")
gate_p.multiple_results = True
gate_p.def_impl(functools.partial(xla.apply_primitive, gate_p))


@gate_p.def_abstract_eval
def _abstract_eval(*avals: Any, taken: int, made: int) -> list[Any]:
    same = avals[: len(avals) - taken]
    axes = frozenset[Any]().union(*map(compat.varying_axes, avals))
    token = avals[0].update(shape=(), dtype=np.dtype(np.uint32))
    token = compat.with_varying_axes(token, axes)
    return [*same, *[token] * made]


def _lower_cpu(ctx: Any, *operands: Any, taken: int, made: int) -> Any:
    del made
    in_place = {i: i for i in range(len(operands) - taken)}
    return jax.ffi.ffi_lowering(handlers.target("gate"), operand_output_aliases=in_place)(
        ctx, *operands
    )


def pass_on(*operands: jax.Array, taken: int, made: int) -> list[jax.Array]:
    """Do nothing on other platforms: a GPU stream runs in order."""
    return [*operands[: len(operands) - taken], *[jnp.uint32(0)] * made]


def _batch(
    operands: Sequence[Any], dims: Sequence[int | None], *, taken: int, made: int
) -> tuple[list[Any], list[int | None]]:
    results = gate_p.bind(*operands, taken=taken, made=made)
    return results, [*dims[: len(dims) - taken], *[None] * made]


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, taken: int, made: int
) -> tuple[list[Any], list[Any]]:
    results = gate_p.bind(*primals, taken=taken, made=made)
    same = len(primals) - taken
    return results, [*tangents[:same], *map(compat.zero_tangent, results[same:])]


def _transpose(cotangents: Sequence[Any], *operands: Any, taken: int, made: int) -> list[Any]:
    """Return cotangents unchanged; tokens have none."""
    del made
    same = len(operands) - taken
    pairs = zip(operands[:same], cotangents[:same], strict=True)
    return [*(ct if ad.is_undefined_primal(x) else None for x, ct in pairs), *[None] * taken]


mlir.register_lowering(gate_p, _lower_cpu, platform="cpu")
mlir.register_lowering(gate_p, mlir.lower_fun(pass_on))
batching.primitive_batchers[gate_p] = _batch
ad.primitive_jvps[gate_p] = _jvp
ad.primitive_transposes[gate_p] = _transpose
