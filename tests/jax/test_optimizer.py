"""average_gradients: steps with error feedback against the oracle, state, checkpoints.

The gradient of the loss here is the device's row of the batch, independent of the weights.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax import NamedSharding, lax
from jax.sharding import PartitionSpec as P
from support import jax_optimizer_cases as cases
from support.jax_cases import (
    PROCESSES,
    SRA,
    Values,
    expected,
    fetch,
    mesh_of,
    normal,
    same_bits,
    seed_of,
    use_cpu_devices,
    with_config,
)
from support.launch import mpirun

from cgx_ops import Config, Rules
from cgx_ops.jax import (
    average_gradients,
    compressed_adamw,
    deep_gradient,
    power_sgd,
    signum,
    state_specs,
)

use_cpu_devices(8)

pytestmark = [pytest.mark.timeout(120), pytest.mark.mpirun]

one_process = pytest.mark.skipif(PROCESSES > 1, reason="is about one process, or starts its own")
both_modes = pytest.mark.parametrize(
    "check_vma", [True, pytest.param(False, marks=pytest.mark.exhaustive)]
)

N, STEPS, NUMEL = 8, 4, 1200
WEIGHTS, ROWS = normal(0, NUMEL), normal(1, STEPS, N, NUMEL)
KEY = jax.random.key(3)
MESH = mesh_of((N,), ("d",))
U = 2.0**-24  # relative rounding error of a float32 operation


def oracle(
    rows: Values, *, feedback: bool = True, key: Any = None, at: Sequence[int] | None = None
) -> Iterator[Any]:
    """Yield each step's mean and residuals, (N, NUMEL). `at`: as in expected()."""
    residual = np.zeros_like(rows[0])
    for step, row in enumerate(rows):
        seeds = None if key is None else [seed_of(jax.random.fold_in(key, step))] * len(row)
        residual = residual.copy()
        mean = expected(
            row, op="avg", bits=2, seeds=seeds, at=at,
            residuals=list(residual) if feedback else None,
        )  # fmt: skip
        yield mean, residual


def average(**knobs: Any) -> Any:
    return average_gradients(
        "d",
        **with_config(
            **{
                "bits": 2,
                "algorithm": "sra",
                "mesh": MESH,
                "rules": Rules(exact_vectors=False),
                **knobs,
            }
        ),
    )


def gradient_of(weights: Any, rows: jax.Array) -> Any:
    """Return the device's own gradients: its row, for every leaf of the weights."""

    def loss(copies: Any) -> jax.Array:
        return jnp.stack([(w * rows[0]).sum() for w in jax.tree.leaves(copies)]).sum()

    return jax.grad(loss)(lax.pcast(weights, "d", to="varying"))


def placed(optimizer: optax.GradientTransformation, params: Any, specs: Any) -> Any:
    shardings = jax.tree.map(lambda spec: NamedSharding(MESH, spec), specs)
    return jax.jit(optimizer.init, out_shardings=shardings)(params)


def program_of(optimizer: optax.GradientTransformation, params: Any, check_vma: bool = True) -> Any:
    """Return step(params, state, rows), which returns the updates and the new state."""
    specs = state_specs(optimizer, params, "d")

    def step(params: Any, state: Any, rows: jax.Array) -> Any:
        return optimizer.update(gradient_of(params, rows), state, params)

    mapped = jax.shard_map(
        step, mesh=MESH, in_specs=(P(), specs, P("d")), out_specs=(P(), specs),
        check_vma=check_vma,
    )  # fmt: skip
    return jax.jit(mapped, donate_argnums=1)


# ---- steps ---------------------------------------------------------------------------------------


