"""deep_gradient: Deep Gradient Compression as an optax transformation.

1. steps: compared with the reference for all options; NaN; one program
2. states: checkpoints, other device counts; the same losses as in torch
3. bad input
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from jax.sharding import PartitionSpec as P
from support import launch
from support.jax_cases import fetch, mesh_of, normal, same_bits, use_cpu_devices
from support.jax_optimizer_cases import (
    check_none_is_no_leaf,
    check_resumed,
    copied,
    mesh_with,
    placed,
    program_of,
)

from cgx_ops import Config, Rules
from cgx_ops.jax import (
    DeepGradientState,
    average_gradients,
    consolidate,
    deep_gradient,
    state_specs,
)
from cgx_ops.methods.deep_gradient import Method

use_cpu_devices(8)

pytestmark = pytest.mark.timeout(120)

SHAPES = {"a": (24, 20), "conv": (3, 3, 4, 16), "bias": (20,), "small": (3, 5)}
SPARSE = {"a", "conv"}
WEIGHTS = {name: normal(0, *shape) for name, shape in SHAPES.items()}
ROWS = {name: normal(1, 50, 4, *shape) for name, shape in SHAPES.items()}
RATE = 0.1
# additional rounding error of a result
ROUNDED = {"float32": 0.0, "bfloat16": 2.0**-9, "float16": 2.0**-11}

slow = pytest.mark.slow
MESH = mesh_with(4)


def at(step: int, devices: int = 4) -> Any:
    return {name: x[step, :devices] for name, x in ROWS.items()}


# ---- 1. steps ------------------------------------------------------------------------------------


def references(devices: int, **options: Any) -> dict[str, reference.DeepGradient]:
    return {
        name: reference.DeepGradient(devices, int(np.prod(shape)), sparse=name in SPARSE, **options)
        for name, shape in SHAPES.items()
    }


def follow(
    steps: int, devices: int = 4, dtype: str = "float32", check_vma: bool = True, **options: Any
) -> None:
    """Compare averages, u, v and weights of every step with the reference.

    XLA may fuse a product and a sum, which then round once where the reference rounds twice;
    everything else is the same. So a step adds to u an error of at most 2^-24 max|u|, of which m
    remains in the next: at most 1 / (1 - m) times that. v adds this error and one rounding in each
    of t steps, and once more with Nesterov's momentum. An average consists of v's, rounded to its
    dtype; a weight sums up averages times the rate. With clip, a norm is off by at most n / 2 + 2
    roundings of n terms, and therefore each gradient by as many.
    """
    density, warmup = options.pop("density", 0.05), options.pop("warmup_steps", 0)
    momentum = options.setdefault("momentum", 0.9)
    mesh = mesh_with(devices)
    optimizer = deep_gradient("d", density=density, warmup_steps=warmup, mesh=mesh, **options)
    params = {name: jnp.asarray(x, dtype) for name, x in WEIGHTS.items()}
    step, state = program_of(optimizer, params, mesh, check_vma), placed(optimizer, params, mesh)
    wanted = references(devices, **options)
    weights = {name: (x.copy(), x.copy()) for name, x in WEIGHTS.items()}
    off = dict.fromkeys(SHAPES, 0.0)
    for i in range(steps):
        rows = {name: jnp.asarray(x, dtype) for name, x in at(i, devices).items()}
        got, state = step(params, state, rows)
        kept = copied(state)
        for name, shape in SHAPES.items():
            layer, flat = wanted[name], np.asarray(rows[name], np.float32).reshape(devices, -1)
            old = layer.v.copy()
            dense = reference.density_at(i, warmup, density)
            average = layer.step(list(flat), dense).reshape(shape)
            clipping = 2 + flat.shape[1] / 2 if options.get("clip") else 0
            largest = max(np.abs(x).max() for x in (old, layer.v, layer.u, flat, average))
            unit = 2.0**-24 * largest * (2 + clipping) / (1 - momentum)
            off[name] = 2 * unit * (i + 1) * devices
            found = fetch(got[name])
            rounded = 2 * ROUNDED[dtype] * np.abs(average)
            assert (np.abs(found.astype(np.float32) - average) <= off[name] + rounded).all(), name
            ours, theirs = weights[name]
            ours -= np.float32(RATE) * found.astype(np.float32)
            theirs -= np.float32(RATE) * average
            if name in SPARSE:
                v = kept.residual[name].reshape(devices, -1)
                assert np.abs(v - layer.v).max() <= off[name], (i, name)
                assert ((v == 0) == (layer.v == 0)).all(), (i, name)  # the same values were sent
            if momentum:
                u = kept.momentum[name].reshape(-1, flat.shape[1])
                assert np.abs(u - layer.u).max() <= off[name], (i, name)
    if dtype == "float32":
        for name, (ours, theirs) in weights.items():
            bound = steps * (RATE * off[name] + 2.0**-22 * np.abs(theirs).max())
            assert np.abs(ours - theirs).max() <= bound, name
    assert int(state.step) == steps


def test_default_method() -> None:
    follow(50)


FORMS: list[dict[str, Any]] = [
    {"devices": 2, "nesterov": True},
    {"devices": 1, "steps": 10},
    {"clip": 5.0},
    {"clip": 5.0, "nesterov": True, "momentum": 0.5, "check_vma": False},
    {"momentum": 0.0, "steps": 10},
    {"warmup_steps": 18, "density": 0.01},
    {"density": 1.0, "steps": 10},
    {"dtype": "bfloat16"},
    {"dtype": "float16", "steps": 10},
]


@slow
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_all_options(form: dict[str, Any]) -> None:
    follow(**{"steps": 50, **form})


def check_conservation(optimizer: Any, steps: int, devices: int = 4) -> None:
    """Check that without momentum, gradients and old residuals are either sent or kept.

    Each device rounds c = v + g once, and c minus the sent values once; then come sums and a
    quotient.
    """
    step, state = program_of(optimizer, WEIGHTS, MESH), placed(optimizer, WEIGHTS, MESH)
    for i in range(steps):
        old: Any = copied(state)
        got, state = step(WEIGHTS, state, at(i))
        new: Any = copied(state)
        for name in SPARSE:
            given, sent = at(i)[name].astype(np.float64), fetch(got[name]).astype(np.float64)
            owed = given + old.residual[name]
            error = np.abs(owed.sum(0) - sent * devices - new.residual[name].sum(0, np.float64))
            assert (error <= (devices + 3) * 2.0**-24 * np.abs(owed).sum(0)).all(), (i, name)
            assert 0 < (sent != 0).sum() < sent.size


@pytest.mark.parametrize(
    "knobs",
    [
        {"config": Config(compressor="topk", value_bits=16)},
        pytest.param({"config": Config(compressor="topk", value_bits=4)}, marks=slow),
        pytest.param(
            {"carrier": "xla", "rules": Rules([("conv", {"density": 0.3})])},
            marks=slow,
        ),
    ],
    ids=str,
)
def test_conservation(knobs: dict[str, Any]) -> None:
    check_conservation(deep_gradient("d", density=0.05, momentum=0, mesh=MESH, **knobs), 3)


def test_zeros_and_nan() -> None:
    """Check that one device's NaN appears once in the average, and not in the state."""
    optimizer = deep_gradient("d", density=0.05, clip=9.0, mesh=MESH)
    step, state = program_of(optimizer, WEIGHTS, MESH), placed(optimizer, WEIGHTS, MESH)
    zeros = jax.tree.map(np.zeros_like, at(0))
    spoilt = at(1) | {name: at(1)[name].copy() for name in ("a", "bias")}
    for name in ("a", "bias"):
        spoilt[name][2, ..., 3] = np.nan
    for i, rows in enumerate((zeros, at(0), spoilt, at(2))):
        got, state = step(WEIGHTS, state, rows)
        for name in SHAPES:
            spoilt_here = {"a": 24, "bias": 1}.get(name, 0) if i == 2 else 0
            assert np.isnan(fetch(got[name])).sum() == spoilt_here
            assert fetch(got[name]).any() == (i > 0)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(copied(state)))


