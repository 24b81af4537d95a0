"""average_gradients with every compressor: residuals, and resuming on other device counts.

1. which leaves have error feedback, and its values
2. consolidated state: a run of two devices continues on four, and on one
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import reference
from jax import NamedSharding
from jax.sharding import PartitionSpec as P
from support.jax_cases import SRA, Values, fetch, normal, same_bits, use_cpu_devices, with_config
from support.jax_compressor_cases import KEY, config_of, numpy_result
from support.jax_optimizer_cases import mesh_with, program_of

from cgx_ops import Config, Rules
from cgx_ops.jax import AverageGradientsState, average_gradients, consolidate, state_specs

use_cpu_devices(8)

pytestmark = pytest.mark.timeout(120)

NUMEL = 1200
U = 2.0**-24  # relative rounding error of a float32 operation
TOPK: dict[str, Any] = {"compressor": "topk", "density": 0.05}


# ---- 1. which leaves have error feedback ---------------------------------------------------------

RULES = Rules(
    [
        ("bias", 32),
        ("conv", {"compressor": "sign"}),
        ("dense", TOPK),
        ("head", {"compressor": "half"}),
        ("norm", {"compressor": "levels", "bits": 1}),
    ],
    exact_vectors=False,
)
PARAMS = {
    name: normal(i, NUMEL)
    for i, name in enumerate(("bias", "conv", "dense", "head", "norm", "rest"))
}


def test_feedback_by_default() -> None:
    """Check that biased encodings have feedback, and exact and unbiased leaves have no residual."""
    mesh = mesh_with(2)
    ours = average_gradients("d", bits=2, config=SRA, rules=RULES, mesh=mesh)
    optimizer = optax.chain(ours, optax.scale(0.5))
    state: Any = optimizer.init(PARAMS)
    kept = {name for name, leaf in state[0].residual.items() if leaf is not None}
    assert kept == {"dense", "norm", "rest"}
    specs = state_specs(optimizer, PARAMS, "d")
    assert specs[0].residual == {name: P("d") if name in kept else None for name in PARAMS}
    step = program_of(optimizer, PARAMS, mesh)
    configs = {
        "bias": config_of("uniform", bits=32, key=None, algorithm="sra"),
        "conv": config_of("sign", key=None, algorithm="sra"),
        "dense": config_of("topk", key=None, algorithm="sra"),
        "head": config_of("half", key=None, algorithm="sra"),
        "norm": config_of("levels", bits=1, key=None, algorithm="sra"),
        "rest": config_of("uniform", key=None, algorithm="sra"),
    }
    residuals = {name: np.zeros((2, NUMEL), np.float32) for name in kept}
    for number in range(3):
        rows = {name: normal(10 * number + i, 2, NUMEL) for i, name in enumerate(PARAMS)}
        updates, state = step(PARAMS, state, rows)
        for name in PARAMS:
            old = list(residuals[name]) if name in kept else None
            mean = numpy_result(
                "allreduce", rows[name], configs[name], op="avg", key=None, residuals=old
            )[0]
            assert same_bits(updates[name], mean * np.float32(0.5)), name
            if name in kept:
                # Copy, because JAX 0.11 does not donate arrays that numpy has accessed.
                assert same_bits(jnp.copy(state[0].residual[name]), residuals[name]), name
            else:
                assert state[0].residual[name] is None


def test_entropy_equals_the_oracle() -> None:
    """Compare steps with the oracle, which packs the small leaves as the core does."""
    n, sizes = 3, {"bias": 40, "dense": 1200, "head": 70_000, "norm": 300}
    mesh, config = mesh_with(n), Config(compressor="entropy", rate=1.5)
    rules = Rules([("bias", 32)], exact_vectors=False)
    params = {name: normal(i, numel) for i, (name, numel) in enumerate(sizes.items())}
    optimizer = optax.chain(
        average_gradients("d", config=config, rules=rules, mesh=mesh), optax.scale(0.5)
    )
    state: Any = optimizer.init(params)
    step = program_of(optimizer, params, mesh)
    starts = np.cumsum([0, *sizes.values()]).tolist()
    segments = [
        reference.Segment(start, numel, 32 if name == "bias" else 4, 512, "entropy", rate=1.5)
        for start, (name, numel) in zip(starts, sizes.items(), strict=False)
    ]
    residuals = [np.zeros(starts[-1], np.float32) for _ in range(n)]
    for number in range(3):
        rows = {name: normal(10 * number + i, n, sizes[name]) for i, name in enumerate(sizes)}
        updates, state = step(params, state, rows)
        mean = reference.allreduce(
            [np.concatenate([rows[name][rank] for name in sizes]) for rank in range(n)],
            segments, op="avg", algorithm="sra", residuals=residuals,
        )  # fmt: skip
        for name, start in zip(sizes, starts, strict=False):
            at = slice(start, start + sizes[name])
            assert same_bits(updates[name], mean[at] * np.float32(0.5)), (number, name)
            if name != "bias":
                got = jnp.copy(state[0].residual[name])
                assert same_bits(got, np.stack([e[at] for e in residuals])), (number, name)
    assert state[0].residual["bias"] is None


def test_feedback_on_request() -> None:
    mesh = mesh_with(2)

    def kept(**knobs: Any) -> set[str]:
        state: Any = average_gradients(
            "d", mesh=mesh, **with_config(**{"rules": Rules(exact_vectors=False), **knobs})
        ).init(PARAMS)
        return {name for name, leaf in state.residual.items() if leaf is not None}

    assert not kept(error_feedback=False, rules=RULES)
    assert not kept(compressor="half")
    assert kept(compressor="half", error_feedback=True) == PARAMS.keys()
    assert kept(compressor="half", rules=Rules([("dense", TOPK)], exact_vectors=False)) == {"dense"}
    with pytest.raises(ValueError, match=r"average_gradients: .*'conv': error feedback .*'sign'"):
        kept(rules=RULES, error_feedback=True)
    with pytest.raises(ValueError, match=r"1 bit.*compressor='levels'"):
        kept(rules=Rules([("dense", {"bits": 1})], exact_vectors=False))
    assert kept(compressor="levels", bits=1) == PARAMS.keys()


# ---- 2. consolidated state -----------------------------------------------------------------------

WEIGHTS = {"w": normal(30, NUMEL), "b": normal(31, 40)}


def rows_of(step: int, devices: int) -> Any:
    return {name: normal(40 + step, devices, leaf.size) for name, leaf in WEIGHTS.items()}


def run(
    optimizer: optax.GradientTransformation, state: Any, devices: int, steps: range
) -> tuple[Any, dict[str, Values], float]:
    """Return the state, each leaf's pending correction, and the bound of its rounding.

    A step rounds each device's sum of gradient and residual, its new residual and the sum over
    devices: 4 operations per device, of values bounded by the sum over all devices.
    """
    step = program_of(optimizer, WEIGHTS, mesh_with(devices))
    missing, rounded = {name: np.zeros(leaf.size) for name, leaf in WEIGHTS.items()}, 0.0
    for number in steps:
        rows = rows_of(number, devices)
        held = sum(np.abs(leaf).sum(0).max() for leaf in fetch(state[0].residual).values())
        updates, state = step(WEIGHTS, jax.tree.map(jnp.copy, state), rows)
        held += sum(np.abs(leaf).sum(0).max() for leaf in fetch(state[0].residual).values())
        for name, values in rows.items():
            update = fetch(updates[name])
            missing[name] += values.mean(0, np.float64) - update
            held += np.abs(values).sum(0).max() + devices * np.abs(update).max()
        # of means: 4 operations per device, divided by the number of devices
        rounded += 4 * U * held
    return state, missing, rounded


def owed(state: Any) -> dict[str, Values]:
    """Return the pending correction of each leaf's mean, in float64."""
    residual = fetch(state[0].residual)
    return {name: leaf.mean(0, np.float64) for name, leaf in residual.items()}


