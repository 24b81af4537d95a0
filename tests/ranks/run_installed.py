"""Run an allreduce with an installed cgx_ops (no source tree), in numpy and each named framework.

    mpirun -np 2 python -I run_installed.py [torch] [jax]

4-bit levels represent these values and their sum exactly.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import cgx_ops

VALUES = np.tile(np.arange(16, dtype=np.float32), 1000)


def by_numpy() -> np.ndarray:
    return cgx_ops.allreduce(VALUES, "sum", cgx_ops.Config(bits=4))


def by_torch() -> np.ndarray:
    import torch
    import torch.distributed as dist

    import cgx_ops.torch

    options = cgx_ops.torch.BackendOptions(cgx_ops.Config(bits=4), compress="all")
    dist.init_process_group("cgx", pg_options=options)
    summed = torch.from_numpy(VALUES.copy())
    dist.all_reduce(summed)
    dist.destroy_process_group()
    ours = torch.ops.cgx.quantized_allreduce(torch.from_numpy(VALUES), bits=4)
    assert torch.equal(summed, ours)
    return ours.numpy()


def by_jax() -> np.ndarray:
    import jax

    import cgx_ops.jax

    cgx_ops.jax.initialize()
    mesh = jax.make_mesh((jax.device_count(),), ("data",))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
    def summed(x: jax.Array) -> jax.Array:
        return cgx_ops.jax.psum_q(x, "data", bits=4)

    return np.asarray(summed(VALUES))


FRAMEWORKS: dict[str, Callable[[], np.ndarray]] = {"torch": by_torch, "jax": by_jax}


def main() -> None:
    assert Path(cgx_ops.__file__).is_relative_to(sys.prefix), cgx_ops.__file__
    for name in ("numpy", *sys.argv[1:]):
        summed = {"numpy": by_numpy, **FRAMEWORKS}[name]()
        np.testing.assert_array_equal(summed, VALUES * cgx_ops.size())
    world = cgx_ops.init()
    # exact values would have ratio 1
    assert all(stats.ratio > 4 for stats in cgx_ops.stats().values())
    print(f"rank {world.rank} of {world.size}: {world.transport}, {' '.join(sys.argv[1:])}, ok")


main()
