"""psum_q under JAX's transformations: grad, vmap, scan, cond, remat, in and around shard_map."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from support.jax_cases import (
    SRA,
    expected,
    fetch,
    mesh_of,
    normal,
    on_mesh,
    same_bits,
    seed_of,
    spread,
    use_cpu_devices,
)

from cgx_ops.jax import all_gather_q, all_to_all_q, pmean_q, psum_q, psum_scatter_q

use_cpu_devices(8)

pytestmark = [pytest.mark.timeout(120), pytest.mark.mpirun]

both_modes = pytest.mark.parametrize(
    "check_vma", [True, pytest.param(False, marks=pytest.mark.exhaustive)]
)


def q(x: Any, **knobs: Any) -> Any:
    return psum_q(x, "d", config=SRA, **knobs)


def run(body: Callable[..., Any], *operands: Any, check_vma: bool = False) -> Any:
    """Apply body on eight devices; results have a row for each."""
    return jax.tree.map(np.asarray, on_mesh(mesh_of((8,), ("d",)), body, check_vma)(*operands))


# ---- differentiation -----------------------------------------------------------------------------


@both_modes
@pytest.mark.parametrize("reduce", [psum_q, pmean_q])
def test_gradient_equals_that_of_the_exact_sum(reduce: Any, check_vma: bool) -> None:
    x, weight = normal(0, 8, 2000), normal(1, 8, 2000)
    exact = lax.psum if reduce is psum_q else lax.pmean

    def gradient(f: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
        return jax.grad(lambda v, w: (f(v) * w).sum())

    ours = run(gradient(lambda v: reduce(v, "d")), x, weight, check_vma=check_vma)
    theirs = run(gradient(lambda v: exact(v, "d")), x, weight, check_vma=check_vma)
    assert same_bits(ours, theirs)
    assert np.abs(ours).max() > 0


@both_modes
def test_gradient_of_the_whole_shard_map(check_vma: bool) -> None:
    x, weight = normal(2, 8, 2000), normal(3, 2000)
    mesh = mesh_of((8,), ("d",))

    def loss(f: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
        mapped = jax.shard_map(
            lambda v: f(v[0]), mesh=mesh, in_specs=P("d"), out_specs=P(), check_vma=check_vma
        )
        return lambda v: (mapped(v) * weight).sum()

    x = spread(mesh, x, P("d"))
    ours = fetch(jax.jit(jax.grad(loss(lambda v: q(v))))(x))
    theirs = fetch(jax.jit(jax.grad(loss(lambda v: lax.psum(v, "d"))))(x))
    assert np.array_equal(ours, theirs)


@both_modes
def test_jvp_and_vjp(check_vma: bool) -> None:
    x, t = normal(4, 8, 2000), normal(5, 8, 2000)
    value, tangent = run(lambda v, s: jax.jvp(q, (v,), (s,)), x, t, check_vma=check_vma)
    assert same_bits(value[0], expected(x))
    assert np.allclose(tangent, t.sum(0), atol=1e-4)
    value, exact = run(
        lambda v, s: (
            (lambda y, pull: (y, pull(y)[0]))(*jax.vjp(q, v))
        ),
        x, t, check_vma=check_vma,
    )  # fmt: skip
    assert same_bits(value[0], expected(x))
    assert np.isfinite(exact).all()


def pairs_with_exact(tiled: bool) -> dict[str, tuple[Any, Any]]:
    """Return our collectives and JAX's own, for arrays whose first dimension is divisible by 8."""
    return {
        "psum_q": (q, lambda v: lax.psum(v, "d")),
        "pmean_q": (lambda v: pmean_q(v, "d"), lambda v: lax.pmean(v, "d")),
        "psum_scatter_q": (
            lambda v: psum_scatter_q(v, "d", tiled=tiled),
            lambda v: lax.psum_scatter(v, "d", tiled=tiled),
        ),
        "all_gather_q": (
            lambda v: all_gather_q(v, "d", tiled=tiled),
            lambda v: lax.all_gather(v, "d", tiled=tiled),
        ),
        "all_to_all_q": (
            lambda v: all_to_all_q(v, "d", 0, 0, tiled=tiled),
            lambda v: lax.all_to_all(v, "d", 0, 0, tiled=tiled),
        ),
    }


