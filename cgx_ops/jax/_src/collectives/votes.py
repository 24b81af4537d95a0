"""Majority votes where a process has several devices of a group, and so sends sums.

    1. each device turns its values into votes of 1 or -1, before its process sums them
    2. processes exchange exact counts, in 16 bits if those can represent them
    3. the result is the sign of the sum

Between hosts the core does the same ("sign" in docs/reference/wire_format.md). Votes are
bit-identical.
"""

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.interpreters import mlir

from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.config import Config
from cgx_ops.jax._src.collectives.calls import parted
from cgx_ops.jax._src.collectives.options import is_vote
from cgx_ops.jax._src.collectives.primitive import Settings, collective_q_p
from cgx_ops.jax._src.runtime import compat

# bf16 and fp16 represent all integers up to this one.
_MOST_IN_HALF = 256


def need_counts(
    settings: Settings, groups: npt.NDArray[np.int64], processes: Sequence[int] | None
) -> bool:
    """Return whether a call has votes that are summed within a process before they are sent.

    Args:
        settings: The static parameters of the call.
        groups: The partition ids of each group, a row each.
        processes: The process of each partition; None: all are in this one.
    """
    if processes is None or not settings.row["reduces"] or not any(map(is_vote, settings.configs)):
        return False
    counts = (Counter(processes[partition] for partition in group) for group in groups)
    return any(1 < len(count) < groups.shape[1] for count in counts)


def lower_by_counts(ctx: Any, operands: Sequence[Any], settings: Settings) -> Any:
    """Lower a call to votes, a sum of these votes, and the signs of its results."""
    plain = ctx.replace(avals_in=[compat.plain(aval) for aval in ctx.avals_in])
    return mlir.lower_fun(functools.partial(_by_counts, settings=settings))(plain, *operands)


def _by_counts(*operands: jax.Array, settings: Settings) -> list[jax.Array]:
    leaves, seeds, residuals = parted(operands, settings.feedback)
    votes = [
        _cast(x, c) if is_vote(c) else x for x, c in zip(leaves, settings.configs, strict=True)
    ]
    travel = (
        {"compressor": "half"} if settings.groups.size <= _MOST_IN_HALF else {"bits": EXACT_BITS}
    )
    configs = tuple(replace(c, **travel) if is_vote(c) else c for c in settings.configs)
    results = collective_q_p.bind(
        *votes, *seeds, *residuals, settings=replace(settings, configs=configs)
    )
    sums, lost = results[: len(leaves)], results[len(leaves) :]
    return [
        *(_sign(x) if is_vote(c) else x for x, c in zip(sums, settings.configs, strict=True)),
        *lost,
    ]


def _cast(values: jax.Array, config: Config) -> jax.Array:
    """Return a device's votes; NaN in buckets that contain a value that is not finite."""
    # Test the sign bit: XLA's arithmetic flushes subnormal values to 0.
    width = 8 * values.dtype.itemsize
    bits = jax.lax.bitcast_convert_type(values, f"uint{width}")
    votes = jnp.where(bits > jnp.array(1 << (width - 1), bits.dtype), -1, 1).astype(values.dtype)
    return jnp.where(_in_finite_buckets(values, config.bucket_size), votes, jnp.nan)


def _in_finite_buckets(values: jax.Array, bucket_size: int) -> jax.Array:
    *batch, numel = values.shape
    buckets = -(-numel // bucket_size)
    padding = [(0, 0)] * len(batch) + [(0, buckets * bucket_size - numel)]
    finite = jnp.pad(jnp.isfinite(values), padding, constant_values=True)
    whole = finite.reshape(*batch, buckets, bucket_size).all(axis=-1)
    return jnp.repeat(whole, bucket_size, axis=-1)[..., :numel]


def _sign(counts: jax.Array) -> jax.Array:
    """Return the majority: 1 for ties."""
    won = jnp.where(counts < 0, -1, 1).astype(counts.dtype)
    return jnp.where(jnp.isnan(counts), counts, won)
