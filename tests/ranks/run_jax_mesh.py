"""Rank program: meshes over four processes: parts of them, other orders, two axes, training."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jax_cases import (
    expected,
    mesh_of,
    normal,
    on_mesh,
    rows_of_processes,
    same_bits,
    seed_of,
    use_cpu_devices,
)

import cgx_ops
import cgx_ops.jax
from cgx_ops.jax import pmean_q, psum_q

use_cpu_devices(1)
cgx_ops.jax.initialize()
RANK = jax.process_index()
X = normal(5, 4, 3000)


def check_two_axes() -> None:
    mesh = mesh_of((2, 2), ("a", "b"))
    for axes, group in (("a", [RANK % 2, RANK % 2 + 2]), ("b", [RANK // 2 * 2, RANK // 2 * 2 + 1])):
        step = on_mesh(mesh, lambda v, axes=axes: psum_q(v, axes, algorithm="sra"))
        row = step(rows_of_processes(mesh, X[RANK])).addressable_data(0)
        assert same_bits(np.asarray(row)[0], expected(X[group])), axes


def check_another_order() -> None:
    """Rank in the group is the place in the mesh, not the process."""
    order = [2, 0, 3, 1]
    mesh = mesh_of((4,), ("d",), [jax.devices()[i] for i in order])
    step = on_mesh(mesh, lambda v: psum_q(v, "d", algorithm="sra"))
    row = step(rows_of_processes(mesh, X[RANK])).addressable_data(0)
    assert same_bits(np.asarray(row)[0], expected(X[order]))


def check_parts() -> None:
    """Two meshes of two processes each, which know nothing of each other."""
    part = [0, 3] if RANK in (0, 3) else [2, 1]
    mesh = mesh_of((2,), ("d",), [jax.devices()[i] for i in part])
    step = on_mesh(mesh, lambda v: psum_q(v, "d", algorithm="sra"))
    row = step(rows_of_processes(mesh, X[RANK])).addressable_data(0)
    assert same_bits(np.asarray(row)[0], expected(X[part]))
    alone = mesh_of((1,), ("d",), [jax.devices()[RANK]])
    row = on_mesh(alone, lambda v: psum_q(v, "d"))(X[RANK][None])
    assert same_bits(np.asarray(row)[0], X[RANK])


def check_own_keys() -> None:
    mesh = mesh_of((4,), ("d",))
    keys = jax.random.split(jax.random.key(9), 4)
    mine = rows_of_processes(mesh, np.asarray(jax.random.key_data(keys))[RANK])
    step = on_mesh(mesh, lambda v, key: psum_q(v, "d", key=key, algorithm="sra"))
    row = step(rows_of_processes(mesh, X[RANK]), mine).addressable_data(0)
    assert same_bits(np.asarray(row)[0], expected(X, seeds=[seed_of(key) for key in keys]))


def check_one_program_for_all() -> None:
    """Nothing of this process is in the program: all ranks compile, and could cache, the same."""
    mesh = mesh_of((4,), ("d",))
    step = on_mesh(mesh, lambda v: psum_q(v, "d") + psum_q(v, "d", bits=8))
    text = step.lower(rows_of_processes(mesh, X[RANK])).as_text()
    assert text.count("@cgx_psum_q") == 2
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8).astype(np.float32)
    everybody = cgx_ops.init().all_gather(digest, cgx_ops.Config(bits=32)).reshape(4, -1)
    assert (np.asarray(everybody) == digest).all()


def check_training() -> None:
    """Weights stay equal to the bit over steps, under one jit, with remat and scan inside."""
    mesh = mesh_of((4,), ("d",))
    truth = normal(6, 64, 8)

    def loss(weights: jax.Array, batch: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda b: b @ weights)
        return jnp.square(layer(batch) - batch @ truth).mean()

    def step(weights: jax.Array, batches: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        def one(w: jax.Array, operand: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            batch, key = operand
            copy = lax.pcast(w, "d", to="varying")
            value, gradient = jax.value_and_grad(loss)(copy, batch)
            return w - pmean_q(gradient, "d", key=key), value

        keys = jax.random.split(key, batches.shape[1])
        weights, losses = lax.scan(one, weights, (batches[0], keys))
        return weights, lax.pmean(losses, "d")

    compiled = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(P(), P("d"), P()), out_specs=(P(), P()))
    )
    weights, losses = jnp.zeros((64, 8)), jnp.zeros(0)
    for epoch in range(5):
        batches = rows_of_processes(mesh, normal(100 + 4 * epoch + RANK, 20, 32, 64))
        weights, losses = compiled(weights, batches, jax.random.key(epoch))
    mine = np.asarray(weights)
    everybody = cgx_ops.init().all_gather(mine, cgx_ops.Config(bits=32)).reshape(4, *mine.shape)
    assert all(same_bits(other, mine) for other in everybody)
    assert float(losses[-1]) < 1e-3, losses  # it began at 64


for check in (
    check_two_axes,
    check_another_order,
    check_parts,
    check_own_keys,
    check_one_program_for_all,
    check_training,
):
    check()
    print("ok", check.__name__, flush=True)
