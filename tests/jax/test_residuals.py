"""Error feedback: residuals of psum_q and pmean_q, bit for bit as the oracle's.

1. values: algorithms, carriers, dtypes, conservation
2. trees and shapes
3. transformations and donation
4. errors
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support.jax_cases import (
    EMPTY_OPERANDS,
    PROCESSES,
    SRA,
    Values,
    expected,
    mesh_of,
    normal,
    on_mesh,
    same_bits,
    seed_of,
    spread,
    use_cpu_devices,
    with_config,
)

from cgx_ops import Config, Rules
from cgx_ops.jax import compress_grads, pmean_q, psum_q, value_and_grad

use_cpu_devices(8)

pytestmark = [pytest.mark.timeout(120), pytest.mark.mpirun]
both_modes = pytest.mark.parametrize(
    "check_vma", [True, pytest.param(False, marks=pytest.mark.exhaustive)]
)
both_carriers = pytest.mark.parametrize("carrier", ["native", "xla"])

BF16 = ml_dtypes.bfloat16
MESH = mesh_of((8,), ("d",))
X, OLD = normal(50, 8, 2000), normal(51, 8, 2000)


def run(body: Callable[..., Any], *operands: Any, check_vma: bool = False) -> Any:
    """Apply body on eight devices; results have a row for each."""
    return jax.tree.map(np.asarray, on_mesh(MESH, body, check_vma)(*operands))


def q(x: Any, residual: Any, **knobs: Any) -> Any:
    return psum_q(x, "d", residual=residual, **with_config(**{"algorithm": "sra", **knobs}))


def oracle(x: Values, old: Values, **knobs: Any) -> tuple[Values, Values]:
    """Return the sum and the new residuals, a row for each device."""
    new = old.reshape(len(old), -1).copy()
    return expected(x, residuals=list(new), **knobs), new.reshape(old.shape)


def check(got: Any, want: tuple[Values, Values]) -> None:
    """Require the oracle's sum on every device, and each device's residual."""
    sums, residuals = got
    assert all(same_bits(row, want[0]) for row in sums)
    assert all(map(same_bits, residuals, want[1]))


# ---- 1. values -----------------------------------------------------------------------------------


@both_modes
@both_carriers
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("algorithm", ["sra", "one_shot"])
def test_equals_the_oracle(algorithm: Any, op: str, carrier: Any, check_vma: bool) -> None:
    key = jax.random.key(1)
    reduce = {"sum": psum_q, "avg": pmean_q}[op]
    got = run(
        lambda x, old: reduce(
            x, "d", key=key, bits=2, config=Config(algorithm=algorithm), carrier=carrier,
            residual=old,
        ),
        X, OLD, check_vma=check_vma,
    )  # fmt: skip
    check(got, oracle(X, OLD, bits=2, op=op, algorithm=algorithm, seeds=[seed_of(key)] * 8))


@pytest.mark.skipif(
    PROCESSES > 1, reason="a process sums its devices' values and residuals separately"
)
@pytest.mark.parametrize("key", [None, jax.random.key(2)], ids=["nearest", "stochastic"])
@both_carriers
def test_equals_the_sum_of_both(carrier: Any, key: Any) -> None:
    def apart(x: jax.Array, old: jax.Array) -> jax.Array:
        return q(x, old, key=key, carrier=carrier)[0]

    def together(x: jax.Array, old: jax.Array) -> jax.Array:
        return psum_q(x + old, "d", key=key, carrier=carrier, config=SRA)

    assert same_bits(run(apart, X, OLD), run(together, X, OLD))


def test_groups_with_different_residuals_have_different_noise() -> None:
    """Use residuals that vary over "b" with values that do not: noise is that of their sum."""
    mesh, key = mesh_of((4, 2), ("a", "b")), jax.random.key(3)

    def body(x: jax.Array, old: jax.Array) -> tuple[jax.Array, jax.Array]:
        same = lax.pmax(x, "b")
        apart = psum_q(same, "a", key=key, residual=old)[0]
        return apart, psum_q(same + old, "a", key=key)

    apart, together = on_mesh(mesh, body, check_vma=True)(X, OLD)
    assert PROCESSES > 1 or same_bits(apart, together)
    assert not same_bits(apart[0], apart[1])


# ---- 2. trees and shapes -------------------------------------------------------------------------


@both_carriers
@pytest.mark.parametrize("fuse", [True, False])
def test_trees(fuse: bool, carrier: Any) -> None:
    x = {"bias": normal(54, 8, 90), "half": normal(55, 8, 3, 200, dtype=BF16), "kernel": X}
    old = {"bias": normal(56, 8, 90), "half": normal(57, 8, 3, 200, dtype=BF16), "kernel": OLD}
    sums, residuals = run(
        lambda v, e: q(
            v, e, rules=Rules([("bias", 32)], exact_vectors=False), fuse=fuse, carrier=carrier
        ),
        x,
        old,
    )
    for name in x:
        want = oracle(x[name], old[name], bits=32 if name == "bias" else 4)
        check((sums[name], residuals[name]), want)
    assert not residuals["bias"].any()


@pytest.mark.skipif(not EMPTY_OPERANDS, reason="this jaxlib cannot compile it")
@both_modes
def test_empty_leaves(check_vma: bool) -> None:
    x, old = {"a": X, "b": np.zeros((8, 0, 3), BF16)}, {"a": OLD, "b": np.zeros((8, 0, 3), BF16)}
    sums, residuals = run(q, x, old, check_vma=check_vma)
    check((sums["a"], residuals["a"]), oracle(X, OLD))
    assert sums["b"].shape == residuals["b"].shape == (8, 0, 3)
    assert sums["b"].dtype == residuals["b"].dtype == BF16


@both_modes
def test_one_device_sends_nothing(check_vma: bool) -> None:
    mesh = mesh_of((8, 1), ("d", "one"))
    alone = on_mesh(mesh, lambda v, e: pmean_q(v, "one", residual=e), check_vma)
    total, none = alone(X, OLD)
    assert same_bits(total, X + OLD)
    assert not np.asarray(none).any()


# ---- 3. transformations and donation -------------------------------------------------------------


@both_modes
def test_vmap(check_vma: bool) -> None:
    """Check that each example of values, residuals or keys is computed as if alone."""
    x, old = normal(58, 8, 3, 600), normal(59, 8, 3, 600)
    sums, residuals = run(jax.vmap(q, in_axes=1, out_axes=1), x.swapaxes(1, 2), old.swapaxes(1, 2),
                          check_vma=check_vma)  # fmt: skip
    for i in range(3):
        check((sums[..., i], residuals[..., i]), oracle(x[:, i], old[:, i]))
    got = run(lambda v, e: jax.vmap(lambda one: q(v[0], one))(e), x, old, check_vma=check_vma)
    for i in range(3):
        check([rows[:, i] for rows in got], oracle(x[:, 0], old[:, i]))
    got = run(lambda v, e: jax.vmap(lambda one: q(one, e[0]))(v), x, old, check_vma=check_vma)
    for i in range(3):
        check([rows[:, i] for rows in got], oracle(x[:, i], old[:, 0]))
    keys = jax.random.split(jax.random.key(4), 3)
    got = run(lambda v, e: jax.vmap(lambda k: q(v[0], e[0], key=k))(keys), x, old)
    for i in range(3):
        want = oracle(x[:, 0], old[:, 0], seeds=[seed_of(keys[i])] * 8)
        check([rows[:, i] for rows in got], want)


@both_modes
@both_carriers
def test_scan(carrier: Any, check_vma: bool) -> None:
    """Use the residual as a loop's state, in one buffer."""
    x = normal(60, 4, 8, 600)

    def body(rows: jax.Array, old: jax.Array) -> Any:
        def step(residual: jax.Array, row: jax.Array) -> Any:
            total, residual = q(row, residual, carrier=carrier)
            return residual, total

        return lax.scan(step, old, rows)

    residuals, sums = run(body, x.swapaxes(0, 1), OLD[:, :600], check_vma=check_vma)
    old = OLD[:, :600]
    for i, row in enumerate(x):
        total, old = oracle(row, old)
        assert all(same_bits(got, total) for got in sums[:, i])
    assert all(map(same_bits, residuals, old))


