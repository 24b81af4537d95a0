"""Trees in one message, scatter and gather: eight devices, bit for bit as the oracle.

1. one message for a tree: rules, names, dtypes
2. psum_scatter_q and all_gather_q
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from support.jax_cases import (
    EMPTY_OPERANDS,
    SRA,
    expected,
    gather_expected,
    mesh_of,
    normal,
    on_mesh,
    same_bits,
    scatter_expected,
    seed_of,
    use_cpu_devices,
)

from cgx_ops import Rules
from cgx_ops.jax import all_gather_q, pmean_q, psum_q, psum_scatter_q

use_cpu_devices(8)

pytestmark = [pytest.mark.timeout(120), pytest.mark.mpirun]
both_modes = pytest.mark.parametrize(
    "check_vma", [True, pytest.param(False, marks=pytest.mark.exhaustive)]
)

BF16 = ml_dtypes.bfloat16

# Daily runs test each dtype and each number of bits, but not each combination.
each_dtype_and_bits = pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        pytest.param(dtype, bits, marks=[] if (i + j) % 3 == 0 else [pytest.mark.exhaustive])
        for i, dtype in enumerate((np.float32, np.float16, BF16))
        for j, bits in enumerate((1, 4, 8, 32))
    ],
)


def run(body: Callable[..., Any], *operands: Any, check_vma: bool = False) -> Any:
    """Apply body on eight devices; results have a row for each."""
    return jax.tree.map(np.asarray, on_mesh(mesh_of((8,), ("d",)), body, check_vma)(*operands))


def calls_in(body: Callable[..., Any], *operands: Any) -> int:
    """Return the number of cgx's custom calls in the compiled program."""
    text = on_mesh(mesh_of((8,), ("d",)), body).lower(*operands).compile().as_text()
    return text.count('custom_call_target="cgx_psum_q"')


EMPTY = {"empty": np.zeros((8, 0), np.float32)} if EMPTY_OPERANDS else {}


def tree_of(seed: int) -> dict[str, Any]:
    return {
        "dense": {"kernel": normal(seed, 8, 40, 50), "bias": normal(seed + 1, 8, 50)},
        "norm": normal(seed + 2, 8, 300),
        "half": normal(seed + 3, 8, 700, dtype=BF16),
        **EMPTY,
    }


# ---- 1. one message for a tree -------------------------------------------------------------------


@both_modes
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_fusion_changes_no_bits(op: str, fuse: bool, check_vma: bool) -> None:
    tree, key = tree_of(0), jax.random.key(5)
    rules = Rules([("bias|norm", 32), ("kernel", 2)], exact_vectors=False)
    reduce = psum_q if op == "sum" else pmean_q
    sums = run(
        lambda t: reduce(t, "d", key=key, rules=rules, fuse=fuse, config=SRA), tree,
        check_vma=check_vma,
    )  # fmt: skip
    bits = {"kernel": 2, "bias": 32, "norm": 32, "half": 4, "empty": 4}
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    for leaf, ((path, x), got) in enumerate(zip(flat, jax.tree.leaves(sums), strict=True)):
        name = path[-1].key
        want = expected(x, bits=bits[name], op=op, seeds=[seed_of(key, leaf)] * 8)
        assert all(same_bits(row, want) for row in got), name


def test_one_custom_call_for_each_dtype() -> None:
    tree = tree_of(10)
    assert calls_in(lambda t: psum_q(t, "d"), tree) == 2
    assert calls_in(lambda t: psum_q(t, "d", fuse=False), tree) == 4


def test_auto_depends_on_message_size() -> None:
    """Check that leaves that are small alone are large together, and all devices agree."""
    tree = [normal(20 + i, 8, 3000) for i in range(20)]
    fused = run(lambda t: psum_q(t, "d"), tree)
    for x, got in zip(tree, fused, strict=True):
        assert same_bits(got[0], expected(x, algorithm="sra"))
    alone = run(lambda t: psum_q(t, "d", fuse=False), tree)
    for x, got in zip(tree, alone, strict=True):
        assert same_bits(got[0], expected(x, algorithm="one_shot"))


