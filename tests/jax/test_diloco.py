"""diloco: against a numpy version, special settings, all kinds of parameters, bad input.

jax/test_diloco_states.py tests states, checkpoints and processes. Inner steps add
jax_diloco_cases.moves(), independent of the parameters.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import torch
from jax import P
from support import jax_diloco_cases as cases
from support import launch
from support import torch_cases as tc
from support.jax_cases import fetch, mesh_of, normal, same_bits, use_cpu_devices
from support.jax_diloco_cases import (
    PLAIN,
    SHAPES,
    SPARSE,
    STREAMING,
    all_same,
    leaf_of,
    loop_options,
    started,
    trained,
    weights,
)
from support.jax_optimizer_cases import mesh_with

from cgx_ops import Config, Rules
from cgx_ops.jax import diloco

use_cpu_devices(8)

pytestmark = pytest.mark.timeout(120)
slow = pytest.mark.slow

MEMBERS = {
    1: [[*SHAPES]],
    2: [["blocks/0/kernel", "blocks/0/bias", "head/kernel"], ["blocks/1/kernel"]],
    3: [["blocks/0/kernel", "blocks/0/bias"], ["blocks/1/kernel"], ["head/kernel"]],
}
# Multiplication by 1/2 is exact, so XLA has numpy's bits although it fuses products and sums. The
# encoded values are then numpy's, too, although they jump where values round.
HALF = optax.sgd(0.5)
HALVES: dict[str, Any] = {**SPARSE, "residual_decay": 0.5, "outer_optimizer": HALF}
ENTROPY: dict[str, Any] = {
    "sync_every": 2, "compressor": "entropy", "rate": 2.0, "outer_optimizer": HALF
}  # fmt: skip
# The rate and the momentum of each outer optimizer.
OUTER = {None: (0.7, 0.9), SPARSE["outer_optimizer"]: (0.8, 0.0), HALF: (0.5, 0.0)}


def exact(mesh: Any, **options: Any) -> Any:
    options = {"outer_optimizer": optax.sgd(1.0), "bits": 32, **options}
    return diloco("d", mesh=mesh, **options)


# ---- 1. special cases ----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [4, pytest.param(1, marks=slow), pytest.param(3, marks=slow)])
def test_parameter_averaging(n: int) -> None:
    """With H = 1 and an exact outer SGD of rate 1 without momentum, expect the parameters' mean."""
    mesh = mesh_with(n)
    loop = exact(mesh, sync_every=1)
    params, state = started(loop)
    for step in range(4):
        params = cases.moved(params, cases.spread_moves(mesh, step, n))
        before = fetch(params)
        params, state = loop.outer(params, state)
        for name in SHAPES:
            own, got = leaf_of(before, name), leaf_of(fetch(params), name)
            assert all(same_bits(row, got[0]) for row in got), name
            assert same_bits(got[0], leaf_of(fetch(state.outer_parameters), name))
            # Roundings: the differences to the outer parameters, their n - 1 sums, the quotient and
            # the last difference, each by 2^-24 of the largest sum of magnitudes.
            bound = (n + 3) * 2.0**-24 * 2 * np.abs(own).max()
            assert np.abs(got[0] - own.mean(0, np.float64)).max() <= bound, (name, step)