@both_modes
def test_derivatives_are_those_of_the_exact_sum_of_both(check_vma: bool) -> None:
    """Check that the quantization error counts as a constant."""
    t, u = normal(61, 8, 2000), normal(62, 8, 2000)

    def exact(x: jax.Array, old: jax.Array) -> Any:
        return lax.psum(x + old, "d"), 0 * lax.stop_gradient(x)

    def tangents(f: Any) -> Any:
        return lambda *operands: jax.jvp(f, operands[:2], operands[2:])[1]

    def gradients(f: Any) -> Any:
        def loss(x: jax.Array, old: jax.Array, weight: jax.Array) -> jax.Array:
            total, new = f(x, old)
            return (total * weight).sum() + new.sum()

        return jax.grad(loss, argnums=(0, 1))

    for derived, operands in ((tangents, (t, u)), (gradients, (t,))):
        ours, theirs = (run(derived(f), X, OLD, *operands, check_vma=check_vma) for f in (q, exact))
        assert all(map(same_bits, ours, theirs))
    one = run(lambda x, old, s: jax.jvp(lambda e: q(x, e), (old,), (s,))[1][0], X, OLD, t,
              check_vma=check_vma)  # fmt: skip
    assert same_bits(one, run(lambda s: lax.psum(s, "d"), t))


