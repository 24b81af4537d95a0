"""Rank program: deep_gradient on two processes with two devices each.

The devices of a process form one mesh axis, over which gradients are averaged exactly. Each process
has one pair (v, u). One axis over all devices raises an error.
"""

from typing import Any

import checks
import jax
import numpy as np
import reference
from failing import fails
from jax import NamedSharding
from jax.sharding import PartitionSpec as P
from support.jax_cases import mesh_of, normal, use_cpu_devices

import cgx_ops.jax
from cgx_ops.jax import deep_gradient, state_specs

use_cpu_devices(2)
cgx_ops.jax.initialize()
STEPS, SHAPE = 10, (60, 50)
ROWS = normal(8, STEPS, 4, *SHAPE)
WEIGHTS = np.zeros(SHAPE, np.float32)
MESH = mesh_of((2, 2), ("hosts", "devices"))
assert [device.process_index for device in MESH.devices.flat] == [0, 0, 1, 1]


def program_of(axes: Any, **options: Any) -> tuple[Any, Any]:
    """Return a step and its initial state."""
    optimizer = deep_gradient(axes, density=0.05, mesh=MESH, **options)
    specs = state_specs(optimizer, WEIGHTS, axes)
    shardings = jax.tree.map(lambda spec: NamedSharding(MESH, spec), specs)

    def body(state: Any, rows: Any) -> Any:
        return optimizer.update(rows[0], state)

    step = jax.shard_map(
        body, mesh=MESH, in_specs=(specs, P(("hosts", "devices"))), out_specs=(P(), specs)
    )
    return jax.jit(step), jax.jit(optimizer.init, out_shardings=shardings)(WEIGHTS)


def on_devices(rows: Any) -> jax.Array:
    spread = NamedSharding(MESH, P(("hosts", "devices")))
    return jax.make_array_from_callback(rows.shape, spread, lambda index: rows[index])


def one_axis_per_process() -> None:
    step, state = program_of("hosts", dense_axis="devices")
    layer = reference.DeepGradient(2, WEIGHTS.size, momentum=0.9)
    for i, rows in enumerate(ROWS):
        mean, state = step(state, on_devices(rows))
        means = [(rows[n] + rows[n + 1]).ravel() / np.float32(2) for n in (0, 2)]
        want = layer.step(means, 0.05).reshape(SHAPE)
        # XLA may fuse m u + g into one rounding, for u and then for v in every step; 1 / (1 - m) =
        # 10.
        off = 2 * 2.0**-24 * 10 * (i + 2) * np.abs(layer.v).max()
        for shard in mean.addressable_shards:
            assert np.abs(np.asarray(shard.data) - want).max() <= off, i
        for shard in state.residual.addressable_shards:
            v = np.asarray(shard.data)[0]
            assert np.abs(v - layer.v[shard.index[0]].reshape(SHAPE)).max() <= off, i


def single_axis_refused() -> None:
    together, first = program_of(("hosts", "devices"))
    words = "a group of the mesh has [2, 2] devices in its 2 processes; it may have only one"
    fails(NotImplementedError, words, lambda: together(first, on_devices(ROWS[0])))


checks.run(checks.named(one_axis_per_process, single_axis_refused))
