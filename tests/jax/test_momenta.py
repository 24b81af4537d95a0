"""compressed_adamw and signum: steps against the reference, states, checkpoints, bad input.

The gradients here are the device's rows of the batch, independent of the weights.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P
from support import jax_optimizer_cases as cases
from support.jax_cases import fetch, normal, same_bits, use_cpu_devices
from support.jax_optimizer_cases import mesh_with, restored
from support.rank_checks import Launch, RankCheck, rank_checks

from cgx_ops import Config, Rules
from cgx_ops._core import adam as core_adam
from cgx_ops._core.adam import longest_update
from cgx_ops.jax import (
    CompressedAdamWState,
    SignumState,
    compressed_adamw,
    consolidate,
    signum,
    state_specs,
)
from cgx_ops.jax._src.transforms.compressed_adamw import has_settled, level

use_cpu_devices(8)

pytestmark = pytest.mark.timeout(120)
slow = pytest.mark.slow

STEPS, WARMUP = 50, 10
SHAPES = {"a": (24, 30), "b": (7, 90), "bias": (20,)}
WEIGHTS = {name: normal(0, *shape) for name, shape in SHAPES.items()}
RULES = Rules([("bias", 32)], exact_vectors=False)
ONE_BIT = Config(compressor="levels", bits=1, algorithm="sra")


def rows_of(n: int, steps: int = STEPS) -> dict[str, Any]:
    return {
        name: 0.3 * normal(2, 1, 1, *shape) + normal(1, steps, n, *shape)
        for name, shape in SHAPES.items()
    }


def adam(mesh: Any, **options: Any) -> Any:
    own = {"warmup_steps": WARMUP, "refreshes": 2, "rules": RULES, "config": ONE_BIT}
    options = {**own, **options}
    return compressed_adamw("d", 0.01, mesh=mesh, **options)


def voting(mesh: Any, **options: Any) -> Any:
    return signum("d", 0.002, mesh=mesh, **{"weight_decay": 0.01, **options})


MAKERS = {"compressed_adamw": adam, "signum": voting}


def program_of(optimizer: Any, mesh: Any, params: Any = WEIGHTS, check_vma: bool = True) -> Any:
    """Return step(params, state, rows), which returns new parameters and the new state."""
    return cases.program_of(optimizer, params, mesh, check_vma, applies=True)


def placed(optimizer: Any, mesh: Any) -> Any:
    return cases.placed(optimizer, WEIGHTS, mesh)


# ---- 1. steps ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    ("n", "check_vma"),
    [
        (4, True),
        pytest.param(1, True, marks=slow),
        pytest.param(2, True, marks=slow),
        pytest.param(2, False, marks=slow),
    ],
)
def test_steps(name: str, n: int, check_vma: bool) -> None:
    mesh, rows = mesh_with(n), rows_of(n)
    optimizer = MAKERS[name](mesh)
    step, state, params = program_of(optimizer, mesh, check_vma=check_vma), None, WEIGHTS
    state = placed(optimizer, mesh)
    wants: dict[str, Any] = {}
    for leaf, x in WEIGHTS.items():
        own: dict[str, Any] = {"bits": 1, "compressor": "levels"} if x.ndim > 1 else {"bits": 32}
        segment = reference.Segment(0, x.size, **own)
        whole = reference.Segment(0, x.size, 8 if x.ndim > 1 else 32)
        wants[leaf] = (
            reference.Signum(n, x, lr=0.002, decay=0.01)
            if name == "signum"
            else reference.CompressedAdamW(
                n, x, lr=0.01, warmup=WARMUP, decay=0.01, segment=segment, variance_segment=whole
            )
        )
    for i in range(STEPS):
        params, state = step(params, state, {leaf: x[i] for leaf, x in rows.items()})
        now: Any = fetch(state[0])
        for leaf, want in wants.items():
            want.step(list(rows[leaf][i]))
            got = fetch(params[leaf]).ravel()
            assert np.abs(got - want.x).max() <= 1e-5 * max(1, np.abs(want.x).max()), (leaf, i)
            if name == "compressed_adamw":
                assert int(now.schedule.due) == want.schedule[0], i
                assert np.allclose(now.nu[leaf].ravel(), want.v, rtol=1e-5), (leaf, i)
            if name == "signum":
                found = now.momentum[leaf].reshape(n, -1)
                assert np.allclose(found, want.momenta, rtol=1e-5, atol=1e-6), (leaf, i)
            elif leaf == "bias":
                assert now.residual[leaf] is None
            else:
                found = now.residual[leaf].reshape(n, -1)
                assert np.allclose(found, want.residuals, rtol=1e-5, atol=1e-5), (leaf, i)
    assert int(state[0].step) == STEPS


def test_recommended_codecs() -> None:
    """Compare updates of half a bit, and gradients of four bits in variance steps.

    XLA divides with other roundings, which move a value into another code once in about 10^7.
    So there are 5,000 values, and a dozen steps after the warm-up.
    """
    mesh, n, rates = mesh_with(4), 4, {"segment": 0.5, "variance_segment": 4.0}
    rows, start = normal(5, WARMUP + 12, n, 25, 50), normal(6, 25, 50)
    segments: dict[str, Any] = {
        name: reference.Segment(0, start.size, compressor="entropy", rate=rate)
        for name, rate in rates.items()
    }
    want = reference.CompressedAdamW(n, start, lr=0.01, warmup=WARMUP, decay=0.01, **segments)
    few, gradients = (
        Config(compressor="entropy", rate=rate, algorithm="sra") for rate in rates.values()
    )
    optimizer = adam(
        mesh, config=few, warmup_config=replace(gradients, error_feedback=False), rules=Rules()
    )
    params: Any = {"a": start}
    step, state = program_of(optimizer, mesh, params), cases.placed(optimizer, params, mesh)
    for i in range(len(rows)):
        params, state = step(params, state, {"a": rows[i]})
        want.step(list(rows[i]))
        now: Any = fetch(state[0])
        assert np.allclose(now.nu["a"].ravel(), want.v, rtol=1e-5), i
        found = now.residual["a"].reshape(n, -1)
        assert np.allclose(found, want.residuals, rtol=1e-5, atol=1e-5), i
        assert np.abs(fetch(params["a"]).ravel() - want.x).max() <= 1e-5 * np.abs(want.x).max(), i


def test_leaves_are_exact_in_both_kinds_of_steps() -> None:
    mesh, rows, ends = mesh_with(2), rows_of(2, 14), []
    for own in ({"compressor": "lossless"}, {"minimal_size": 10**6}, {"bits": 32}):
        rules = Rules([("bias", 32), ("a", own)], exact_vectors=False)
        optimizer = adam(mesh, rules=rules)
        step, state, params = program_of(optimizer, mesh), placed(optimizer, mesh), WEIGHTS
        for i in range(14):
            params, state = step(params, state, {leaf: x[i] for leaf, x in rows.items()})
        ends.append(fetch(params))
    for leaf in SHAPES:
        assert same_bits(ends[0][leaf], ends[2][leaf]) and same_bits(ends[1][leaf], ends[2][leaf])


def test_variance_steps_leave_decaying_residuals() -> None:
    mesh, rows = mesh_with(2), rows_of(2, 12)
    optimizer = adam(mesh, warmup_steps=2, config=replace(ONE_BIT, residual_decay=0.5))
    step, state, params = program_of(optimizer, mesh), placed(optimizer, mesh), WEIGHTS
    kept = 0
    for i in range(12):
        due, before = int(state[0].schedule.due), fetch(state[0].residual["a"])
        params, state = step(params, state, {leaf: x[i] for leaf, x in rows.items()})
        after = fetch(state[0].residual["a"])
        assert same_bits(after, before) == (i == due), i
        kept += i == due and before.any()
    assert kept


def test_conservation() -> None:
    """Check that momenta plus old residuals equal the average (as a sum) plus new residuals."""
    mesh, rows = mesh_with(4), rows_of(4, 16)
    optimizer = adam(mesh, refreshes=0)
    step, state, params = program_of(optimizer, mesh), placed(optimizer, mesh), WEIGHTS
    for i in range(16):
        old: Any = fetch(state[0])
        params, state = step(params, state, {leaf: x[i] for leaf, x in rows.items()})
        new: Any = fetch(state[0])
        if i < WARMUP:
            assert not new.residual["a"].any()
            assert new.nu["a"].all()
            continue
        assert same_bits(old.nu["a"], new.nu["a"])
        for leaf in ("a", "b"):
            below = np.sqrt(np.float64(old.nu[leaf]) / old.weight) + 1e-8
            own = old.mu[leaf][None].astype(np.float64) * 0.9 + rows[leaf][i] * (1 - 0.9)
            values = own / below + old.residual[leaf]
            lost = values.sum(0) - new.residual[leaf].sum(0, np.float64) - 4 * new.mu[leaf] / below
            # As in tests/ranks/torch_hooks/optim.py, plus the momenta, which are rounded only here.
            bound = (2 * 4 + 12) * 2.0**-24 * 4 * np.abs(values).sum(0).max()
            assert (np.abs(lost) <= bound).all(), (leaf, i)


@slow
@pytest.mark.parametrize("name", MAKERS)
def test_in_a_scan_with_init_inside(name: str) -> None:
    mesh, rows = mesh_with(4), rows_of(4, 14)
    optimizer = MAKERS[name](None)

    def train(params: Any, rows: Any) -> Any:
        def one(carry: Any, row: Any) -> Any:
            updates, state = optimizer.update(jax.tree.map(lambda x: x[0], row), carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        return lax.scan(one, (params, optimizer.init(params)), rows)[0][0]

    program = jax.shard_map(train, mesh=mesh, in_specs=(P(), P(None, "d")), out_specs=P())
    got = jax.jit(program)(WEIGHTS, rows)
    outside = MAKERS[name](mesh)
    step, state, params = program_of(outside, mesh), outside.init(WEIGHTS), WEIGHTS
    for i in range(14):
        params, state = step(params, state, {leaf: x[i] for leaf, x in rows.items()})
    for leaf, want in params.items():
        assert np.allclose(fetch(got[leaf]), fetch(want), atol=1e-5), leaf


def test_elements_without_gradients_and_nan() -> None:
    """Check elements without a gradient in the warm-up: they move when they have one."""
    mesh = mesh_with(4)
    rows = {leaf: x[0] for leaf, x in rows_of(4, 1).items()}
    rows["a"][:, 3:5] = 0
    later = {leaf: x.copy() for leaf, x in rows.items()}
    later["a"][:, 4] = 1e-3
    spoilt = {leaf: x.copy() for leaf, x in rows.items()}
    spoilt["b"][2, 1, 1] = np.nan
    exact = Config(bits=32)
    optimizer = adam(mesh, warmup_steps=2, weight_decay=0.0, refreshes=0, warmup_config=exact)
    step, state, params = program_of(optimizer, mesh), placed(optimizer, mesh), WEIGHTS
    moved = np.zeros(())
    for i in range(8):
        params, state = step(params, state, rows if i < 2 else later)
        moved = np.abs(fetch(params["a"]) - WEIGHTS["a"])
        assert moved[[3, 4]].any() == (i >= 2)
        assert np.delete(moved, [3, 4], axis=0).all()
    assert moved[3].max() < 0.2 * moved[4].min(), "the error of compression moves it"
    assert moved[4].max() <= 8 * 0.01 * longest_update(0.9, 0.999) / (1 - 0.9**3)
    params, state = step(params, state, spoilt)
    assert np.isnan(fetch(params["b"])[1, 1])
    assert np.isfinite(fetch(params["a"])).all()
    assert all(np.isfinite(e).all() for e in jax.tree.leaves(fetch(state[0].residual)))

    votes = voting(mesh, weight_decay=0.0)
    step, state, params = program_of(votes, mesh), placed(votes, mesh), WEIGHTS
    for _ in range(6):
        params, state = step(params, state, rows)
    assert np.abs(fetch(params["a"]) - WEIGHTS["a"])[3].max() <= 1e-5, "it drifts"
    params, state = step(params, state, spoilt)
    assert np.isnan(fetch(params["b"])[1, 1])


def test_as_adamw() -> None:
    """Check that exact variance steps are optax's AdamW on the mean gradient."""
    mesh, rows = mesh_with(4), rows_of(4, 30)
    options: dict[str, Any] = {"b2": 0.95, "weight_decay": 0.1}
    optimizer = adam(mesh, warmup_steps=30, warmup_config=Config(bits=32), **options)
    step, state, params = program_of(optimizer, mesh), placed(optimizer, mesh), WEIGHTS
    other = optax.adamw(0.01, **options)
    weights: Any = WEIGHTS
    kept = other.init(weights)
    for i in range(30):
        params, state = step(params, state, {leaf: x[i] for leaf, x in rows.items()})
        means = {leaf: x[i].mean(0) for leaf, x in rows.items()}
        updates, kept = other.update(means, kept, weights)
        weights = optax.apply_updates(weights, updates)
        for leaf in SHAPES:
            assert np.allclose(fetch(params[leaf]), weights[leaf], atol=3e-6), (leaf, i)


