"""Processes whose plans differ: what agree() says, and what a step does without having asked.

Prints both errors; before the second the seconds that it took.
"""

import time

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax_cases import mesh_of, use_cpu_devices

import cgx_ops.jax
from cgx_ops.planner import Plan

use_cpu_devices(1)
cgx_ops.jax.initialize()
groups = ((0, 1), (2,)) if cgx_ops.rank() == 0 else ((0,), (1, 2))
plan = Plan(("a", "b", "c"), (1000, 2000, 3000), (4, 4, 4), groups)
error = ""
try:
    plan.agree(cgx_ops.init())
except cgx_ops.MismatchError as found:
    error = str(found)
mesh = mesh_of((2,), ("d",))
rows = NamedSharding(mesh, P("d"))
tree = {
    name: jax.make_array_from_callback((2, numel), rows, lambda _, n=numel: np.ones((1, n), "f4"))
    for name, numel in zip(plan.names, plan.numels, strict=True)
}
step = jax.jit(
    jax.shard_map(
        lambda t: cgx_ops.jax.psum_q(t, "d", fuse=plan), mesh=mesh, in_specs=P("d"), out_specs=P()
    )
)
start, mismatch = time.perf_counter(), ""
try:
    jax.block_until_ready(step(tree))
except jax.errors.JaxRuntimeError as found:
    mismatch = " ".join(str(found).split())
print(error)
print(f"error after {time.perf_counter() - start:.1f} s: {mismatch}" if mismatch else "no error")
