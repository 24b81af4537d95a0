"""Rank program: four Python threads of each process launch programs on a mesh of all processes.

    run_jax_threads.py DEVICES CASE...

with DEVICES in each process. Each thread has values of its own, so that calls which take those of
another thread's give wrong results. Every case prints "ok" and its name at its end.

1. what is right: blocks of launching(), with collectives of XLA's own between; names, where each
   process has one device; a program that one process exports
2. what is refused, in every thread of every process
3. what is refused in all processes if it happens in one: calls of one name, both in flight
"""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from functools import partial

import checks
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from support.jax_cases import (
    PROGRAMS,
    SRA,
    Values,
    expected,
    mesh_of,
    normal,
    on_mesh,
    order_expected,
    order_inputs,
    same_bits,
    spread,
    use_cpu_devices,
)

import cgx_ops
import cgx_ops.jax
from cgx_ops.jax import launching, psum_q
from cgx_ops.jax._src.runtime.compat import gather_from_processes

THREADS, LAUNCHES = 4, 5

DEVICES = int(sys.argv[1])
use_cpu_devices(DEVICES)
cgx_ops.jax.initialize()
RANK, SIZE = jax.process_index(), jax.process_count()
MESH = mesh_of((SIZE * DEVICES,), ("d",))


def operand_of(rows: Values) -> jax.Array:
    return spread(MESH, rows, P("d"))


def check(result: jax.Array, want: Values) -> None:
    for shard in result.addressable_shards:
        row = np.asarray(shard.data)[0]
        assert same_bits(row, want[: len(row)])


def in_threads(work: Callable[[int], None]) -> None:
    """Call work(thread) at the same time in all of them; raise what the first to fail raised."""
    together = threading.Barrier(THREADS, timeout=60)

    def run(thread: int) -> None:
        together.wait()
        work(thread)

    with ThreadPoolExecutor(THREADS) as pool:
        for future in [pool.submit(run, thread) for thread in range(THREADS)]:
            future.result()


# ---- 1. what is right ---------------------------------------------------------------------------


def blocks(functions: list[Callable[[jax.Array], jax.Array]]) -> None:
    """Launch functions[i] in a thread's blocks, which carry its name."""
    inputs = order_inputs(MESH.size)
    operands = [operand_of(np.roll(inputs, thread, axis=1)) for thread in range(THREADS)]
    want = order_expected(inputs, DEVICES)
    steps = {f: on_mesh(MESH, f) for f in functions}

    def work(thread: int) -> None:
        for _ in range(LAUNCHES):
            with launching(f"thread {thread}"):
                result = steps[functions[thread]](operands[thread])
            check(result, np.roll(want, thread, axis=0))

    in_threads(work)


def own_functions() -> None:
    blocks([PROGRAMS[name] for name in ("mixed", "inner_jit", "unrolled", "independent")])


def one_function() -> None:
    blocks([PROGRAMS["mixed"]] * THREADS)


def names() -> None:
    x = normal(1, THREADS, MESH.size, 16, 4096)

    def body(v: jax.Array, name: str) -> jax.Array:
        return jnp.stack([psum_q(row, "d", config=SRA, name=name) for row in v])

    def work(thread: int) -> None:
        step = on_mesh(MESH, partial(body, name=f"thread {thread}"))
        want = np.stack([expected(x[thread, :, i]) for i in range(16)])
        for _ in range(LAUNCHES):
            check(step(operand_of(x[thread])), want)

    in_threads(work)


def exported() -> None:
    """What process 0 exports, the others only load: in every program that has it the calls meet."""
    x = normal(5, MESH.size, 3000)
    step = on_mesh(MESH, lambda v: psum_q(v, "d", config=SRA, name="exported"))

    def work() -> None:
        vouched_for = cgx_ops.jax.register()
        blob = b""
        if RANK == 0:
            export = jax.export.export(step.jitted, disabled_checks=vouched_for)
            blob = bytes(export(operand_of(x)).serialize())
        blob = gather_from_processes("exported", blob, 60, list(range(SIZE)))[0]
        call = jax.export.deserialize(bytearray(blob)).call
        for times in (1, 2):
            check(jax.jit(lambda v, n=times: call(v) * n)(operand_of(x)), times * expected(x))

    with ThreadPoolExecutor(1) as pool:  # which has lowered nothing yet
        pool.submit(work).result()


# ---- 2. what is refused -------------------------------------------------------------------------


def refused(name: str, remedies: list[str]) -> None:
    """Launch one function, without blocks: nobody gets a result, and this thread goes on."""
    x = normal(2, MESH.size, 3000)
    step = on_mesh(MESH, lambda v: psum_q(v, "d", config=SRA, name=name))

    def work(_: int) -> None:
        try:
            step(operand_of(x))
        except RuntimeError as error:
            missing = [remedy for remedy in remedies if remedy not in str(error)]
            assert not missing, (missing, str(error))
        else:
            raise AssertionError("nothing was refused")

    in_threads(work)
    check(step(operand_of(x)), expected(x))


def unnamed() -> None:
    remedies = ["cgx_ops.jax.launching("]
    refused("", [*remedies, "(name=)"] if DEVICES == 1 else remedies)


def names_of_several_devices() -> None:
    """XLA runs such programs one after the other, in the order of launching: names don't help."""
    refused("given", ["cgx_ops.jax.launching("])


def names_of_blocks() -> None:
    """A block that cannot begin does not keep the others waiting."""
    x = normal(4, MESH.size, 3000)
    step = on_mesh(MESH, lambda v: psum_q(v, "d", config=SRA))
    for name in ("x" * 5000, "a\0b"):
        try:
            with launching(name):
                raise AssertionError("it began")
        except ValueError as error:
            assert "name" in str(error), error
        with launching("a good name"):
            result = step(operand_of(x))
        check(result, expected(x))


# ---- 3. calls of one name in flight -------------------------------------------------------------


def one_name() -> None:
    """All processes but the last launch from two threads at once; the last then from one, twice.

    Either of the two may have met the last process's first launch: if it was the other one, both
    processes are told. Both are errors where they overlap, and in the last process the second one,
    which is refused.
    """
    x = normal(3, SIZE, 3000)
    operand, want = operand_of(x), expected(x)
    step = on_mesh(MESH, lambda v: psum_q(v, "d", config=SRA, name="one"))

    def launch() -> str:
        try:
            check(step(operand), want)
        except (RuntimeError, ValueError) as error:  # INVALID_ARGUMENT: JAX raises either
            if "disagree on collective 'one#0': launch " in str(error):
                return "met another launch"
            assert "launches overlap on a device" in str(error), error
            assert "(name=)" in str(error), error
            return "refused"
        return "right"

    with ThreadPoolExecutor(2) as pool:
        assert pool.submit(launch).result() == "right"  # compiled, and has a communicator
        last = RANK == SIZE - 1
        both = [] if last else [pool.submit(launch) for _ in range(2)]
        wait(both, 60, FIRST_COMPLETED)  # the other one waits for the last process
        cgx_ops.allreduce(np.zeros(1, np.float32), name="the last process has its turn")
        if last:
            found = [pool.submit(launch).result() for _ in range(2)]
            assert found[0] in ("right", "met another launch"), found
            assert found[1] == "refused", found
        else:
            found = [outcome.result() for outcome in both]
            assert sorted(found) in (["refused"] * 2, ["met another launch", "refused"]), found
        assert pool.submit(launch).result() == "right"


checks.run(
    checks.named(
        own_functions, one_function, names, exported, unnamed, names_of_several_devices,
        names_of_blocks, one_name,
    ),
    sys.argv[2:],
)  # fmt: skip