@pytest.mark.parametrize(("grows", "last"), [(0, 8), (12, 64)])
def test_warm_up_that_ends_by_itself(grows: int, last: int) -> None:
    """Compare the end with the reference, also where gradients grow until step 12."""
    mesh, rows = mesh_with(2), normal(3, 80, 2, 24, 30)
    weights = {"a": WEIGHTS["a"]}
    optimizer = adam(mesh, warmup_steps="auto", b2=0.95, rules=Rules(exact_vectors=False))
    whole = reference.Segment(0, 720, 8)
    segment = reference.Segment(0, 720, 1, compressor="levels")
    want = reference.CompressedAdamW(
        2, weights["a"], lr=0.01, warmup="auto", betas=(0.9, 0.95), decay=0.01, segment=segment,
        variance_segment=whole,
    )  # fmt: skip
    step, params = program_of(optimizer, mesh, weights), weights
    state: Any = cases.placed(optimizer, weights, mesh)
    ended = 0
    for i, row in enumerate(rows):
        row = row * np.float32(2.0 ** min(i, grows))
        want.step(list(row))
        params, state = step(params, state, {"a": row})
        schedule = state[0].schedule
        assert int(schedule.due) == want.schedule[0], (i, want.schedule)
        ended = ended or (i + 1 if int(schedule.interval) else 0)
    assert ended == last


