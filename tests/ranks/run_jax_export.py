"""Rank program: programs that are exported, compiled ahead of time, and cached, run again later.

    run_jax_export.py FOLDER DEVICES

With DEVICES in each process. The first launch of all processes writes the programs to FOLDER; the
second loads them, traces nothing before, and finds its compiled programs in the cache there. Prints
the digests of what it lowered, and how many compiled programs came from the cache.
"""

import hashlib
import pickle
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import serialize_executable
from jax.sharding import PartitionSpec as P
from jax_cases import expected, mesh_of, normal, on_mesh, same_bits, spread, use_cpu_devices

import cgx_ops.jax
from cgx_ops.jax import psum_q

FOLDER, DEVICES = Path(sys.argv[1]), int(sys.argv[2])
NATIVE, XLA, LOADED = FOLDER / "native", FOLDER / "xla", FOLDER / "compiled"

use_cpu_devices(DEVICES)
cgx_ops.jax.initialize()
jax.config.update("jax_compilation_cache_dir", str(FOLDER / "cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
events: Counter[str] = Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rpartition("/")[2]]))

MESH = mesh_of((jax.device_count(),), ("d",))
X = normal(1, MESH.size, 3000)
OPERAND = spread(MESH, X, P("d"))
MINE = f"{LOADED}.{jax.process_index()}"  # an executable is of one process


def body(v: jax.Array, carrier: Any) -> jax.Array:
    """Two calls, one of them in a loop, and a collective of XLA's."""
    twice = lax.fori_loop(
        0, 2, lambda _, s: s + psum_q(v, "d", algorithm="sra", carrier=carrier), 0 * v
    )
    once = psum_q(v, "d", algorithm="sra", carrier=carrier)
    return once + 0 * lax.psum(twice, "d")


def program(carrier: str) -> Any:
    return on_mesh(MESH, lambda v: body(v, carrier)).jitted


def check(run: Callable[[jax.Array], Any]) -> None:
    for shard in run(OPERAND).addressable_shards:
        assert same_bits(np.asarray(shard.data)[0], expected(X))


if NATIVE.exists():
    checks = cgx_ops.jax.register()
    for file in (NATIVE, XLA):
        check(jax.jit(jax.export.deserialize(bytearray(file.read_bytes())).call))
    check(serialize_executable.deserialize_and_load(*pickle.loads(Path(MINE).read_bytes())))
    events.clear()  # an exported program is another one, within its caller
for carrier, file in (("native", NATIVE), ("xla", XLA)):
    lowered = program(carrier).lower(OPERAND)
    print(f"lowered {carrier}: {hashlib.sha256(lowered.as_text().encode()).hexdigest()}")
    compiled = lowered.compile()
    check(compiled)
    if carrier == "native":
        Path(MINE).write_bytes(pickle.dumps(serialize_executable.serialize(compiled)))
    exported = jax.export.export(program(carrier), disabled_checks=cgx_ops.jax.register())(OPERAND)
    if jax.process_index() == 0:
        file.write_bytes(exported.serialize())
print(f"from the cache: {events['cache_hits']}, compiled: {events['cache_misses']}")
print("ok")
