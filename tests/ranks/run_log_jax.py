"""Print what a user of JAX sees on stderr, as run_log.py does for torch.

Usage: run_log_jax.py native|xla. The argument is the carrier.
"""

import sys

import jax
import numpy as np
from jax import P

import cgx_ops
import cgx_ops.jax as cgx

cgx.initialize()
mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=P("d"), out_specs=P())
def mean(tree: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return cgx.pmean_q(tree, "d", bits=4, carrier=sys.argv[1])  # type: ignore[arg-type]


sharding = jax.NamedSharding(mesh, P("d"))
arrays = {"a": np.ones((1, 60_000), np.float32), "b": np.ones((1, 9), np.float32)}
tree = {k: jax.make_array_from_process_local_data(sharding, x) for k, x in arrays.items()}
for _ in range(5):
    jax.block_until_ready(mean(tree))
if jax.process_index() == 0:
    name = "carrier" if sys.argv[1] == "xla" else "jax:0,1"
    assert cgx_ops.stats()[name].collectives >= 5, cgx_ops.stats()
