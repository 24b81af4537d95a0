"""Rank program: JAX's collectives on CUDA.

    run_cuda_jax.py [--on-cpu LIBRARY] CASE...

Under mpirun each process has one device. With --on-cpu there is no GPU: XLA:CPU runs the CUDA
lowerings and handlers, and the core runs on the CPU. LIBRARY is the compiled
tests/cpp/cuda_handlers_on_cpu.cc, in LD_PRELOAD. A single process then has four devices.
"""

import ctypes
import functools
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import checks
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir
from support.jax_cases import (
    PROCESSES,
    SRA,
    exchange_expected,
    expected,
    gather_expected,
    independent,
    mesh_of,
    normal,
    on_mesh,
    order_expected,
    order_inputs,
    same_bits,
    scatter_expected,
    seed_of,
    use_cpu_devices,
)

import cgx_ops.jax
from cgx_ops import Config, Rules
from cgx_ops.jax import all_gather_q, all_to_all_q, allreduce_q, pmean_q, psum_q, psum_scatter_q
from cgx_ops.jax._src.collectives import overlap, primitive
from cgx_ops.jax._src.runtime import handlers

ON_CPU = sys.argv[1] == "--on-cpu"
CASES = sys.argv[3 if ON_CPU else 1 :]
LIBRARY: Any = ctypes.CDLL(sys.argv[2]) if ON_CPU else None
# The errors that JAX raises at a launch; the second one if the program has run before.
LAUNCH_ERRORS = (jax.errors.JaxRuntimeError, ValueError)
# Deadline of the case "late". It also covers everything before, such as the start of the GPU.
LATE_S = 20
RANKS = 4 if ON_CPU and PROCESSES == 1 else PROCESSES

# ---- the handlers on XLA:CPU ---------------------------------------------------------------------


def address(capsule: Any) -> ctypes.c_void_p:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return ctypes.c_void_p(get(capsule, None))


def register_for_cpu() -> tuple[str, ...]:
    """Do the work of _register_cuda with XLA:CPU in place of the GPU."""
    binding = handlers._binding()
    # XLA:CPU passes the device id as the DeviceOrdinal.
    binding.set_cuda_devices({device.id: device.id for device in jax.local_devices()})
    jax.ffi.register_ffi_type("cuda_site_on_cpu", binding.cuda_site_type())
    table = binding.cuda_handlers()
    stages = table["cgx_psum_q"]  # all collectives share this handler
    LIBRARY.set_handlers(address(stages["execute"]), address(table["cgx_allreduce_q"]))
    stages["execute"] = jax.ffi.pycapsule(LIBRARY.collective_execute)
    table["cgx_allreduce_q"] = jax.ffi.pycapsule(LIBRARY.allreduce_q)
    return handlers._register(table, "cpu")


def use_cuda_handlers() -> None:
    handlers._REGISTER["cuda"] = register_for_cpu
    lower = functools.partial(primitive._lower, platform="cuda")
    mlir.register_lowering(primitive.collective_q_p, lower, platform="cpu", cacheable=False)
    mlir.register_lowering(overlap.gate_p, mlir.lower_fun(overlap.pass_on), platform="cpu")


# ---- cases with and without a GPU ----------------------------------------------------------------


def on_ranks(body: Callable[..., Any], *operands: Any, devices: Any = None) -> list[Any]:
    """Return body's results on this process's devices, each with its rank."""
    mesh = mesh_of((RANKS,), ("d",), devices)
    step = on_mesh(mesh, body)
    results = step.jitted(*step.spread(operands))
    ranks = [device.id for device in mesh.devices.flat]
    return [
        (ranks.index(shard.device.id), np.asarray(shard.data)[0])
        for shard in results.addressable_shards
    ]


def check(results: list[Any], want: Sequence[Any]) -> None:
    assert results
    for rank, result in results:
        assert same_bits(result, want[rank]), rank


def values() -> None:
    for dtype in (np.float32, np.float16, jnp.bfloat16):
        x = normal(1, RANKS, 3000, dtype=dtype)
        check(
            on_ranks(lambda v: psum_q(v, "d", config=SRA), x),
            [expected(x)] * RANKS,
        )
        got = on_ranks(lambda v: pmean_q(v, "d", bits=2, bucket_size=64, config=SRA), x)
        check(got, [expected(x, op="avg", bits=2, bucket_size=64)] * RANKS)


def keys() -> None:
    """Sum two leaves, whose seeds are concatenated; each rank has its own key."""
    x, y = normal(2, RANKS, 3000), normal(3, RANKS, 700)
    own = [jax.random.key(rank) for rank in range(RANKS)]
    raw = np.stack([np.asarray(jax.random.key_data(key)) for key in own])

    def body(v: jax.Array, w: jax.Array, key: jax.Array) -> jax.Array:
        sums = psum_q([v, w], "d", key=jax.random.wrap_key_data(key), config=SRA)
        return jnp.concatenate(sums)

    want = [
        expected(rows, seeds=[seed_of(key, leaf) for key in own])
        for leaf, rows in enumerate((x, y))
    ]
    check(on_ranks(body, x, y, raw), [np.concatenate(want)] * RANKS)


