"""Check processes with different plans: the error of a compiled step, and of agree().

Before, process 0 alone lowers a step, for instance to count its operations. Prints both errors, the
first one after its delay in seconds. Then compiles and runs steps with equal plans, two of them in
threads, in another order on process 1.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.jax_cases import mesh_of, use_cpu_devices

import cgx_ops.jax
from cgx_ops.planner import Plan

use_cpu_devices(1)
cgx_ops.jax.initialize()
groups = ((0, 1), (2,)) if cgx_ops.rank() == 0 else ((0,), (1, 2))
plan = Plan(("a", "b", "c"), (1000, 2000, 3000), (4, 4, 4), groups)
mesh = mesh_of((2,), ("d",))
rows = NamedSharding(mesh, P("d"))
tree = {
    name: jax.make_array_from_callback((2, numel), rows, lambda _, n=numel: np.ones((1, n), "f4"))
    for name, numel in zip(plan.names, plan.numels, strict=True)
}


def step(fuse: Plan, name: str = "step") -> Any:
    def body(t: object) -> object:
        return cgx_ops.jax.psum_q(t, "d", fuse=fuse)

    body.__name__ = name
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P()))


one = Plan(plan.names, plan.numels, plan.bits, ((0, 1, 2),))
if cgx_ops.rank() == 0:
    step(one, "alone").lower(tree).cost_analysis()
different = step(plan)
start = time.perf_counter()
for call in (
    lambda: jax.block_until_ready(different(tree)),
    lambda: different(tree),
    lambda: plan.agree(cgx_ops.init()),
):
    try:
        call()
    except cgx_ops.MismatchError as error:
        print(f"error after {time.perf_counter() - start:.1f} s: {error}")
same = Plan(plan.names, plan.numels, plan.bits, ((0, 1), (2,)))
lowered = [step(one, "one").lower(tree), step(same, "two").lower(tree)]
order = 1 if cgx_ops.rank() == 0 else -1
with ThreadPoolExecutor(2) as pool:
    compiled = list(pool.map(lambda program: program.compile(), lowered[::order]))
for program in compiled[::order]:
    jax.block_until_ready(program(tree))
jax.block_until_ready(step(same)(tree))
sums = step(same)(tree)  # plans are compared once
print("sums", sorted({float(x) for leaf in jax.tree.leaves(sums) for x in np.unique(leaf)}))