@pytest.mark.parametrize("wrapped", [False, True])
def test_automatic_warm_up_without_leaves(wrapped: bool) -> None:
    """Train nothing: with an empty tree, and by optax.partition with other labels only."""
    mesh = mesh_with(2)
    optimizer: Any = adam(mesh, warmup_steps="auto", rules=Rules(exact_vectors=False))
    params: Any = {}
    if wrapped:
        parts: Any = {"trained": optimizer, "frozen": optax.set_to_zero()}
        optimizer, params = optax.partition(parts, {"a": "frozen"}), {"a": WEIGHTS["a"]}
    step = cases.program_of(optimizer, params, mesh, check_vma=not wrapped)
    state: Any = cases.placed(optimizer, params, mesh)
    for _ in range(2):
        updates, state = step(params, state, jax.tree.map(lambda x: np.stack([x, x]), params))
        assert not any(leaf.any() for leaf in jax.tree.leaves(fetch(updates)))


def test_level_of_large_sums() -> None:
    """Check the carries of the sum of logarithms, which exceeds int32."""
    x = 1e37 * np.abs(normal(4, 2**20 + 77)) + 1e37
    high, low = jax.jit(level)({"a": jnp.asarray(x), "b": jnp.asarray(x[:5])}, jnp.float32(0.5))
    bits = [(v / np.float32(0.5)).astype(np.float32).view(np.int32) >> 19 for v in (x, x[:5])]
    want = sum(int(v.sum(dtype=np.int64)) for v in bits)
    assert want > 2**31
    assert int(high) * 2**12 + int(low) == want


