"""Rank program: export programs, compile them ahead of time, cache them, and run them later.

    run_jax_export.py FOLDER DEVICES

DEVICES is the number in each process. The first run of all processes writes the programs to
FOLDER. The second run loads them without tracing, and finds the compiled programs in the cache.
Prints the digests of the lowered programs, and how many compiled programs came from the cache.
"""

import hashlib
import pickle
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import serialize_executable
from jax.sharding import PartitionSpec as P
from support.jax_cases import (
    SRA,
    Values,
    expected,
    gather_expected,
    mesh_of,
    normal,
    on_mesh,
    same_bits,
    scatter_expected,
    spread,
    use_cpu_devices,
)

import cgx_ops.jax
from cgx_ops.jax import all_gather_q, psum_q, psum_scatter_q
from cgx_ops.jax._src.collectives.options import Carrier

FOLDER, DEVICES = Path(sys.argv[1]), int(sys.argv[2])

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


def sums(v: jax.Array, carrier: Carrier) -> jax.Array:
    """Make two calls, one in a loop, and a collective of XLA's own."""
    twice = lax.fori_loop(
        0,
        2,
        lambda _, s: s + psum_q(v, "d", config=SRA, carrier=carrier),
        0 * v,
    )
    once = psum_q(v, "d", config=SRA, carrier=carrier)
    return once + 0 * lax.psum(twice, "d")


def halves(v: jax.Array) -> jax.Array:
    """Return the two halves of a sum."""
    return all_gather_q(psum_scatter_q(v, "d", tiled=True), "d", tiled=True)


def halves_expected() -> Values:
    blocks = scatter_expected(X.reshape(MESH.size, MESH.size, -1))
    return gather_expected(np.stack(blocks)).reshape(-1)


# The programs to write, and their results on every device.
PROGRAMS = {
    "native": (lambda v: sums(v, "native"), expected(X)),
    "xla": (lambda v: sums(v, "xla"), expected(X)),
    "halves": (halves, halves_expected()),
}


def exported_of(name: str) -> Path:
    return FOLDER / f"{name}.exported"


def compiled_of(name: str) -> Path:
    """Return the file of a compiled program; executables are specific to a process."""
    return FOLDER / f"{name}.compiled.{jax.process_index()}"


def check(name: str, run: Any) -> None:
    for shard in run(OPERAND).addressable_shards:
        assert same_bits(np.asarray(shard.data)[0], PROGRAMS[name][1]), name


if compiled_of("native").exists():
    cgx_ops.jax.register()
    for name in PROGRAMS:
        exported = jax.export.deserialize(bytearray(exported_of(name).read_bytes()))
        check(name, jax.jit(exported.call))
        compiled = pickle.loads(compiled_of(name).read_bytes())
        check(name, serialize_executable.deserialize_and_load(*compiled))
    events.clear()  # an exported program is compiled again within its caller
for name, (body, _) in PROGRAMS.items():
    program = on_mesh(MESH, body).jitted
    lowered = program.lower(OPERAND)
    print(f"lowered {name}: {hashlib.sha256(lowered.as_text().encode()).hexdigest()}")
    compiled = lowered.compile()
    check(name, compiled)
    compiled_of(name).write_bytes(pickle.dumps(serialize_executable.serialize(compiled)))
    exported = jax.export.export(program, disabled_checks=cgx_ops.jax.register())(OPERAND)
    if jax.process_index() == 0:
        exported_of(name).write_bytes(exported.serialize())
print(f"from the cache: {events['cache_hits']}, compiled: {events['cache_misses']}")
print("ok")