@both_modes
@pytest.mark.parametrize("key", [None, KEY], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("feedback", [True, False])
def test_steps_with_donated_state(feedback: bool, key: Any, check_vma: bool) -> None:
    optimizer = average(error_feedback=feedback, key=key)
    step = program_of(optimizer, WEIGHTS, check_vma)
    state: Any = placed(optimizer, WEIGHTS, state_specs(optimizer, WEIGHTS, "d"))
    for rows, (mean, residual) in zip(ROWS, oracle(ROWS, feedback=feedback, key=key), strict=True):
        before = state
        got, state = step(WEIGHTS, state, rows)
        assert same_bits(got, mean)
        if feedback:
            assert before.residual.is_deleted(), "it was not donated"
            # Copy, because JAX 0.11 does not donate arrays that numpy has accessed.
            assert same_bits(jnp.copy(state.residual), residual)
            assert state.residual.sharding.spec == P("d")
        else:
            assert state.residual is None
    assert int(state.step) == STEPS


@both_modes
def test_steps_in_a_scan_with_init_inside(check_vma: bool) -> None:
    optimizer = average(mesh=None, key=KEY, error_feedback=True)

    def train(weights: jax.Array, rows: jax.Array) -> Any:
        def step(state: Any, row: jax.Array) -> Any:
            mean, state = optimizer.update(gradient_of(weights, row), state)
            return state, mean

        state, means = lax.scan(step, optimizer.init(weights), rows)
        return means, state.residual, state.step

    program = jax.shard_map(
        train, mesh=MESH, in_specs=(P(), P(None, "d")), out_specs=(P(), P("d"), P()),
        check_vma=check_vma,
    )  # fmt: skip
    means, residual, count = jax.jit(program)(WEIGHTS, ROWS)
    want = list(oracle(ROWS, key=KEY))
    assert same_bits(means, np.stack([mean for mean, _ in want]))
    assert same_bits(residual, want[-1][1])
    assert int(count) == STEPS


def largest_of_buckets(rows: Values) -> Values:
    """Return the largest magnitude of each bucket, summed over devices."""
    return np.array([np.abs(rows[:, i : i + 512]).max(1).sum() for i in range(0, NUMEL, 512)])


@pytest.mark.parametrize("feedback", [True, False])
def test_feedback_bounds_the_error(feedback: bool) -> None:
    """Check the bound of the error with feedback, for data that 2 bits encode badly.

    At two bits a bucket's largest value hides the others, the same in every step. With feedback the
    sum of the steps' means differs from that of the gradients only by the residuals. These stay
    within 2 / (n - 2) with n = 3, the bound of docs/guides/jax/optax.md. A step rounds fewer than
    32 times, and values of at most the gradients plus the residuals.
    """
    rows = normal(2, N, NUMEL) / 10
    rows[:, ::512] += 10
    optimizer = average(error_feedback=feedback)
    step, state = program_of(optimizer, WEIGHTS), optimizer.init(WEIGHTS)
    total, residual = np.zeros(NUMEL), np.zeros_like(rows)
    steps, bound = 50, 2 * largest_of_buckets(rows)
    for _ in range(steps):
        mean, state = step(WEIGHTS, state, rows)
        total += fetch(mean).astype(np.float64)
        residual = fetch(state.residual) if feedback else residual
        assert (largest_of_buckets(residual) <= bound).all()
    missing = rows.mean(0, np.float64) - total / steps
    rounded = 32 * U * (np.abs(rows).max() + bound.max())
    if feedback:
        assert np.abs(missing - residual.mean(0, np.float64) / steps).max() <= rounded
        assert np.abs(missing).max() <= bound.max() / N / steps + rounded
    else:
        assert np.abs(missing).max() > 0.1


def test_one_bit_without_feedback_only() -> None:
    for knobs in ({"bits": 1}, {"gather_bits": 1}, {"rules": Rules([("kernel", 1)])}):
        with pytest.raises(ValueError, match=r"'uniform': at 1 bit.*use 2 bits or more"):
            average(**knobs).init({"kernel": WEIGHTS})
        assert average(error_feedback=False, **knobs).init({"kernel": WEIGHTS})


def test_nonfinite_gradients_leave_the_state_clean() -> None:
    rows = ROWS.copy()
    rows[1, 3, 700] = np.nan
    optimizer = average()
    step = program_of(optimizer, WEIGHTS)
    state: Any = optimizer.init(WEIGHTS)
    means = []
    for row, (mean, residual) in zip(rows, oracle(rows), strict=True):
        got, state = step(WEIGHTS, state, row)
        assert same_bits(state.residual, residual)
        means.append(fetch(got))
        assert np.array_equal(means[-1], mean, equal_nan=True)
    assert np.isnan(means[1][512:1024]).all()
    assert np.isfinite(means[2]).all()


@pytest.mark.parametrize(("kept", "sent"), [("float16", "float32"), ("float32", "float16")])
def test_residuals_too_large_for_a_dtype_stay_finite(kept: str, sent: str) -> None:
    """Use gradients with another dtype than the parameters, which residuals have."""
    params, optimizer = WEIGHTS.astype(kept), average()
    step, state = cases.program_of(optimizer, params, MESH), optimizer.init(params)
    if kept == "float32":
        state = state._replace(residual=1e6 * state.residual.at[:].set(ROWS[1]))
    for row in ROWS[:2] * (1e6 if sent == "float32" else 1):
        mean, state = step(params, state, row.astype(sent))
        assert np.isfinite(fetch(mean)).all()
        assert np.isfinite(fetch(state.residual)).all()
        assert state.residual.dtype == kept


# ---- trees, optimizers and meshes ----------------------------------------------------------------


@pytest.mark.parametrize("exact", [{"bits": 32}, {"bits": 4, "compressor": "lossless"}])
def test_residuals_are_sent_when_all_becomes_exact(exact: dict[str, Any]) -> None:
    state: Any = average().init(WEIGHTS)
    _, state = program_of(average(), WEIGHTS)(WEIGHTS, state, ROWS[0])
    owed = list(next(oracle(ROWS))[1])
    assert np.any(owed)
    becomes = optax.GradientTransformation(average().init, average(**exact).update)
    got, state = program_of(becomes, WEIGHTS)(WEIGHTS, state, ROWS[1])
    assert same_bits(got, expected(ROWS[1], bits=32, op="avg", residuals=owed))
    assert not fetch(state.residual).any()


@pytest.mark.parametrize("fuse", [True, False])
def test_trees_with_rules_and_dtypes(fuse: bool) -> None:
    params = {
        "bias": WEIGHTS, "half": WEIGHTS.astype(ml_dtypes.bfloat16), "kernel": WEIGHTS,
    }  # fmt: skip
    optimizer = average(rules=Rules([("bias", 32)], exact_vectors=False), fuse=fuse)
    step = program_of(optimizer, params)
    state: Any = optimizer.init(params)
    for row, (mean, residual) in zip(ROWS, oracle(ROWS), strict=True):
        got, state = step(params, state, row)
        assert same_bits(got["kernel"], mean)
        assert same_bits(state.residual["kernel"], residual)
        assert same_bits(got["bias"], expected(row, bits=32, op="avg"))
        assert state.residual["bias"] is None
        assert got["half"].dtype == state.residual["half"].dtype == jnp.bfloat16
    assert fetch(state.residual["half"]).any()


WRAPPERS = {
    "alone": lambda ours, _: ours,
    "adam": lambda ours, _: optax.chain(ours, optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
    "multi_steps": lambda ours, _: optax.chain(
        ours, optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation()
    ),
    "masked": lambda ours, exact: optax.chain(
        optax.masked(ours, {"a": True, "b": False}), optax.masked(exact, {"a": False, "b": True})
    ),
    "partition": lambda ours, exact: optax.partition(
        {"x": optax.chain(ours, optax.trace(0.9)), "y": exact}, {"a": "x", "b": "y"}
    ),
    "finite": lambda ours, _: optax.chain(ours, optax.apply_if_finite(optax.adam(1e-3), 3)),
}


@both_modes
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_inside_other_transformations(wrapper: str, check_vma: bool) -> None:
    """Check that specs match the state, and two steps give equal updates on all devices."""
    params = {"a": WEIGHTS, "b": WEIGHTS}
    optimizer = WRAPPERS[wrapper](average(), average(bits=32))
    specs = state_specs(optimizer, params, "d")
    state: Any = placed(optimizer, params, specs)
    assert jax.tree.structure(specs) == jax.tree.structure(state)
    step = program_of(optimizer, params, check_vma)
    for row in ROWS[:2]:
        updates, state = step(params, state, row)
        for leaf in jax.tree.leaves(updates):
            assert np.isfinite(leaf).all()
            assert len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}) == 1
    assert any(leaf.any() for leaf in jax.tree.leaves(fetch(state)))