@both_modes
@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("name", pairs_with_exact(True))
def test_linear_transpose_equals_that_of_the_exact_collective(
    name: str, tiled: bool, check_vma: bool
) -> None:
    ours, theirs = pairs_with_exact(tiled)[name]
    x = normal(30, 8, 8, 300)

    def transposed(f: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
        # The cotangent has the result's own type, and varies over devices if possible.
        return lambda v: jax.linear_transpose(f, v)(jnp.cos(theirs(v)))[0]

    results = [run(transposed(f), x, check_vma=check_vma) for f in (ours, theirs)]
    assert same_bits(*results)
    assert np.abs(results[0]).max() > 0


@both_modes
@pytest.mark.parametrize("fuse", [True, False], ids=["one message", "several messages"])
def test_linear_transpose_of_a_tree(fuse: bool, check_vma: bool) -> None:
    """Use leaves on which the function does not depend linearly, or whose results are not used."""
    x, y = normal(31, 8, 300), normal(32, 8, 400)

    def transposed(f: Any) -> Any:
        def body(u: jax.Array, v: jax.Array) -> Any:
            first = jax.linear_transpose(lambda a: f({"a": a, "b": v})["a"], u)
            second = jax.linear_transpose(lambda a, b: f({"a": a, "b": b})["b"], u, v)
            of_result = jnp.sin(lax.psum(v, "d"))
            return first(jnp.sin(lax.psum(u, "d"))), second(of_result)

        return body

    ours = run(transposed(lambda t: q(t, fuse=fuse)), x, y, check_vma=check_vma)
    theirs = run(transposed(lambda t: lax.psum(t, "d")), x, y, check_vma=check_vma)
    assert all(map(same_bits, jax.tree.leaves(ours), jax.tree.leaves(theirs)))


def test_gradients_are_right_in_both_modes() -> None:
    """Check derivatives numerically at 32 bits, where the functions are exact."""
    x, mesh = normal(33, 8, 8, 20), mesh_of((8,), ("d",))
    bodies = {
        "psum": lambda v: psum_q(v, "d", bits=32),
        "scatter": lambda v: psum_scatter_q(v, "d", bits=32),
        "gather": lambda v: all_gather_q(v, "d", bits=32),
        "exchange": lambda v: all_to_all_q(v, "d", 0, 1, bits=32),
    }
    for body in bodies.values():
        mapped = on_mesh(mesh, lambda v, body=body: jnp.sin(body(v)), check_vma=True)
        check_grads(mapped, (x,), order=1, modes=("fwd", "rev"), atol=0.05, rtol=0.05)


def test_no_gradient_without_dependence() -> None:
    x = normal(6, 8, 2000)
    gradient = run(jax.grad(lambda v: (v * 3).sum() + lax.stop_gradient(q(v)).sum()), x)
    assert (gradient == 3).all()


@both_modes
def test_quantized_gradients_of_replicated_weights(check_vma: bool) -> None:
    """Test the idiom of the documentation: differentiate a varying copy, then sum compressed."""
    batch, weights = normal(7, 8, 2000), normal(8, 2000)

    def body(b: jax.Array) -> jax.Array:
        copy = lax.pcast(jnp.asarray(weights), "d", to="varying")
        return q(jax.grad(lambda w: (w * b).sum())(copy))

    assert same_bits(run(body, batch, check_vma=check_vma)[0], expected(batch))


@both_modes
@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.everything_saveable])
def test_remat(policy: Any, check_vma: bool) -> None:
    x = normal(9, 8, 2000)

    def loss(v: jax.Array, wrap: Any) -> jax.Array:
        return wrap(lambda u: jnp.sin(q(jnp.sin(u), key=jax.random.key(1))))(v).sum()

    plain = run(jax.value_and_grad(lambda v: loss(v, lambda f: f)), x, check_vma=check_vma)
    remat = run(
        jax.value_and_grad(lambda v: loss(v, lambda f: jax.checkpoint(f, policy=policy))),
        x, check_vma=check_vma,
    )  # fmt: skip
    for a, b in zip(plain, remat, strict=True):
        assert np.allclose(a, b, rtol=1e-5, atol=1e-6)


