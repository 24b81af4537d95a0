"""power_sgd: steps against the reference, conservation, states, checkpoints, bad input.

The gradients here are the device's rows of the batch, independent of the weights.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from jax import lax
from jax.sharding import PartitionSpec as P
from support.jax_cases import fetch, mesh_of, normal, same_bits, use_cpu_devices, with_config
from support.jax_optimizer_cases import (
    check_none_is_no_leaf,
    check_resumed,
    copied,
    mesh_with,
    placed,
    program_of,
)

from cgx_ops import Config, Rules
from cgx_ops.jax import PowerSGDState, consolidate, power_sgd, state_specs
from cgx_ops.methods import low_rank

use_cpu_devices(8)

pytestmark = pytest.mark.timeout(120)

N, STEPS = 4, 5
SHAPES = {"a": (24, 20), "conv": (3, 3, 4, 16), "bias": (20,), "small": (3, 6)}
MATRICES = {"a": (24, 20), "conv": (36, 16)}
MESH = mesh_with(N)
WEIGHTS = {name: normal(0, *shape) for name, shape in SHAPES.items()}
ROWS = {name: normal(1, STEPS, N, *shape) for name, shape in SHAPES.items()}
# additional rounding error of a result
U = {"float32": 0.0, "bfloat16": 2.0**-9, "float16": 2.0**-11}


def at(step: int, rows: Any = ROWS) -> Any:
    return {name: x[step] for name, x in rows.items()}


slow = pytest.mark.slow


# ---- 1. steps ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "check_vma"),
    [(1, True), pytest.param(3, True, marks=slow), pytest.param(3, False, marks=slow)],
)
def test_steps_with_donated_state(rank: int, check_vma: bool) -> None:
    optimizer = power_sgd("d", bits=32, rank=rank, seed=3, mesh=MESH)
    step = program_of(optimizer, WEIGHTS, MESH, check_vma=check_vma)
    state: Any = placed(optimizer, WEIGHTS, MESH)
    references = {
        name: reference.PowerSGD(N, n, low_rank.first_q(3, name, 0, m, rank), "local")
        for name, (n, m) in MATRICES.items()
    }
    for i in range(STEPS):
        before: Any = state
        got, state = step(WEIGHTS, state, at(i))
        assert before.residual["a"].is_deleted(), "it was not donated"
        assert state.q["bias"] is state.q["small"] is state.residual["bias"] is None
        for name, rows in at(i).items():
            mean = fetch(got[name])
            if name not in MATRICES:
                assert np.abs(mean - rows.mean(0, np.float64)).max() <= 1e-6
                continue
            want = references[name].step(rows.reshape(N, *MATRICES[name]))
            # As in float64 up to the rounding of products of at most 36 terms; the matrices'
            # singular values differ by a factor below 100.
            close = (
                100
                * 36
                * 2.0**-24
                * (np.abs(want).max() + np.abs(references[name].residuals).max())
            )
            assert np.abs(mean.reshape(want.shape) - want).max() <= close, (i, name)
            residual = fetch(jnp.copy(state.residual[name])).reshape(N, *want.shape)
            assert np.abs(residual - references[name].residuals).max() <= close, (i, name)
    assert int(state.step) == STEPS


@pytest.mark.slow
def test_steps_in_a_scan_with_init_inside() -> None:
    optimizer = power_sgd("d", rank=2)

    def train(params: Any, rows: Any) -> Any:
        def step(state: Any, row: Any) -> Any:
            mean, state = optimizer.update(jax.tree.map(lambda x: x[0], row), state)
            return state, mean

        last, means = lax.scan(step, optimizer.init(params), rows)
        state: Any = last
        return means, state.residual

    program = jax.shard_map(train, mesh=MESH, in_specs=(P(), P(None, "d")), out_specs=(P(), P("d")))
    means, residual = jax.jit(program)(WEIGHTS, ROWS)
    outside = power_sgd("d", bits=32, rank=2, mesh=MESH)
    step = program_of(outside, WEIGHTS, MESH)
    state: Any = outside.init(WEIGHTS)
    for i in range(STEPS):
        want, state = step(WEIGHTS, state, at(i))
        for name in SHAPES:
            assert np.allclose(means[name][i], fetch(want[name]), rtol=1e-4, atol=1e-5), (i, name)
    assert np.allclose(residual["a"], fetch(state.residual["a"]), atol=1e-4)


KNOBS: dict[str, dict[str, Any]] = {
    "exact": {"bits": 32},
    "16 bits": {"bits": 32, "factor_bits": 16},
    "8 bits": {"bits": 32, "factor_bits": 8, "key": jax.random.key(1)},
    "topk": {"compressor": "topk", "density": 0.1, "rules": Rules([("bias", 32)])},
}


@pytest.mark.parametrize(
    ("how", "dtype"),
    [
        ("8 bits", "float32"),
        ("topk", "bfloat16"),
        *(
            pytest.param(how, dtype, marks=slow)
            for how in KNOBS
            for dtype in ("float32", "float16")
            if (how, dtype) != ("8 bits", "float32")
        ),
    ],
)
def test_conservation(how: str, dtype: str) -> None:
    optimizer = power_sgd("d", rank=2, mesh=MESH, **with_config(**KNOBS[how]))
    weights = {name: jnp.asarray(x, dtype) for name, x in WEIGHTS.items()}
    step, state = program_of(optimizer, weights, MESH), placed(optimizer, weights, MESH)
    for i in range(3):
        rows = {name: jnp.asarray(x, dtype) for name, x in at(i).items()}
        old: Any = copied(state)
        got, state = step(weights, state, rows)
        new: Any = copied(state)
        for name, x in rows.items():
            shape = MATRICES.get(name, (1, -1))
            assert got[name].dtype == dtype
            given = [np.asarray(row, np.float32).reshape(shape) for row in x]
            before, after = (
                [np.zeros_like(g) for g in given] if e is None else [r.reshape(shape) for r in e]
                for e in (old.residual[name], new.residual[name])
            )
            average = fetch(got[name]).astype(np.float32).reshape(shape)
            lost = reference.given_up(given, before, average, after)
            bound = reference.given_up_bound(given, before, 2, U[dtype])
            assert (np.abs(lost) <= bound).all(), (i, name)
    assert state.residual["a"].any()
    assert (state.residual["small"] is not None) == (how == "topk")


def test_zeros_and_nan() -> None:
    """Check that zeros give no NaN, and one device's NaN fills its leaf's average once."""
    optimizer = power_sgd("d", bits=32, rank=2, mesh=MESH)
    step, state = program_of(optimizer, WEIGHTS, MESH), placed(optimizer, WEIGHTS, MESH)
    zeros = jax.tree.map(np.zeros_like, at(0))
    spoilt = at(1) | {"a": at(1)["a"].copy()}
    spoilt["a"][2, 3, 4] = np.nan
    for i, rows in enumerate((zeros, at(0), zeros, spoilt, at(2))):
        got, state = step(WEIGHTS, state, rows)
        assert np.isnan(fetch(got["a"])).all() == (i == 3)
        assert np.isnan(fetch(got["a"])).any() == (i == 3)
        assert np.isfinite(fetch(got["conv"])).all()
        assert fetch(got["conv"]).any() == (i > 0)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(copied(state)))


def test_exact_at_the_start() -> None:
    optimizer = power_sgd("d", bits=32, start=2, mesh=MESH)
    step, state = program_of(optimizer, WEIGHTS, MESH), placed(optimizer, WEIGHTS, MESH)
    first: Any = copied(state)
    for i in range(3):
        got, state = step(WEIGHTS, state, at(i))
        mean = at(i)["a"].mean(0, np.float64)
        assert (np.abs(fetch(got["a"]) - mean).max() <= 1e-6) == (i < 2)
        now: Any = copied(state)
        assert now.residual["a"].any() == (i == 2)
        assert np.array_equal(now.q["a"], first.q["a"]) == (i < 2)


def matrix_of_all(rows: Any, device: int) -> Any:
    """Return a device's leaves as one matrix, in the tree's order, padded with zeros."""
    flat = np.concatenate([rows[name][device].ravel() for name in sorted(rows)])
    side = int(np.ceil(np.sqrt(flat.size)))
    return np.pad(flat, (0, side * side - flat.size)).reshape(side, side)


def test_all_leaves_as_one_matrix() -> None:
    """Compare with the reference; use specs, donation and consolidation."""
    optimizer = power_sgd(
        "d",
        rank=2,
        seed=3,
        batched=True,
        mesh=MESH,
        rules=Rules([("bias", 32)], exact_vectors=False),
    )
    step = program_of(optimizer, WEIGHTS, MESH)
    state: Any = placed(optimizer, WEIGHTS, MESH)
    side = len(matrix_of_all(at(0), 0))
    inside = matrix_of_all({name: np.ones((1, *shape)) for name, shape in SHAPES.items()}, 0)
    oracle = reference.PowerSGD(N, side, low_rank.first_q(3, "", 0, side, 2), "local")
    for i in range(STEPS):
        got, state = step(WEIGHTS, state, at(i))
        want = oracle.step([matrix_of_all(at(i), device) for device in range(N)])
        # the padding belongs to no leaf
        oracle.residuals = [lost * inside for lost in oracle.residuals]
        kept = {name: fetch(jnp.copy(state.residual[name])) for name in SHAPES}
        # As for single leaves, with products of `side` terms.
        close = 100 * side * 2.0**-24 * (np.abs(want).max() + np.abs(oracle.residuals).max())
        means = matrix_of_all({name: fetch(got[name])[None] for name in SHAPES}, 0)
        assert np.abs((means - want) * inside).max() <= close, i
        for device in range(N):
            lost = matrix_of_all(kept, device) - oracle.residuals[device]
            assert np.abs(lost).max() <= close, (i, device)
    assert state.q.shape == (side, 2)
    text = step.lower(WEIGHTS, optimizer.init(WEIGHTS), at(0)).as_text()
    assert text.count("stablehlo.custom_call @cgx") == 2
    fewer: Any = consolidate(copied(state), devices=2)
    assert same_bits(fewer.q, state.q)
    assert fewer.residual["a"].shape == (2, *SHAPES["a"])


@pytest.mark.parametrize("batched", [False, True])
def test_without_warm_start(batched: bool) -> None:
    """Check that Q differs in every step, and is the same in every run."""
    optimizer = power_sgd("d", bits=32, rank=2, batched=batched, warm_start=False, mesh=MESH)
    step = program_of(optimizer, WEIGHTS, MESH)
    found = []
    for _ in range(2):
        state: Any = placed(optimizer, WEIGHTS, MESH)
        state = state._replace(residual=jax.tree.map(jnp.zeros_like, state.residual))
        for _ in range(2):
            # With the same gradients and no residuals, averages differ because of Q.
            got, state = step(WEIGHTS, state, at(0))
            found.append(fetch(got["a"]))
            state = state._replace(residual=jax.tree.map(jnp.zeros_like, state.residual))
    assert same_bits(found[0], found[2]) and same_bits(found[1], found[3])
    assert not np.allclose(found[0], found[1], rtol=1e-2)


def test_two_messages_a_step() -> None:
    optimizer = power_sgd("d", rank=2, mesh=MESH, config=Config(compressor="topk", density=0.1))
    step = program_of(optimizer, WEIGHTS, MESH)
    text = step.lower(WEIGHTS, optimizer.init(WEIGHTS), at(0)).as_text()
    assert text.count("stablehlo.custom_call @cgx") == 2


# ---- 2. states -----------------------------------------------------------------------------------


def test_checkpoint(tmp_path: Path) -> None:
    """Save by orbax, in a chain: arrays keep their sharding, training resumes bit for bit."""
    optimizer = optax.chain(power_sgd("d", bits=32, rank=2, mesh=MESH), optax.trace(0.9))
    specs = state_specs(optimizer, WEIGHTS, "d")
    assert specs[0].residual["a"] == P("d")
    assert specs[0].q["a"] == P()
    again = check_resumed(optimizer, WEIGHTS, MESH, at, 2, tmp_path)
    assert isinstance(again[0], PowerSGDState)


def test_resume_on_other_device_count() -> None:
    """Check that the pending correction (the mean of residuals) and Q are preserved."""
    optimizer = power_sgd("d", bits=32, rank=2, mesh=MESH)
    step, state = program_of(optimizer, WEIGHTS, MESH), placed(optimizer, WEIGHTS, MESH)
    for i in range(2):
        _, state = step(WEIGHTS, state, at(i))
    mesh = mesh_with(2)
    other: Any = consolidate(copied(state), devices=2)
    pending = fetch(state.residual["a"]).mean(0, np.float64)
    assert other.residual["a"].shape == (2, 24, 20)
    assert same_bits(other.q["a"], state.q["a"])
    program = program_of(power_sgd("d", bits=32, rank=2, mesh=mesh), WEIGHTS, mesh)
    zeros = {name: np.zeros((2, *shape), np.float32) for name, shape in SHAPES.items()}
    got, other = program(WEIGHTS, other, zeros)
    left = fetch(other.residual["a"]).mean(0, np.float64)
    assert np.abs(fetch(got["a"]) + left - pending).max() <= 64 * 2.0**-24 * np.linalg.norm(pending)


@pytest.mark.parametrize("batched", [False, True])
def test_parameters_with_none(batched: bool) -> None:
    """Use None for frozen parameters, as equinox.partition does; other averages are unaffected."""
    optimizer = power_sgd("d", bits=32, rank=2, start=1, batched=batched, mesh=MESH)
    check_none_is_no_leaf(optimizer, WEIGHTS, at(0), MESH)


@pytest.mark.parametrize("batched", [False, True])
def test_no_parameters(batched: bool) -> None:
    """Take a step without any trainable weights."""
    optimizer = power_sgd("d", bits=32, rank=2, batched=batched, mesh=MESH)
    got, _ = program_of(optimizer, {}, MESH)({}, placed(optimizer, {}, MESH), {})
    assert got == {}


# ---- 3. bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"rank": 0}, "rank is 0; it must be an integer of at least 1"),
        ({"rank": 1.5}, "rank is 1.5"),
        ({"min_compression_rate": -1}, "min_compression_rate is -1; it must be a number above 0"),
        ({"min_compression_rate": float("nan")}, "min_compression_rate is nan"),
        ({"min_compression_rate": True}, "min_compression_rate is True"),
        ({"factor_bits": 4}, "factor_bits is 4; it must be one of 32, 16, 8"),
        ({"start": -1}, "power_sgd: start is -1; it must be an integer of at least 0"),
        ({"start": 2.5}, "start is 2.5; it must be an integer"),
        ({"start": "a"}, "start is 'a'; it must be an integer"),
        ({"start": True}, "start is True; it must be an integer"),
        ({"residual_decay": 2}, "residual_decay is 2; it must be more than 0"),
        ({"bits": 1}, "at 1 bit the error may be as large"),
        ({"bits": 4, "compressor": "levels", "density": 0.1}, "density"),
    ],
)
def test_bad_arguments(knobs: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        power_sgd("d", mesh=MESH, **with_config(**knobs)).init(WEIGHTS)


def test_numpy_numbers() -> None:
    numbers: Any = {"rank": np.int64(2), "start": np.int32(1)}
    assert power_sgd("d", **numbers, min_compression_rate=np.float32(2))  # pyright: ignore[reportArgumentType]


def test_unknown_knobs() -> None:
    for knob in ("fuse", "residual"):
        with pytest.raises(TypeError, match=knob):
            power_sgd("d", **{knob: True})  # pyright: ignore[reportArgumentType]


def test_bad_states_and_gradients() -> None:
    optimizer = power_sgd("d", bits=32, rank=2, mesh=MESH)
    step = program_of(optimizer, WEIGHTS, MESH)
    good: Any = optimizer.init(WEIGHTS)
    for q in (jnp.ones((20, 1)), jnp.ones((9, 2))):
        with pytest.raises(ValueError, match=r"updates\['a'\].*the state belongs to another model"):
            step(WEIGHTS, good._replace(q={**good.q, "a": q}), at(0))
    one = power_sgd("d", bits=32, rank=2, batched=True, mesh=MESH)
    other: Any = one.init(WEIGHTS)
    for bad, words in (
        (good, r"updates\['bias'\] has error feedback, .* or with other settings"),
        (other._replace(q=jnp.ones((3, 2))), r"all updates together need a q of shape \(34, 2\)"),
        (other._replace(q=good.q), r"without batched=True"),
    ):
        with pytest.raises(ValueError, match=words):
            program_of(one, WEIGHTS, MESH)(WEIGHTS, bad, at(0))
    short = {**good.residual, "a": jnp.ones((N, 2, 2))}
    with pytest.raises(ValueError, match=r"residual of updates\['a'\] has shape \(1, 2, 2\)"):
        step(WEIGHTS, good._replace(residual=short), at(0))
    complex_rows = at(0) | {"bias": at(0)["bias"].astype(np.complex64)}
    with pytest.raises(TypeError, match=r"\['bias'\] has dtype complex64"):
        step(WEIGHTS, good, complex_rows)
    with pytest.raises(ValueError, match="needs the sizes of the axes"):
        power_sgd("d").init(WEIGHTS)


def test_parameters_split_over_another_axis() -> None:
    mesh = mesh_of((4, 2), ("d", "m"))
    optimizer = power_sgd("d", mesh=mesh)
    params = {"a": WEIGHTS["a"]}
    specs = state_specs(optimizer, params, "d")
    program = jax.shard_map(
        lambda s, x: optimizer.update({"a": x[0]}, s), mesh=mesh,
        in_specs=(specs, P("d", "m")), out_specs=(P("m"), specs),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"varies over \['m'\]: its parameter is split"):
        jax.eval_shape(program, optimizer.init(params), ROWS["a"][0])