@both_modes
def test_parameters_spread_over_another_axis(check_vma: bool) -> None:
    """Check that each index of "m" has its own part of weights, residuals and moments."""
    mesh, batch = mesh_of((4, 2), ("d", "m")), normal(3, STEPS, 4, 2 * NUMEL)
    params, param_specs = {"w": normal(4, 2 * NUMEL)}, {"w": P("m")}
    optimizer = optax.chain(average(mesh=mesh), optax.trace(0.5))
    specs = state_specs(optimizer, params, "d", param_specs)
    assert specs[0].residual == {"w": P("d", "m")}
    assert specs[1].trace == param_specs
    program = jax.shard_map(
        lambda w, s, rows: optimizer.update(gradient_of(w, rows), s), mesh=mesh,
        in_specs=(param_specs, specs, P("d", "m")), out_specs=(param_specs, specs),
        check_vma=check_vma,
    )  # fmt: skip
    state: Any = optimizer.init(params)
    parts = [oracle(batch[:, :, m * NUMEL :][:, :, :NUMEL], at=range(m, N, 2)) for m in range(2)]
    trace = np.zeros(2 * NUMEL, np.float32)
    for rows in batch:
        updates, state = jax.jit(program)(params, state, rows)
        means, residuals = zip(*map(next, parts), strict=True)
        trace = np.concatenate(means) + np.float32(0.5) * trace
        assert same_bits(state[0].residual["w"], np.concatenate(residuals, axis=1))
        assert same_bits(updates["w"], trace)


