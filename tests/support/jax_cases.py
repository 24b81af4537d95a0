"""Helpers of the JAX tests and rank programs: devices, inputs, programs, the oracle.

Call use_cpu_devices() before anything that starts an XLA backend. Tests with the marker `mpirun`
run as `pytest` on eight devices of one process, and as `mpirun -np N pytest` on 8/N devices of each
of N processes. on_mesh() takes and returns whole arrays in every process, and expected() supports
groups of several processes.
"""

import itertools
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import reference
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_ops.jax
from cgx_ops import Config
from cgx_ops.jax import psum_q

Values = npt.NDArray[Any]

SRA = Config(algorithm="sra")
CALLS, NUMEL = 64, 65536  # size of the programs for the order of calls
INNER_CALLS = 32

# jaxlib 0.11.2 crashes when it compiles a shard_map with one empty operand among others.
EMPTY_OPERANDS = jax.__version_info__ < (0, 11)

# Number of processes started by mpirun.
PROCESSES = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))


def use_cpu_devices(count: int) -> None:
    """Make JAX use `count` CPU devices and nothing else.

    In a test, `count` is the total of all processes started by mpirun. In a rank program it is that
    of this process, which then calls initialize() itself.
    """
    in_test = "pytest" in sys.modules
    here = count // PROCESSES if in_test else count
    if jax.config.values["jax_num_cpu_devices"] != here:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", here)
    if in_test and PROCESSES > 1 and not jax.distributed.is_initialized():
        cgx_ops.jax.initialize()


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...], devices: Any = None) -> Mesh:
    return jax.make_mesh(shape, names, (AxisType.Auto,) * len(names), devices=devices)


class OnMesh:
    """A compiled program in which every device applies `body` to its row of each operand.

    Operands and results have a leading axis with a row for each device of the mesh, in mesh order.
    Numpy arrays are given and returned as a whole, in every process of the mesh; jax.Arrays are
    used as they come.
    """

    def __init__(self, mesh: Mesh, body: Callable[..., Any], check_vma: bool) -> None:
        rows = P(mesh.axis_names)

        def as_row(y: jax.Array) -> jax.Array:
            # The type of psum_q's result states that it is equal on all devices: remove this.
            if check_vma:
                missing = set(mesh.axis_names) - set(jax.typeof(y).mat.varying)
                y = lax.pcast(y, tuple(missing), to="varying")
            return y[None]

        def on_device(*operands: jax.Array) -> Any:
            return jax.tree.map(as_row, body(*jax.tree.map(lambda x: x[0], operands)))

        self.mesh = mesh
        self.eager = jax.shard_map(
            on_device, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=check_vma
        )
        self.jitted = jax.jit(self.eager)

    def __call__(self, *operands: Any) -> Any:
        return self.run(self.jitted, *operands)

    def eagerly(self, *operands: Any) -> Any:
        """Run without jit."""
        return self.run(self.eager, *operands)

    def run(self, program: Callable[..., Any], *operands: Any) -> Any:
        """Apply a program of the same mesh and specs to these operands."""
        if isinstance(jax.tree.leaves(operands)[0], jax.Array):
            return program(*operands)
        return fetch(program(*self.spread(operands)))

    def spread(self, operands: Any) -> Any:
        rows = P(self.mesh.axis_names)
        return jax.tree.map(lambda x: spread(self.mesh, x, rows), operands)

    def lower(self, *operands: Any) -> Any:
        return self.jitted.lower(*self.spread(operands))


def on_mesh(mesh: Mesh, body: Callable[..., Any], check_vma: bool = False) -> OnMesh:
    return OnMesh(mesh, body, check_vma)


