"""allreduce_q: values to the bit, order, transformations, errors. Ranks are threads or processes.

Threads have a device each, and a communicator of their own; ranks/run_jax_allreduce.py has the
processes.
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
from jax import export, lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax_cases import expected, mesh_of, normal, on_mesh, same_bits, seed_of, use_cpu_devices
from launch import mpirun, threads

import cgx_ops
from cgx_ops import Communicator, Config
from cgx_ops.jax import allreduce_q

use_cpu_devices(8)

pytestmark = pytest.mark.timeout(120)

Values = npt.NDArray[Any]
DTYPES = (np.float32, np.float16, jnp.bfloat16)
AUTO: dict[str, Any] = {"algorithm": "auto"}  # the oracle's too
SIZES = (0, 1, 17, 511, 512, 513, 5003)
ENVIRONMENT = {
    "XLA_FLAGS": "",
    "JAX_PLATFORMS": "cpu",
    "OMP_NUM_THREADS": "1",
    "CGX_TIMEOUT": "30",  # where a defect hangs
}


def on_ranks(
    n: int, body: Callable[[int, Communicator], Any], name: str | None = None
) -> list[Any]:
    """Call body(rank, communicator) on threads with a device each; return what they return."""

    def run(rank: int, comm: Communicator) -> Any:
        with jax.default_device(jax.devices()[rank]):
            return jax.block_until_ready(body(rank, comm))

    return threads(n, run, name=name)


def seed_on(rank: int, key: jax.Array, leaf: int = 0) -> int:
    """Return a rank's seed of one leaf on the communicator "noise"."""
    return seed_of(key, leaf, call=f"allreduce_q on noise/{rank}: ")


def check(results: list[Any], wanted: Any) -> None:
    """Require the wanted tree, to the bit, of every rank."""
    for rank, result in enumerate(results):
        result = jax.tree.map(np.asarray, result)
        assert jax.tree.structure(result) == jax.tree.structure(wanted)
        for got, want in zip(jax.tree.leaves(result), jax.tree.leaves(wanted), strict=True):
            assert same_bits(got, want), rank


# ---- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_sizes_and_dtypes(ranks: int, dtype: Any, where: Any) -> None:
    inputs = [normal(size, ranks, size, dtype=dtype) for size in SIZES]
    results = on_ranks(
        ranks,
        lambda rank, comm: [where(lambda v: allreduce_q(v, comm))(x[rank]) for x in inputs],
    )
    check(results, [expected(x, **AUTO) for x in inputs])


@pytest.mark.parametrize(
    "knobs",
    [
        {"bits": 2, "bucket_size": 64},
        {"bits": 32},
        {"op": "avg"},
        {"gather_bits": 8},
        {"skip_incomplete_buckets": True},
        {"minimal_size": 4000},
        {"algorithm": "one_shot"},
        {"algorithm": "ring"},
    ],
    ids=str,
)
def test_knobs(knobs: dict[str, Any]) -> None:
    x = normal(1, 3, 3000)
    knobs = {"algorithm": "sra", **knobs}
    results = on_ranks(3, lambda rank, comm: allreduce_q(x[rank], comm, **knobs))
    check(results, expected(x, **knobs))


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_keys(make: Callable[[int], jax.Array]) -> None:
    """Ranks may have keys of their own; the key may be traced."""
    x = normal(2, 3, 3000)
    keys = [make(7 + rank) for rank in range(3)]

    def body(rank: int, comm: Communicator) -> Any:
        return jax.jit(lambda v, k: allreduce_q(v, comm, key=k, algorithm="sra"))(
            x[rank], keys[rank]
        )

    seeds = [seed_on(rank, key) for rank, key in enumerate(keys)]
    check(on_ranks(3, body, "noise"), expected(x, seeds=seeds))


def test_a_tree_is_one_message_for_each_dtype() -> None:
    shapes = {"a": ((3, 700), np.float32), "b": ((513,), np.float16), "c": ((), np.float32)}
    shapes["d"] = ((40, 1, 20), np.float32)
    trees = {
        name: normal(index, 2, *shape, dtype=dtype)
        for index, (name, (shape, dtype)) in enumerate(shapes.items())
    }
    key = jax.random.key(3)

    def body(rank: int, comm: Communicator) -> Any:
        mine = {name: rows[rank] for name, rows in trees.items()}
        sums = jax.block_until_ready(allreduce_q(mine, comm, key=key))
        return sums, comm.collectives

    for sums, collectives in on_ranks(2, body, "noise"):
        assert collectives == 2
        for leaf, (name, rows) in enumerate(trees.items()):
            seeds = [seed_on(rank, key, leaf) for rank in range(2)]
            assert same_bits(sums[name], expected(rows, seeds=seeds, **AUTO)), name