def test_explicit_mesh() -> None:
    """Use jax.make_mesh's default mode, in which types contain the sharding."""
    with jax.set_mesh(jax.make_mesh((N,), ("d",))):
        optimizer = average(mesh=None)
        specs = state_specs(optimizer, WEIGHTS, "d")
        weights = jax.device_put(WEIGHTS, P())
        state: Any = jax.jit(optimizer.init, out_shardings=specs)(weights)
        step = jax.jit(
            jax.shard_map(
                lambda w, s, rows: optimizer.update(gradient_of(w, rows), s),
                in_specs=(P(), specs, P("d")), out_specs=(P(), specs),
            )
        )  # fmt: skip
        for row, (mean, residual) in zip(ROWS, oracle(ROWS), strict=True):
            got, state = step(weights, state, jax.device_put(row, P("d")))
            assert same_bits(got, mean)
            assert same_bits(state.residual, residual)


# ---- state ---------------------------------------------------------------------------------------


def test_init_finds_the_mesh() -> None:
    given = average().init(WEIGHTS)
    with jax.set_mesh(MESH):
        found = average(mesh=None).init(WEIGHTS)
    wide = average_gradients(
        ("b", "a"), rules=Rules(exact_vectors=False), mesh=mesh_of((2, 4), ("a", "b"))
    ).init(WEIGHTS)
    states: list[Any] = [given, found, wide]
    for state in states:
        assert state.residual.shape == (N, NUMEL)
        assert not fetch(state.residual).any()


@pytest.mark.parametrize(
    "make",
    [
        average_gradients, deep_gradient, power_sgd, partial(signum, learning_rate=0.1),
        partial(compressed_adamw, learning_rate=0.1, warmup_steps=1),
    ],
)  # fmt: skip
def test_state_has_no_duplicate_arrays(make: Any) -> None:
    """Check this because such a state could not be donated."""
    leaves = jax.tree.leaves(make("d", mesh=MESH).init({"a": ROWS[0], "b": WEIGHTS}))
    assert len(leaves) > 1
    assert len({id(leaf) for leaf in leaves}) == len(leaves)


@pytest.mark.parametrize("mesh", [None, mesh_of((N,), ("other",))], ids=["none", "other"])
def test_init_without_the_axis(mesh: Any) -> None:
    with pytest.raises(ValueError, match=r"needs the sizes of the axes \['d'\].*set_mesh"):
        average(mesh=mesh).init(WEIGHTS)


def test_two_axes_in_the_order_of_the_group() -> None:
    """Check that residuals have the order of the given axes, as the ranks of psum_q."""
    mesh = mesh_of((2, 4), ("a", "b"))
    optimizer = average_gradients(
        ("b", "a"), bits=2, config=SRA, rules=Rules(exact_vectors=False), mesh=mesh
    )
    specs = state_specs(optimizer, WEIGHTS, ("b", "a"))
    program = jax.shard_map(
        lambda w, s, rows: optimizer.update(
            jax.grad(lambda v: (v * rows[0]).sum())(lax.pcast(w, ("a", "b"), to="varying")), s
        ),
        mesh=mesh, in_specs=(P(), specs, P(("b", "a"))), out_specs=(P(), specs),
    )  # fmt: skip
    state: Any = optimizer.init(WEIGHTS)
    order = np.arange(N).reshape(2, 4).T.reshape(-1).tolist()
    for rows, (mean, residual) in zip(ROWS, oracle(ROWS, at=order), strict=True):
        got, state = jax.jit(program)(WEIGHTS, state, rows)
        assert same_bits(got, mean)
        assert same_bits(state.residual, residual)


