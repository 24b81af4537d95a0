"""What the JAX tests share with the programs in ranks/: devices, inputs, programs, the oracle.

Call use_cpu_devices() before anything that starts an XLA backend.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import reference
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cgx_ops.jax import psum_q

Values = npt.NDArray[Any]

CALLS, NUMEL = 64, 65536  # of the programs that show that order does not matter
INNER_CALLS = 32


def use_cpu_devices(count: int) -> None:
    """Make JAX see `count` CPU devices in this process and nothing else."""
    if jax.config.values["jax_num_cpu_devices"] != count:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...], devices: Any = None) -> Mesh:
    return jax.make_mesh(shape, names, (AxisType.Auto,) * len(names), devices=devices)


def on_mesh(mesh: Mesh, body: Callable[..., Any], check_vma: bool = False) -> Any:
    """Return the compiled program in which every device applies `body` to its row of each operand.

    Operands and results have a leading axis with a row for each device.
    """
    rows = P(mesh.axis_names)

    def as_row(y: jax.Array) -> jax.Array:
        # What psum_q returns is equal on all devices, and its checked type says so: forget it.
        if check_vma:
            missing = set(mesh.axis_names) - set(jax.typeof(y).mat.varying)
            y = lax.pcast(y, tuple(missing), to="varying")
        return y[None]

    def on_device(*operands: jax.Array) -> Any:
        return jax.tree.map(as_row, body(*jax.tree.map(lambda x: x[0], operands)))

    return jax.jit(
        jax.shard_map(on_device, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=check_vma)
    )


def normal(seed: int, *shape: int, dtype: npt.DTypeLike = np.float32) -> Values:
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def expected(
    rows: Values, *, bits: int = 4, bucket_size: int = 512, seeds: list[int] | None = None,
    algorithm: reference.Algorithm = "sra", **knobs: Any,
) -> Values:  # fmt: skip
    """Return the oracle's result for one psum_q of rows[r] on rank r."""
    flat = [row.reshape(-1) for row in rows]
    segment = reference.Segment(0, flat[0].size, bits, bucket_size)
    rounding: reference.RoundingMode = "nearest" if seeds is None else "stochastic"
    knobs = {"seeds": seeds, "rounding": rounding, "algorithm": algorithm, **knobs}
    return reference.allreduce(flat, [segment], **knobs).reshape(rows[0].shape)


def seed_of(key: jax.Array, leaf: int = 0) -> int:
    """Return the seed that psum_q gives the core for one leaf: documented as fold_in(key, leaf)."""
    low, high = np.asarray(jax.random.bits(jax.random.fold_in(key, leaf), (2,), jnp.uint32))
    return int(np.array([low, high], np.uint32).view(np.int64)[0])


def same_bits(a: Any, b: Any) -> bool:
    """Tell whether two arrays have the same dtype, shape and bytes."""
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


# ---- the programs that show that order does not matter ------------------------------------------
#
# Each takes (CALLS, NUMEL) values on a device and sums them call by call over the axis "d".


def independent(x: jax.Array) -> jax.Array:
    """CALLS calls that XLA may start in any order."""
    return jnp.stack([psum_q(x[i], "d", algorithm="sra") for i in range(CALLS)])


def inner_jit(x: jax.Array) -> jax.Array:
    """One function, lowered once and called INNER_CALLS times: equal custom calls."""
    inner = jax.jit(lambda v: psum_q(v, "d", algorithm="sra"))
    return jnp.stack([inner(x[i]) for i in range(INNER_CALLS)])


def scanned(x: jax.Array) -> jax.Array:
    """One call, executed CALLS times in a loop."""
    return lax.scan(lambda c, v: (c, psum_q(v, "d", algorithm="sra")), 0, x)[1]


def unrolled(x: jax.Array) -> jax.Array:
    """A loop of which XLA sees eight steps at a time."""
    return lax.scan(lambda c, v: (c, psum_q(v, "d", algorithm="sra")), 0, x, unroll=8)[1]


def mixed(x: jax.Array) -> jax.Array:
    """Half of the calls, and as many independent collectives of XLA's own between them."""
    half = CALLS // 2
    ours = [psum_q(x[i], "d", algorithm="sra") for i in range(half)]
    theirs = [lax.psum(x[i], "d") for i in range(half)]
    return jnp.stack([y + 0 * jnp.isnan(t).sum() for y, t in zip(ours, theirs, strict=True)])


def chained(x: jax.Array) -> jax.Array:
    """XLA's own collectives wait for each call: completing it resumes a program that blocks."""
    return jnp.stack([lax.pmax(psum_q(x[i], "d", algorithm="sra"), "d") for i in range(CALLS // 2)])


PROGRAMS = {f.__name__: f for f in (independent, inner_jit, scanned, unrolled, mixed, chained)}


def order_inputs(ranks: int) -> Values:
    """Return the programs' operands, (ranks, CALLS, NUMEL)."""
    return normal(7, ranks, CALLS, NUMEL)


def order_expected(inputs: Values) -> Values:
    """Return what each call gives, (CALLS, NUMEL)."""
    flat = [row.reshape(-1) for row in inputs]
    segments = [reference.Segment(i * NUMEL, NUMEL) for i in range(CALLS)]
    return reference.allreduce(flat, segments, algorithm="sra").reshape(CALLS, NUMEL)


def rows_of_processes(mesh: Mesh, mine: Values) -> jax.Array:
    """Return the global operand of which this process's device has the row `mine`."""
    sharding = NamedSharding(mesh, P(mesh.axis_names))
    return jax.make_array_from_process_local_data(sharding, mine[None])