def pair(whole: int) -> tuple[jax.Array, jax.Array]:
    high, low = divmod(whole, 2**12)
    return jnp.int32(high), jnp.int32(low)


@st.composite
def levels(draw: st.DrawFn) -> tuple[int, int, int]:
    """Draw the level now and before, and the number of values."""
    numel = draw(st.one_of(st.integers(1, 2**31), st.integers(0, 31).map(lambda i: 2**i)))
    any_level = st.integers(-2400 * numel, 2400 * numel)
    threshold = draw(st.sampled_from([-16 * numel, 16 * numel]))
    changes = st.one_of(st.integers(-1, 1).map(lambda i: threshold + i), st.integers(-9999, 9999))
    before = draw(any_level)
    now = draw(st.one_of(changes.map(lambda change: before + change), any_level))
    return now, before, numel


@given(levels())
@example((2**35 - 1, 0, 2**31))
@example((-(2**35) + 1, 0, 2**31))
@example((2**35, 0, 2**31))
@example((-(2**35), 0, 2**31))
@example((2**42, 2**42 - 2**31, 2**27 + 1))
@example((-(2**43), 2**43 - 1, 2**31))  # The difference exceeds int32.
@example((2**43 - 1, -(2**43), 2**31))
@settings(max_examples=300)
def test_settled_as_in_torch(drawn: tuple[int, int, int]) -> None:
    now, before, numel = drawn
    got = has_settled(pair(now), pair(before), numel)
    assert bool(got) == core_adam.has_settled(now, before, numel)


