"""average_gradients with every compressor: which leaves keep residuals, and runs that move on.

1. which leaves have error feedback, and its values
2. consolidated state: a run of two devices goes on with four, and with one
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
U = 2.0**-24  # what a float32 operation rounds, of its result
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


def test_by_default_where_it_is_needed() -> None:
    """Where the encoding is biased; exact leaves and others keep nothing."""
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
                # A copy: what numpy has seen is not donated any more (jax 0.11).
                assert same_bits(jnp.copy(state[0].residual[name]), residuals[name]), name
            else:
                assert state[0].residual[name] is None


def test_on_request() -> None:
    mesh = mesh_with(2)

    def kept(**knobs: Any) -> set[str]:
        state: Any = average_gradients(
            "d", mesh=mesh, **with_config(**{"rules": None, **knobs})
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
    """Return the state, by leaf what of the gradients' means is missing, and what rounding misses.

    A step rounds each device's sum of gradient and residual, its new residual and the sum over
    devices: 4 operations a device, of values of at most what all devices have.
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
        rounded += 4 * U * held  # of means: a devices-th of 4 operations a device
    return state, missing, rounded


def owed(state: Any) -> dict[str, Values]:
    """Return what is pending of each leaf's mean, in float64."""
    residual = fetch(state[0].residual)
    return {name: leaf.mean(0, np.float64) for name, leaf in residual.items()}


@pytest.mark.parametrize("devices", [4, 1])
@pytest.mark.parametrize(
    "knobs",
    [TOPK, {"compressor": "randk", "key": KEY}, {"bits": 2}],
    ids=["topk", "randk", "2 bits"],
)
def test_another_number_of_devices_goes_on(
    knobs: dict[str, Any], devices: int, tmp_path: Path
) -> None:
    """Ten steps of two devices, a consolidated checkpoint, ten steps of more or fewer.

    What is owed stays the same, but for the rounding of its mean; and over all steps the updates
    are the gradients' means but for what is owed at the end.
    """

    def make(size: int) -> optax.GradientTransformation:
        return optax.chain(
            average_gradients("d", mesh=mesh_with(size), **with_config(**knobs, rules=None)),
            optax.identity(),
        )

    old, new = make(2), make(devices)
    state, missing, rounded = run(old, old.init(WEIGHTS), 2, range(10))
    before = owed(state)
    assert np.abs(before["w"]).max() > 0.1
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", consolidate(state, devices=1))
    # What is saved has one row, however many devices there were.
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
        assert devices > 1 or not last.any()  # alone nothing is lost, and all is paid


def test_the_same_number_of_devices() -> None:
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
def test_what_cannot_be_consolidated(state: Any, devices: int | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        consolidate(state, devices)


def test_decay() -> None:
    """A decay of 0.5 is half of what was lost."""
    mesh, params = mesh_with(2), {"a": normal(1, NUMEL)}
    rows = {"a": normal(2, 2 * NUMEL).reshape(2, NUMEL)}

    def step(decay: float, state: Any) -> Any:
        optimizer = average_gradients(
            "d", mesh=mesh, rules=None, config=Config(residual_decay=decay, **TOPK)
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