def spread(mesh: Mesh, x: Any, spec: P) -> jax.Array:
    """Return a whole array as an array of the mesh, split by spec."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return x
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(spread(mesh, np.asarray(jax.random.key_data(x)), spec))
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda at: x[at])


def with_config(**options: Any) -> dict[str, Any]:
    """Return the arguments of a call, with those that are fields of Config in its config."""
    own = {name: value for name, value in options.items() if name in Config.__annotations__}
    others = {name: value for name, value in options.items() if name not in own}
    return {**others, "config": Config(**own)}


def fetch(tree: Any) -> Any:
    """Return arrays of a mesh as whole numpy arrays in every process of it."""

    def is_here(y: Any) -> bool:
        return not isinstance(y, jax.Array) or y.is_fully_addressable or y.is_fully_replicated

    def everywhere(y: jax.Array) -> NamedSharding:
        assert isinstance(y.sharding, NamedSharding)
        return NamedSharding(y.sharding.mesh, P())

    if not all(map(is_here, jax.tree.leaves(tree))):
        tree = jax.jit(lambda t: t, out_shardings=jax.tree.map(everywhere, tree))(tree)
    return jax.tree.map(np.asarray, tree)


def has_part_in(mesh: Mesh) -> bool:
    """Return whether this process has devices of the mesh."""
    return any(device.process_index == jax.process_index() for device in mesh.devices.flat)


def normal(seed: int, *shape: int, dtype: npt.DTypeLike = np.float32) -> Values:
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def expected(
    rows: Values, *, bits: int = 4, bucket_size: int = 512, seeds: list[int] | None = None,
    algorithm: reference.Algorithm = "sra", at: Sequence[int] | None = None,
    residuals: Sequence[Values] | None = None, **knobs: Any,
) -> Values:  # fmt: skip
    """Return the oracle's result for one psum_q of rows[r] on rank r.

    at: indices of jax.devices() for the rows; None: the first ones. If the group has several
    devices in one of several processes, ranks are the processes, each with the exact fp32 sum of
    its devices and the first one's seed. residuals[r]: rank r's, flat, updated in place. Residuals
    of a process's devices are summed, and the first device gets the new one.
    """
    devices = range(len(rows)) if at is None else at
    ranks = ranks_of(processes_of(devices))
    segment = reference.Segment(0, rows[0].size, bits, bucket_size)
    rounding: reference.RoundingMode = "nearest" if seeds is None else "stochastic"
    knobs = {"rounding": rounding, "algorithm": algorithm, "divisor": len(rows), **knobs}
    flat = sums_of([row.reshape(-1) for row in rows], ranks)
    lost = None if residuals is None else [row.copy() for row in sums_of(residuals, ranks)]
    result = reference.allreduce(
        flat, [segment], residuals=lost,
        seeds=None if seeds is None else [seeds[members[0]] for members in ranks], **knobs,
    )  # fmt: skip
    if residuals is not None and lost is not None:
        for residual in residuals:
            residual[:] = 0
        for members, new in zip(ranks, lost, strict=True):
            residuals[members[0]][:] = reference.round_to(reference.widen(new), rows[0].dtype)
    return reference.round_to(reference.widen(result), rows[0].dtype).reshape(rows[0].shape)


def scatter_expected(
    rows: Values, *, bits: int = 4, seeds: list[int] | None = None, **knobs: Any
) -> list[Values]:
    """Return the oracle's block for each rank of one psum_scatter_q of rows[r], (ranks, ...)."""
    ranks, numel = ranks_of(processes_of(range(len(rows)))), rows[0, 0].size
    order = [member for members in ranks for member in members]
    inputs = sums_of([row[order].reshape(-1) for row in rows], ranks)
    segments = [reference.Segment(i * numel, numel, bits) for i in range(len(ranks[0]))]
    own = [[seeds[m[0]] + i for i in range(len(m))] for m in ranks] if seeds else None
    blocks = np.concatenate(
        reference.reduce_scatter(inputs, segments, divisor=len(rows), seeds=own, **knobs)
    ).reshape(len(rows), numel)  # fmt: skip
    rounded = reference.round_to(reference.widen(blocks), rows.dtype)
    return [rounded[order.index(r)].reshape(rows.shape[2:]) for r in range(len(rows))]


def gather_expected(
    rows: Values, *, bits: int = 4, seeds: list[int] | None = None, **knobs: Any
) -> Values:
    """Return the oracle's result of one all_gather_q of rows[r]."""
    ranks, numel = ranks_of(processes_of(range(len(rows)))), rows[0].size
    order = [member for members in ranks for member in members]
    blocks = [rows[members].reshape(-1) for members in ranks]
    segments = [reference.Segment(i * numel, numel, bits) for i in range(len(ranks[0]))]
    own = [[seeds[m] + i for i, m in enumerate(members)] for members in ranks] if seeds else None
    gathered = reference.all_gather(blocks, segments, seeds=own, **knobs).reshape(rows.shape)
    return gathered[np.argsort(order)]


def exchange_expected(
    rows: Values, *, bits: int = 4, seeds: list[int] | None = None,
    at: Sequence[int] | None = None, **knobs: Any,
) -> Values:  # fmt: skip
    """Return the oracle's result of one all_to_all_q: row r has the blocks that rank r receives.

    rows[r, s]: rank r's block for rank s. at: as in expected().
    """
    ranks = ranks_of(processes_of(range(len(rows)) if at is None else at))
    each, result = len(ranks[0]), np.empty_like(rows)
    segment, numel = reference.Segment(0, 0, bits), rows[0, 0].size
    # A process is a rank. Its block for another one has a segment for each pair of their devices.
    for receiver, sender in itertools.product(range(each), repeat=2):
        to, of = ([members[place] for members in ranks] for place in (receiver, sender))
        own = [seeds[s] + receiver * each + sender for s in of] if seeds else None
        inputs = [rows[s, to].reshape(-1) for s in of]
        splits = [[numel] * len(ranks)] * len(ranks)
        received = reference.all_to_all(inputs, splits, segment, seeds=own, **knobs)
        for r, blocks in zip(to, received, strict=True):
            result[r, of] = blocks.reshape(len(of), *rows.shape[2:])
    return result