def test_one_program_serves_the_warm_up() -> None:
    """Check that one program has a branch per density, with two messages in each step."""
    optimizer = deep_gradient("d", density=0.01, warmup_steps=8, mesh=MESH)
    step, state = program_of(optimizer, WEIGHTS, MESH), placed(optimizer, WEIGHTS, MESH)
    text = step.lower(WEIGHTS, state, at(0)).as_text()
    assert text.count("stablehlo.custom_call @cgx") == 5 + 1
    for i in range(10):
        _, state = step(WEIGHTS, state, at(i))
    assert step._cache_size() == 1


def test_sparse_leaves_share_a_message() -> None:
    """Check that the exact leaves share a message per 4 MiB or so."""
    weights = {str(i): jax.ShapeDtypeStruct((1024, 1024), jnp.float32) for i in range(6)}
    rows = {name: jax.ShapeDtypeStruct((4, 1024, 1024), jnp.float32) for name in weights}
    optimizer = deep_gradient("d", density=0.001, rules=Rules([("[01]", 32)]), mesh=MESH)
    step = program_of(optimizer, weights, MESH)
    text = step.lower(weights, jax.eval_shape(optimizer.init, weights), rows).as_text()
    assert text.count("stablehlo.custom_call @cgx_psum_q") == 1 + 2