def halves() -> None:
    x, y = normal(4, RANKS, RANKS, 600), normal(5, RANKS, 600)
    key = jax.random.key(6)
    seeds = [seed_of(key, call="reduce_scatter over d: ")] * RANKS
    blocks = scatter_expected(x, seeds=seeds, rounding="stochastic")
    check(on_ranks(lambda v: psum_scatter_q(v, "d", key=key), x), blocks)
    seeds = [seed_of(key, call="all_gather over d: ")] * RANKS
    gathered = gather_expected(y, seeds=seeds, rounding="stochastic")
    check(on_ranks(lambda v: all_gather_q(v, "d", key=key), y), [gathered] * RANKS)


def exchanges() -> None:
    x, key = normal(18, RANKS, RANKS, 600), jax.random.key(19)
    seeds = [seed_of(key, call="all_to_all over d: ")] * RANKS
    want = exchange_expected(x, seeds=seeds, rounding="stochastic")
    check(on_ranks(lambda v: all_to_all_q(v, "d", 0, 0, key=key), x), list(want))


def examples() -> None:
    """Test vmap with a seed for each example, in a loop."""
    x = normal(7, RANKS, 2, 3, 700)
    key = jax.random.key(8)
    keys = jax.random.split(key, 3)

    def body(v: jax.Array) -> jax.Array:
        def step(_: int, u: jax.Array) -> tuple[int, jax.Array]:
            reduced = jax.vmap(lambda w, k: psum_q(w, "d", key=k, config=SRA))(u, keys)
            return 0, reduced

        return lax.scan(step, 0, v)[1]

    want = np.stack(
        [
            np.stack([expected(x[:, i, j], seeds=[seed_of(keys[j])] * RANKS) for j in range(3)])
            for i in range(2)
        ]
    )
    check(on_ranks(body, x), [want] * RANKS)


def residuals() -> None:
    """Check that the residual is added to the input, and the new residual is returned."""
    x, old = normal(9, RANKS, 3000), normal(13, RANKS, 3000)
    new = old.copy()
    sums = expected(x, residuals=list(new))

    def body(v: jax.Array, e: jax.Array) -> jax.Array:
        return jnp.stack(psum_q(v, "d", bits=4, config=SRA, residual=e))

    check(on_ranks(body, x, old), [np.stack([sums, row]) for row in new])


def permuted() -> None:
    """Check that ranks follow the order of the mesh, not that of the devices."""
    x = normal(10, RANKS, RANKS, 600)
    devices = list(reversed(jax.devices()))[:RANKS]
    blocks = scatter_expected(x)
    check(on_ranks(lambda v: psum_scatter_q(v, "d"), x, devices=devices), blocks)


def in_order() -> None:
    """Test allreduce_q among processes: two calls in a program, and several launches."""
    x = normal(11, RANKS, 2, 3000)
    key = jax.random.key(12)
    mine = x[jax.process_index()]

    @jax.jit
    def step(v: jax.Array) -> jax.Array:
        return jnp.stack([allreduce_q(row, key=key, config=SRA) for row in v])

    for _ in range(2):
        for i, row in enumerate(np.asarray(step(mine))):
            seed = seed_of(key, call="allreduce_q on world: ")
            assert same_bits(row, expected(x[:, i], seeds=[seed] * RANKS))


def failure() -> None:
    """Check that an error of one device fails all immediately; a new communicator works."""
    x = normal(13, RANKS, 3000)
    step = on_mesh(mesh_of((RANKS,), ("d",)), lambda v: psum_q(v, "d", config=SRA))
    for times in (1, RANKS):
        LIBRARY.fail_next(times)
        try:
            jax.block_until_ready(step.jitted(*step.spread([x])))
        except LAUNCH_ERRORS as error:
            assert "psum_q 'jit_on_device/0:" in str(error), error
        else:
            raise AssertionError("nothing was raised")
        LIBRARY.fail_next(0)
        result = step(x)
        assert all(same_bits(row, expected(x)) for row in result)


def sizes() -> None:
    for size in (0, 1, 17, 511, 512, 513, 2**20 + 7):
        x = normal(size, RANKS, size)
        got = on_ranks(lambda v: psum_q(v, "d", config=SRA), x)
        check(got, [expected(x) if size else x[0]] * RANKS)


def bits_and_dtypes() -> None:
    for dtype, bits in itertools.product(
        (np.float32, np.float16, jnp.bfloat16), (*range(1, 9), 32)
    ):
        x = normal(bits, RANKS, 3000, dtype=dtype)
        for algorithm in ("sra", "one_shot"):
            knobs: dict[str, Any] = {"bits": bits, "algorithm": algorithm, "op": "avg"}
            check(on_ranks(mean_of(bits, algorithm), x), [expected(x, **knobs)] * RANKS)


