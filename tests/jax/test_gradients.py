"""compress_grads and value_and_grad: against the oracle and JAX's gradients, bit for bit.

The gradient of the loss `linear` is the device's row of the batch, independent of the weights, so
the oracle takes these rows. Losses over integers have integer gradients, which float32 sums exactly
in any order: they equal JAX's bit for bit.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support.jax_cases import (
    SRA,
    Values,
    expected,
    fetch,
    mesh_of,
    normal,
    same_bits,
    seed_of,
    use_cpu_devices,
)

from cgx_ops import Rules
from cgx_ops.jax import compress_grads, psum_q, value_and_grad

use_cpu_devices(8)

pytestmark = [pytest.mark.timeout(120), pytest.mark.mpirun]

# jax/test_matrix.py tests gradients in both modes in daily runs.
both_modes = pytest.mark.parametrize(
    "check_vma", [True, pytest.param(False, marks=pytest.mark.exhaustive)]
)

N, NUMEL = 8, 2000
WEIGHTS, BATCH = normal(0, NUMEL), normal(1, N, NUMEL)
KEY = jax.random.key(5)
SHARED = P()


def linear(weights: jax.Array, row: jax.Array) -> jax.Array:
    return (weights * row).sum()


def compressed(weights: Any, **knobs: Any) -> Any:
    options: dict[str, Any] = {"config": SRA, "rules": Rules(exact_vectors=False), **knobs}
    return compress_grads(weights, "d", **options)


def averaged(loss: Callable[..., Any], *args: Any, **knobs: Any) -> Callable[..., Any]:
    return value_and_grad(
        loss, "d", *args, **{"config": SRA, "rules": Rules(exact_vectors=False), **knobs}
    )


def varying(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: lax.pcast(leaf, "d", to="varying"), tree)


def on_rows(body: Callable[..., Any], out_specs: Any = SHARED, check_vma: bool = True) -> Any:
    """Return body(weights, row) on eight devices, with shared weights and one row each."""
    return jax.shard_map(
        lambda weights, rows: body(weights, rows[0]), mesh=mesh_of((N,), ("d",)),
        in_specs=(P(), P("d")), out_specs=out_specs, check_vma=check_vma,
    )  # fmt: skip


# ---- compress_grads: three places of jax.grad ----------------------------------------------------


def inside(loss: Callable[..., jax.Array]) -> Any:
    return jax.jit(on_rows(jax.grad(loss)))


def around(loss: Callable[..., jax.Array]) -> Any:
    """Return the loss of each device from the shard_map."""
    each = on_rows(lambda weights, row: loss(weights, row)[None], P("d"))
    return jax.jit(jax.grad(lambda weights, batch: each(weights, batch).sum()))


def around_reduced(loss: Callable[..., jax.Array]) -> Any:
    """Return one loss, reduced inside of the shard_map."""
    return jax.jit(jax.grad(on_rows(loss)))


@pytest.mark.parametrize("key", [None, KEY, jax.random.PRNGKey(5)], ids=["nearest", "typed", "raw"])
@pytest.mark.parametrize("gradient", [inside, around])
def test_losses_of_devices(gradient: Any, key: Any) -> None:
    """JAX differentiates the sum of losses that differ between devices."""
    got = gradient(lambda w, row: linear(compressed(w, key=key), row))(WEIGHTS, BATCH)
    seeds = None if key is None else [seed_of(key)] * N
    assert same_bits(got, expected(BATCH, seeds=seeds))


@pytest.mark.parametrize("gradient", [inside, around_reduced])
@pytest.mark.parametrize("reduce", [lax.psum, lax.pmean])
def test_reduced_loss(gradient: Any, reduce: Any) -> None:
    got = gradient(lambda w, row: reduce(linear(compressed(w), row), "d"))(WEIGHTS, BATCH)
    rows = BATCH if reduce is lax.psum else BATCH / np.float32(N)  # a power of two: exact
    assert same_bits(got, expected(rows))


def whole(seed: int, *shape: int) -> Values:
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32)


WHOLE = {"a": whole(2, NUMEL), "b": whole(3, NUMEL, 3)}


def quadratic(weights: Any, row: jax.Array) -> jax.Array:
    return jnp.square((weights["a"] * row) @ weights["b"]).sum()


@pytest.mark.parametrize("gradient", [inside, around, around_reduced])
def test_equals_jax_without_compression(gradient: Any) -> None:
    def loss(weights: Any, row: jax.Array) -> jax.Array:
        value = quadratic(weights, row)
        return lax.pmean(value, "d") if gradient is around_reduced else value

    ours = gradient(lambda w, row: loss(compressed(w, bits=32), row))(WHOLE, whole(4, N, NUMEL))
    theirs = gradient(loss)(WHOLE, whole(4, N, NUMEL))
    assert jax.tree.all(jax.tree.map(np.array_equal, ours, theirs))  # 0 may be -0
    assert np.abs(ours["a"]).max() > 100


def test_eager_call_does_not_change_values() -> None:
    def body(weights: jax.Array, row: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(lambda w: linear(compressed(w), row))(weights)
        return value[None], linear(weights, row)[None], gradient

    program = on_rows(body, (P("d"), P("d"), P()))
    value, plain, gradient = fetch(program(WEIGHTS, BATCH))
    assert same_bits(value, plain)
    assert same_bits(gradient, expected(BATCH))


# ---- compress_grads under transformations --------------------------------------------------------


@pytest.mark.parametrize("gradient", [inside, around])
@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint], ids=["jit", "remat"])
def test_inside_other_transformations(gradient: Any, wrap: Any) -> None:
    loss = wrap(lambda w, row: linear(compressed(w, key=KEY), row))
    assert same_bits(gradient(loss)(WEIGHTS, BATCH), expected(BATCH, seeds=[seed_of(KEY)] * N))


@pytest.mark.parametrize("gradient", [inside, around])
def test_accumulation_in_a_scan(gradient: Any) -> None:
    """Check one message if the gradient is outside of the scan, one per micro-batch if inside."""
    batch = whole(5, N, 4, NUMEL)

    def total(weights: jax.Array, row: jax.Array, each: Callable[..., Any]) -> jax.Array:
        def add(loss: jax.Array, micro: jax.Array) -> tuple[jax.Array, None]:
            return loss + linear(each(weights), micro), None

        return lax.scan(add, varying(jnp.float32(0)), row)[0]

    outside = gradient(lambda w, row: total(compressed(w), row, lambda v: v))(WEIGHTS, batch)
    assert same_bits(outside, expected(batch.sum(1)))
    within = gradient(lambda w, row: total(w, row, lambda v: compressed(v, bits=32)))
    assert same_bits(within(WEIGHTS, batch), batch.sum((0, 1)))


def test_vmap_of_the_gradient() -> None:
    """Check that each of three models has a separate loss and gradient."""
    models = normal(6, 3, NUMEL)
    scale = np.arange(1, 4, dtype=np.float32)

    def body(weights: jax.Array, row: jax.Array) -> jax.Array:
        one = jax.grad(lambda w, s: s * linear(compressed(w), row))
        return jax.vmap(one)(weights, jnp.asarray(scale))

    got = jax.jit(on_rows(body))(models, BATCH)
    for i in range(3):
        assert same_bits(got[i], expected(scale[i] * BATCH))


def test_traced_key() -> None:
    def gradient(weights: jax.Array, batch: Values, step: int) -> jax.Array:
        key = jax.random.fold_in(KEY, step)
        return jax.shard_map(
            lambda w, rows, k: jax.grad(lambda v: linear(compressed(v, key=k), rows[0]))(w),
            mesh=mesh_of((N,), ("d",)), in_specs=(P(), P("d"), P()), out_specs=P(),
        )(weights, batch, key)  # fmt: skip

    program = jax.jit(gradient)
    for step in (0, 1):
        seed = seed_of(jax.random.fold_in(KEY, step))
        assert same_bits(program(WEIGHTS, BATCH, step), expected(BATCH, seeds=[seed] * N))


# ---- compress_grads on trees and meshes ----------------------------------------------------------


@pytest.mark.parametrize("fuse", [True, False])
def test_leaves_have_separate_bits_and_noise(fuse: bool) -> None:
    weights = {"bias": WEIGHTS[:40], "kernel": WEIGHTS[40:]}

    def loss(w: Any, row: jax.Array) -> jax.Array:
        w = compressed(
            w, key=KEY, bits=2, rules=Rules([("bias|norm", 32)], exact_vectors=False), fuse=fuse
        )
        return linear(w["bias"], row[:40]) + linear(w["kernel"], row[40:])

    program: Any = inside(loss)
    got = program(weights, BATCH)
    assert same_bits(got["bias"], expected(BATCH[:, :40], bits=32))
    seeds = [seed_of(KEY, 1)] * N
    assert same_bits(got["kernel"], expected(BATCH[:, 40:], bits=2, seeds=seeds))
    text = program.lower(weights, BATCH).compile().as_text()
    assert text.count('custom_call_target="cgx_psum_q"') == (1 if fuse else 2)
    assert "all-reduce(" not in text, "JAX summed the gradients as well"


def test_unused_weights() -> None:
    got = inside(lambda w, row: linear(compressed(w)["a"], row))(
        {"a": WEIGHTS, "unused": WEIGHTS}, BATCH
    )
    assert same_bits(got["a"], expected(BATCH))
    assert not np.asarray(got["unused"]).any()


@pytest.mark.parametrize("around_it", [False, True])
def test_jax_sums_over_the_other_axis(around_it: bool) -> None:
    """Check weights shared over "m" too, where JAX sums exactly before cgx."""
    mesh, batch = mesh_of((4, 2), ("d", "m")), whole(7, 4, 2, NUMEL)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return linear(compressed(w), x[0, 0])

    if around_it:
        each = jax.shard_map(
            lambda w, x: loss(w, x)[None, None], mesh=mesh,
            in_specs=(P(), P("d", "m")), out_specs=P("d", "m"),
        )  # fmt: skip
        program = jax.grad(lambda w, x: each(w, x).sum())
    else:
        specs = {"in_specs": (P(), P("d", "m")), "out_specs": P()}
        program = jax.shard_map(jax.grad(loss), mesh=mesh, **specs)
    want = expected(batch.sum(1), at=range(0, N, 2))
    assert same_bits(jax.jit(program)(WEIGHTS, batch), want)


# ---- compress_grads: errors ----------------------------------------------------------------------


@pytest.mark.parametrize("around_it", [False, True])
def test_unchecked_types_raise(around_it: bool) -> None:
    """Check both places: JAX's gradient would be N times too large."""
    loss = lambda w, row: lax.pmean(linear(compressed(w), row), "d")  # noqa: E731
    if around_it:
        program = jax.grad(on_rows(loss, check_vma=False))
    else:
        program = on_rows(jax.grad(loss), check_vma=False)
    with pytest.raises(NotImplementedError, match=r"check_vma.*\n?.*cgx_ops.jax.value_and_grad"):
        jax.jit(program)(WEIGHTS, BATCH)