@one_process
def test_checkpoint_with_sharding(tmp_path: Path) -> None:
    """Check that restored arrays have their sharding, and training resumes bit for bit."""
    optimizer = optax.chain(average(key=KEY, error_feedback=True), optax.trace(0.9))
    step = program_of(optimizer, WEIGHTS)
    specs = state_specs(optimizer, WEIGHTS, "d")
    state: Any = placed(optimizer, WEIGHTS, specs)
    for row in ROWS[:2]:
        _, state = step(WEIGHTS, state, row)
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "state", like)
    assert restored[0].residual.sharding.spec == P("d")
    assert isinstance(restored[0], type(state[0]))
    for row in ROWS[2:]:
        want, state = step(WEIGHTS, state, row)
        got, restored = step(WEIGHTS, restored, row)
        assert same_bits(got, want)


@one_process
@pytest.mark.timeout(240)
@pytest.mark.exhaustive
def test_checkpoint_of_processes_with_two_devices_each(tmp_path: Path) -> None:
    """Check steps and checkpoint with the oracle, and resume in new processes."""
    environment = {
        "XLA_FLAGS": "",
        "JAX_PLATFORMS": "cpu",
    }
    for half in ("first", "second"):
        for output in mpirun(
            2, "run_jax_optimizer.py", half, tmp_path / "state", env=environment, timeout=110
        ):
            assert f"ok {half}" in output.splitlines()


# ---- errors on all processes ---------------------------------------------------------------------


def test_gradients_already_summed_by_jax() -> None:
    optimizer = average(mesh=None)

    def train(weights: Any, rows: jax.Array) -> Any:
        gradients = jax.grad(lambda w: (w["w"] * rows[0]).sum())(weights)
        return optimizer.update(gradients, optimizer.init(weights))[0]

    program = jax.shard_map(train, mesh=MESH, in_specs=(P(), P("d")), out_specs=P())
    with pytest.raises(ValueError, match=r"updates\['w'\] is the same on all devices of \['d'\]"):
        jax.jit(program)({"w": WEIGHTS}, ROWS[0])


def test_unsharded_state() -> None:
    optimizer = average()
    program = jax.shard_map(
        lambda w, s, rows: optimizer.update(gradient_of(w, rows), s)[0], mesh=MESH,
        in_specs=(P(), P(), P("d")), out_specs=P(), check_vma=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"shape \(8, 1200\) here, not \(1, 1200\).*state_specs"):
        jax.jit(program)(WEIGHTS, optimizer.init(WEIGHTS), ROWS[0])


@pytest.mark.parametrize(
    ("make", "without"),
    [
        (partial(average_gradients, bits=2), {"config": Config(error_feedback=False)}),
        (power_sgd, {"config": Config(error_feedback=False)}),
        (partial(compressed_adamw, learning_rate=0.1, warmup_steps=1), {"bits": 32}),
    ],
)
def test_state_without_error_feedback(make: Any, without: dict[str, Any]) -> None:
    params = {"a": ROWS[0]}
    state = make("d", mesh=MESH, **without).init(params)
    step = cases.program_of(make("d", mesh=MESH), params, MESH)
    with pytest.raises(ValueError, match=r"updates\['a'\] has error feedback, .* made without"):
        step(params, state, {"a": np.stack([ROWS[0]] * N)})


def test_outside_of_any_shard_map() -> None:
    optimizer = average()
    with pytest.raises(NameError, match="average_gradients: unbound axis name"):
        optimizer.update(WEIGHTS, optimizer.init(WEIGHTS))


@pytest.mark.parametrize(
    ("knobs", "error"),
    [({"bits": 9}, ValueError), ({"key": 7}, TypeError), ({"no_such_knob": 1}, TypeError)],
)
def test_bad_knobs_raise_immediately(knobs: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        average(**knobs)


@one_process
def test_only_optimizers_need_optax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optax", None)
    for call in (average, lambda: state_specs(None, WEIGHTS, "d")):  # type: ignore[arg-type]
        with pytest.raises(ImportError, match="needs optax: pip install optax"):
            call()
    code = "import sys, cgx_ops.jax; assert 'optax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