@slow
def test_devices_of_a_host_sum_gradients() -> None:
    """Compare with one device per host that has the means, clipped before."""
    mesh = mesh_of((2, 2), ("hosts", "d"), jax.devices()[:4])
    optimizer = deep_gradient("hosts", density=0.05, dense_axis="d", clip=9.0, mesh=mesh)
    specs = state_specs(optimizer, WEIGHTS, "hosts")

    def step(state: Any, rows: Any) -> Any:
        return optimizer.update(jax.tree.map(lambda x: x[0], rows), state)

    program = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(specs, P(("hosts", "d"))), out_specs=(P(), specs))
    )
    state = optimizer.init(WEIGHTS)
    layers = references(2, momentum=0.9)
    limited = references(4, momentum=0.0, clip=9.0)
    for i in range(10):
        got, state = program(state, at(i))
        for name, shape in SHAPES.items():
            rows = [limited[name].clipped(x.ravel(), 4) for x in at(i)[name]]
            means = [(rows[0] + rows[1]) / np.float32(2), (rows[2] + rows[3]) / np.float32(2)]
            want = layers[name].step(means, 0.05).reshape(shape)
            off = 2.0**-24 * (i + 1) * 20 * (4 + rows[0].size / 2) * np.abs(layers[name].v).max()
            assert np.abs(fetch(got[name]) - want).max() <= off + 1e-5, (i, name)
            if name in SPARSE:
                v = fetch(state.residual[name]).reshape(2, -1)
                assert ((v == 0) == (layers[name].v == 0)).all()


@slow
def test_parameters_split_over_another_axis() -> None:
    """Check that each part is a separate leaf, and a vector's parts are averaged exactly."""
    mesh = mesh_of((4, 2), ("d", "m"))
    optimizer = deep_gradient("d", density=0.05, mesh=mesh)
    params, split = {"a": WEIGHTS["a"], "bias": WEIGHTS["bias"]}, {"a": P("m"), "bias": P("m")}
    specs = state_specs(optimizer, params, "d", split)
    program = jax.jit(
        jax.shard_map(
            lambda s, x: optimizer.update(jax.tree.map(lambda leaf: leaf[0], x), s), mesh=mesh,
            in_specs=(specs, {name: P("d", "m") for name in params}), out_specs=(split, specs),
        )
    )  # fmt: skip
    state = optimizer.init(params)
    halves = [reference.DeepGradient(4, 240, momentum=0.9) for _ in range(2)]
    common = reference.DeepGradient(4, 20, momentum=0.9, sparse=False)
    for i in range(5):
        rows = {name: at(i)[name] for name in params}
        got, state = program(state, rows)
        for m, half in enumerate(halves):
            part = slice(12 * m, 12 * m + 12)
            want = half.step([x[part].ravel() for x in rows["a"]], 0.05)
            off = 2 * 2.0**-24 * 10 * (i + 2) * np.abs(half.v).max()
            assert np.abs(fetch(got["a"])[part].ravel() - want).max() <= off
            v = fetch(state.residual["a"])[:, part].reshape(4, -1)
            assert ((v == 0) == (half.v == 0)).all()
        want = common.step(list(rows["bias"]), 0.05)
        assert np.abs(fetch(got["bias"]) - want).max() <= 2.0**-20 * np.abs(want).max()


