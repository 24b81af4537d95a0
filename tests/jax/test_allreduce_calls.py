"""allreduce_q: the order of calls, errors, processes.

Ranks are threads with one device each; ranks/run_jax_allreduce.py tests processes.
"""

import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support.jax_allreduce_cases import AUTO, STEPS, X, check, on_ranks, reduce
from support.jax_cases import SRA, expected, mesh_of, normal, on_mesh, same_bits, with_config
from support.launch import mpirun
from support.rank_checks import Launch, RankCheck, rank_checks

import cgx_ops
from cgx_ops import Communicator, Config
from cgx_ops.jax import allreduce_q

pytestmark = pytest.mark.timeout(120)

Values = npt.NDArray[Any]
ENVIRONMENT = {
    "XLA_FLAGS": "",
    "JAX_PLATFORMS": "cpu",
    "OMP_NUM_THREADS": "1",
    "CGX_TIMEOUT": "30",  # the deadline if a defect makes a test hang
}


# ---- order ---------------------------------------------------------------------------------------


def test_independent_calls_keep_their_order() -> None:
    """Check the order of calls without data dependencies; all differ, so a mismatch would fail."""
    inputs = [normal(size, 3, size) for size in range(600, 664)]

    def body(rank: int, comm: Communicator) -> Any:
        mine = [x[rank] for x in inputs]
        program = jax.jit(lambda xs: [reduce(comm)(x) for x in reversed(xs)])
        return [program(mine) for _ in range(5)][-1]

    check(on_ranks(3, body), [expected(x) for x in reversed(inputs)])


def test_ranks_that_run_different_programs() -> None:
    """Match calls in a loop, from Python, and two per launch, despite extra compilations."""

    def loop(f: Any, x: jax.Array) -> Any:
        return jax.jit(lambda x: lax.map(f, x))(x)

    def eager(f: Any, x: jax.Array) -> Any:
        jax.jit(lambda v: v + jax.jit(lambda v: v * 2)(v))(x)
        return jnp.stack([f(row) for row in x])

    def launches(f: Any, x: jax.Array) -> Any:
        pair = jax.jit(lambda a, b: jnp.stack([f(a), f(b)]))
        return jnp.concatenate([pair(x[0], x[1]), pair(x[2], x[3])])

    programs = (loop, eager, launches)
    results = on_ranks(3, lambda r, comm: programs[r](reduce(comm), jnp.asarray(X[r])))
    check(results, np.stack(STEPS))


def test_two_communicators() -> None:
    """Reduce over all ranks, over a pair, and over all ranks again in one program."""

    def body(rank: int, comm: Communicator) -> Any:
        pair = comm.split(None if rank == 2 else 0, name=f"{comm.name.split('/')[0]}-pair")

        def program(x: jax.Array) -> Any:
            first = reduce(comm)(x[0])
            inside = reduce(pair)(x[1]) if pair else jnp.zeros_like(x[1])
            return first, inside, reduce(comm)(x[2])

        try:
            return jax.block_until_ready(jax.jit(program)(X[rank]))
        finally:
            if pair:
                pair.close()

    results = on_ranks(3, body)
    check(results[:2], (STEPS[0], expected(X[:2, 1]), STEPS[2]))
    check(results[2:], (STEPS[0], np.zeros(1000, np.float32), STEPS[2]))


def test_interleaved_with_numpy_calls() -> None:
    """Check that unnamed calls match within one API, and named calls match across APIs."""
    config = Config(rounding="nearest", algorithm="sra")

    def body(rank: int, comm: Communicator) -> Any:
        if rank == 0:
            request = comm.allreduce_async(X[rank, 1], config=config)
            sums = reduce(comm)(X[rank, 0])
            both = allreduce_q(X[rank, 2], comm, name="both", config=SRA)
        else:
            sums = reduce(comm)(X[rank, 0])
            request = comm.allreduce_async(X[rank, 1], config=config)
            both = comm.allreduce(X[rank, 2], config=config, name="both")
        return [sums, request.wait(), both]

    check(on_ranks(3, body), STEPS[:3])


def test_names_of_a_tree() -> None:
    """Check that the messages of two dtypes have different names, from their first leaves."""
    config = Config(rounding="nearest")
    tree = (normal(0, 2, 900), normal(1, 2, 900, dtype=np.float16))

    def body(rank: int, comm: Communicator) -> Any:
        if rank == 0:
            return allreduce_q((tree[0][0], tree[1][0]), comm, name="t")
        second = comm.allreduce_async(tree[1][1], config=config, name="t/1")
        first = comm.allreduce(tree[0][1], config=config, name="t/0")
        return first, second.wait()

    check(on_ranks(2, body), tuple(expected(x, **AUTO) for x in tree))