def test_one_rank_alone() -> None:
    x = {"a": normal(0, 100), "b": 1.5}
    result = allreduce_q(x, op="avg")
    assert same_bits(result["a"], x["a"])
    assert same_bits(result["b"], np.float32(1.5))
    assert not jax.make_jaxpr(allreduce_q)(x).effects


def test_no_leaves() -> None:
    assert on_ranks(2, lambda _, comm: (allreduce_q({}, comm), comm.collectives)) == [({}, 0)] * 2


# ---- transformations ---------------------------------------------------------------------------

X = normal(3, 3, 4, 1000)
STEPS = [expected(X[:, step]) for step in range(4)]
TWICE = [expected(np.stack([sums] * 3)) for sums in STEPS]


def reduce(comm: Communicator) -> Callable[[jax.Array], jax.Array]:
    return lambda v: allreduce_q(v, comm, algorithm="sra")


def inner_jit(f: Any, x: Any) -> Any:
    inner = jax.jit(f)
    return [inner(row) for row in x]


def while_condition(f: Any, x: Any) -> Any:
    """The condition reduces too; it holds twice."""
    wanted = lambda state: (f(state[1])[0] != 0) & (state[0] < 2)  # noqa: E731
    return lax.while_loop(wanted, lambda state: (state[0] + 1, state[1]), (0, x[0]))[0]


def either_branch(f: Any, x: Any) -> Any:
    branch = lambda p, v: lax.cond(p, f, lambda v: f(f(v)), v)  # noqa: E731
    return branch(True, x[0]), branch(False, x[1])


def twice_while(f: Any, x: Any) -> Any:
    return lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, f(s[1])), (0, x[0]))[1]


def with_custom_vjp(f: Any, x: Any) -> Any:
    """Values and gradients are compressed: the rule is the user's."""
    function = jax.custom_vjp(f)
    function.defvjp(lambda v: (f(v), None), lambda _, ct: (f(ct),), optimize_remat=True)
    return function(x[0]), jax.vjp(function, x[1])[1](x[2])[0]


TRANSFORMED: dict[str, tuple[Callable[[Any, Any], Any], Any]] = {
    "calls": (lambda f, x: [f(row) for row in x], STEPS),
    "inner_jit": (inner_jit, STEPS),
    "scan": (lambda f, x: lax.scan(lambda c, v: (c, f(v)), 0, x)[1], np.stack(STEPS)),
    "scan_unrolled": (
        lambda f, x: lax.scan(lambda c, v: (c, f(v)), 0, x, unroll=2)[1],
        np.stack(STEPS),
    ),
    "map": (lambda f, x: lax.map(f, x), np.stack(STEPS)),
    "while": (twice_while, TWICE[0]),
    "while_condition": (while_condition, np.int32(2)),
    "cond": (either_branch, (STEPS[0], TWICE[1])),
    "vmap": (lambda f, x: jax.vmap(f)(x), np.stack(STEPS)),
    "vmap_axes": (lambda f, x: jax.vmap(f, 1, 1)(x.T), np.stack(STEPS).T),
    "vmap_twice": (
        lambda f, x: jax.vmap(jax.vmap(f))(x.reshape(2, 2, 1000)),
        np.stack(STEPS).reshape(2, 2, 1000),
    ),
    "vmap_of_none": (lambda f, x: jax.vmap(f)(x[:0]), np.zeros((0, 1000), np.float32)),
    "vmap_unbatched": (lambda f, x: jax.vmap(lambda _: f(x[0]), out_axes=None)(x), STEPS[0]),
    "vmap_of_scan": (
        lambda f, x: jax.vmap(lambda v: lax.scan(lambda c, u: (c, f(u)), 0, v)[1])(x[:, None]),
        np.stack(STEPS)[:, None],
    ),
    "custom_vjp": (with_custom_vjp, (STEPS[0], STEPS[2])),
    "remat": (lambda f, x: jax.checkpoint(f)(x[0]), STEPS[0]),
    "donated": (lambda f, x: jax.jit(f, donate_argnums=0).lower(x[0]).compile()(x[0]), STEPS[0]),
    "eval_shape": (
        lambda f, x: jnp.zeros_like(jax.eval_shape(f, x[0])),
        np.zeros(1000, np.float32),
    ),
}