@both_modes
def test_linear_transpose(check_vma: bool) -> None:
    def transposed(f: Any) -> Any:
        def body(x: jax.Array, old: jax.Array) -> Any:
            return jax.linear_transpose(f, x, old)(jnp.sin(lax.psum(x, "d")))

        return body

    ours = run(transposed(lambda x, old: q(x, old)[0]), X, OLD, check_vma=check_vma)
    theirs = run(transposed(lambda x, old: lax.psum(x + old, "d")), X, OLD, check_vma=check_vma)
    assert all(map(same_bits, ours, theirs))


@both_carriers
def test_donated(carrier: Any) -> None:
    """Check that the new residual reuses the old one's memory if donated, and not otherwise."""
    mapped = jax.shard_map(
        lambda x, old: q(x, old, carrier=carrier), mesh=MESH, in_specs=P("d"),
        out_specs=(P(), P("d")),
    )  # fmt: skip
    x, want = spread(MESH, X, P("d")), oracle(X[:, None], OLD[:, None])
    for donated in ((), (1,)):
        # JAX 0.11 keeps arrays that numpy has accessed, donated or not
        kept = spread(MESH, OLD, P("d"))
        total, residual = jax.jit(mapped, donate_argnums=donated)(x, kept)
        assert same_bits(total, want[0])
        assert same_bits(residual, want[1][:, 0])
        assert kept.is_deleted() == bool(donated)
        if not donated:
            assert same_bits(kept, OLD)


# ---- 4. errors on all processes ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("residual", "error", "message"),
    [
        (lambda x: [x["a"]], ValueError, r"psum_q: residual is .*, and x is .*zeros_like, x"),
        (
            lambda x: {"a": x["a"][:5]}, ValueError,
            r"residual\['a'\] has shape \(5,\), and x\['a'\] has \(2000,\)",
        ),
        (
            lambda x: {"a": x["a"].astype(BF16)}, TypeError,
            r"residual\['a'\] has dtype bfloat16, and x\['a'\] has float32",
        ),
    ],
    ids=["structure", "shape", "dtype"],
)  # fmt: skip
def test_residuals_that_do_not_match_x(residual: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run(lambda x: psum_q({"a": x}, "d", residual=residual({"a": x})), X)


def test_calls_without_residuals() -> None:
    calls = {
        "compress_grads": lambda x, **more: compress_grads(x, "d", **more),
        "value_and_grad": lambda x, **more: value_and_grad(jnp.sum, "d", **more)(x),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected .*'residual'"):
            run(lambda x, c=call: c(x, residual=x), X)