# ---- vmap ----------------------------------------------------------------------------------------


@both_modes
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_vmap_examples_are_independent(dim: int, check_vma: bool) -> None:
    x = normal(10, 8, 5, 20, 30)  # 600 elements per example: a bucket and a part of one
    body = jax.vmap(q, in_axes=dim, out_axes=dim)
    y = run(body, np.moveaxis(x, 1, dim + 1), check_vma=check_vma)[0]
    for i in range(5):
        assert same_bits(np.moveaxis(y, dim, 0)[i], expected(x[:, i]))


def test_auto_depends_on_example_size() -> None:
    """Use 64 examples of 600 elements: each is small alone, all together are not."""
    x = normal(11, 8, 64, 600)
    batched = run(jax.vmap(lambda v: psum_q(v, "d")), x)
    alone = run(lambda v: psum_q(v[3], "d"), x)
    assert same_bits(batched[:, 3], alone)


def test_vmap_of_vmap_and_of_unbatched_operands() -> None:
    x = normal(12, 8, 2, 3, 600)
    y = run(jax.vmap(jax.vmap(q)), x)[0]
    for i in range(2):
        for j in range(3):
            assert same_bits(y[i, j], expected(x[:, i, j]))
    z = run(lambda v: jax.vmap(lambda s: q(v[0, 0]) + s)(jnp.arange(4.0)), x)[0]
    assert same_bits(z[0], expected(x[:, 0, 0]))


@both_modes
def test_vmap_over_keys(check_vma: bool) -> None:
    x = normal(13, 8, 3, 600)
    keys = jax.random.split(jax.random.key(2), 3)

    def both(v: jax.Array) -> jax.Array:
        return jax.vmap(lambda u, key: q(u, key=key))(v, keys)

    def keys_only(v: jax.Array) -> jax.Array:
        return jax.vmap(lambda key: q(v[0], key=key))(keys)

    y, z = (run(f, x, check_vma=check_vma)[0] for f in (both, keys_only))
    for i in range(3):
        assert same_bits(y[i], expected(x[:, i], seeds=[seed_of(keys[i])] * 8))
        assert same_bits(z[i], expected(x[:, 0], seeds=[seed_of(keys[i])] * 8))


@both_modes
def test_vmap_around_shard_map(check_vma: bool) -> None:
    x, mesh = normal(14, 3, 8, 600), mesh_of((8,), ("d",))
    mapped = jax.shard_map(
        lambda v: q(v[0]), mesh=mesh, in_specs=P("d"), out_specs=P(), check_vma=check_vma
    )
    y = fetch(jax.jit(jax.vmap(mapped))(spread(mesh, x, P(None, "d"))))
    for i in range(3):
        assert same_bits(y[i], expected(x[i]))


@both_modes
def test_examples_spread_over_an_axis_have_different_noise(check_vma: bool) -> None:
    """Check that spmd_axis_name gives the examples of the same vmap without it."""
    same, mesh = normal(20, 1, 4, 600).repeat(4, axis=0), mesh_of((2, 4), ("r", "d"))
    mapped = jax.shard_map(
        lambda v, key: psum_q(v[0], "d", key=key, bits=2),
        mesh=mesh, in_specs=(P("d"), P()), out_specs=P(), check_vma=check_vma,
    )  # fmt: skip
    x, key = spread(mesh, same, P("r", "d")), spread(mesh, jax.random.key(4), P())
    alone, over_r = (
        fetch(jax.jit(jax.vmap(mapped, (0, None), spmd_axis_name=name))(x, key))
        for name in (None, "r")
    )
    assert same_bits(alone, over_r)
    assert not any(np.array_equal(alone[i], alone[j]) for i in range(4) for j in range(i))


