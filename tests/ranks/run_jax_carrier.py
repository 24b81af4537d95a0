"""Rank program: carrier="xla" over gloo, on meshes of processes with one or two devices each.

    run_jax_carrier.py <devices> <coordinator, or ""> <processes> CHECK...

With a coordinator, JAX starts as process RANK, and nothing of cgx's own may start: no
communicator, no MPI. Without one the program runs under mpirun, and the native carrier must
give the same bits.
"""

import os
import sys
from collections.abc import Sequence
from functools import partial

import checks
import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.jax_carrier_cases import BF16, CASES, Case, Values
from support.jax_cases import expected, mesh_of, on_mesh, same_bits, use_cpu_devices

import cgx_ops.jax
from cgx_ops._core import library
from cgx_ops.jax import psum_q
from cgx_ops.jax._src.collectives.options import Carrier

use_cpu_devices(int(sys.argv[1]))
ALONE = bool(sys.argv[2])
if ALONE:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(sys.argv[2], int(sys.argv[3]), int(os.environ["RANK"]))
else:
    cgx_ops.jax.initialize()
DEVICES = jax.devices()
CARRIERS: tuple[Carrier, ...] = ("xla",) if ALONE else ("xla", "native")


def spread(mesh: Mesh, rows: Values) -> jax.Array:
    """Return an operand whose i-th row is on the mesh's i-th device."""
    sharding = NamedSharding(mesh, P(mesh.axis_names))
    return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])


def check(mesh: Mesh, axes: tuple[str, ...], groups: Sequence[Sequence[int]], case: Case) -> None:
    """Require the expected bits on all local devices. `groups`: positions in the mesh."""
    processes = [device.process_index for device in mesh.devices.flat]
    operands = [spread(mesh, rows) for rows in case.operands(mesh.size)]
    wanted = {group[0]: case.expected(group, processes, axes) for group in groups}
    for carrier in CARRIERS:
        program = on_mesh(mesh, partial(case.call, axes=axes, carrier=carrier))
        results, residuals = (
            {shard.index[0].start: np.asarray(shard.data)[0] for shard in rows.addressable_shards}
            for rows in program(*operands)
        )
        for group in groups:
            result, lost = wanted[group[0]]
            for rank, place in enumerate(group):
                if place in results:
                    what = f"{carrier}, place {place} of {group}, {case}"
                    assert same_bits(results[place], result), f"the result: {what}"
                    assert same_bits(residuals[place], lost[rank]), f"the residual: {what}"


def one_axis() -> None:
    mesh = mesh_of((len(DEVICES),), ("d",))
    for case in CASES[::2]:  # the other cases do not depend on processes
        check(mesh, ("d",), [range(mesh.size)], case)


def two_axes() -> None:
    mesh = mesh_of((2, len(DEVICES) // 2), ("a", "b"))
    places = np.arange(mesh.size).reshape(2, -1)
    for axes, groups in (
        (("a",), places.T),
        (("b",), places),
        (("a", "b"), places.reshape(1, -1)),
        (("b", "a"), places.T.reshape(1, -1)),
    ):
        if groups.shape[1] > 1:
            for case in (Case(3000), Case(3000, dtype=BF16, op="avg", keys="different")):
                check(mesh, axes, groups.tolist(), case)


def permuted_mesh() -> None:
    """Permute the mesh, so that devices of one process are not neighbors."""
    mesh = mesh_of((len(DEVICES),), ("d",), DEVICES[1::2] + DEVICES[0::2])
    for case in (Case(3000), Case(3000, keys="different")):
        check(mesh, ("d",), [range(mesh.size)], case)


def many() -> None:
    """Test independent calls between as many of XLA's own collectives."""
    mesh = mesh_of((len(DEVICES),), ("d",))
    cases = [Case(20000 + 512 * i) for i in range(16)]

    def body(*xs: jax.Array) -> list[jax.Array]:
        theirs = [lax.psum(x, "d") for x in xs]
        ours = [psum_q(x, "d", carrier="xla") for x in xs]
        return [y + 0 * t for y, t in zip(ours, theirs, strict=True)]

    operands = [spread(mesh, case.inputs(mesh.size)) for case in cases]
    wanted = [expected(case.inputs(mesh.size)) for case in cases]
    program = on_mesh(mesh, body)
    for _ in range(5):
        for rows, result in zip(program(*operands), wanted, strict=True):
            assert all(same_bits(shard.data[0], result) for shard in rows.addressable_shards)


def no_native_communicator() -> None:
    assert library.call_for_id("cgx_comm_next", -1) == -1, "a communicator was made"


checks.run(
    checks.named(one_axis, two_axes, permuted_mesh, many, no_native_communicator), sys.argv[4:]
)