def test_automatic_warm_up_refuses_split_parameters() -> None:
    mesh = jax.make_mesh((2, 2), ("d", "model"), (jax.sharding.AxisType.Auto,) * 2)
    optimizer = compressed_adamw("d", 0.01, mesh=mesh)
    specs = state_specs(optimizer, WEIGHTS["a"], "d", P("model"))
    step = jax.shard_map(
        lambda s, x: optimizer.update(x, s)[0], mesh=mesh, out_specs=P("model"),
        in_specs=(specs, P(("d", "model"))),
    )  # fmt: skip
    with pytest.raises(ValueError, match="warmup_steps='auto' needs whole parameters"):
        jax.eval_shape(step, optimizer.init(WEIGHTS["a"]), np.ones((48, 30), np.float32))


PROGRAM = "run_jax_momenta.py"
BY = [f"{name} by {carrier}" for name in MAKERS for carrier in ("native", "xla")]


def in_one_process(devices: int, names: list[str], file: Path) -> None:
    """Create the file of the rank program."""
    mesh, rows, ends = mesh_with(2 * devices), normal(1, 14, 2 * devices, 24, 30), {}
    for name in names:
        make = MAKERS[name]
        optimizer = make(mesh)
        weights: dict[str, Any] = {"a": WEIGHTS["a"]}
        step, state = program_of(optimizer, mesh, weights), optimizer.init(weights)
        for row in rows:
            weights, state = step(weights, state, {"a": row})
        ends[name] = fetch(weights["a"])
    np.savez(file, x=WEIGHTS["a"], rows=rows, **ends)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for devices, names in ((1, [*MAKERS]), (2, ["signum"])):
        in_one_process(devices, names, folder / f"{devices}.npz")
    return folder


@rank_checks(
    Launch(2, PROGRAM, names=BY, arguments=[1], marks=[slow]),
    Launch(2, PROGRAM, "signum by *", names=BY, arguments=[2], marks=[slow]),
)
def test_two_processes(check: RankCheck, files: Path) -> None:
    """Compare with as many devices of one process, bit for bit, for both carriers.

    The values of a process's devices are summed exactly before they are sent. Except for votes, the
    messages then differ from those of one process.
    """
    check.passes(files)


# ---- 2. states -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "at"),
    [
        *(("compressed_adamw", at) for at in (6, 12)),
        pytest.param("compressed_adamw", 10, marks=slow),
        pytest.param("signum", 12, marks=slow),
    ],
)
def test_checkpoint(name: str, at: int, tmp_path: Path) -> None:
    """Save by orbax: restored arrays have their sharding, and training resumes bit for bit."""
    mesh, rows = mesh_with(4), rows_of(4, at + 4)
    optimizer = MAKERS[name](mesh)
    step, state, params = program_of(optimizer, mesh), placed(optimizer, mesh), WEIGHTS
    row = lambda i: {leaf: x[i] for leaf, x in rows.items()}  # noqa: E731
    for i in range(at):
        params, state = step(params, state, row(i))
    again = restored(state, tmp_path)
    for i in range(at, at + 4):
        want, state = step(params, state, row(i))
        got, again = step(params, again, row(i))
        params = want
        assert all(same_bits(got[leaf], want[leaf]) for leaf in SHAPES), i
    own = state[0].residual if name == "compressed_adamw" else state[0].momentum
    assert own["a"].sharding.spec == P("d")
    assert isinstance(again[0], CompressedAdamWState if name == "compressed_adamw" else SignumState)


