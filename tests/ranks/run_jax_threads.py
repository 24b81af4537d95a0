"""Rank program: four Python threads of each process launch programs on a mesh of all processes.

    run_jax_threads.py DEVICES CASE...

DEVICES is the number in each process. Each thread has different values, so that a call matched
with another thread's gives a wrong result. Every case prints "ok" and its name at its end.

1. Correct use: launching() blocks, with XLA's own collectives between them; names, if each
      process has one device; a program that one process exports.
2. Errors raised in every thread of every process.
3. Errors raised in all processes if one process causes them: two calls of one name in flight.
"""

import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from functools import cache, partial

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
from cgx_ops._core import user_warnings
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
    """Call work(thread) in all threads at the same time; raise the first exception."""
    together = threading.Barrier(THREADS, timeout=60)

    def run(thread: int) -> None:
        together.wait()
        work(thread)

    with ThreadPoolExecutor(THREADS) as pool:
        for future in [pool.submit(run, thread) for thread in range(THREADS)]:
            future.result()


# ---- 1. correct use ------------------------------------------------------------------------------


def blocks(functions: list[Callable[[jax.Array], jax.Array]]) -> None:
    """Launch functions[i] in a launching() block named after its thread."""
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


def losses_in_blocks() -> None:
    """Compute the mean loss of all processes, which XLA's own collective does, in two threads.

    A loop precedes the mean, in thread 0 on process 0 and in thread 1 on the others. So the order
    of the two means would differ between processes if programs of two threads ran concurrently.
    """
    together = threading.Barrier(2, timeout=60)
    weights = spread(MESH, normal(6, 100), P())

    def work(thread: int) -> None:
        batch = operand_of(np.full((MESH.size, 4096), thread, np.float32))
        slow = [(process == 0) == (thread == 0) for process in range(SIZE)]
        rounds = operand_of(np.repeat(np.where(slow, 2000, 0), DEVICES))
        for _ in range(3):
            together.wait()
            with launching(f"thread {thread}"):
                loss, _ = loss_step()(weights, batch, rounds)
            assert float(loss) == thread, (float(loss), thread)

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(work, thread) for thread in range(2)]:
            future.result()


@cache
def loss_step() -> Callable[..., tuple[jax.Array, jax.Array]]:
    def loss_of(w: jax.Array, batch: jax.Array, rounds: jax.Array) -> jax.Array:
        zero = jax.lax.fori_loop(0, rounds[0], lambda _, y: jnp.sin(y), 0 * batch)
        return (0 * w).sum() + (batch + zero).mean()

    gradient_of = cgx_ops.jax.value_and_grad(loss_of, "d", name="loss")
    in_specs = (P(), P("d"), P("d"))
    return jax.jit(jax.shard_map(gradient_of, mesh=MESH, in_specs=in_specs, out_specs=P()))


def exported() -> None:
    """Check that calls match across programs that load what process 0 exported."""
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

    with ThreadPoolExecutor(1) as pool:  # a new thread, which has lowered nothing yet
        pool.submit(work).result()


def main_thread_outside_of_blocks() -> None:
    """Check that a warning names the remedy if another thread launches, too, and is alive."""
    x = normal(7, MESH.size, 3000)

    def launch(times: int) -> None:
        step = on_mesh(MESH, lambda v: times * psum_q(v, "d", config=SRA))
        check(step(operand_of(x)), times * expected(x))

    def in_block(times: int) -> None:
        with launching("another thread"):
            launch(times)

    launch(1)
    for in_main in (launch, in_block):
        with ThreadPoolExecutor(1) as pool, warnings.catch_warnings(record=True) as warned:
            user_warnings.forget()
            pool.submit(in_block, 2).result()
            in_main(3)
            in_main(4)
        (warning,) = warned
        assert "outside of a block" in str(warning.message), warning
        assert "cgx_ops.jax.launching(" in str(warning.message), warning
    with warnings.catch_warnings(record=True) as warned:
        user_warnings.forget()
        launch(5)
    assert not warned, warned