def test_varying_weights_raise() -> None:
    with pytest.raises(ValueError, match=r"params\['w'\] varies over \['d'\].*without lax.pcast"):
        inside(lambda w, row: linear(compressed({"w": varying(w)})["w"], row))(WEIGHTS, BATCH)


def test_keys_that_differ_over_another_axis_raise() -> None:
    mesh = mesh_of((4, 2), ("d", "m"))
    keys = jax.random.split(KEY, 2)
    body = jax.shard_map(
        lambda w, k: jax.grad(lambda v: compressed(v, key=k[0]).sum())(w),
        mesh=mesh, in_specs=(P(), P("m")), out_specs=P(),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"key varies over \['m'\].*same key"):
        jax.jit(body)(WEIGHTS, keys)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda w: compress_grads(w, "other"), NameError, "unbound axis name: 'other'"),
        (lambda w: compressed({"n": 3}), TypeError, r"\['n'\] has dtype int32"),
        (lambda w: compressed(w, bits=9), ValueError, "bits"),
        (lambda w: compressed(w, key=7), TypeError, "not a PRNG key"),
        (lambda w: compressed(w, bits=jnp.int32(4) + w[0].astype(int)), TypeError, "static"),
        (lambda w: compressed(w, no_such_knob=1), TypeError, "no_such_knob"),
    ],
)
def test_bad_calls(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        inside(lambda w, row: linear(call(w), row))(WEIGHTS, BATCH)
    if message not in ("bits", "no_such_knob"):  # for the others, Config checks the name
        assert "compress_grads: " in str(caught.value)


def test_outside_of_any_shard_map() -> None:
    for call in (compressed, value_and_grad(jnp.sum, "d")):
        with pytest.raises(NameError, match=r"unbound axis name: 'd'.*inside jax.shard_map"):
            call(WEIGHTS)


# ---- value_and_grad ------------------------------------------------------------------------------


def mean_of_losses(check_vma: bool) -> Any:
    reduced = on_rows(lambda w, row: lax.pmean(linear(w, row), "d"), check_vma=check_vma)
    return jax.jit(reduced)(WEIGHTS, BATCH)


@both_modes
@pytest.mark.parametrize("key", [None, KEY], ids=["nearest", "stochastic"])
def test_means_of_value_and_gradient(check_vma: bool, key: Any) -> None:
    """Pass weights unchanged: no pcast is needed."""
    program: Any = jax.jit(on_rows(averaged(linear, key=key), check_vma=check_vma))
    value, gradient = program(WEIGHTS, BATCH)
    seeds = None if key is None else [seed_of(key)] * N
    assert same_bits(gradient, expected(BATCH, op="avg", seeds=seeds))
    assert same_bits(value, mean_of_losses(check_vma))
    text = program.lower(WEIGHTS, BATCH).compile().as_text()
    assert text.count(" all-reduce(") == 1, "the value's alone"


def test_gradients_are_not_summed_twice() -> None:
    """Compare with the naive way: psum_q of the sum that JAX makes is eight times too large."""

    def naive(weights: jax.Array, row: jax.Array) -> jax.Array:
        return psum_q(jax.grad(linear)(weights, row), "d", bits=32)

    batch = whole(8, N, NUMEL)
    assert same_bits(jax.jit(on_rows(naive))(WEIGHTS, batch), N * batch.sum(0))
    right = jax.jit(on_rows(averaged(linear, bits=32)))(WEIGHTS, batch)[1]
    assert same_bits(right, batch.mean(0))


@both_modes
def test_several_arguments_and_an_auxiliary_result(check_vma: bool) -> None:
    def loss(row: jax.Array, a: jax.Array, *, b: jax.Array, c: Any) -> Any:
        return linear(a, row) + linear(c["w"], 3 * row), {"own": row[:2] + b}

    def body(weights: jax.Array, row: jax.Array) -> Any:
        fun = lambda x, y, z, b: loss(x, y, b=b, c=z)  # noqa: E731
        trees = (row, weights, {"w": weights})
        (value, aux), gradients = averaged(fun, (1, -1), True)(*trees, b=1.0)
        (_, _), first = averaged(fun, 1, has_aux=True)(*trees, b=1.0)
        return value, aux, gradients, first

    program = on_rows(body, (P(), P("d"), P(), P()), check_vma)
    _, aux, (first, last), alone = fetch(jax.jit(program)(WEIGHTS, BATCH))
    assert same_bits(first, expected(BATCH, op="avg"))
    assert same_bits(last["w"], expected(3 * BATCH, op="avg"))
    assert same_bits(alone, first)
    assert same_bits(aux["own"], (BATCH[:, :2] + 1).reshape(-1))


@both_modes
@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint], ids=["jit", "remat"])
def test_around_other_transformations(check_vma: bool, wrap: Any) -> None:
    program = jax.jit(on_rows(averaged(wrap(linear)), check_vma=check_vma))
    assert same_bits(program(WEIGHTS, BATCH)[1], expected(BATCH, op="avg"))