def test_threads_with_names() -> None:
    """Dispatch calls with a separate name from each of four threads of a rank."""

    def body(rank: int, comm: Communicator) -> Any:
        results: list[Any] = [None] * 4

        def dispatch(index: int) -> None:
            with jax.default_device(jax.devices()[4 * rank + index]):
                call = jax.jit(lambda v: allreduce_q(v, comm, name=str(index), config=SRA))
                for _ in range(10):
                    results[index] = np.asarray(call(X[rank, index]))

        started = [threading.Thread(target=dispatch, args=(index,)) for index in range(4)]
        for thread in started[:: 1 - 2 * rank]:
            thread.start()
        for thread in started:
            thread.join()
        return results

    check(on_ranks(2, body), [expected(X[:2, row]) for row in range(4)])


# ---- errors --------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Any:
    communicators = Communicator.local(2, timeout=20)
    yield communicators
    for communicator in communicators:
        communicator.close()


@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.complex64])
def test_dtypes(dtype: Any, pair: list[Communicator]) -> None:
    with pytest.raises(TypeError, match=r"allreduce_q: x\['w'\] has dtype .*float32"):
        allreduce_q({"w": np.zeros(3, dtype)}, pair[0])


def test_float64(pair: list[Communicator]) -> None:
    with jax.enable_x64(True), pytest.raises(TypeError, match=r"float64.*cast it to float32"):
        allreduce_q(np.ones(3), pair[0])

    def body(rank: int, comm: Communicator) -> Any:
        with jax.enable_x64(True):
            return reduce(comm)(X[rank, 0])

    check(on_ranks(3, body), STEPS[0])


@pytest.mark.parametrize("knob", ["bits", "bucket_size", "compressor", "rounding"])
def test_traced_knobs(knob: str, pair: list[Communicator]) -> None:
    with pytest.raises(TypeError, match=f"allreduce_q: {knob} must be a static Python value"):
        jax.jit(lambda v: allreduce_q(np.ones(3), pair[0], **{knob: v}))(4)


@pytest.mark.parametrize(
    ("knobs", "error", "words"),
    [
        ({"bits": 9}, ValueError, "bits is 9"),
        ({"bucket_size": 0}, ValueError, "bucket_size is 0"),
        ({"algorithm": "fast"}, ValueError, "algorithm is 'fast'"),
        ({"op": "max"}, ValueError, "op is 'max'; it must be 'sum' or 'avg'"),
        ({"carrier": "xla"}, ValueError, "use carrier='native', or psum_q in a jax.shard_map"),
        ({"residual": [1]}, ValueError, "residual is PyTreeDef([*]), and x is PyTreeDef(*)"),
        ({"name": 3}, TypeError, "name is 3"),
        ({"key": 3}, TypeError, "key is 3, not a PRNG key"),
    ],
    ids=str,
)
def test_knobs_out_of_range(
    knobs: dict[str, Any], error: type[Exception], words: str, pair: list[Communicator]
) -> None:
    with pytest.raises(error, match=re.escape(words)):
        allreduce_q(np.ones(3, np.float32), pair[0], **with_config(**knobs))


@pytest.mark.parametrize("comm", ["world", 0, object()], ids=repr)
def test_invalid_communicators(comm: Any) -> None:
    with pytest.raises(TypeError, match=r"comm is .*cgx_ops\.Communicator, or None"):
        allreduce_q(np.ones(3, np.float32), comm)


def test_devices(pair: list[Communicator]) -> None:
    """Check that several devices in one program raise an error that recommends psum_q."""
    mesh, x = mesh_of((4,), ("d",)), np.ones((4, 100), np.float32)
    with pytest.raises(NotImplementedError, match=r"4 devices.*psum_q\(x, \('d',\)\)"):
        on_mesh(mesh, lambda v: allreduce_q(v, pair[0]))(x)
    with jax.set_mesh(jax.make_mesh((4,), ("d",), (AxisType.Explicit,))):  # noqa: SIM117
        with pytest.raises(NotImplementedError, match=r"explicit mesh of 4 devices.*psum_q"):
            allreduce_q(jnp.asarray(x), pair[0])
    spread = jax.device_put(x, jax.NamedSharding(mesh, P("d")))
    with pytest.raises(ValueError, match=r"allreduce_q \(.*psum_q in jax\.shard_map"):
        jax.jit(lambda v: allreduce_q(v, pair[0]))(spread)
    with pytest.raises(NotImplementedError, match="CPU and CUDA devices, not on tpu"):
        jax.jit(lambda v: allreduce_q(v, pair[0])).trace(x).lower(lowering_platforms=("tpu",))


def test_a_closed_communicator(pair: list[Communicator]) -> None:
    x = jnp.ones(100)
    program = jax.jit(lambda v: allreduce_q(v, pair[0]))
    program.lower(x)
    pair[0].close()
    with pytest.raises(cgx_ops.Closed, match=r"is closed.*Create another"):
        allreduce_q(x, pair[0])
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"NOT_FOUND.*trace the program again"):
        jax.block_until_ready(program(x))


