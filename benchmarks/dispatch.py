"""Time that a collective of cgx_ops.jax adds to the launch of a small program.

    python benchmarks/dispatch.py [--json FILE]
    mpirun -n 2 python benchmarks/dispatch.py [--json FILE]     # the part "ranks"

Every program multiplies NUMEL values by two. `plain` does nothing else; the others also reduce the
product. All contenders take turns: a round times CALLS calls of each, and waits for each call. The
table has medians over rounds on rank 0, and the difference to `plain`.

    one device   a mesh and a world of one: nothing is sent, only JAX's launch remains
    two devices  of this process: XLA uses a barrier, cgx sends 4 bits
    ranks        jit launches from Python, with the tokens of the ordered effect
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import cgx_ops
from cgx_ops import Communicator, Config
from cgx_ops.jax import allreduce_q, psum_q

NUMEL, CALLS = 1024, 200
Contenders = dict[str, Callable[[], Any]]


def on_devices(count: int) -> Contenders:
    """Return programs on a mesh of this process's first devices."""
    mesh = jax.make_mesh((count,), ("d",), (AxisType.Auto,), devices=jax.local_devices()[:count])
    x = jax.device_put(jnp.ones((count, NUMEL)), jax.NamedSharding(mesh, P("d")))

    def program(reduce: Callable[[Any], Any], out: P) -> Callable[[], Any]:
        body = jax.shard_map(lambda v: reduce(v * 2), mesh=mesh, in_specs=P("d"), out_specs=out)
        compiled = jax.jit(body)
        return lambda: compiled(x)

    return {
        "plain": program(lambda v: v, P("d")),
        "lax.psum": program(lambda v: lax.psum(v, "d"), P()),
        "psum_q": program(lambda v: psum_q(v, "d"), P()),
    }


def among_ranks(comm: Communicator) -> Contenders:
    """Return programs on this process's default device."""
    x = jnp.ones(NUMEL)
    plain = jax.jit(lambda v: v * 2)
    reduced = jax.jit(lambda v: allreduce_q(v * 2, comm))
    array, config = np.ones(NUMEL, np.float32), Config(rounding="nearest")
    return {
        "plain": lambda: plain(x),
        "numpy allreduce": lambda: comm.allreduce(array * 2, config=config),
        "allreduce_q": lambda: reduced(x),
    }


def measure(calls: Contenders, rounds: int) -> dict[str, float]:
    """Return the median seconds of one call of each contender."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds + 2):
        for name, call in calls.items():
            begin = time.perf_counter()
            for _ in range(CALLS):
                jax.block_until_ready(call())
            if index >= 2:  # the first rounds compile, and warm up
                times[name].append((time.perf_counter() - begin) / CALLS)
    return {name: statistics.median(values) for name, values in times.items()}


def table_of(results: dict[str, dict[str, float]]) -> Table:
    table = Table(title=f"launch of a program on {NUMEL} values: microseconds")
    table.add_column("part")
    table.add_column("contender")
    table.add_column("a call", justify="right")
    table.add_column("above plain", justify="right")
    for part, times in results.items():
        for name, seconds in times.items():
            above = "" if name == "plain" else f"{(seconds - times['plain']) * 1e6:+.1f}"
            table.add_row(part, name, f"{seconds * 1e6:.1f}", above)
        table.add_section()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="What cgx_ops.jax adds to a launch")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", help="also write the results to this file")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    world = cgx_ops.init()
    if world.size > 1:
        parts = {f"{world.size} ranks": among_ranks(world)}
    else:
        one = {**on_devices(1), "allreduce_q": among_ranks(world)["allreduce_q"]}
        parts = {"one device": one, "two devices": on_devices(2)}
    results = {part: measure(calls, arguments.rounds) for part, calls in parts.items()}
    if world.rank == 0:
        Console(width=100).print(table_of(results))
        if arguments.json:
            with open(arguments.json, "w") as file:
                json.dump({"machine": platform.platform(), "seconds": results}, file, indent=1)


main()