def compiled_in_threads() -> None:
    """Check that calls match if other threads compile the programs, in another order on rank 0.

    The two programs differ only in the size of the batch, so their calls have equal names.
    """

    def body(batch: jax.Array) -> jax.Array:
        return psum_q(batch[0], "d", config=SRA)

    for threads in (1, 2):
        batches = [operand_of(normal(8, MESH.size, n, 3000)) for n in (threads, threads + 2)]
        lowered = [on_mesh(MESH, body).lower(batch) for batch in batches]
        order = lowered if RANK else lowered[::-1]
        with ThreadPoolExecutor(threads) as pool:
            compiled = list(pool.map(lambda program: program.compile(), order))
        for program, batch in zip(compiled if RANK else compiled[::-1], batches, strict=True):
            check(program(batch), expected(normal(8, *batch.shape)[:, 0]))


# ---- 2. errors on all processes ------------------------------------------------------------------


def refused(step: Callable[[], object], remedies: list[str], others: tuple[str, ...] = ()) -> None:
    """Launch one function without blocks: all threads get an error and continue.

    Args:
        step: The launch.
        remedies: Texts that the error contains.
        others: Texts that it does not contain.
    """

    def work(_: int) -> None:
        try:
            step()
        except RuntimeError as error:
            missing = [remedy for remedy in remedies if remedy not in str(error)]
            found = [other for other in others if other in str(error)]
            assert not missing, (missing, str(error))
            assert not found, (found, str(error))
        else:
            raise AssertionError("nothing was refused")

    in_threads(work)
    step()


def refused_sum(name: str, remedies: list[str]) -> None:
    x = normal(2, MESH.size, 3000)
    step = on_mesh(MESH, lambda v: psum_q(v, "d", config=SRA, name=name))
    refused(lambda: check(step(operand_of(x)), expected(x)), remedies)


def unnamed() -> None:
    remedies = ["cgx_ops.jax.launching("]
    refused_sum("", [*remedies, "(name=)"] if DEVICES == 1 else remedies)


def names_beside_xla() -> None:
    """Check that a name does not help where XLA's own collective averages the loss."""
    weights = spread(MESH, normal(6, 100), P())
    batch = operand_of(np.ones((MESH.size, 8), np.float32))

    def loss_of(w: jax.Array, batch: jax.Array) -> jax.Array:
        return (0 * w).sum() + batch.mean()

    in_specs = (P(), P("d"))
    inside = jax.shard_map(
        cgx_ops.jax.value_and_grad(loss_of, "d", name="inside"),
        mesh=MESH, in_specs=in_specs, out_specs=P(),
    )  # fmt: skip
    around = cgx_ops.jax.value_and_grad(loss_of, "d", in_specs=in_specs, mesh=MESH, name="around")
    for gradient_of in (inside, around):
        step = jax.jit(gradient_of)
        refused(lambda f=step: f(weights, batch), ["cgx_ops.jax.launching("], ("(name=)",))


def names_of_several_devices() -> None:
    """Check that names do not help: XLA runs such programs in launch order, one after another."""
    refused_sum("given", ["cgx_ops.jax.launching("])


def names_of_blocks() -> None:
    """Check that a block that fails to begin does not block the others."""
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


# ---- 3. two calls of one name in flight ----------------------------------------------------------


def one_name() -> None:
    """Launch twice concurrently on all processes but the last, then twice in a row on the last.

    Either of the two launches may have matched the last process's first one. If the other launch
    was meant, both processes get an error. Overlapping launches raise on both sides. The last
    process's second launch is refused.
    """
    x = normal(3, SIZE, 3000)
    operand, want = operand_of(x), expected(x)
    step = on_mesh(MESH, lambda v: psum_q(v, "d", config=SRA, name="one"))

    def launch() -> str:
        try:
            check(step(operand), want)
        except (RuntimeError, ValueError) as error:  # for INVALID_ARGUMENT, JAX raises either type
            if "disagree on collective 'one#0': launch " in str(error):
                return "met another launch"
            assert "launches overlap on a device" in str(error), error
            assert "(name=)" in str(error), error
            return "refused"
        return "right"

    with ThreadPoolExecutor(2) as pool:
        assert pool.submit(launch).result() == "right"  # compiles, and creates the communicator
        last = RANK == SIZE - 1
        both = [] if last else [pool.submit(launch) for _ in range(2)]
        wait(both, 60, FIRST_COMPLETED)  # the other launch waits for the last process
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
        own_functions, one_function, names, losses_in_blocks, exported, compiled_in_threads,
        main_thread_outside_of_blocks, unnamed, names_beside_xla, names_of_several_devices,
        names_of_blocks, one_name,
    ),
    sys.argv[2:],
)  # fmt: skip
