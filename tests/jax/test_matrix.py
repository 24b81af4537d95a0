"""Transformation x mesh x carrier x check_vma: values, tangents and gradients, bit for bit.

1. the transformations: ways to apply a function to each row of an array
2. the oracle: numpy's for values; for derivatives that of the exact sum. The tangents and
   weights are small integers, whose sums are exact in any order
3. the matrix; daily runs test a part of it in which every transformation and every mesh
   occurs with both carriers and both modes
4. special cases: eager, donation, x64, weak types, zero sizes, trees
"""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.jax_cases import (
    SRA,
    Values,
    expected,
    mesh_of,
    normal,
    on_mesh,
    same_bits,
    use_cpu_devices,
)
from support.jax_mesh_cases import MESHES, MeshCase, carriers_and_modes

from cgx_ops.jax import psum_q

use_cpu_devices(8)

pytestmark = [pytest.mark.timeout(120), pytest.mark.mpirun]

ROWS, NUMEL = 4, 600  # 600 elements: a bucket and a part of one

Function = Callable[[jax.Array], jax.Array]

# ---- 1. transformations --------------------------------------------------------------------------


def _one_by_one(f: Function) -> Function:
    return lambda v: jnp.stack([f(row) for row in v])


def _vmap_out(f: Function) -> Function:
    return lambda v: jax.vmap(f, in_axes=1, out_axes=1)(v.T).T