@both_modes
def test_gradient_of_vmap_and_vmap_of_gradient(check_vma: bool) -> None:
    x = normal(15, 8, 3, 600)
    a = run(jax.grad(lambda v: jnp.sin(jax.vmap(q)(v)).sum()), x, check_vma=check_vma)
    b = run(jax.vmap(jax.grad(lambda v: jnp.sin(q(v)).sum())), x, check_vma=check_vma)
    assert np.allclose(a, b, rtol=1e-5, atol=1e-6)


# ---- control flow --------------------------------------------------------------------------------


@both_modes
def test_scan_and_its_gradient(check_vma: bool) -> None:
    x = normal(16, 8, 6, 600)
    y = run(lambda v: lax.scan(lambda c, u: (c, q(u)), 0, v)[1], x, check_vma=check_vma)[0]
    for i in range(6):
        assert same_bits(y[i], expected(x[:, i]))

    def loss(v: jax.Array) -> jax.Array:
        return jnp.sin(lax.scan(lambda c, u: (c, q(u)), 0, v)[1]).sum()

    a = run(jax.grad(loss), x, check_vma=check_vma)
    b = run(jax.grad(lambda v: jnp.sin(jax.vmap(q)(v)).sum()), x, check_vma=check_vma)
    assert np.allclose(a, b, rtol=1e-5, atol=1e-6)


@both_modes
def test_while_with_collectives_of_xla(check_vma: bool) -> None:
    x = normal(17, 8, 600)

    def body(v: jax.Array) -> jax.Array:
        def step(state: Any) -> Any:
            i, u = state
            summed = q(u) / 8 + lax.psum(u, "d") / 8
            return i + 1, lax.pcast(summed, "d", to="varying") / 2

        return lax.while_loop(lambda state: state[0] < 5, step, (0, v))[1]

    rows = run(body, x, check_vma=check_vma)
    assert all(same_bits(row, rows[0]) for row in rows)


@both_modes
@pytest.mark.parametrize("branch", [0, 1])
def test_cond_with_one_predicate_for_all(branch: int, check_vma: bool) -> None:
    x = normal(18, 8, 600)

    def body(v: jax.Array, b: jax.Array) -> jax.Array:
        same = lax.pmax(b, "d")
        return lax.cond(same == 0, lambda u: q(u, bits=2), lambda u: q(u, bits=8), v)

    rows = run(body, x, np.full(8, branch, np.int32), check_vma=check_vma)
    assert same_bits(rows[0], expected(x, bits=(2, 8)[branch]))


def test_map_and_fori() -> None:
    x = normal(19, 8, 4, 600)
    mapped = run(lambda v: lax.map(q, v), x)[0]
    for i in range(4):
        assert same_bits(mapped[i], expected(x[:, i]))
    looped = run(lambda v: lax.fori_loop(0, 4, lambda i, a: a + q(v[i]), jnp.zeros(600)), x)[0]
    total = np.zeros(600, np.float32)
    for i in range(4):
        total += expected(x[:, i])
    assert same_bits(looped, total)


# ---- shapes without a run ------------------------------------------------------------------------


@both_modes
def test_eval_shape_and_jaxpr(check_vma: bool) -> None:
    program = on_mesh(mesh_of((8,), ("d",)), q, check_vma)
    for dtype in (jnp.float32, jnp.bfloat16):
        shape = jax.eval_shape(program, jax.ShapeDtypeStruct((8, 10, 3), dtype))
        assert (shape.shape, shape.dtype) == ((8, 10, 3), dtype)
    jaxpr = jax.make_jaxpr(program)(np.zeros((8, 10), np.float32))
    assert not jaxpr.effects
    assert "cgx_collective_q" in str(jaxpr)
