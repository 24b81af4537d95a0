"""Rank program: allreduce_q among processes, each of which has its own JAX and one device.

    run_jax_allreduce.py CHECK... | cached FOLDER

A check of an error prints the error.
"""

import functools
import hashlib
import itertools
import sys
import threading
import time
from collections import Counter
from typing import Any

import checks
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from support.jax_cases import SRA, expected, normal, same_bits, seed_of

import cgx_ops
from cgx_ops import Config
from cgx_ops.jax import allreduce_q

WORLD = cgx_ops.init()
RANK, SIZE = WORLD.rank, WORLD.size
X = normal(5, SIZE, 4, 3000)
AUTO: dict[str, Any] = {"algorithm": "auto"}  # also used for the oracle
reduce = functools.partial(allreduce_q, config=SRA)


def same_on_all_ranks(data: bytes) -> bool:
    digest = np.frombuffer(hashlib.sha256(data).digest(), np.uint8).astype(np.float32)
    everybody = WORLD.all_gather(digest, Config(bits=32)).reshape(SIZE, -1)
    return bool((everybody == digest).all())


def values() -> None:
    """Test all dtypes and sizes; large ones without noise, because the oracle is slow."""
    sizes = (0, 1, 17, 511, 512, 513)
    for dtype, size in itertools.product((jnp.float32, jnp.float16, jnp.bfloat16), sizes):
        x, key = normal(size, SIZE, size, dtype=dtype), jax.random.key(size)
        seed = seed_of(key, call="allreduce_q on world: ")
        want = expected(x, seeds=[seed] * SIZE, **AUTO)
        got = jax.jit(lambda v, k: allreduce_q(v, key=k))(x[RANK], key)
        assert same_bits(got, want), (dtype, size)
        if dtype == jnp.float32:
            assert same_bits(allreduce_q(x[RANK], key=key), want), size
    large = normal(1, SIZE, (1 << 20) + 7)
    assert same_bits(jax.jit(reduce)(large[RANK]), expected(large))


def different_programs() -> None:
    """Check that the same calls match from different programs: a loop, Python, two in a launch."""
    mine = jnp.asarray(X[RANK])
    if RANK == 0:
        rows = jax.jit(lambda x: lax.map(reduce, x))(mine)
    elif RANK == 1:
        rows = jnp.stack([reduce(row) for row in mine])
    else:
        pair = jax.jit(lambda a, b: jnp.stack([reduce(a), reduce(b)]))
        rows = jnp.concatenate([pair(mine[0], mine[1]), pair(mine[2], mine[3])])
    assert same_bits(rows, np.stack([expected(X[:, row]) for row in range(4)]))


def two_communicators() -> None:
    """Reduce over halves of the world and over all of it in one program."""
    half = WORLD.split(RANK % 2, name="halves")
    assert half is not None
    program = jax.jit(lambda x: (reduce(x[0]), reduce(x[1], half), reduce(x[2])))
    results = [program(X[RANK]) for _ in range(20)][-1]
    wanted = (expected(X[:, 0]), expected(X[RANK % 2 :: 2, 1]), expected(X[:, 2]))
    assert all(map(same_bits, results, wanted))


def threads_with_names() -> None:
    """Dispatch from threads in a different order on every rank, with background work."""
    x = normal(6, SIZE, 4, 1 << 18)
    results: list[Any] = [None] * 4

    def dispatch(index: int) -> None:
        call = jax.jit(lambda v: jnp.negative(reduce(-v, name=f"thread {index}")))
        for _ in range(10):
            results[index] = call(x[RANK, index])

    started = [threading.Thread(target=dispatch, args=(index,)) for index in range(4)]
    for thread in started[RANK:] + started[:RANK]:
        thread.start()
    for thread in started:
        thread.join()
    for index, result in enumerate(results):
        assert same_bits(result, -expected(-x[:, index])), index