@both_modes
def test_micro_batches_and_steps_in_scans(check_vma: bool) -> None:
    """Run SGD steps in a scan; each averages gradients accumulated over micro-batches by a scan."""
    steps = whole(9, N, 3, 2, NUMEL)

    def loss(weights: jax.Array, micros: jax.Array) -> jax.Array:
        return jax.vmap(linear, (None, 0))(weights, micros).sum()

    def accumulated(weights: jax.Array, micros: jax.Array) -> jax.Array:
        def add(total: jax.Array, micro: jax.Array) -> tuple[jax.Array, None]:
            return total + linear(weights, micro), None

        return lax.scan(add, 0 * loss(weights, micros), micros)[0]

    def body(weights: jax.Array, row: jax.Array) -> jax.Array:
        def step(w: jax.Array, micros: jax.Array) -> tuple[jax.Array, jax.Array]:
            value, gradient = averaged(accumulated)(w, micros)
            return w - gradient, value

        return lax.scan(step, weights, row)[0]

    got = jax.jit(on_rows(body, check_vma=check_vma))(WEIGHTS, steps)
    want = WEIGHTS
    for i in range(3):
        want = want - expected(steps[:, i].sum(1), op="avg")
    assert same_bits(got, want)


@both_modes
def test_vmap_of_value_and_grad(check_vma: bool) -> None:
    models = normal(10, 3, NUMEL)
    body = lambda w, row: jax.vmap(averaged(linear), (0, None))(w, row)  # noqa: E731
    value, gradient = jax.jit(on_rows(body, check_vma=check_vma))(models, BATCH)
    assert value.shape == (3,)
    for i in range(3):
        assert same_bits(gradient[i], expected(BATCH, op="avg"))


