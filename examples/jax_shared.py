"""Code shared by the JAX examples on meshes: batches of digits, and a comparison of copies."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax import NamedSharding, P
from jax_digits import digits

import cgx_ops
from cgx_ops import Config

HIDDEN, BATCH, LEARNING_RATE, MOMENTUM = 256, 32, 0.1, 0.9


def use_cpu_devices(count: int) -> None:
    """Give each process `count` CPU devices. Call it before anything that starts JAX's backend."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def steps_of_epoch(mesh: jax.sharding.Mesh) -> int:
    return len(digits()[0]) // (mesh.shape["data"] * BATCH)


def batches(mesh: jax.sharding.Mesh, epoch: int) -> Iterator[tuple[jax.Array, jax.Array]]:
    """Yield an epoch's images and labels, BATCH for each place of the mesh axis "data".

    The order follows from the epoch's number alone, so that a run can go on in any epoch.
    """
    images, _, labels, _ = digits()
    order = np.random.default_rng([1, epoch]).permutation(len(images))
    spread, size = NamedSharding(mesh, P("data")), mesh.shape["data"] * BATCH
    for step in range(steps_of_epoch(mesh)):
        chosen = order[step * size : (step + 1) * size]
        yield on_mesh(images[chosen], spread), on_mesh(labels[chosen], spread)


def on_mesh(values: Any, sharding: NamedSharding) -> jax.Array:
    """Return a global array; every process has all values and gives its devices their parts."""
    return jax.make_array_from_callback(values.shape, sharding, lambda where: values[where])


def digest(weights: Any) -> str | None:
    """Return a hash of all weights' bits; None if copies of a part of them differ in this process.

    Every process must have all parts.
    """
    hashed = hashlib.sha256()
    for leaf in jax.tree.leaves(weights):
        parts: dict[str, set[bytes]] = {}
        for shard in leaf.addressable_shards:
            parts.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
        for _, copies in sorted(parts.items()):
            if len(copies) > 1:
                return None
            hashed.update(copies.pop())
    return hashed.hexdigest()


def same_everywhere(weights: Any) -> bool:
    """Tell whether all copies of the weights, on all devices, have the same bits."""
    own = digest(weights)
    values = np.frombuffer(bytes.fromhex(own or "00" * 32), np.uint8).astype(np.float32)
    low, high = (cgx_ops.allreduce(values, op, Config(bits=32)) for op in ("min", "max"))
    return own is not None and bool((low == high).all())


def say(**facts: Any) -> None:
    """Print a line of JSON, on rank 0."""
    if jax.process_index() == 0:
        print(json.dumps(facts), flush=True)