@pytest.mark.parametrize("where", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformations(name: str, where: Any) -> None:
    transform, wanted = TRANSFORMED[name]
    if name == "donated" and where is jax.jit:
        where = lambda f: f  # noqa: E731  (compiled programs do not nest)

    def body(rank: int, comm: Communicator) -> Any:
        return where(lambda x: transform(reduce(comm), x))(jnp.asarray(X[rank]))

    results = on_ranks(3, body)
    check(results, wanted)


def test_examples_have_their_own_keys() -> None:
    keys = jax.random.split(jax.random.key(5), 4)

    def body(rank: int, comm: Communicator) -> Any:
        noisy = lambda v, k: allreduce_q(v, comm, key=k, algorithm="sra")  # noqa: E731
        return jax.vmap(noisy)(X[rank], keys), jax.vmap(noisy, (None, 0))(X[rank, 0], keys)

    seeds = [[seed_on(rank, key) for rank in range(3)] for key in keys]
    wanted = [expected(X[:, row], seeds=seeds[row]) for row in range(4)]
    repeated = [expected(X[:, 0], seeds=seeds[row]) for row in range(4)]
    check(on_ranks(3, body, "noise"), (np.stack(wanted), np.stack(repeated)))


@pytest.mark.parametrize("check_vma", [False, True])
def test_a_mesh_of_one_device(check_vma: bool) -> None:
    def body(rank: int, comm: Communicator) -> Any:
        mesh = mesh_of((1,), ("d",), [jax.devices()[rank]])
        return on_mesh(mesh, reduce(comm), check_vma)(X[rank, :1])[0]

    check(on_ranks(3, body), STEPS[0])


def test_export() -> None:
    safe = [export.DisabledSafetyCheck.custom_call("cgx_allreduce_q")]

    def body(rank: int, comm: Communicator) -> Any:
        exported = export.export(jax.jit(reduce(comm)), disabled_checks=safe)(X[rank, 0])
        return jax.jit(export.deserialize(exported.serialize()).call)(X[rank, 0])

    check(on_ranks(3, body), STEPS[0])


# ---- derivatives -------------------------------------------------------------------------------

EXACT = expected(X[:, 0], bits=32)


@pytest.mark.parametrize("where", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_derivatives_are_those_of_exact_sums(where: Any) -> None:
    """Each rank weighs the sum with its own row: the gradient is the sum of the rows."""

    def body(rank: int, comm: Communicator) -> Any:
        x, f = jnp.asarray(X[rank, 0]), reduce(comm)
        weighed = lambda v: jnp.vdot(f(v), x)  # noqa: E731
        looped = lambda v: lax.scan(lambda c, u: (c + jnp.vdot(f(u), x), None), 0.0, v[None])[0]  # noqa: E731
        return {
            "jvp": where(lambda v: jax.jvp(f, (v,), (v,)))(x),
            "linearize": where(lambda v: jax.linearize(f, v)[1](v))(x),
            "transpose": where(lambda v: jax.linear_transpose(f, v)(v))(x),
            "grad": where(jax.grad(weighed))(x),
            "grad of scan": where(jax.grad(looped))(x),
            "vmap of grad": where(jax.vmap(jax.grad(weighed)))(x[None]),
            "grad of vmap": where(jax.grad(lambda v: jnp.vdot(jax.vmap(f)(v[None]), x)))(x),
        }

    wanted = {
        "jvp": (STEPS[0], EXACT),
        "linearize": EXACT,
        "transpose": (EXACT,),
        "grad": EXACT,
        "grad of scan": EXACT,
        "vmap of grad": EXACT[None],
        "grad of vmap": EXACT,
    }
    check(on_ranks(3, body), wanted)


def test_tangents_of_one_leaf() -> None:
    """Each rank pushes another leaf: the others' tangents are zeros, and travel."""

    def body(rank: int, comm: Communicator) -> Any:
        x = list(jnp.asarray(X[rank]))
        f = lambda v: allreduce_q([*x[:rank], v, *x[rank + 1 :]], comm)  # noqa: E731
        return jax.jvp(f, (x[rank],), (x[3],))[1]

    check(on_ranks(3, body), [*X[:, 3], np.zeros(1000, np.float32)])


def test_averages_have_averaged_derivatives() -> None:
    def body(rank: int, comm: Communicator) -> Any:
        loss = lambda v: jnp.vdot(allreduce_q(v, comm, op="avg"), X[rank, 0])  # noqa: E731
        return jax.grad(loss)(X[rank, 0])

    check(on_ranks(3, body), expected(X[:, 0], bits=32, op="avg"))


def test_second_derivatives() -> None:
    """Of |sum|^2: a sum of sums, all exact, and of the same values on all ranks."""

    def body(rank: int, comm: Communicator) -> Any:
        norm = lambda v: jnp.square(allreduce_q(v, comm, bits=32)).sum()  # noqa: E731
        v = jnp.asarray(X[rank, 0])
        return jax.jvp(jax.grad(norm), (v,), (v,))[1]

    check(on_ranks(3, body), expected(np.stack([2 * EXACT] * 3), bits=32))


@pytest.mark.parametrize("policy", [None, "nothing_saveable", "dots_saveable"])
def test_remat_communicates_nothing_twice(policy: str | None) -> None:
    saved = getattr(jax.checkpoint_policies, policy) if policy else None

    def body(rank: int, comm: Communicator) -> Any:
        f = jax.checkpoint(lambda v: jnp.square(reduce(comm)(v)).sum(), policy=saved)
        gradient = jax.block_until_ready(jax.jit(jax.grad(f))(X[rank, 0]))
        return gradient, comm.collectives

    wanted = expected(np.stack([2 * STEPS[0]] * 3), bits=32)
    for gradient, collectives in on_ranks(3, body):
        assert same_bits(gradient, wanted)
        assert collectives == 2  # the values; the cotangents


def test_ranks_whose_results_are_not_used() -> None:
    """Rank 0's loss looks at one leaf, rank 1's at the other: zeros travel, and nobody waits."""

    def body(rank: int, comm: Communicator) -> Any:
        def loss(x: dict[str, jax.Array]) -> jax.Array:
            sums = allreduce_q(x, comm)
            return jnp.vdot(sums["ab"[rank]], X[rank, 0])

        return jax.jit(jax.grad(loss))({"a": X[rank, 1], "b": X[rank, 2]})

    check(on_ranks(2, body), {"a": X[0, 0], "b": X[1, 0]})


# ---- order -------------------------------------------------------------------------------------


def test_independent_calls_keep_their_order() -> None:
    """No data connects them, and no two are alike: calls that met others would fail."""
    inputs = [normal(size, 3, size) for size in range(600, 664)]

    def body(rank: int, comm: Communicator) -> Any:
        mine = [x[rank] for x in inputs]
        program = jax.jit(lambda xs: [reduce(comm)(x) for x in reversed(xs)])
        return [program(mine) for _ in range(5)][-1]

    check(on_ranks(3, body), [expected(x) for x in reversed(inputs)])


def test_ranks_that_run_different_programs() -> None:
    """A loop, calls from Python, and launches of two calls meet, and a rank compiles more."""

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
    """One program reduces over all ranks, over a pair, and over all again."""

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


def test_among_calls_from_python() -> None:
    """Calls without a name meet their own kind, whichever is first; a name crosses the border."""
    config = Config(rounding="nearest", algorithm="sra")

    def body(rank: int, comm: Communicator) -> Any:
        if rank == 0:
            request = comm.allreduce_async(X[rank, 1], config=config)
            sums = reduce(comm)(X[rank, 0])
            both = allreduce_q(X[rank, 2], comm, name="both", algorithm="sra")
        else:
            sums = reduce(comm)(X[rank, 0])
            request = comm.allreduce_async(X[rank, 1], config=config)
            both = comm.allreduce(X[rank, 2], config=config, name="both")
        return [sums, request.wait(), both]

    check(on_ranks(3, body), STEPS[:3])


def test_names_of_a_tree() -> None:
    """The messages of two dtypes have names of their own, by their first leaf."""
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
    """Each of four threads of a rank dispatches calls of its own name."""

    def body(rank: int, comm: Communicator) -> Any:
        results: list[Any] = [None] * 4

        def dispatch(index: int) -> None:
            with jax.default_device(jax.devices()[4 * rank + index]):
                call = jax.jit(lambda v: allreduce_q(v, comm, name=str(index), algorithm="sra"))
                for _ in range(10):
                    results[index] = np.asarray(call(X[rank, index]))

        started = [threading.Thread(target=dispatch, args=(index,)) for index in range(4)]
        for thread in started[:: 1 - 2 * rank]:
            thread.start()
        for thread in started:
            thread.join()
        return results

    check(on_ranks(2, body), [expected(X[:2, row]) for row in range(4)])


# ---- errors ------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "knob", ["bits", "bucket_size", "minimal_size", "gather_bits", "intra_bits"]
)
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
        ({"name": 3}, TypeError, "name is 3"),
        ({"key": 3}, TypeError, "key is 3, not a PRNG key"),
    ],
    ids=str,
)
def test_knobs_out_of_range(
    knobs: dict[str, Any], error: type[Exception], words: str, pair: list[Communicator]
) -> None:
    with pytest.raises(error, match=re.escape(words)):
        allreduce_q(np.ones(3, np.float32), pair[0], **knobs)


