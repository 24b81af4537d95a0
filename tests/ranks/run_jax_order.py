"""Rank program: run the programs of jax_cases on a mesh of all processes.

    run_jax_order.py WANT.npy DEVICES LAUNCHES PROGRAM... [--extra RANK] [--cache FOLDER]

Each process has DEVICES devices. Prints "ok PROGRAM" for each. With --extra, that rank first
traces, lowers and compiles more programs than the others, including every tested one, so that
process-wide counters differ. With --cache, rank 0 alone has a persistent compilation cache, and
prints how many executables came from it.
"""

import argparse
import threading
import time

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from support.jax_cases import (
    PROGRAMS,
    mesh_of,
    on_mesh,
    order_inputs,
    same_bits,
    spread,
    use_cpu_devices,
)

import cgx_ops.jax
from cgx_ops.jax._src.runtime.compat import dispatch

COMPILATION = dispatch.BACKEND_COMPILE_EVENT


def compile_extra(mesh: jax.sharding.Mesh, operand: jax.Array, program: str) -> None:
    """Compile executables that other ranks do not have, some with the same call sites or names.

    Another thread compiles functions without collectives at the same time.
    """
    begun = threading.Event()

    def compile_something() -> None:
        jax.monitoring.record_scalar(COMPILATION, 0.0)
        begun.set()
        time.sleep(0.5)
        jax.monitoring.record_event_duration_secs(COMPILATION, 0.5)

    other = threading.Thread(target=compile_something)
    other.start()
    begun.wait()
    for _ in range(2):
        on_mesh(mesh, PROGRAMS[program]).lower(operand).compile()
        jax.clear_caches()
    jax.make_jaxpr(on_mesh(mesh, PROGRAMS[program]))(operand)

    def on_device(x: jax.Array) -> jax.Array:
        return PROGRAMS[program](x) + 1

    on_mesh(mesh, on_device).lower(operand).compile()
    other.join()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("want")
    parser.add_argument("devices", type=int)
    parser.add_argument("launches", type=int)
    parser.add_argument("programs", nargs="+")
    parser.add_argument("--extra", type=int, default=-1)
    parser.add_argument("--cache")
    args = parser.parse_args()

    use_cpu_devices(args.devices)
    cgx_ops.jax.initialize()
    rank, size = jax.process_index(), jax.process_count()
    assert (rank, size) == (cgx_ops.rank(), cgx_ops.size())
    hits: list[str] = []
    if args.cache and rank == 0:
        jax.config.update("jax_compilation_cache_dir", args.cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        jax.monitoring.register_event_listener(
            lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None
        )
    mesh = mesh_of((size * args.devices,), ("d",))
    operand = spread(mesh, order_inputs(mesh.size), P("d"))
    want = np.load(args.want)
    for program in args.programs:
        if rank == args.extra:
            compile_extra(mesh, operand, program)
        step = on_mesh(mesh, PROGRAMS[program])
        for _ in range(args.launches):
            for shard in step(operand).addressable_shards:
                row = np.asarray(shard.data)[0]
                assert same_bits(row, want[: len(row)]), program
        print("ok", program, flush=True)
    print("cache hits:", len(hits), flush=True)


main()