@pytest.mark.parametrize("name", [pytest.param("compressed_adamw", marks=slow), "signum"])
def test_resume_on_other_device_count(name: str) -> None:
    mesh, rows = mesh_with(4), rows_of(4, 13)
    optimizer = MAKERS[name](mesh)
    step, state, params = program_of(optimizer, mesh), placed(optimizer, mesh), WEIGHTS
    for i in range(13):
        params, state = step(params, state, {leaf: x[i] for leaf, x in rows.items()})
    field = "residual" if name == "compressed_adamw" else "momentum"
    before = fetch(getattr(state[0], field)["a"])
    after = consolidate(state, devices=2)
    mean = fetch(getattr(after[0], field)["a"])
    assert mean.shape == (2, *SHAPES["a"])
    assert np.allclose(mean, before.mean(0, np.float64), atol=1e-6)
    fewer = mesh_with(2)
    step = program_of(MAKERS[name](fewer), fewer)
    step(jax.device_get(params), jax.device_get(after), {n: x[0] for n, x in rows_of(2, 1).items()})


# ---- 3. bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (adam, {"warmup_steps": True}, "warmup_steps is True"),
        (adam, {"warmup_steps": 2.0}, r"warmup_steps is 2\.0"),
        (adam, {"warmup_steps": 0}, "warmup_steps is 0; it must be an integer of at least 1"),
        (adam, {"warmup_steps": 1.5}, "warmup_steps is 1.5"),
        (adam, {"warmup_steps": -2}, "warmup_steps is -2"),
        (adam, {"warmup_steps": "long"}, "warmup_steps is 'long'; it must be 'auto' or"),
        (adam, {"refreshes": -1}, "refreshes is -1; it must be an integer of at least 0"),
        (adam, {"warmup_config": 8}, "warmup_config is 8; it must be a Config"),
        (adam, {"warmup_config": Config(compressor="sign")}, "votes have no magnitude"),
        (adam, {"warmup_config": ONE_BIT}, "warmup_config has error feedback"),
        (adam, {"b1": 1.0}, "b1 is 1.0; it must be at least 0 and less than 1"),
        (adam, {"b2": -0.1}, "b2 is -0.1"),
        (adam, {"eps": 0}, "eps is 0; it must be more than 0"),
        (adam, {"weight_decay": -1}, "weight_decay is -1; it must be at least 0"),
        (
            adam,
            {"compressor": "sign"},
            "'sign' has no magnitudes.*: use cgx_ops.jax.signum",
        ),
        (adam, {"bits": 1, "compressor": "uniform"}, "at 1 bit the error may be as large"),
        (voting, {"momentum": 1}, "momentum is 1; it must be"),
        (
            voting,
            {"config": Config()},
            r"signum: config is Config\(.*it must be Config\(compressor='sign",
        ),
    ],
)
def test_bad_arguments(make: Any, options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(mesh_with(2), **options).init(WEIGHTS)


def test_numpy_numbers() -> None:
    assert adam(None, warmup_steps=np.int64(5), b1=np.float32(0.9))


@pytest.mark.parametrize("name", MAKERS)
def test_bad_states_and_gradients(name: str) -> None:
    mesh = mesh_with(4)
    optimizer = MAKERS[name](mesh)
    step, state = program_of(optimizer, mesh), optimizer.init(WEIGHTS)
    rows = {leaf: x[0] for leaf, x in rows_of(4, 1).items()}
    with pytest.raises(TypeError, match=r"\['bias'\] has dtype complex64"):
        step(WEIGHTS, state, rows | {"bias": rows["bias"].astype(np.complex64)})
    other = {**WEIGHTS, "a": np.ones((3, 5), np.float32)}
    with pytest.raises(
        ValueError, match=r"updates\['a'\] has shape \(24, 30\), and the state .*an"
    ):
        step(WEIGHTS, optimizer.init(other), rows)
    with pytest.raises(ValueError, match="needs the sizes of the axes"):
        MAKERS[name](None).init(WEIGHTS)
    shared = jax.shard_map(
        lambda s, x: optimizer.update(x, s)[0], mesh=mesh, out_specs=P(),
        in_specs=(state_specs(optimizer, WEIGHTS, "d"), P()),
    )  # fmt: skip
    with pytest.raises(ValueError, match="is the same on all devices"):
        jax.eval_shape(shared, state, WEIGHTS)
