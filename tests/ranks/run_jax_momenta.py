"""Rank program: check that two processes give the optimizers the weights of one process.

    mpirun -np 2 python run_jax_momenta.py DEVICES FOLDER CHECK...

Tests both carriers, with DEVICES in each process. FOLDER/DEVICES.npz has "x", a weight; "rows",
its gradients (steps, devices, ...); and the expected weights, "compressed_adamw" and/or "signum".
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import checks
import jax
import numpy as np
import optax
from jax import NamedSharding
from jax.sharding import PartitionSpec as P
from support.jax_cases import fetch, mesh_of, use_cpu_devices

import cgx_ops.jax
from cgx_ops import Config, Rules
from cgx_ops.jax import compressed_adamw, signum, state_specs

DEVICES = int(sys.argv[1])
use_cpu_devices(DEVICES)
cgx_ops.jax.initialize()
RUN = np.load(Path(sys.argv[2], f"{DEVICES}.npz"))
MESH = mesh_of((2 * DEVICES,), ("d",))
ONE_BIT = Config(compressor="levels", bits=1, algorithm="sra")
VOTES = Config(compressor="sign", algorithm="sra")
MAKERS = {
    "compressed_adamw": partial(
        compressed_adamw,
        "d",
        0.01,
        warmup_steps=10,
        refreshes=2,
        config=ONE_BIT,
        rules=Rules(exact_vectors=False),
    ),
    "signum": partial(signum, "d", 0.002, config=VOTES),
}


def check(name: str, carrier: Any) -> None:
    optimizer = MAKERS[name](mesh=MESH, carrier=carrier, weight_decay=0.01)
    x: Any = RUN["x"]
    specs = state_specs(optimizer, x, "d")

    def step(x: Any, state: Any, rows: Any) -> Any:
        updates, state = optimizer.update(rows[0], state, x)
        return optax.apply_updates(x, updates), state

    program = jax.jit(
        jax.shard_map(step, mesh=MESH, in_specs=(P(), specs, P("d")), out_specs=(P(), specs))
    )
    shardings = jax.tree.map(lambda spec: NamedSharding(MESH, spec), specs)
    state: Any = jax.jit(optimizer.init, out_shardings=shardings)(x)
    for rows in RUN["rows"]:
        spread = NamedSharding(MESH, P("d"))
        own = jax.make_array_from_callback(rows.shape, spread, lambda at, rows=rows: rows[at])
        x, state = program(x, state, own)
    assert np.array_equal(fetch(x), RUN[name]), np.abs(fetch(x) - RUN[name]).max()


checks.run(
    {
        f"{name} by {carrier}": partial(check, name, carrier)
        for name in MAKERS
        for carrier in ("native", "xla")
    },
    sys.argv[3:],
)