def processes_of(devices: Sequence[int]) -> list[int]:
    """Return the process of each of jax.devices()."""
    return [jax.devices()[device].process_index for device in devices]


def ranks_of(processes: Sequence[int]) -> list[list[int]]:
    """Return the positions of each rank's members in a group, given their processes."""
    if len(set(processes)) in (1, len(processes)):
        return [[place] for place in range(len(processes))]
    return [
        [place for place, other in enumerate(processes) if other == process]
        for process in dict.fromkeys(processes)
    ]


def sums_of(rows: Sequence[Values], ranks: list[list[int]]) -> list[Values]:
    """Return each rank's values: exact fp32 sums, or unchanged if all are single devices."""
    if all(len(members) == 1 for members in ranks):
        return [rows[place] for (place,) in ranks]
    wide = [reference.widen(row) for row in rows]
    return [
        reference.reduce_in_order("sum", [wide[place] for place in members]) for members in ranks
    ]


def seed_of(
    key: jax.Array, leaf: int = 0, *, call: str = "allreduce over d: ", at: Sequence[int] = ()
) -> int:
    """Return the seed of one leaf in psum_q: see docs/guides/jax/collectives.md.

    call: verb, axes and name. at: the device's index along each other axis over which the leaf
    varies, in the order of the axis names.
    """
    for number in (zlib.crc32(call.encode()), *at):
        key = jax.random.fold_in(key, number)
    low, high = np.asarray(jax.random.bits(jax.random.fold_in(key, leaf), (2,), jnp.uint32))
    return int(np.array([low, high], np.uint32).view(np.int64)[0])


def same_bits(a: Any, b: Any) -> bool:
    """Return whether two arrays, sharded or not, have the same dtype, shape and bytes."""
    a, b = fetch(a), fetch(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


# ---- programs for the order of calls -------------------------------------------------------------
#
# Each takes (CALLS, NUMEL) values on a device and sums them call by call over the axis "d".


def independent(x: jax.Array) -> jax.Array:
    """Make CALLS calls that XLA may start in any order."""
    return jnp.stack([psum_q(x[i], "d", config=SRA) for i in range(CALLS)])


def inner_jit(x: jax.Array) -> jax.Array:
    """Call one lowered function INNER_CALLS times: equal custom calls."""
    inner = jax.jit(lambda v: psum_q(v, "d", config=SRA))
    return jnp.stack([inner(x[i]) for i in range(INNER_CALLS)])


def scanned(x: jax.Array) -> jax.Array:
    """Execute one call CALLS times in a loop."""
    return lax.scan(lambda c, v: (c, psum_q(v, "d", config=SRA)), 0, x)[1]


def unrolled(x: jax.Array) -> jax.Array:
    """Unroll a loop by eight steps."""
    return lax.scan(lambda c, v: (c, psum_q(v, "d", config=SRA)), 0, x, unroll=8)[1]


def mixed(x: jax.Array) -> jax.Array:
    """Alternate calls with independent collectives of XLA's own."""
    half = CALLS // 2
    ours = [psum_q(x[i], "d", config=SRA) for i in range(half)]
    theirs = [lax.psum(x[i], "d") for i in range(half)]
    return jnp.stack([y + 0 * jnp.isnan(t).sum() for y, t in zip(ours, theirs, strict=True)])


def chained(x: jax.Array) -> jax.Array:
    """Make XLA's own collectives wait for each call, which would deadlock if calls blocked XLA."""
    return jnp.stack([lax.pmax(psum_q(x[i], "d", config=SRA), "d") for i in range(CALLS // 2)])


PROGRAMS = {f.__name__: f for f in (independent, inner_jit, scanned, unrolled, mixed, chained)}


def order_inputs(ranks: int) -> Values:
    """Return the programs' operands, (ranks, CALLS, NUMEL)."""
    return normal(7, ranks, CALLS, NUMEL)


def order_expected(inputs: Values, devices: int = 1) -> Values:
    """Return each call's result for that many devices per process, shaped as inputs[0]."""
    ranks = ranks_of([row // devices for row in range(len(inputs))])
    flat = sums_of([row.reshape(-1) for row in inputs], ranks)
    calls, numel = inputs[0].shape
    segments = [reference.Segment(i * numel, numel) for i in range(calls)]
    return reference.allreduce(flat, segments, algorithm="sra").reshape(calls, numel)


def rows_of_processes(mesh: Mesh, mine: Values) -> jax.Array:
    """Return the global operand of which this single-device process has the row `mine`."""
    sharding = NamedSharding(mesh, P(mesh.axis_names))
    return jax.make_array_from_process_local_data(sharding, mine[None])