def test_communicator_closed_by_a_late_rank() -> None:
    comms = Communicator.local(2, timeout=0.3)
    with pytest.raises(cgx_ops.DeadlineExceeded):
        comms[0].allreduce(np.ones(100, np.float32))
    with pytest.raises(cgx_ops.Closed, match=r"closed: .*rank 1 has not started.*Create another"):
        allreduce_q(jnp.ones(100), comms[0])
    for comm in comms:
        comm.close()


def error_of(call: Callable[[], Any]) -> str:
    try:
        jax.block_until_ready(call())
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("in_background", [False, True])
def test_mismatched_shapes(in_background: bool) -> None:
    """Check that every rank gets an error, and the program and communicator remain usable.

    XLA runs a small program at dispatch, unless the program waits for an operand. In the latter
    case the error comes later, with JAX's token.
    """

    def body(rank: int, comm: Communicator) -> Any:
        program = jax.jit(reduce(comm))
        late = jax.jit(lambda v, m: v + 0 * (m @ m @ m @ m)[0, 0])
        matrix = jnp.ones((1500, 1500)) if in_background else jnp.ones((1, 1))
        operands = [jnp.ones(numel) for numel in (100, 100 + rank)]
        for operand in operands:
            jax.block_until_ready(late(operand, matrix))
        program(operands[0])
        text = error_of(lambda: program(late(operands[1], matrix)))
        return text, [program(operands[0]) for _ in range(3)]

    for text, later in on_ranks(2, body):
        assert "FAILED_PRECONDITION: allreduce_q 'cgx_ops.jax.allreduce_q' on 'local-" in text
        assert "numel 100 against 101" in text
        assert all(same_bits(sums, np.full(100, 2, np.float32)) for sums in later)


def test_missing_rank() -> None:
    comms = Communicator.local(2, timeout=1)
    text = error_of(lambda: allreduce_q(np.ones(100, np.float32), comms[0], name="lonely"))
    assert "DEADLINE_EXCEEDED: allreduce_q 'lonely'" in text
    assert "rank 1 has not started it" in text
    with pytest.raises(cgx_ops.Closed):
        allreduce_q(np.ones(100, np.float32), comms[0])
    check(on_ranks(2, lambda rank, comm: reduce(comm)(X[rank, 0])), expected(X[:2, 0]))
    for comm in comms:
        comm.close()


def test_threads_without_names(pair: list[Communicator]) -> None:
    """Check that a second thread's unnamed call raises on all ranks while the first one waits.

    The first call fails, too, because the peer may have matched either of the two.
    """
    programs = [jax.jit(reduce(comm)) for comm in pair]
    wanted = expected(X[:2, 0])

    def call(rank: int, row: int, device: int | None = None) -> Values:
        with jax.default_device(jax.devices()[rank if device is None else device]):
            return np.asarray(programs[rank](X[rank, row]))

    def in_background(rank: int, row: int) -> Future[Values]:
        future: Future[Values] = Future()

        def run() -> None:
            try:
                future.set_result(call(rank, row))
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future

    first = in_background(0, 0)
    assert same_bits(call(1, 0), wanted)  # both ranks have compiled
    assert same_bits(first.result(), wanted)
    sent = pair[0].bytes_sent
    waiting = in_background(0, 0)
    while pair[0].bytes_sent == sent:  # the header shows that the call has started
        time.sleep(0.001)
    refused = error_of(lambda: call(0, 1, device=2))
    assert re.search("INVALID_ARGUMENT.*several Python threads", refused)
    assert same_bits(call(1, 0), wanted)
    assert "several Python threads" in error_of(lambda: waiting.result(timeout=60))
    assert "several Python threads" in error_of(lambda: call(1, 1))


# ---- processes -----------------------------------------------------------------------------------


PROGRAM = "run_jax_allreduce.py"
RIGHT = ["values", "different_programs", "two_communicators", "threads_with_names"]
RIGHT += ["same_program_on_all_ranks", "training"]


def on(ranks: int, mark: pytest.MarkDecorator) -> Launch:
    return Launch(ranks, PROGRAM, *RIGHT, env=ENVIRONMENT, timeout=220, marks=[mark])


@rank_checks(
    Launch(2, PROGRAM, "between_ordered_callbacks", env=ENVIRONMENT),
    Launch(2, PROGRAM, "mismatch", "late", env={**ENVIRONMENT, "CGX_TIMEOUT": "3"}),
    on(3, pytest.mark.slow),
    *(on(n, pytest.mark.exhaustive) for n in (1, 2, 4)),
)
def test_processes(check: RankCheck) -> None:
    check.passes()


@pytest.mark.slow
def test_the_persistent_cache(tmp_path: Path) -> None:
    """Check that both ranks load rank 0's program: it does not depend on the process."""
    outputs = mpirun(2, "run_jax_allreduce.py", "cached", tmp_path, env=ENVIRONMENT)
    assert any("misses: 1" in output for output in outputs), outputs
    for output in mpirun(2, "run_jax_allreduce.py", "cached", tmp_path, env=ENVIRONMENT):
        assert "hits: 1, misses: 0" in output