def _vmap_twice(f: Function) -> Function:
    return lambda v: jax.vmap(jax.vmap(f))(v.reshape(2, ROWS // 2, -1)).reshape(v.shape)


def _scan(**how: Any) -> Callable[[Function], Function]:
    return lambda f: lambda v: lax.scan(lambda c, u: (c, f(u)), 0, v, **how)[1]


def _fori(f: Function) -> Function:
    return lambda v: lax.fori_loop(
        0, ROWS, lambda i, rows: rows.at[i].set(f(v[i])), jnp.zeros_like(f(v[0]), shape=v.shape)
    )


def _while(f: Function) -> Function:
    def loop(v: jax.Array) -> jax.Array:
        def step(state: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
            i, rows = state
            return i + 1, rows.at[i].set(f(v[i]))

        start = (0, jnp.zeros_like(f(v[0]), shape=v.shape))
        return lax.while_loop(lambda state: state[0] < ROWS, step, start)[1]

    return loop


def _cond(f: Function) -> Function:
    """Use a predicate known only at run time; the branches have separate calls."""

    def choose(i: jax.Array, row: jax.Array) -> jax.Array:
        return lax.cond(i % 2 == 0, f, lambda u: f(u), row)

    return lambda v: lax.scan(lambda c, x: (c, choose(*x)), 0, (jnp.arange(ROWS), v))[1]


def _custom_vjp(f: Function) -> Function:
    """Use a backward function that transposes the linear part."""

    @jax.custom_vjp
    def g(u: jax.Array) -> jax.Array:
        return f(u)

    def backward(u: jax.Array, cotangent: jax.Array) -> Any:
        return jax.linear_transpose(jax.linearize(f, u)[1], u)(cotangent)

    g.defvjp(lambda u: (f(u), u), backward)
    return _one_by_one(g)


def _custom_jvp(f: Function) -> Function:
    g = jax.custom_jvp(f)
    g.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
    return _one_by_one(g)


def _linearized(f: Function) -> Function:
    """Return the values of jax.linearize plus zero times its linear function."""

    def g(v: jax.Array) -> jax.Array:
        values, linear = jax.linearize(_one_by_one(f), v)
        return values + linear(jnp.zeros_like(v))

    return g


def _remat(policy: str | None) -> Callable[[Function], Function]:
    saved = getattr(jax.checkpoint_policies, policy) if policy else None
    return lambda f: _one_by_one(jax.checkpoint(f, policy=saved))


POLICIES = (
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "checkpoint_dots",
    "dots_with_no_batch_dims_saveable",
    "checkpoint_dots_with_no_batch_dims",
)

WAYS: dict[str, Callable[[Function], Function]] = {
    "one_by_one": _one_by_one,
    "inner_jit": lambda f: _one_by_one(jax.jit(f)),
    "vmap": jax.vmap,
    "vmap_out": _vmap_out,
    "vmap_twice": _vmap_twice,
    "scan": _scan(),
    "scan_unrolled": _scan(unroll=2),
    "scan_backwards": _scan(reverse=True),
    "map": lambda f: lambda v: lax.map(f, v),
    "map_in_batches": lambda f: lambda v: lax.map(f, v, batch_size=2),
    "fori": _fori,
    "while": _while,
    "cond": _cond,
    "custom_vjp": _custom_vjp,
    "custom_jvp": _custom_jvp,
    "linearized": _linearized,
    "remat": _remat(None),
    **{f"remat_{policy}": _remat(policy) for policy in POLICIES},
    "scan_of_remat": lambda f: _scan()(jax.checkpoint(f)),
    "remat_of_scan": lambda f: jax.checkpoint(_scan()(f)),
    "vmap_of_cond": lambda f: jax.vmap(lambda u: lax.cond(True, f, f, u)),
}
# Transformations that JAX cannot differentiate in that direction.
NO_TANGENTS, NO_GRADIENTS = {"custom_vjp"}, {"while"}


def test_all_remat_policies_are_covered() -> None:
    """Compare the list with JAX's policies, functions of (primitive, *avals, **params)."""
    found = set()
    for name in dir(jax.checkpoint_policies):
        # A policy returns a value for a primitive; a function that creates policies raises, or
        # returns a function.
        with contextlib.suppress(TypeError, AssertionError):
            answer = getattr(jax.checkpoint_policies, name)(lax.sin_p)
            if not name.startswith("_") and not callable(answer):
                found.add(name)
    assert found == set(POLICIES)


# ---- 2. the oracle -------------------------------------------------------------------------------


def small_integers(seed: int, devices: int) -> Values:
    return np.random.default_rng(seed).integers(-8, 9, (devices, ROWS, NUMEL)).astype(np.float32)


def check_values(case: MeshCase, rows: Any, x: Values) -> None:
    case.check(
        rows,
        lambda places, devices: np.stack([expected(x[places, i], at=devices) for i in range(ROWS)]),
    )


def check_sums(case: MeshCase, rows: Any, x: Values) -> None:
    """Require exact sums, up to the sign of zeros."""
    case.check(np.asarray(rows) + 0, lambda places, _: x[places].sum(0) + 0)


# ---- 3. the matrix -------------------------------------------------------------------------------


def matrix() -> list[Any]:
    """Return all combinations; those of daily runs are not marked as exhaustive."""
    combinations = []
    for i, way in enumerate(WAYS):
        for j, case in enumerate(MESHES):
            for k, (carrier, check_vma) in enumerate(
                [("native", True), ("xla", False), ("native", False), ("xla", True)]
            ):
                # One per transformation, with alternating meshes, carriers and modes.
                daily = (i % len(MESHES), i % 4) == (j, k)
                marks = [] if daily else [pytest.mark.exhaustive]
                name = f"{way}-{case.name}-{carrier}-{check_vma}"
                combinations.append(
                    pytest.param(way, case, carrier, check_vma, id=name, marks=marks)
                )
    return combinations


@pytest.mark.parametrize(("way", "case", "carrier", "check_vma"), matrix())
def test_values_tangents_and_gradients(
    way: str, case: MeshCase, carrier: Any, check_vma: bool
) -> None:
    if carrier == "xla" and not case.is_even:
        pytest.skip("carrier='xla' refuses uneven groups")
    devices = len(case.devices)
    x = normal(1, devices, ROWS, NUMEL)
    t, w = small_integers(2, devices), small_integers(3, devices)
    apply = WAYS[way](lambda u: psum_q(u, case.axes, config=SRA, carrier=carrier))

    def inside(v: jax.Array, tangent: jax.Array, weight: jax.Array) -> dict[str, jax.Array]:
        """Differentiate on each device."""
        found = {"values": apply(v)}
        if way not in NO_TANGENTS:
            found["tangents"] = jax.jvp(apply, (v,), (tangent,))[1]
        if way not in NO_GRADIENTS:
            found["gradients"] = jax.grad(lambda u: (apply(u) * weight).sum())(v)
        return found

    program = on_mesh(case.mesh, inside, check_vma)
    assert jax.eval_shape(program, x, t, w)["values"].shape == x.shape
    found = program(x, t, w)
    check_values(case, found["values"], x)
    if "tangents" in found:
        check_sums(case, found["tangents"], t)
    if "gradients" in found:
        check_sums(case, found["gradients"], w)

        # Differentiate the whole shard_map.
        whole = on_mesh(case.mesh, apply, check_vma)
        around = jax.jit(jax.grad(lambda u, weight: (whole.eager(u) * weight).sum()))
        check_sums(case, whole.run(around, x, w), w)


# ---- 4. special cases ----------------------------------------------------------------------------


@carriers_and_modes
def test_eager(carrier: Any, check_vma: bool) -> None:
    case = MESHES[0]
    x, w = normal(4, 8, ROWS, NUMEL), small_integers(5, 8)

    def apply(v: jax.Array) -> jax.Array:
        return jax.vmap(lambda u: psum_q(u, case.axes, config=SRA, carrier=carrier))(v)

    def both(v: jax.Array, weight: jax.Array) -> Any:
        return apply(v), jax.grad(lambda u: (apply(u) * weight).sum())(v)

    values, gradients = on_mesh(case.mesh, both, check_vma).eagerly(x, w)
    check_values(case, values, x)
    check_sums(case, gradients, w)


@carriers_and_modes
def test_donation(carrier: Any, check_vma: bool) -> None:
    x = normal(6, 8, 5000)
    program = on_mesh(
        mesh_of((8,), ("d",)),
        lambda v: psum_q(v, "d", config=SRA, carrier=carrier),
        check_vma,
    )
    (operand,) = program.spread((x,))
    donating = jax.jit(program.eager, donate_argnums=0)
    rows = program.run(lambda _: donating(operand), x)
    assert operand.is_deleted()
    assert all(same_bits(row, expected(x)) for row in rows)


@carriers_and_modes
def test_x64(carrier: Any, check_vma: bool) -> None:
    x = normal(7, 8, 5000)

    def body(v: jax.Array) -> jax.Array:
        return psum_q(v, "d", config=SRA, carrier=carrier)

    with jax.enable_x64(True):
        rows = on_mesh(mesh_of((8,), ("d",)), body, check_vma)(x)
        assert all(same_bits(row, expected(x)) for row in rows)
        with pytest.raises(TypeError, match=r"float64.*cast it to float32"):
            on_mesh(mesh_of((8,), ("d",)), body, check_vma)(x.astype(np.float64))


@carriers_and_modes
def test_weak_types_become_strong(carrier: Any, check_vma: bool) -> None:
    def body(v: jax.Array) -> jax.Array:
        total = psum_q(2.5, "d", carrier=carrier)
        assert not jax.typeof(total).weak_type
        return total * v.astype(total.dtype)

    rows = on_mesh(mesh_of((8,), ("d",)), body, check_vma)(np.ones((8, 1), jnp.bfloat16))
    assert np.array_equal(rows, np.full((8, 1), 20, np.float32))


@carriers_and_modes
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_nothing_to_sum(shape: tuple[int, ...], carrier: Any, check_vma: bool) -> None:
    def body(v: jax.Array) -> Any:
        reduce = lambda u: psum_q(u, "d", carrier=carrier)  # noqa: E731
        return reduce(v), jax.vmap(reduce)(v), jax.grad(lambda u: reduce(u).sum())(v)

    for rows in on_mesh(mesh_of((8,), ("d",)), body, check_vma)(np.zeros((8, *shape), np.float32)):
        assert (rows.shape, rows.dtype) == ((8, *shape), np.float32)


@carriers_and_modes
def test_trees(carrier: Any, check_vma: bool) -> None:
    tree = {"a": normal(8, 8, 700), "b": [normal(9, 8, 3, 40), None, normal(10, 8)]}
    w = jax.tree.map(lambda x: np.round(8 * x), tree)

    def body(t: Any, weights: Any) -> Any:
        def loss(u: Any) -> jax.Array:
            sums = psum_q(u, "d", carrier=carrier)
            products = jax.tree.map(lambda s, v: (s * v).sum(), sums, weights)
            return jnp.stack(jax.tree.leaves(products)).sum()

        return psum_q(t, "d", config=SRA, carrier=carrier), jax.grad(loss)(t)

    values, gradients = on_mesh(mesh_of((8,), ("d",)), body, check_vma)(tree, w)
    assert jax.tree.structure(values) == jax.tree.structure(tree)
    for x, rows in zip(jax.tree.leaves(tree), jax.tree.leaves(values), strict=True):
        assert all(same_bits(row, expected(x)) for row in rows)
    for x, rows in zip(jax.tree.leaves(w), jax.tree.leaves(gradients), strict=True):
        assert all(same_bits(row + 0, x.sum(0) + 0) for row in rows)