def mean_of(bits: int, algorithm: Any) -> Callable[[jax.Array], jax.Array]:
    return lambda v: pmean_q(v, "d", bits=bits, config=Config(algorithm=algorithm))


def trees() -> None:
    """Test one message per dtype, rules, and small leaves, which are exact."""
    x, y, bias = normal(14, RANKS, 700), normal(15, RANKS, 600), normal(16, RANKS, 5)

    def body(v: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
        tree = {"v": v, "w": w, "half": v.astype(jnp.bfloat16), "bias": b}
        sums = psum_q(tree, "d", rules=Rules([("w", 8)], exact_vectors=False), config=SRA)
        return jnp.concatenate([sums[name].astype(jnp.float32) for name in tree])

    want = [
        expected(x),
        expected(y, bits=8),
        expected(x.astype(jnp.bfloat16)).astype(np.float32),
        expected(bias, bits=32),
    ]
    check(on_ranks(body, x, y, bias), [np.concatenate(want)] * RANKS)


def gradients() -> None:
    x = normal(17, RANKS, 3000)

    def body(v: jax.Array) -> jax.Array:
        gradient = jax.grad(lambda w: (w * w).sum() / 2)(v)  # w
        return psum_q(gradient, "d", config=SRA)

    check(on_ranks(body, x), [expected(x)] * RANKS)


def two_programs() -> None:
    """Alternate between two programs without waiting for results."""
    mesh, inputs = mesh_of((RANKS,), ("d",)), [normal(18, RANKS, 3000), normal(19, RANKS, 40000)]
    step = on_mesh(mesh, lambda v: psum_q(v, "d", config=SRA))
    operands = [step.spread([x]) for x in inputs]
    results = [step.jitted(*operands[i % 2]) for i in range(10)]
    for i, result in enumerate(results):
        got = np.asarray(result.addressable_shards[0].data)[0]
        assert same_bits(got, expected(inputs[i % 2])), i


# ---- cases that need a GPU -----------------------------------------------------------------------


def independent_calls() -> None:
    x = order_inputs(RANKS)
    check(on_ranks(independent, x), [order_expected(x)] * RANKS)


def alone() -> None:
    """Test a group of one rank."""
    x = normal(20, 1, 3000)
    check(on_ranks(lambda v: psum_q(v, "d"), x), list(x))
    assert same_bits(allreduce_q(x[0]), x[0])


def raises_soon(step: Callable[[], jax.Array]) -> str:
    """Return the error of the call after the failed one, whose results are NaN."""
    for _ in range(3):
        try:
            values = np.asarray(step().addressable_shards[0].data)
        except LAUNCH_ERRORS as error:
            return str(error)
        assert np.isnan(values).all()
    raise AssertionError("nothing was raised")


def mismatch() -> None:
    x = normal(21, RANKS, 3000)
    bits = 4 + jax.process_index()
    step = on_mesh(mesh_of((RANKS,), ("d",)), lambda v: psum_q(v, "d", bits=bits, name="clash"))
    error = raises_soon(lambda: step.jitted(*step.spread([x])))
    assert re.search(r"psum_q 'clash#0' on rank \d of 2.*bits [45] against [45]", error), error


def late() -> None:
    x = normal(22, RANKS, 3000)
    step = on_mesh(mesh_of((RANKS,), ("d",)), lambda v: psum_q(v, "d", config=SRA))
    operands = step.spread([x])
    first = step.jitted(*operands)
    assert same_bits(np.asarray(first.addressable_shards[0].data)[0], expected(x))
    if jax.process_index() == 0:
        error = raises_soon(lambda: step.jitted(*operands))
        assert "rank 1" in error, error
    else:
        time.sleep(3 * LATE_S)


CHECKS = [
    values,
    keys,
    halves,
    exchanges,
    examples,
    residuals,
    permuted,
    in_order,
    failure,
    sizes,
    bits_and_dtypes,
    trees,
    gradients,
    two_programs,
    independent_calls,
    alone,
    mismatch,
    late,
]


def main() -> None:
    if "late" in CASES:
        os.environ["CGX_TIMEOUT"] = str(LATE_S)
    # XLA's processes would otherwise wait for each other's autotuning of other programs
    if "mismatch" in CASES:
        os.environ["XLA_FLAGS"] = "--xla_gpu_shard_autotuning=false"
    if ON_CPU:
        use_cpu_devices(RANKS // PROCESSES)
    else:
        jax.config.update("jax_platforms", "cuda")
    cgx_ops.jax.initialize()
    if ON_CPU:
        use_cuda_handlers()
    assert len(jax.devices()) >= RANKS
    checks.run(checks.named(*CHECKS), CASES)


main()