@both_modes
def test_vmap_of_a_tree_and_its_gradient(check_vma: bool) -> None:
    """Use examples in one leaf only; the other leaf is summed once."""
    a, b = normal(30, 8, 3, 600), normal(31, 8, 700)

    def both(u: jax.Array, v: jax.Array) -> Any:
        sums = jax.vmap(lambda x: psum_q({"a": x, "b": v}, "d", config=SRA))(u)
        return sums["a"], sums["b"]

    got_a, got_b = run(both, a, b, check_vma=check_vma)
    for i in range(3):
        assert same_bits(got_a[0, i], expected(a[:, i]))
        assert same_bits(got_b[0, i], expected(b))

    def loss(u: jax.Array, v: jax.Array, f: Any) -> jax.Array:
        sums = f({"a": u, "b": v})
        return jnp.sin(sums["a"]).sum() + (sums["b"] * sums["b"]).sum()

    def gradient(f: Any) -> Any:
        return run(jax.grad(lambda u, v: loss(u, v, f), argnums=(0, 1)), a, b, check_vma=check_vma)

    exact = gradient(lambda t: jax.tree.map(lambda x: lax.psum(x, "d"), t))
    ours = gradient(lambda t: psum_q(t, "d", bits=32, config=SRA))
    for x, y in zip(ours, exact, strict=True):
        assert np.allclose(x, y, rtol=1e-4, atol=1e-5)


def test_first_matching_rule_wins() -> None:
    x = normal(29, 8, 700)
    got = run(
        lambda v: psum_q(
            {"ab": v},
            "d",
            rules=Rules([("c", 8), ("b", 2), ("a", 32)], exact_vectors=False),
            config=SRA,
        ),
        x,
    )
    alone = run(lambda v: psum_q({"ab": v}, "d", bits=2, config=SRA), x)
    assert same_bits(got["ab"], alone["ab"])


def test_vectors_are_exact_with_rules() -> None:
    """Check the default of rules; a call without rules compresses every leaf."""
    x = {"matrix": normal(29, 8, 30, 20), "vector": normal(30, 8, 600)}
    got = run(lambda t: psum_q(t, "d", bits=2, rules=Rules(), config=SRA), x)
    alone = run(lambda t: psum_q(t, "d", bits=2, config=SRA), x)
    exact = run(lambda t: psum_q(t, "d", bits=32, config=SRA), x)
    assert same_bits(got["matrix"], alone["matrix"])
    assert same_bits(got["vector"], exact["vector"])
    assert not same_bits(got["vector"], alone["vector"])


def test_invalid_rules() -> None:
    wrong: list[Any] = [{"bias": 4}, [("bias", 4)], 4]
    for rules in wrong:
        with pytest.raises(TypeError, match=r"psum_q: rules is .*; give cgx_ops\.Rules"):
            run(lambda v, r=rules: psum_q({"a": v}, "d", rules=r), normal(0, 8, 100))


# ---- 2. scatter and gather -----------------------------------------------------------------------


@both_modes
@each_dtype_and_bits
def test_scatter(bits: int, dtype: Any, check_vma: bool) -> None:
    x, key = normal(40, 8, 8, 30, 20, dtype=dtype), jax.random.key(2)
    got = run(lambda v: psum_scatter_q(v, "d", bits=bits, key=key), x, check_vma=check_vma)
    seeds = [seed_of(key, call="reduce_scatter over d: ")] * 8
    for row, want in zip(
        got, scatter_expected(x, bits=bits, seeds=seeds, rounding="stochastic"), strict=True
    ):
        assert same_bits(row, want)