@pytest.mark.parametrize("devices", [4, 1])
@pytest.mark.parametrize(
    "knobs",
    [TOPK, {"compressor": "randk", "key": KEY}, {"bits": 2}],
    ids=["topk", "randk", "2 bits"],
)
def test_resume_on_other_device_count(knobs: dict[str, Any], devices: int, tmp_path: Path) -> None:
    """Run ten steps on two devices, save a consolidated checkpoint, run ten on more or fewer.

    The pending correction is preserved up to the rounding of its mean. Over all steps, the updates
    equal the gradients' means minus the correction pending at the end.
    """

    def make(size: int) -> optax.GradientTransformation:
        return optax.chain(
            average_gradients(
                "d", mesh=mesh_with(size), **with_config(**knobs, rules=Rules(exact_vectors=False))
            ),
            optax.identity(),
        )

    old, new = make(2), make(devices)
    state, missing, rounded = run(old, old.init(WEIGHTS), 2, range(10))
    before = owed(state)
    assert np.abs(before["w"]).max() > 0.1
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", consolidate(state, devices=1))
    # The saved state has one row for any number of devices.
    like = jax.eval_shape(lambda: consolidate(new.init(WEIGHTS), devices=1))
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh_with(devices), P())
        ),
        like,
    )
    with ocp.StandardCheckpointer() as checkpointer:
        saved = checkpointer.restore(tmp_path / "state", like)
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh_with(devices), spec), state_specs(new, WEIGHTS, "d")
    )
    state = jax.jit(functools.partial(consolidate, devices=devices), out_shardings=shardings)(saved)
    assert int(state[0].step) == 10
    for name, leaf in state[0].residual.items():
        assert leaf.shape == (devices, WEIGHTS[name].size)
        assert leaf.sharding.spec == P("d")
        rows = np.asarray(jnp.copy(leaf))
        assert all(same_bits(row, rows[0]) for row in rows)
        assert np.abs(rows[0] - before[name]).max() <= 2 * U * np.abs(before[name]).max()
        rounded += 2 * U * np.abs(before[name]).max()
    state, more, rounded_more = run(new, state, devices, range(10, 20))
    for name, last in owed(state).items():
        unpaid = missing[name] + more[name] - last
        assert np.abs(unpaid).max() <= rounded + rounded_more
        # on one device there is no error, and the whole correction is applied
        assert devices > 1 or not last.any()


