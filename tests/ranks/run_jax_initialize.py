"""Rank program: initialize() with and without mpirun, and collectives after it.

    run_jax_initialize.py CHECK...

Without mpirun, the variables COORDINATOR, PROCESSES and RANK describe the processes. A check of
an error prints the error. Several checks form a sequence: errors, initialize(), then collectives.
"""

import os
import socket
from typing import Any

import checks
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from support.jax_cases import SRA, expected, mesh_of, normal, on_mesh, same_bits, spread
from support.jax_fault_cases import check_backend, error_of

import cgx_ops
import cgx_ops.jax
from cgx_ops.jax import psum_q

BY_MPIRUN = "OMPI_COMM_WORLD_RANK" in os.environ
SIZE = int(os.environ.get("PROCESSES") or os.environ.get("OMPI_COMM_WORLD_SIZE") or 1)
RANK = int(os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)


def initialize() -> None:
    if BY_MPIRUN:
        cgx_ops.jax.initialize()
    else:
        cgx_ops.jax.initialize(os.environ["COORDINATOR"], SIZE, RANK)


def check_mesh(**knobs: Any) -> None:
    """Sum over all devices, with and without compression."""
    count = jax.device_count()
    x = normal(1, count, 3000)
    mesh = mesh_of((count,), ("d",))

    def both(v: jax.Array) -> tuple[jax.Array, jax.Array]:
        return psum_q(v, "d", config=SRA, **knobs), lax.psum(jnp.ones(()), "d")

    ours, theirs = on_mesh(mesh, both).jitted(spread(mesh, x, P("d")))
    for shard in ours.addressable_shards:
        assert same_bits(shard.data[0], expected(x))
    for shard in theirs.addressable_shards:
        assert shard.data[0] == count


def works() -> None:
    initialize()
    assert (jax.process_index(), jax.process_count()) == (RANK, SIZE)
    check_mesh()
    check_mesh(carrier="xla")
    with cgx_ops.jax.launching("block"):
        check_mesh()
    assert cgx_ops.init().name == ("world" if BY_MPIRUN else "jax")  # the latter needs no MPI
    assert cgx_ops.size() == SIZE


def detected() -> None:
    """Check that JAX reads everything from the launcher's variables."""
    os.environ["SLURM_PROCID"] = os.environ["SLURM_LOCALID"] = str(RANK)
    cgx_ops.jax.initialize()
    assert (jax.process_index(), jax.process_count()) == (RANK, SIZE)
    check_mesh()


def by_torchrun() -> None:
    """Check that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT suffice, without torch."""
    cgx_ops.jax.initialize()
    assert (jax.process_index(), jax.process_count()) == (RANK, SIZE)
    check_mesh()
    assert cgx_ops.size() == SIZE


def single_process() -> None:
    cgx_ops.jax.initialize()
    assert not jax.distributed.is_initialized()
    cgx_ops.jax.initialize()
    assert jax.process_count() == 1
    check_mesh()


def unreachable() -> None:
    """Check that carrier="xla" works among processes that cgx cannot connect."""
    initialize()
    text = error_of(check_mesh)
    assert "RuntimeError: cgx cannot connect JAX's processes" in text
    assert "Make them reachable from each other, or pass carrier='xla'" in text
    check_mesh(carrier="xla")


def twice() -> None:
    """Check that a second initialize() raises immediately and waits for no other process."""
    if RANK == 0:
        text = error_of(initialize)
        assert text.startswith("RuntimeError: cgx_ops.jax.initialize: jax.distributed is init")
    check_mesh()


def missing_process() -> None:
    """Check that all present processes get an error, and may try again, if one never comes."""
    before = os.environ["CGX_TIMEOUT"]
    os.environ["CGX_TIMEOUT"] = "1"
    text = error_of(lambda: cgx_ops.jax.initialize(os.environ["COORDINATOR"], SIZE + 1, RANK))
    assert f"process {RANK} of {SIZE + 1} did not reach the others at " in text
    assert "within 1 s: each process must call initialize()" in text
    assert not jax.distributed.is_initialized()
    os.environ["CGX_TIMEOUT"] = before


def invalid_port() -> None:
    for address in ("localhost:65536", "localhost"):
        text = error_of(lambda at=address: cgx_ops.jax.initialize(at, SIZE, RANK))
        assert (
            f"ValueError: cgx_ops.jax.initialize: the coordinator's address is '{address}'" in text
        )


def late_on_one_rank() -> None:
    """Check that all ranks report the rank that already has a backend, and can work alone."""
    if BY_MPIRUN:
        cgx_ops.init()
    late = SIZE - 1
    if late == RANK:
        jax.devices()
    text = error_of(initialize)
    assert f"RuntimeError: cgx_ops.jax.initialize: rank {late}: an XLA backend is running" in text
    assert not jax.distributed.is_initialized()
    assert jax.process_count() == 1


def rank_differs_from_mpirun() -> None:
    """Check that all ranks raise, and may call initialize() again."""
    size, rank = (SIZE, 1) if RANK == 0 else (None, None)
    text = error_of(lambda: cgx_ops.jax.initialize(num_processes=size, process_id=rank))
    assert "rank 0: this is process 1 of 2 by the arguments, but rank 0 of 2 under mpirun" in text


def port_in_use() -> None:
    """Check that all ranks report that rank 0 cannot bind its address, and may try again."""
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        text = error_of(lambda: cgx_ops.jax.initialize(address))
    wanted = address if RANK == 0 else "127.0.0.1:"
    assert f"process 0 cannot start the coordinator at {wanted}" in text
    assert "is the port free?" in text


def not_initialized() -> None:
    """Check that a collective raises without initialize(): it would sum over local devices only."""
    x = normal(3, 1, 100)
    text = error_of(lambda: on_mesh(mesh_of((1,), ("d",)), lambda v: psum_q(v, "d"))(x))
    assert "RuntimeError: psum_q: " in text
    assert "Call cgx_ops.jax.initialize() first" in text


def works_alone() -> None:
    """Check that a backend that started too early serves independent processes."""
    os.environ["CGX_WORLD"] = "single"
    check_backend()


jax.config.update("jax_platforms", "cpu")
checks.run(
    checks.named(
        rank_differs_from_mpirun, port_in_use, invalid_port,
        missing_process, works, twice, detected, by_torchrun, single_process, unreachable,
        late_on_one_rank, not_initialized, works_alone,
    )
)  # fmt: skip