@both_modes
@each_dtype_and_bits
def test_gather(bits: int, dtype: Any, check_vma: bool) -> None:
    x, key = normal(41, 8, 30, 20, dtype=dtype), jax.random.key(2)
    got = run(lambda v: all_gather_q(v, "d", bits=bits, key=key), x, check_vma=check_vma)
    seeds = [seed_of(key, call="all_gather over d: ")] * 8
    want = gather_expected(x, bits=bits, seeds=seeds, rounding="stochastic")
    assert all(same_bits(row, want) for row in got)


@both_modes
@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("dimension", [0, 1, -1])
def test_shapes_are_those_of_lax(dimension: int, tiled: bool, check_vma: bool) -> None:
    """In 32 bits compare values too, up to the order of fp32 sums of 8 terms of size 5 at most."""
    shape = [6, 5, 4]
    shape[dimension] = 16 if tiled else 8
    x, y = normal(42, 8, *shape), normal(43, 8, 6, 5, 4)
    how = {"tiled": tiled}
    ours, theirs = (
        run(lambda v, f=f, k=k: f(v, "d", scatter_dimension=dimension % 3, **how, **k), x,
            check_vma=check_vma)
        for f, k in ((psum_scatter_q, {"bits": 32}), (lax.psum_scatter, {}))
    )  # fmt: skip
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= 2 * 7 * 2.0**-24 * 8 * np.abs(x).max()
    ours, theirs = (
        run(lambda v, f=f, k=k: f(v, "d", axis=dimension % 3, **how, **k), y, check_vma=check_vma)
        for f, k in ((all_gather_q, {"bits": 32}), (lax.all_gather, {}))
    )
    assert same_bits(ours, theirs)


@both_modes
def test_scatter_and_gather_under_transformations(check_vma: bool) -> None:
    x, y = normal(44, 8, 3, 8, 600), normal(45, 8, 3, 600)
    blocks = run(jax.vmap(lambda v: psum_scatter_q(v, "d")), x, check_vma=check_vma)
    gathered = run(jax.vmap(lambda v: all_gather_q(v, "d")), y, check_vma=check_vma)
    for i in range(3):
        assert all(
            same_bits(row, want)
            for row, want in zip(blocks[:, i], scatter_expected(x[:, i]), strict=True)
        )
        assert all(same_bits(row, gather_expected(y[:, i])) for row in gathered[:, i])

    def gradient(f: Any, v: Any) -> Any:
        return run(jax.grad(lambda u: (f(u) ** 2).sum()), v, check_vma=check_vma)

    for ours, theirs, v in (
        (lambda u: psum_scatter_q(u, "d", bits=32), lambda u: lax.psum_scatter(u, "d"), x[:, 0]),
        (lambda u: all_gather_q(u, "d", bits=32), lambda u: lax.all_gather(u, "d"), y[:, 0]),
    ):
        assert np.allclose(gradient(ours, v), gradient(theirs, v), rtol=1e-5, atol=1e-5)


def test_small_and_empty_blocks() -> None:
    for n in (0, 1, 15, 17):
        x = normal(46, 8, 8, n)
        got = run(lambda v: psum_scatter_q(v, "d"), x)
        assert all(same_bits(a, b) for a, b in zip(got, scatter_expected(x), strict=True))
        assert run(lambda v: all_gather_q(v[0], "d"), x).shape == (8, 8, n)


def test_indivisible_messages() -> None:
    x = normal(47, 8, 12, 5)
    with pytest.raises(ValueError, match=r"dimension 0 of .12, 5. has size 12.*it must be 8"):
        run(lambda v: psum_scatter_q(v, "d"), x)
    with pytest.raises(ValueError, match="a multiple of 8"):
        run(lambda v: psum_scatter_q(v, "d", tiled=True), x)
    with pytest.raises(ValueError, match="scatter_dimension is 2"):
        run(lambda v: psum_scatter_q(v, "d", scatter_dimension=2), x)