def test_resume_on_same_device_count() -> None:
    state = (AverageGradientsState(jnp.int32(3), {"a": jnp.arange(6.0).reshape(2, 3), "b": None}),)
    mean = consolidate(state)
    assert mean[0].step == 3
    assert mean[0].residual["b"] is None
    assert same_bits(mean[0].residual["a"], np.tile(np.arange(1.5, 4.5, dtype=np.float32), (2, 1)))
    halves = (AverageGradientsState(jnp.int32(3), jnp.ones((2, 3), jnp.bfloat16)),)
    assert consolidate(halves, devices=4)[0].residual.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("state", "devices", "said"),
    [
        ({"a": jnp.ones(3)}, None, "the state contains no state of cgx_ops.jax"),
        (AverageGradientsState(jnp.int32(0), None), 0, "devices is 0; it must be at least 1"),
    ],
)
def test_invalid_consolidation(state: Any, devices: int | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        consolidate(state, devices)


def test_decay() -> None:
    """Check that a decay of 0.5 halves the residual."""
    mesh, params = mesh_with(2), {"a": normal(1, NUMEL)}
    rows = {"a": normal(2, 2 * NUMEL).reshape(2, NUMEL)}

    def step(decay: float, state: Any) -> Any:
        optimizer = average_gradients(
            "d",
            mesh=mesh,
            rules=Rules(exact_vectors=False),
            config=Config(residual_decay=decay, **TOPK),
        )
        state = optimizer.init(params) if state is None else state
        return program_of(optimizer, params, mesh)(params, state, rows)

    lost = jax.tree.map(np.asarray, step(1.0, None)[1])
    half = lost._replace(residual=jax.tree.map(lambda e: e * np.float32(0.5), lost.residual))
    (decayed, _), (expected, _) = step(0.5, lost), step(1.0, half)
    assert same_bits(fetch(decayed["a"]), fetch(expected["a"]))
    assert not same_bits(fetch(decayed["a"]), fetch(step(1.0, lost)[0]["a"]))
    with pytest.raises(ValueError, match=r"residual_decay is 1.5; it must be more than 0"):
        average_gradients("d", config=Config(residual_decay=1.5))