@both_modes
@pytest.mark.parametrize("fuse", [True, False])
def test_rules_and_fusion(check_vma: bool, fuse: bool) -> None:
    weights = {"layer": {"bias": WEIGHTS[:40], "kernel": WEIGHTS[40:]}}

    def loss(w: Any, row: jax.Array) -> jax.Array:
        return linear(w["layer"]["bias"], row[:40]) + linear(w["layer"]["kernel"], row[40:])

    fun = averaged(
        loss, rules=Rules([("layer.bias", 32), ("kernel", 2)], exact_vectors=False), fuse=fuse
    )
    program: Any = jax.jit(on_rows(fun, check_vma=check_vma))
    got = program(weights, BATCH)[1]["layer"]
    assert same_bits(got["bias"], expected(BATCH[:, :40], bits=32, op="avg"))
    assert same_bits(got["kernel"], expected(BATCH[:, 40:], bits=2, op="avg"))
    text = program.lower(weights, BATCH).compile().as_text()
    assert text.count('custom_call_target="cgx_psum_q"') == (1 if fuse else 2)


@both_modes
@pytest.mark.parametrize("axes", ["d", ("d", "m")])
def test_two_axes(check_vma: bool, axes: Any) -> None:
    """Over "d" alone, each index of "m" is a separate model."""
    mesh, batch = mesh_of((4, 2), ("d", "m")), normal(11, 4, 2, NUMEL)
    fun = value_and_grad(linear, axes, config=SRA, rules=Rules(exact_vectors=False))
    weights = normal(12, 2, NUMEL)
    specs = (P("m"), P("m")) if axes == "d" else (P(), P())

    def body(w: jax.Array, x: jax.Array) -> Any:
        own = w[0] if axes == "d" else w.sum(0)
        value, gradient = fun(own, x[0, 0])
        return (value[None], gradient[None]) if axes == "d" else (value, gradient)

    program = jax.shard_map(
        body, mesh=mesh, in_specs=(specs[0], P("d", "m")), out_specs=specs, check_vma=check_vma
    )
    gradient = fetch(jax.jit(program)(weights, batch))[1]
    if axes == "d":
        for m in range(2):
            want = expected(batch[:, m], op="avg", at=range(m, N, 2))
            assert same_bits(gradient[m], want)
    else:
        assert same_bits(gradient, expected(batch.reshape(N, NUMEL), op="avg"))


@pytest.mark.parametrize("reduce", [lax.psum, lax.pmean])
def test_value_that_is_already_reduced(reduce: Any) -> None:
    """Check that checked types raise; without them, the results are still right."""
    batch, weights = whole(13, N, NUMEL), whole(14, NUMEL)
    fun = averaged(lambda w, row: reduce(linear(w, row), "d"), bits=32)
    with pytest.raises(ValueError, match=r"same on all devices of \['d'\].*without psum or pmean"):
        jax.jit(on_rows(fun))(weights, batch)
    value, gradient = jax.jit(on_rows(fun, check_vma=False))(weights, batch)
    exact = batch.sum(0) if reduce is lax.psum else batch.mean(0)
    assert same_bits(gradient, exact)
    assert float(value) == float((exact * weights).sum())
