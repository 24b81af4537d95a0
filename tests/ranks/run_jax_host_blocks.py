"""Rank program: psum_scatter_q and all_gather_q over processes on simulated hosts.

mpirun -np 4 python run_jax_host_blocks.py CHECK ...     # with CGX_HOST_ID
"""

from typing import Any

import checks
import jax
import numpy as np
import reference
from jax.sharding import PartitionSpec as P
from support.jax_cases import mesh_of, normal, on_mesh, same_bits, spread

import cgx_ops
import cgx_ops.jax
from cgx_ops import Config
from cgx_ops.config import Algorithm
from cgx_ops.jax import all_gather_q, psum_scatter_q

NUMEL = 3000


def hosts() -> list[int]:
    """Return the host of each process."""
    world = cgx_ops.init()
    found = world.all_gather(np.full(1, world.host, np.float32), Config(bits=32)).reshape(-1)
    assert 1 < world.hosts < world.size
    return [int(host) for host in found]


def segments(config: Config) -> list[reference.Segment]:
    return [reference.Segment(0, NUMEL, config.bits, config.bucket_size)]


def scatter() -> None:
    """Compare every algorithm with the oracle; intra_bits arrive."""
    count, of_processes = jax.device_count(), hosts()
    mesh, x = mesh_of((count,), ("d",)), normal(1, count, count, NUMEL)
    inputs = [np.ascontiguousarray(each).reshape(-1) for each in x]
    results = []
    rows: list[tuple[Algorithm, int | None]]
    rows = [("hierarchical", 8), ("by_hosts", None), ("one_shot", None)]
    for algorithm, intra_bits in rows:
        config = Config(4, 64, "nearest", algorithm, intra_bits=intra_bits)

        def body(v: jax.Array, config: Config = config) -> Any:
            return psum_scatter_q(v, "d", config=config)

        got = on_mesh(mesh, body).jitted(spread(mesh, x, P("d")))
        want = reference.reduce_scatter(
            inputs, segments(config), algorithm=algorithm, intra_bits=intra_bits or 0,
            hosts=of_processes,
        )  # fmt: skip
        for shard in got.addressable_shards:
            assert same_bits(shard.data[0], want[shard.index[0].start]), algorithm
        results.append(np.concatenate(want).tobytes())
    assert len(set(results)) == len(results)


def gather() -> None:
    """Compare with the oracle: all algorithms give the same bits."""
    count = jax.device_count()
    mesh, x = mesh_of((count,), ("d",)), normal(2, count, NUMEL)
    want = reference.all_gather(list(x), segments(Config(4, 64)), rounding="nearest")
    for algorithm in ("hierarchical", "sra"):
        config = Config(4, 64, "nearest", algorithm)

        def body(v: jax.Array, config: Config = config) -> Any:
            return all_gather_q(v, "d", config=config)

        got = on_mesh(mesh, body).jitted(spread(mesh, x, P("d")))
        for shard in got.addressable_shards:
            assert same_bits(shard.data[0], want.reshape(count, NUMEL)), algorithm


def main() -> None:
    cgx_ops.jax.initialize()
    checks.run(checks.named(scatter, gather))


main()