@slow
def test_processes_with_two_devices_each() -> None:
    environment = {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    launch.check_ok(launch.mpirun(2, "run_jax_deep_gradient.py", env=environment, timeout=100))


# ---- 2. states -----------------------------------------------------------------------------------


def test_checkpoint(tmp_path: Path) -> None:
    """Save by orbax during the warm-up, in a chain; resume bit for bit."""
    optimizer = optax.chain(
        deep_gradient("d", density=0.01, warmup_steps=6, nesterov=True, clip=9.0, mesh=MESH),
        optax.sgd(0.1),
    )
    specs = state_specs(optimizer, WEIGHTS, "d")
    assert specs[0].residual == {"a": P("d"), "conv": P("d"), "bias": None, "small": None}
    assert specs[0].momentum == {"a": P("d"), "conv": P("d"), "bias": P(), "small": P()}
    again = check_resumed(optimizer, WEIGHTS, MESH, at, 4, tmp_path)
    assert isinstance(again[0], DeepGradientState)


def test_resume_on_other_device_count() -> None:
    """Check that the pending correction (mean residual) and the mean momentum are kept."""
    optimizer = deep_gradient("d", density=0.05, mesh=MESH)
    step, state = program_of(optimizer, WEIGHTS, MESH), placed(optimizer, WEIGHTS, MESH)
    for i in range(3):
        _, state = step(WEIGHTS, state, at(i))
    old: Any = copied(state)
    mesh = mesh_with(2)
    other: Any = consolidate(old, devices=2)
    assert other.residual["a"].shape == other.momentum["a"].shape == (2, 24, 20)
    assert same_bits(other.momentum["bias"], old.momentum["bias"])
    program = program_of(deep_gradient("d", density=0.05, mesh=mesh), WEIGHTS, mesh)
    zeros = {name: np.zeros((2, *shape), np.float32) for name, shape in SHAPES.items()}
    got, other = program(WEIGHTS, other, zeros)
    u, v = (tree["a"].mean(0, np.float64) for tree in (old.momentum, old.residual))
    left = fetch(other.residual["a"]).mean(0, np.float64)
    assert np.abs(fetch(got["a"]) + left - (v + 0.9 * u)).max() <= 16 * 2.0**-24 * np.abs(v).max()


def test_parameters_with_none() -> None:
    """Use None for frozen parameters, as equinox.partition does; other averages are unaffected."""
    optimizer = deep_gradient("d", density=0.05, mesh=MESH)
    check_none_is_no_leaf(optimizer, WEIGHTS, at(0), MESH)


# ---- 3. bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"density": 0}, "density is 0; it must be more than 0 and at most 1"),
        ({"density": 1.5}, "density is 1.5"),
        ({"momentum": 1}, "momentum is 1; it must be at least 0 and less than 1"),
        ({"nesterov": True, "momentum": 0}, "Nesterov's momentum must be more than 0"),
        ({"clip": -1}, "clip is -1; it must be a number above 0, or None"),
        ({"warmup_steps": -1}, "warmup_steps is -1; it must be an integer"),
        ({"warmup_steps": True}, "warmup_steps is True"),
        ({"momentum": float("nan")}, "momentum is nan"),
        ({"density": True}, "density is True"),
        ({"compressor": "levels"}, "compressor is 'levels'; Deep Gradient Compression sends"),
        ({"config": Config(compressor="topk", density=0.1)}, "density is 0.1; give density as an"),
    ],
)
def test_bad_arguments(knobs: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        deep_gradient("d", **knobs)


def test_numpy_numbers() -> None:
    numbers: Any = {
        "density": np.float32(0.25), "momentum": np.float64(0.5), "clip": np.int64(2),
        "warmup_steps": np.int64(4),
    }  # fmt: skip
    assert repr(Method(**numbers, nesterov=False)) == repr(Method(0.25, 0.5, False, 2.0, 4))
    assert deep_gradient("d", **numbers)


def test_momentum_twice() -> None:
    sgd = optax.sgd(0.1, momentum=0.9)
    for behind in (sgd, optax.adam(0.1)):
        optimizer = optax.chain(deep_gradient("d", mesh=MESH), behind)
        with pytest.raises(ValueError, match="deep_gradient has momentum, and so has"):
            state_specs(optimizer, WEIGHTS, "d")
        state_specs(optax.chain(deep_gradient("d", momentum=0, mesh=MESH), behind), WEIGHTS, "d")
    decayed = optax.chain(deep_gradient("d", mesh=MESH), optax.add_decayed_weights(0.1))
    state_specs(decayed, WEIGHTS, "d")
    parts: Any = {"sparse": decayed, "dense": optax.chain(average_gradients("d", mesh=MESH), sgd)}
    labels = {name: "dense" if name == "bias" else "sparse" for name in WEIGHTS}
    state_specs(optax.partition(parts, labels), WEIGHTS, "d")


def test_bad_states_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = deep_gradient("d", mesh=MESH)
    step = program_of(optimizer, WEIGHTS, MESH)
    good: Any = optimizer.init(WEIGHTS)
    short = {**good.residual, "a": jnp.ones((4, 2, 2))}
    with pytest.raises(ValueError, match=r"residual of updates\['a'\] has shape \(1, 2, 2\)"):
        step(WEIGHTS, good._replace(residual=short), at(0))
    other = {**good.momentum, "bias": jnp.ones(7)}
    with pytest.raises(ValueError, match=r"a momentum of shape \(7,\): the state belongs to"):
        step(WEIGHTS, good._replace(momentum=other), at(0))
    ruled = deep_gradient("d", rules=Rules([("a", 32)]), mesh=MESH)
    with pytest.raises(ValueError, match=r"updates\['a'\] of shape \(24, 20\) is sparse here, but"):
        step(WEIGHTS, ruled.init(WEIGHTS), at(0))
    complex_rows = at(0) | {"bias": at(0)["bias"].astype(np.complex64)}
    with pytest.raises(TypeError, match=r"\['bias'\] has dtype complex64"):
        step(WEIGHTS, good, complex_rows)
    with pytest.raises(ValueError, match="needs the sizes of the axes"):
        deep_gradient("d").init(WEIGHTS)
    levels = deep_gradient(
        "d",
        rules=Rules([("a", {"compressor": "levels", "bits": 2})]),
        mesh=MESH,
    )
    with pytest.raises(ValueError, match="a rule gives layer 'a' compressor='levels'"):
        levels.init(WEIGHTS)
    shared = jax.shard_map(
        lambda s, x: optimizer.update(x, s), mesh=MESH,
        in_specs=(state_specs(optimizer, WEIGHTS, "d"), P()), out_specs=P(),
    )  # fmt: skip
    with pytest.raises(ValueError, match="is the same on all devices"):
        jax.eval_shape(shared, good, WEIGHTS)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    nowhere = deep_gradient("d")
    specs = state_specs(optimizer, WEIGHTS, "d")
    program = jax.shard_map(
        lambda s, x: nowhere.update(x, s), mesh=MESH, in_specs=(specs, P("d")),
        out_specs=(P(), specs),
    )  # fmt: skip
    with pytest.raises(ValueError, match="processes have several devices each, so mesh must be"):
        jax.eval_shape(program, good, at(0))