def test_equals_data_parallel_training() -> None:
    """With H = 1 and plain SGD inside, expect the result of averaged gradients."""
    n, mesh, x, y = 4, mesh_with(4), normal(1, 8, 4, 5, 20), normal(2, 8, 4, 5, 3)

    def loss(w: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.square(jnp.tanh(x @ w["a"]) @ w["b"] - y).mean()

    w = {"a": normal(3, 20, 30) / 5, "b": normal(4, 30, 3) / 5}
    loop = exact(mesh, sync_every=1)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    @jax.vmap
    def inner(w: Any, x: jax.Array, y: jax.Array) -> Any:
        return jax.tree.map(lambda p, g: p - 0.3 * g, w, jax.grad(loss)(w, x, y))

    params, state, want = loop.replicate(w), loop.init(w), w
    for i in range(8):
        params, state = loop.outer(inner(params, x[i], y[i]), state)
        both = [jax.grad(loss)(want, x[i, r], y[i, r]) for r in range(n)]
        want = jax.tree.map(lambda p, *g: p - 0.3 * sum(g) / n, want, *both)
    for name in w:
        # Each of the 8 steps, which are contractions, rounds differently by a few 2^-24 of
        # parameters below 2.
        assert np.abs(fetch(params)[name][0] - want[name]).max() <= 8 * 8 * 2.0**-24 * 2


@pytest.mark.parametrize(
    ("options", "n"),
    [
        (PLAIN, 4),
        (STREAMING, 4),
        (SPARSE, 4),
        (ENTROPY, 4),
        pytest.param({**ENTROPY, "sync_every": 6, "fragments": 2}, 3, marks=slow),
        pytest.param({**STREAMING, "fragments": 2, "residual_decay": 0.9}, 2, marks=slow),
        pytest.param({**PLAIN, "fragment_update_alpha": 0.25, "bits": 32}, 3, marks=slow),
        pytest.param({**STREAMING, "fragment_sync_delay": 0}, 1, marks=slow),
        pytest.param({**HALVES, "value_bits": 16, "density": 0.25}, 3, marks=slow),
        pytest.param({**HALVES, "value_bits": 2}, 4, marks=slow),
    ],
)
def test_transcription(options: dict[str, Any], n: int) -> None:
    mesh = mesh_with(n)
    loop = diloco("d", mesh=mesh, **loop_options(options))
    own = {
        knob: options[knob]
        for knob in ("bits", "compressor", "density", "bucket_size", "value_bits", "rate")
        if knob in options
    }
    senders = "mean_over" in options
    rate, momentum = OUTER[options.get("outer_optimizer")]
    first = {name: leaf_of(weights(), name) for name in SHAPES}
    want = reference.OuterLoop(
        first, n, loop.schedule, MEMBERS[loop.schedule.fragments],
        lambda _, numel: reference.Segment(0, numel, **own), rate=rate,
        momentum=momentum, decay=options.get("residual_decay", 1.0),
        feedback=options.get("bits") != 32, of_senders=senders,
    )  # fmt: skip
    params, state = started(loop)
    for step in range(14):
        by = cases.moves(step, n)
        for name in SHAPES:
            for rank, of in enumerate(want.params):
                of[name] = of[name] + by[name][rank].ravel()
        want.step()
        params, state = trained(loop, mesh, (params, state), [step])
        for name in SHAPES:
            for found, known in (
                (leaf_of(params, name), [of[name] for of in want.params]),
                (leaf_of(state.outer_parameters, name), want.anchor[name]),
                (leaf_of(state.residual, name), want.residuals[name]),
            ):
                if found is not None:
                    off = np.abs(fetch(found).ravel() - np.ravel(known)).max()
                    assert off <= 1e-5 * max(1, np.abs(known).max()), (name, step)
    assert int(state.step) == 14


@pytest.mark.parametrize("options", [STREAMING, pytest.param(SPARSE, marks=slow)])
def test_in_jit_and_inside_shard_map(options: dict[str, Any]) -> None:
    """Branch on the step count in one program: the results are the same up to XLA's fusion."""
    mesh = mesh_with(4)
    loop = diloco("d", mesh=mesh, **loop_options(options))
    specs = loop.copy_specs(weights()), loop.state_specs(weights())
    mapped = jax.shard_map(loop.outer, mesh=mesh, in_specs=specs, out_specs=specs)
    inside = jax.jit(mapped, donate_argnums=(0, 1))
    ends = [
        trained(loop, mesh, started(loop), range(9), outer)
        for outer in (None, inside, jax.jit(loop.outer, donate_argnums=(0, 1)))
    ]
    assert all_same(ends[1], ends[2])
    for a, b in zip(*map(jax.tree.leaves, ends[:2]), strict=True):
        assert np.abs(fetch(a) - fetch(b)).max() <= 1e-5
        assert a.sharding.spec == b.sharding.spec


def test_rules_of_senders() -> None:
    """Check that a rule (with a numpy integer) makes leaves exact, averaged over all ranks."""
    mesh, w = mesh_with(4), {"a": np.zeros(40, np.float32), "b": np.zeros(40, np.float32)}
    rules = Rules([("a", 32), ("b", {"density": 0.5})], exact_vectors=False)
    loop = diloco("d", mesh=mesh, **loop_options(SPARSE, sync_every=1, rules=rules))
    own = normal(1, 4, 40)
    params, _ = loop.outer({"a": own, "b": own}, loop.init(w))
    assert np.allclose(fetch(params["a"]), 0.8 * own.mean(0), atol=1e-6)
    assert not np.allclose(fetch(params["b"]), 0.8 * own.mean(0), atol=1e-6)


@slow
def test_in_a_scan_with_init_inside() -> None:
    mesh, loop = mesh_with(4), diloco("d", **loop_options(PLAIN))

    def train(w: Any, by: Any) -> Any:
        def one(carry: Any, d: Any) -> Any:
            return loop.outer(jax.tree.map(lambda p, m: p + m, carry[0], d), carry[1]), None

        first = jax.tree.map(lambda x: jax.lax.pcast(x[None], "d", to="varying"), w)
        return jax.lax.scan(one, (first, loop.init(w)), by)[0][0]

    by = [cases.tree_of(cases.moves(step, 4)) for step in range(5)]
    steps = jax.tree.map(lambda *x: np.stack(x), *by)
    mapped = jax.shard_map(train, mesh=mesh, in_specs=(P(), P(None, "d")), out_specs=P("d"))
    got = jax.jit(mapped)(weights(), steps)
    outside = diloco("d", mesh=mesh, **loop_options(PLAIN))
    want, _ = trained(outside, mesh, started(outside), range(5))
    for name in SHAPES:
        assert np.abs(fetch(leaf_of(got, name)) - fetch(leaf_of(want, name))).max() <= 1e-5


def test_equals_torch() -> None:
    """Compare averages and residuals of equal deltas with torch's operators, bit for bit.

    The outer parameters are equal for an SGD of rate 1; other optimizers round differently.
    """
    n, mesh, decay = 4, mesh_with(4), 0.75
    loop = diloco(
        "d", mesh=mesh, sync_every=1, bits=2, compressor="levels", rules=Rules(exact_vectors=False),
        config=Config(algorithm="sra", residual_decay=decay), outer_optimizer=optax.sgd(1.0),
    )  # fmt: skip
    params, state = started(loop)
    for step in range(4):
        params = cases.moved(params, cases.spread_moves(mesh, step, n))
        own, anchor, kept = fetch((params, state.outer_parameters, state.residual))
        deltas = [[leaf_of(anchor, s) - leaf_of(own, s)[r] for s in SHAPES] for r in range(n)]
        owed = [[leaf_of(kept, s)[r] * np.float32(decay) for s in SHAPES] for r in range(n)]

        def rank_program(rank: int, comm: Any, deltas: Any = deltas, owed: Any = owed) -> Any:
            x, e = (list(map(torch.from_numpy, of[rank])) for of in (deltas, owed))
            config = str(Config(2, 512, "nearest", "sra", compressor="levels"))
            return tc.feedback_list(x, e, op="avg", group_name=comm.name, config=config)

        ranks = launch.threads(n, rank_program)
        params, state = loop.outer(params, state)
        for place, s in enumerate(SHAPES):
            stepped = leaf_of(anchor, s) - ranks[0][0][place].numpy()
            assert same_bits(leaf_of(state.outer_parameters, s), stepped), (s, step)
            for rank, (_, lost) in enumerate(ranks):
                found = fetch(leaf_of(state.residual, s))[rank]
                assert same_bits(found, lost[place].numpy()), (s, step, rank)


# ---- 2. parameters of all kinds ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(np.float16, marks=slow)])
def test_half_precision_has_outer_parameters_in_float32(dtype: Any) -> None:
    mesh = mesh_with(4)
    loop = exact(mesh, sync_every=2)
    first = weights(dtype)
    params, state = loop.replicate(first), loop.init(first)
    params, state = trained(loop, mesh, (params, state), range(2))
    for name in SHAPES:
        got, anchor = fetch((leaf_of(params, name), leaf_of(state.outer_parameters, name)))
        assert anchor.dtype == np.float32
        assert got.dtype == dtype
        assert all(same_bits(row, anchor.astype(dtype)) for row in got)
        assert (anchor != got[0].astype(np.float32)).any(), "the outer parameters were rounded"


def test_unusual_leaves() -> None:
    mesh = mesh_with(4)
    shared = normal(1, 40)
    tree = {
        "count": np.int32(7), "mask": np.array([True, False]), "a": shared, "b": shared,
        "empty": np.zeros((0, 3), np.float32), "none": None,
    }  # fmt: skip
    loop = exact(mesh, sync_every=1)
    params, state = loop.replicate(tree), loop.init(tree)
    assert state.outer_parameters["count"] is None
    counts = jnp.arange(4)
    params = {**params, "count": counts, "a": params["a"] + 1.0, "b": params["b"] + 1.0}
    params, state = loop.outer(params, state)
    assert same_bits(params["count"], counts)
    assert params["mask"].shape == (4, 2)
    assert np.allclose(fetch(params["a"]), shared + 1, atol=1e-6)
    assert same_bits(params["a"], params["b"])
    again = loop.restart(params, state)
    assert all_same(again["a"], params["a"])
    assert (fetch(again["count"]) == 0).all(), "the first device's"

    for nothing in ({}, {"count": np.int32(1)}):
        params, state = loop.replicate(nothing), loop.init(nothing)
        params, state = loop.outer(params, state)
        assert int(state.step) == 1


def test_nan_appears_on_all_devices() -> None:
    mesh = mesh_with(4)
    loop = diloco("d", mesh=mesh, **loop_options(PLAIN))
    params, state = trained(loop, mesh, started(loop), range(1))
    spoilt = fetch(params["head"]["kernel"]).copy()
    spoilt[2, 3] = np.nan
    params["head"]["kernel"] = spoilt
    params, state = loop.outer(params, state)
    assert np.isnan(fetch(params["head"]["kernel"])[:, 3]).all()
    assert np.isfinite(fetch(params["blocks"]["0"]["kernel"])).all()
    assert all(np.isfinite(fetch(e)).all() for e in jax.tree.leaves(state.residual))


def test_parameters_split_over_another_axis() -> None:
    """Compare with parameters that are not split: exact messages do not depend on the layout."""
    mesh = mesh_of((4, 2), ("d", "model"))
    specs = cases.tree_of({n: P("model") if n != "blocks/1/kernel" else P() for n in SHAPES})
    options: Any = {"bits": 32, "sync_every": 4, "fragments": 2, "fragment_sync_delay": 1}
    loop = diloco("d", mesh=mesh, param_specs=specs, **options)
    params, state = started(loop)
    whole = diloco("d", mesh=mesh_with(4), **options)
    wanted, known = started(whole)
    for step in range(5):
        by = cases.tree_of(cases.moves(step, 4))
        params = cases.moved(params, by)
        params, state = loop.outer(params, state)
        wanted, known = trained(whole, mesh_with(4), (wanted, known), [step])
    assert params["head"]["kernel"].sharding.spec == P("d", "model")
    assert state.outer_parameters["head"]["kernel"].sharding.spec == P("model")
    for name in SHAPES:
        off = np.abs(fetch(leaf_of(params, name)) - fetch(leaf_of(wanted, name))).max()
        assert off <= 1e-6, name


# ---- 3. bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sync_every": 0}, "sync_every is 0; it must be an integer of at least 1"),
        ({"fragments": 4}, "fragments must divide it"),
        ({"fragment_sync_delay": 6}, "it must be less than"),
        ({"fragment_update_alpha": 2}, "fragment_update_alpha is 2; it must be from 0 to 1"),
        ({"mean_over": "all"}, "mean_over is 'all'; it must be 'ranks' or 'senders'"),
        ({"mean_over": "senders"}, "mean_over='senders' needs leaves of which each"),
        (
            {
                "mean_over": "senders",
                "compressor": "topk",
                "rules": Rules([("kernel", {"compressor": "half"})]),
            },
            "each device sends some",
        ),
        (
            {"mean_over": "senders", "compressor": "topk", "algorithm": "sra"},
            "needs error feedback",
        ),
        ({"name": ""}, "name is ''; it must not be empty"),
        ({"residual_decay": 0}, "residual_decay"),
        ({"bits": 1, "error_feedback": True}, "at 1 bit the error may be as large"),
        ({"bits": 9}, "bits"),
    ],
)
def test_bad_arguments(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        diloco("d", mesh=mesh_with(4), **loop_options(PLAIN, **options)).init(weights())


def test_bad_calls() -> None:
    mesh = mesh_with(4)
    loop = diloco("d", mesh=mesh, **loop_options(PLAIN))
    params, state = started(loop)
    with pytest.raises(
        ValueError, match=r"\['bias'\] has shape \(12,\) here, not \(4, 12\): start"
    ):
        loop.outer(weights(), state)
    with pytest.raises(ValueError, match="the state belongs to another model"):
        loop.outer({"a": params["head"]}, state)
    with pytest.raises(ValueError, match="needs the sizes of the axes"):
        diloco("d", **loop_options(PLAIN)).init(weights())
    with pytest.raises(ValueError, match="fragments is 3, but there are 1 layers"):
        diloco("d", mesh=mesh, **loop_options(STREAMING)).init({"a": np.ones(40, np.float32)})
    with pytest.raises(TypeError, match="has dtype complex64"):
        loop.init({"a": np.ones(40, np.complex64)})
    with pytest.raises(TypeError, match="unexpected keyword argument 'residuals'"):
        diloco("d", sync_every=2, residuals=1)  # pyright: ignore[reportCallIssue]
    whole = P()
    shared = jax.shard_map(loop.outer, mesh=mesh, in_specs=whole, out_specs=whole)
    with pytest.raises(ValueError, match="copy_specs"):
        jax.eval_shape(shared, params, state)
