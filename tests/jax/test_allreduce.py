"""allreduce_q: bitwise values, transformations, derivatives. Ranks are threads.

Each rank has a device and a communicator. jax/test_allreduce_calls.py covers sequences of calls,
errors and processes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from support.jax_allreduce_cases import AUTO, STEPS, X, check, on_ranks, reduce, seed_on
from support.jax_cases import SRA, expected, mesh_of, normal, on_mesh, same_bits, with_config

import cgx_ops
from cgx_ops import Communicator, Rules
from cgx_ops.jax import allreduce_q

pytestmark = pytest.mark.timeout(120)

DTYPES = (np.float32, np.float16, jnp.bfloat16)
SIZES = (0, 1, 17, 511, 512, 513, 5003)


# ---- values --------------------------------------------------------------------------------------


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
    results = on_ranks(3, lambda rank, comm: allreduce_q(x[rank], comm, **with_config(**knobs)))
    check(results, expected(x, **knobs))


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_keys(make: Callable[[int], jax.Array]) -> None:
    """Test different keys on the ranks, and traced keys."""
    x = normal(2, 3, 3000)
    keys = [make(7 + rank) for rank in range(3)]

    def body(rank: int, comm: Communicator) -> Any:
        return jax.jit(lambda v, k: allreduce_q(v, comm, key=k, config=SRA))(x[rank], keys[rank])

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


@pytest.mark.parametrize("fuse", [True, False])
def test_rules_and_residuals(fuse: bool) -> None:
    """Check each leaf's bits and residual, with different sums in each step."""
    x = {"bias": normal(20, 2, 100), "kernel": normal(21, 2, 3, 1000)}
    old = {"bias": normal(22, 2, 100), "kernel": normal(23, 2, 3, 1000)}

    def body(rank: int, comm: Communicator) -> Any:
        def step(residual: Any, _: Any) -> Any:
            total, residual = allreduce_q(
                jax.tree.map(lambda leaf: leaf[rank], x), comm, config=SRA, residual=residual,
                rules=Rules([("bias", 32)], exact_vectors=False), fuse=fuse,
            )  # fmt: skip
            return residual, total

        mine = jax.tree.map(lambda leaf: leaf[rank], old)
        return jax.jit(lambda residual: lax.scan(step, residual, length=2))(mine)

    results = on_ranks(2, body)
    for name, bits in (("bias", 32), ("kernel", 4)):
        residuals = old[name].reshape(2, -1).copy()
        for step in range(2):
            total = expected(x[name], bits=bits, residuals=list(residuals))
            assert all(same_bits(sums[name][step], total) for _, sums in results)
        for (kept, _), residual in zip(results, residuals, strict=True):
            assert same_bits(kept[name].reshape(-1), residual)


def test_residuals_under_vmap_and_grad() -> None:
    x, old = normal(24, 2, 3, 600), normal(25, 2, 600)

    def body(rank: int, comm: Communicator) -> Any:
        def q(v: jax.Array, e: jax.Array) -> Any:
            return allreduce_q(v, comm, config=SRA, residual=e)

        def loss(v: jax.Array, e: jax.Array) -> jax.Array:
            total, residual = q(v, e)
            return 3 * total.sum() + residual.sum()

        batched = jax.vmap(q, in_axes=(0, None))(x[rank], old[rank])
        return *batched, *jax.grad(loss, argnums=(0, 1))(x[rank, 0], old[rank])

    results = on_ranks(2, body)
    for i in range(3):
        residuals = old.copy()
        total = expected(x[:, i], residuals=list(residuals))
        for rank, (sums, kept, *_) in enumerate(results):
            assert same_bits(sums[i], total)
            assert same_bits(kept[i], residuals[rank])
    assert all((gradient == 6).all() for _, _, *gradients in results for gradient in gradients)


def test_one_rank_alone() -> None:
    x = {"a": normal(0, 100), "b": 1.5}
    result = allreduce_q(x, op="avg")
    assert same_bits(result["a"], x["a"])
    assert same_bits(result["b"], np.float32(1.5))
    assert not jax.make_jaxpr(allreduce_q)(x).effects


