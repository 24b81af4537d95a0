"""Rank program: torch and jax in one process, over one communicator.

    run_jax_shared_state.py torch|jax

The named framework is called first. It is imported first on even ranks, last on the others.
Communicators are registered by name in the process: torch's op and the numpy API can use
the group that a JAX mesh created.
"""

import importlib
import os
import sys
from typing import Any

import numpy as np

first = sys.argv[1]
frameworks = ("torch", "jax") if first == "torch" else ("jax", "torch")
even = int(os.environ["OMPI_COMM_WORLD_RANK"]) % 2 == 0
for framework in frameworks if even else reversed(frameworks):
    importlib.import_module(f"cgx_ops.{framework}")

import torch  # noqa: E402
from support.jax_cases import (  # noqa: E402
    SRA,
    expected,
    mesh_of,
    normal,
    on_mesh,
    rows_of_processes,
    same_bits,
    use_cpu_devices,
)

import cgx_ops  # noqa: E402
import cgx_ops.jax  # noqa: E402

use_cpu_devices(1)
cgx_ops.jax.initialize()
rank, size = cgx_ops.rank(), cgx_ops.size()
x = normal(1, size, 5000)
want = expected(x)


def with_jax() -> Any:
    mesh = mesh_of((size,), ("d",))
    step = on_mesh(mesh, lambda v: cgx_ops.jax.psum_q(v, "d", config=SRA))
    return np.asarray(step(rows_of_processes(mesh, x[rank])).addressable_data(0))[0]


def with_torch(group_name: str) -> Any:
    y = torch.ops.cgx.quantized_allreduce(
        torch.from_numpy(x[rank].copy()),
        config="algorithm='sra'",
        rounding="nearest",
        group_name=group_name,
    )
    return y.numpy()


order = [with_jax, lambda: with_torch("")]
for call in order if first == "jax" else reversed(order):
    assert same_bits(call(), want)

# torch and numpy use the communicator that JAX created: all share its call counter.
name = "jax:" + ",".join(map(str, range(size)))
shared = cgx_ops.Communicator.find(name)
assert (shared.rank, shared.size) == (rank, size)
before = shared.collectives
assert same_bits(with_torch(name), want)
config = cgx_ops.Config(rounding="nearest", algorithm="sra")
assert same_bits(shared.allreduce(x[rank], config=config), want)
assert same_bits(with_jax(), want)
assert shared.collectives == before + 3

with open("/proc/self/maps") as maps:
    libraries = {line.split()[-1] for line in maps if line.rstrip().endswith("/libcgx.so")}
assert len(libraries) == 1, libraries
print("ok", flush=True)