@pytest.mark.parametrize("comm", ["world", 0, object()], ids=repr)
def test_what_is_no_communicator(comm: Any) -> None:
    with pytest.raises(TypeError, match=r"comm is .*cgx_ops\.Communicator, or None"):
        allreduce_q(np.ones(3, np.float32), comm)


def test_devices(pair: list[Communicator]) -> None:
    """Several devices in one program: psum_q's affair, as each way to get there says."""
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
    with pytest.raises(cgx_ops.Closed, match=r"is closed.*Make another"):
        allreduce_q(x, pair[0])
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"NOT_FOUND.*trace the program again"):
        jax.block_until_ready(program(x))


def error_of(call: Callable[[], Any]) -> str:
    try:
        jax.block_until_ready(call())
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("in_background", [False, True])
def test_shapes_that_differ(in_background: bool) -> None:
    """Every rank is told, and goes on with the same program and communicator.

    XLA runs a small program where it is dispatched, unless it waits for an operand: then the error
    comes later, and JAX's token with it.
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


def test_a_rank_that_never_calls() -> None:
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
    """While a call of one thread waits for its peer, another thread's is refused on all ranks.

    The first one is an error, too: nobody knows which of the two the peer has met.
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
    assert same_bits(call(1, 0), wanted)  # both have compiled
    assert same_bits(first.result(), wanted)
    sent = pair[0].bytes_sent
    waiting = in_background(0, 0)
    while pair[0].bytes_sent == sent:  # the header says that it has started
        time.sleep(0.001)
    refused = error_of(lambda: call(0, 1, device=2))
    assert re.search("INVALID_ARGUMENT.*several Python threads", refused)
    assert same_bits(call(1, 0), wanted)
    assert "several Python threads" in error_of(lambda: waiting.result(timeout=60))
    assert "several Python threads" in error_of(lambda: call(1, 1))


# ---- processes ---------------------------------------------------------------------------------


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "ranks", [3, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 2, 4))]
)
def test_processes(ranks: int) -> None:
    outputs = mpirun(ranks, "run_jax_allreduce.py", "checks", env=ENVIRONMENT, timeout=220)
    for output in outputs:
        assert output.count("ok check_") == 6


@pytest.mark.parametrize("case", ["mismatch", "late"])
def test_processes_that_fail(case: str) -> None:
    environment = {**ENVIRONMENT, "CGX_TIMEOUT": "3"}
    for output in mpirun(2, "run_jax_allreduce.py", case, env=environment, timeout=100):
        assert "ok" in output.splitlines()


def test_the_persistent_cache(tmp_path: Path) -> None:
    """Both ranks load what a run of rank 0's compiled: nothing in it is a process's own."""
    outputs = mpirun(2, "run_jax_allreduce.py", "cached", tmp_path, env=ENVIRONMENT)
    assert any("misses: 1" in output for output in outputs), outputs
    for output in mpirun(2, "run_jax_allreduce.py", "cached", tmp_path, env=ENVIRONMENT):
        assert "hits: 1, misses: 0" in output