@pytest.mark.parametrize("where", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_communicator_of_one_rank(where: Any) -> None:
    """Check that values stay the same, that calls count, and that they end with close()."""
    comm = Communicator.create(0, 1, lambda mine: [mine], "one rank")
    x, residual = normal(0, 2, 1000)
    step = where(lambda v: allreduce_q(v, comm, op="avg", bits=2))
    assert same_bits(step(x), x)
    result, kept = where(lambda v, r: allreduce_q(v, comm, residual=r))(x, residual)
    assert same_bits(result, x + residual)
    assert not np.asarray(kept).any()
    assert where(jax.grad(lambda v: (2 * allreduce_q(v, comm)).sum()))(x)[0] == 2
    jax.effects_barrier()
    assert comm.collectives == 4
    comm.close()
    errors = (cgx_ops.Closed, jax.errors.JaxRuntimeError)
    with pytest.raises(errors, match=r"closed.*Create another|trace the program again"):
        jax.block_until_ready(step(x))


def test_no_leaves() -> None:
    assert on_ranks(2, lambda _, comm: (allreduce_q({}, comm), comm.collectives)) == [({}, 0)] * 2


# ---- transformations -----------------------------------------------------------------------------


TWICE = [expected(np.stack([sums] * 3)) for sums in STEPS]


def inner_jit(f: Any, x: Any) -> Any:
    inner = jax.jit(f)
    return [inner(row) for row in x]


def while_condition(f: Any, x: Any) -> Any:
    """Use a loop condition that reduces, too, and holds twice."""
    wanted = lambda state: (f(state[1])[0] != 0) & (state[0] < 2)  # noqa: E731
    return lax.while_loop(wanted, lambda state: (state[0] + 1, state[1]), (0, x[0]))[0]


def either_branch(f: Any, x: Any) -> Any:
    branch = lambda p, v: lax.cond(p, f, lambda v: f(f(v)), v)  # noqa: E731
    return branch(True, x[0]), branch(False, x[1])


def twice_while(f: Any, x: Any) -> Any:
    return lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, f(s[1])), (0, x[0]))[1]


def with_custom_vjp(f: Any, x: Any) -> Any:
    """Check that a user's custom VJP compresses both values and gradients."""
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
        noisy = lambda v, k: allreduce_q(v, comm, key=k, config=SRA)  # noqa: E731
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


# ---- derivatives ---------------------------------------------------------------------------------

EXACT = expected(X[:, 0], bits=32)


@pytest.mark.parametrize("where", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_derivatives_are_those_of_exact_sums(where: Any) -> None:
    """Check that the gradient is the sum of the ranks' weights, as for an exact sum."""

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
    """Differentiate a different leaf on each rank; the other tangents are zeros."""

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
    """Differentiate |sum|^2 twice: a sum of sums, all exact, equal on all ranks."""

    def body(rank: int, comm: Communicator) -> Any:
        norm = lambda v: jnp.square(allreduce_q(v, comm, bits=32)).sum()  # noqa: E731
        v = jnp.asarray(X[rank, 0])
        return jax.jvp(jax.grad(norm), (v,), (v,))[1]

    check(on_ranks(3, body), expected(np.stack([2 * EXACT] * 3), bits=32))


@pytest.mark.parametrize("policy", [None, "nothing_saveable", "dots_saveable"])
def test_remat_does_not_repeat_communication(policy: str | None) -> None:
    saved = getattr(jax.checkpoint_policies, policy) if policy else None

    def body(rank: int, comm: Communicator) -> Any:
        f = jax.checkpoint(lambda v: jnp.square(reduce(comm)(v)).sum(), policy=saved)
        gradient = jax.block_until_ready(jax.jit(jax.grad(f))(X[rank, 0]))
        return gradient, comm.collectives

    wanted = expected(np.stack([2 * STEPS[0]] * 3), bits=32)
    for gradient, collectives in on_ranks(3, body):
        assert same_bits(gradient, wanted)
        assert collectives == 2  # the values; the cotangents


def test_unused_results() -> None:
    """Use different leaves in the losses of ranks 0 and 1: zeros are sent, and no rank waits."""

    def body(rank: int, comm: Communicator) -> Any:
        def loss(x: dict[str, jax.Array]) -> jax.Array:
            sums = allreduce_q(x, comm)
            return jnp.vdot(sums["ab"[rank]], X[rank, 0])

        return jax.jit(jax.grad(loss))({"a": X[rank, 1], "b": X[rank, 2]})

    check(on_ranks(2, body), {"a": X[0, 0], "b": X[1, 0]})