def between_ordered_callbacks() -> None:
    """Run between other ordered callbacks, in straight-line code and in a loop."""
    seen: list[float] = []

    def see(x: jax.Array) -> None:
        io_callback(lambda value: seen.append(float(value)), None, x[0], ordered=True)

    def body(rows: jax.Array) -> Any:
        def step(_: None, row: jax.Array) -> tuple[None, jax.Array]:
            total = reduce(row)
            see(total)
            return None, total

        see(rows[0])
        return lax.scan(step, None, rows)[1]

    rows = jax.block_until_ready(jax.jit(body)(X[RANK]))
    jax.effects_barrier()
    wanted = np.stack([expected(X[:, row]) for row in range(4)])
    assert same_bits(rows, wanted)
    assert seen == [X[RANK, 0, 0], *wanted[:, 0]]


def same_program_on_all_ranks() -> None:
    """Check that the lowered program contains nothing specific to this process."""
    text = jax.jit(lambda v: reduce(v) + reduce(v, bits=8)).lower(X[RANK]).as_text()
    assert text.count("@cgx_allreduce_q") == (2 if SIZE > 1 else 0)
    assert same_on_all_ranks(text.encode())


def training() -> None:
    """Check that weights stay bitwise equal over steps, with numpy collectives in between."""
    truth = normal(6, 64, 8)

    def loss(weights: jax.Array, batch: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda b: b @ weights)
        return jnp.square(layer(batch) - batch @ truth).mean()

    @jax.jit
    def epoch(weights: jax.Array, batches: jax.Array, key: jax.Array) -> tuple[Any, Any]:
        def step(weights: jax.Array, operand: tuple[jax.Array, jax.Array]) -> tuple[Any, Any]:
            batch, key = operand
            value, gradient = jax.value_and_grad(loss)(weights, batch)
            return weights - allreduce_q(gradient, op="avg", key=key), value

        return lax.scan(step, weights, (batches, jax.random.split(key, len(batches))))

    weights, losses = jnp.zeros((64, 8)), jnp.zeros(0)
    for number in range(5):
        batches = normal(100 + SIZE * number + RANK, 20, 32, 64)
        weights, losses = epoch(weights, batches, jax.random.key(number))
        WORLD.allreduce(np.ones(100, np.float32))
    assert same_on_all_ranks(np.asarray(weights).tobytes())
    assert float(losses[-1]) < 1e-3, losses  # it began at 64


def error_of(call: Any, *args: Any) -> str:
    """Return and print the text of the JaxRuntimeError that `call` raises."""
    try:
        jax.block_until_ready(call(*args))
    except jax.errors.JaxRuntimeError as error:
        print(error, flush=True)
        return str(error)
    raise AssertionError("no error")


def mismatch() -> None:
    """Check that both ranks report mismatched bits and continue."""
    text = error_of(jax.jit(lambda v: reduce(v, bits=4 + RANK)), X[RANK])
    assert "FAILED_PRECONDITION" in text
    assert "bits" in text
    assert same_bits(jax.jit(reduce)(X[RANK]), expected(X))


def late() -> None:
    """Check that a rank gets an error within CGX_TIMEOUT (3 s here) if its peer never calls."""
    if RANK == 0:
        start = time.monotonic()
        text = error_of(jax.jit(reduce), X[RANK])
        assert "DEADLINE_EXCEEDED" in text
        assert "rank 1" in text
        assert time.monotonic() - start < 10
        # This process continues alone.
        assert float(jnp.arange(4.0).sum()) == 6
    else:
        time.sleep(6)


def cached() -> None:
    events: Counter[str] = Counter()
    jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
    for option, value in (
        ("jax_compilation_cache_dir", sys.argv[2]),
        ("jax_persistent_cache_min_compile_time_secs", 0),
        ("jax_persistent_cache_min_entry_size_bytes", -1),
    ):
        jax.config.update(option, value)
    assert same_bits(jax.jit(reduce)(X[RANK]), expected(X))
    hits, misses = (events[f"/jax/compilation_cache/cache_{what}"] for what in ("hits", "misses"))
    print(f"hits: {hits}, misses: {misses}", flush=True)


jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)  # lets XLA run four threads' programs concurrently
if sys.argv[1] == "cached":
    cached()
else:
    checks.run(
        checks.named(
            values, different_programs, two_communicators, threads_with_names,
            between_ordered_callbacks, same_program_on_all_ranks, training, mismatch, late,
        )
    )  # fmt: skip
