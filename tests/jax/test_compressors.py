"""Every compressor in every call of JAX, bit for bit as the numpy collectives.

1. values: verbs, carriers, dtypes, trees with a different compressor for each leaf
2. conservation: inputs plus old residuals equal results plus new residuals
3. transformations, donation, export

jax/test_votes.py tests votes.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support.jax_allreduce_cases import on_ranks
from support.jax_cases import (
    PROCESSES,
    SRA,
    fetch,
    has_part_in,
    mesh_of,
    normal,
    on_mesh,
    processes_of,
    same_bits,
    spread,
    use_cpu_devices,
)
from support.jax_compressor_cases import (
    AT,
    CASES,
    KEPT,
    KEY,
    MESH,
    OLD,
    N,
    X,
    check_conservation,
    config_of,
    numpy_result,
    run,
)

import cgx_ops.jax
from cgx_ops import Config, Rules
from cgx_ops.jax import (
    all_gather_q,
    all_to_all_q,
    allreduce_q,
    compress_grads,
    pmean_q,
    psum_q,
    psum_scatter_q,
    value_and_grad,
)

use_cpu_devices(8)

one_process = pytest.mark.skipif(PROCESSES > 1, reason="is about one process")
both_carriers = pytest.mark.parametrize("carrier", ["native", "xla"])

BF16 = ml_dtypes.bfloat16
U = {np.float32: 2.0**-24, BF16: 2.0**-9}  # relative rounding error of an operation
pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.mpirun,
    pytest.mark.skipif(not has_part_in(MESH), reason="other processes' devices"),
]
# Otherwise the devices of a process form one of numpy's ranks, which divides by their number.
EACH_IS_A_RANK = len(set(processes_of(AT))) in (1, N)


def of_all(names: list[str], call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a program with one call per case, because compiling takes longer than the calls."""
    return lambda *operands: {name: call(*operands, config=Config(**CASES[name])) for name in names}


# ---- 1. values -----------------------------------------------------------------------------------


@both_carriers
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_sums_and_means(dtype: Any, carrier: Any) -> None:
    x = X.astype(dtype)
    for op, reduce in (("sum", psum_q), ("avg", pmean_q)):
        if op == "avg" and not EACH_IS_A_RANK:
            continue
        call = functools.partial(reduce, axis_name="d", key=KEY, carrier=carrier)
        got = run(of_all(list(CASES), call), x)
        for name in CASES:
            want = numpy_result("allreduce", x, config_of(name), op=op, at=AT)
            assert all(map(same_bits, got[name], want)), (op, name)


@both_carriers
@pytest.mark.parametrize("algorithm", ["one_shot", "sra"])
def test_algorithms_with_residuals(algorithm: Any, carrier: Any) -> None:
    def call(v: jax.Array, old: jax.Array, config: Config) -> Any:
        config = replace(config, algorithm=algorithm)
        return psum_q(v, "d", key=KEY, carrier=carrier, config=config, residual=old)

    got = run(of_all(KEPT, call), X, OLD)
    for name in KEPT:
        residuals = OLD.copy()
        config = config_of(name, algorithm=algorithm)
        want = numpy_result("allreduce", X, config, residuals=list(residuals), at=AT)
        assert all(map(same_bits, got[name][0], want)), name
        assert all(map(same_bits, got[name][1], residuals)), name


def test_without_a_key() -> None:
    names = ["levels", "onebit", "half", "topk"]
    got = run(of_all(names, lambda v, **k: psum_q(v, "d", **k)), X)
    for name in names:
        want = numpy_result("allreduce", X, config_of(name, key=None), key=None, at=AT)
        assert all(map(same_bits, got[name], want)), name


@one_process
def test_scatter_and_gather() -> None:
    """Compare with numpy's results in rank order, as blocks and as a whole."""
    blocks = normal(82, N, N, 700)
    names = [name for name in CASES if "gather_bits" not in CASES[name]]
    got = run(of_all(names, lambda v, **k: psum_scatter_q(v, "d", key=KEY, **k)), blocks)
    for name in names:
        call = "reduce_scatter over d: "
        want = numpy_result("reduce_scatter", blocks, config_of(name), call=call)
        assert all(map(same_bits, got[name], want)), name
    got = run(of_all(names, lambda v, **k: all_gather_q(v, "d", key=KEY, tiled=True, **k)), X)
    for name in names:
        want = numpy_result("all_gather", X, config_of(name), call="all_gather over d: ")
        assert all(map(same_bits, got[name], want)), name


@pytest.mark.parametrize("name", ["topk", "randk"])
def test_scatter_and_gather_all_values(name: Any) -> None:
    """With density 1, check that all values are sent, with their indices."""
    blocks = normal(87, N, N, 700)
    knobs: dict[str, Any] = {"config": Config(compressor=name, density=1.0), "key": KEY}
    got = run(lambda v: psum_scatter_q(v, "d", **knobs), blocks)
    exact = blocks.sum(0, np.float64)
    assert np.abs(got - exact).max() <= N * U[np.float32] * np.abs(blocks).sum(0).max()
    assert all(same_bits(rows, X) for rows in run(lambda v: all_gather_q(v, "d", **knobs), X))


@both_carriers
@pytest.mark.parametrize("fuse", [True, False])
def test_different_compressors_per_leaf(fuse: bool, carrier: Any) -> None:
    """Check that each field comes from the first rule that sets it, with few residuals."""
    x = {name: normal(83 + i, N, 900) for i, name in enumerate(("bias", "conv", "dense", "other"))}
    rules = Rules(
        [
            ("bias", 32),
            ("dense", {"compressor": "topk", "density": 0.05}),
            ("de|conv", {"compressor": "levels", "bits": 2, "bucket_size": 64}),
        ],
        exact_vectors=False,
    )
    configs = {
        "bias": config_of("uniform", bits=32, algorithm="sra"),
        "conv": config_of("levels", bucket_size=64, algorithm="sra"),
        "dense": config_of("topk", bucket_size=64, algorithm="sra"),
        "other": config_of("uniform", bits=3, gather_bits=8, bucket_size=128, algorithm="sra"),
    }
    old = {name: rows / 4 for name, rows in x.items()} | {"other": None}

    def body(v: Any, e: Any) -> Any:
        return psum_q(
            v, "d", key=KEY, bits=3, bucket_size=128, rules=rules, fuse=fuse, carrier=carrier,
            config=Config(gather_bits=8, algorithm="sra"), residual={**e, "other": None},
        )  # fmt: skip

    sums, new = run(body, x, {name: rows for name, rows in old.items() if rows is not None})
    assert new["other"] is None
    for leaf, (name, rows) in enumerate(x.items()):
        given = old[name]
        residuals = None if given is None else given.copy()
        want = numpy_result(
            "allreduce", rows, configs[name], leaf=leaf, at=AT,
            residuals=None if residuals is None else list(residuals),
        )  # fmt: skip
        assert all(map(same_bits, sums[name], want)), name
        assert residuals is None or all(map(same_bits, new[name], residuals)), name


def test_rule_overrides_exact_call() -> None:
    rules = Rules([("a", {"compressor": "topk", "density": 0.05}), ("b", 2)], exact_vectors=False)
    x = {"a": X, "b": OLD, "c": X + OLD}
    sums = run(lambda v: psum_q(v, "d", bits=32, config=SRA, rules=rules), x)
    cases: dict[str, dict[str, Any]] = {"a": CASES["topk"], "b": {"bits": 2}, "c": {"bits": 32}}
    for name, case in cases.items():
        config = Config(algorithm="sra", rounding="nearest", **case)
        want = numpy_result("allreduce", x[name], config, key=None, at=AT)
        assert all(map(same_bits, sums[name], want)), name


@one_process
def test_gradients() -> None:
    """Check that the functions built on psum_q accept its options."""
    weights = normal(84, 3000)

    def loss(w: jax.Array, row: jax.Array) -> jax.Array:
        return (w * row).sum()

    knobs: dict[str, Any] = {
        "key": KEY,
        "config": Config(**CASES["topk"]),
        "rules": Rules(exact_vectors=False),
    }
    around = run(lambda row: value_and_grad(loss, "d", **knobs)(jnp.asarray(weights), row)[1], X)
    want = numpy_result("allreduce", X, config_of("topk"), op="avg")
    assert all(map(same_bits, around, want))

    def within(w: jax.Array, row: jax.Array) -> jax.Array:
        return lax.psum(loss(compress_grads(w, "d", **knobs), row[0]), "d")

    program = jax.shard_map(jax.grad(within), mesh=MESH, in_specs=(P(), P("d")), out_specs=P())
    got = jax.jit(program)(weights, X)
    assert same_bits(got, numpy_result("allreduce", X, config_of("topk"))[0])


@one_process
def test_allreduce_q() -> None:
    """Use threads as ranks: communicator names separate their noise, but not the indices."""

    def body(rank: int, comm: Any) -> Any:
        def call(v: jax.Array, old: jax.Array, config: Config) -> Any:
            return allreduce_q(v, comm, key=KEY, residual=old, config=config)

        def vote(v: jax.Array) -> jax.Array:
            return allreduce_q(v, comm, op="avg", config=Config(**CASES["sign"]))

        return jax.jit(of_all(KEPT, call))(X[rank], OLD[rank]), jax.jit(vote)(X[rank])

    results = on_ranks(2, body, "noise")
    for name in KEPT:
        calls = [f"allreduce_q on noise/{rank}: " for rank in range(2)]
        residuals = OLD[:2].copy()
        want = numpy_result(
            "allreduce", X[:2], config_of(name), residuals=list(residuals),
            call=["allreduce_q on : "] * 2 if name == "randk" else calls,
        )  # fmt: skip
        for rank, (result, _) in enumerate(results):
            assert same_bits(result[name][0], want[rank]), name
            assert same_bits(result[name][1], residuals[rank]), name
    votes = numpy_result("allreduce", X[:2], config_of("sign"), op="avg")
    assert all(same_bits(result[1], want) for result, want in zip(results, votes, strict=True))


# ---- 2. conservation -----------------------------------------------------------------------------


WAYS = [
    ("native", "auto"),
    ("native", "sra"),
    ("native", "ring"),
    ("xla", "one_shot"),
    ("xla", "sra"),
]
# Daily, each algorithm runs on three ranks, whose shards are uneven; slow tests have another count.
ON_RANKS = [
    pytest.param(
        ranks,
        *way,
        marks=[]
        if ranks == 3
        else pytest.mark.slow
        if ranks == (1, 2, 4)[i % 3]
        else pytest.mark.exhaustive,
    )
    for ranks in (1, 2, 3, 4)
    for i, way in enumerate(WAYS)
]


@pytest.mark.parametrize(("ranks", "carrier", "algorithm"), ON_RANKS)
def test_conservation(ranks: int, carrier: Any, algorithm: Any) -> None:
    """Check over 50 donated steps in a scan that inputs plus old residuals are conserved.

    Roundings: a step rounds each device's sum of both, its residual and the sum over devices. These
    are 4 operations per device, of values bounded by the sum over all devices. A rotation adds two
    butterflies of 5 stages, there and back: 10 more.
    """
    steps, numel = 50, 1500
    if PROCESSES > 1 and (ranks == 3 or (carrier == "xla" and ranks > PROCESSES)):
        pytest.skip("of several processes: as many devices each, and for xla one")
    mesh = mesh_of((ranks,), ("d",), jax.devices()[:: 8 // ranks][:ranks])
    if not has_part_in(mesh):
        pytest.skip("other processes' devices")
    x = normal(90, ranks, steps, numel)

    def body(rows: jax.Array, old: Any) -> Any:
        def step(residuals: Any, given: Any) -> Any:
            row, number = given
            key = jax.random.fold_in(KEY, number)
            sums, new = {}, {}
            for name in KEPT:
                sums[name], new[name] = psum_q(
                    row, "d", key=key, residual=residuals[name], carrier=carrier,
                    config=Config(algorithm=algorithm, **CASES[name]),
                )  # fmt: skip
            return new, (sums, new)

        new, kept = lax.scan(step, jax.tree.map(lambda e: e[0], old), (rows[0], jnp.arange(steps)))
        return jax.tree.map(lambda y: y[None], (new, kept))

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)
    zeros = {name: spread(mesh, np.zeros((ranks, numel), np.float32), P("d")) for name in KEPT}
    last, (sums, residuals) = jax.jit(mapped, donate_argnums=1)(spread(mesh, x, P("d")), zeros)
    for name in KEPT:
        assert zeros[name].is_deleted(), "it was not donated"
        found = (fetch(tree[name]) for tree in (last, sums, residuals))
        check_conservation(name, x, *(np.asarray(y, np.float64) for y in found))


# ---- 3. transformations, donation, export --------------------------------------------------------

TRANSFORMED = ["topk", "levels", "sign", "ternary"]
transformed = pytest.mark.parametrize("name", TRANSFORMED)


def call(v: jax.Array, name: str, **knobs: Any) -> jax.Array:
    return psum_q(v, "d", key=KEY, config=Config(**CASES[name]), **knobs)


@both_carriers
def test_gradients_are_exact(carrier: Any) -> None:
    """Compare with the gradient of the exact sum, for every compressor."""

    def gradients(reduce: Any) -> Any:
        return lambda v, w: jax.grad(lambda u: (reduce(u) * w).sum())(v)

    exact = run(gradients(lambda u: lax.psum(u, "d")), X, OLD)
    got = run(
        lambda v, w: {
            name: gradients(lambda u, n=name: call(u, n, carrier=carrier))(v, w)
            for name in TRANSFORMED
        },
        X, OLD,
    )  # fmt: skip
    for name in TRANSFORMED:
        assert same_bits(got[name], exact), name


@transformed
def test_vmap_and_scan(name: str) -> None:
    """Check that each example, and each step, is computed as if alone."""
    x = normal(85, N, 3, 800)
    keys = jax.random.split(KEY, 3)

    def body(rows: jax.Array) -> Any:
        one = lambda v, key: psum_q(v, "d", key=key, config=Config(**CASES[name]))  # noqa: E731
        scanned = lax.scan(lambda c, given: (c, one(*given)), 0, (rows, keys))[1]
        return jax.vmap(one)(rows, keys), scanned

    mapped, scanned = run(body, x)
    for i in range(3):
        want = numpy_result("allreduce", x[:, i], config_of(name), key=keys[i], at=AT)
        assert all(map(same_bits, mapped[:, i], want))
        assert all(map(same_bits, scanned[:, i], want))


@both_carriers
@pytest.mark.parametrize("name", ["entropy", "entropy shifted", "lossless"])
@pytest.mark.parametrize(
    ("numels", "algorithm"),
    [((700, 300), "auto"), ((3000, 20), "sra"), ((40_019, 17), "one_shot")],
)
def test_small_leaves_of_an_example_share_messages(
    numels: tuple[int, int], algorithm: Any, name: str, carrier: Any
) -> None:
    """Check that examples have the bits of separate calls, also if one has much smaller values."""
    config, keys = Config(**CASES[name], algorithm=algorithm), jax.random.split(KEY, 3)
    scales = np.array([1, 1e-6, 100], np.float32)[None, :, None]
    x = {
        leaf: scales * normal(86 + i, N, 3, n)
        for i, (leaf, n) in enumerate(zip("ab", numels, strict=True))
    }

    def body(rows: Any) -> Any:
        one = lambda v, key: psum_q(v, "d", key=key, config=config, carrier=carrier)  # noqa: E731
        alone = [one({leaf: v[i] for leaf, v in rows.items()}, keys[i]) for i in range(3)]
        return jax.vmap(one)(rows, keys), alone

    mapped, alone = run(body, x)
    for i, leaf in itertools.product(range(3), x):
        assert same_bits(mapped[leaf][:, i], alone[i][leaf]), (leaf, i)
        assert np.count_nonzero(mapped[leaf][:, i]) > x[leaf].shape[-1], (leaf, i)


@one_process
@pytest.mark.parametrize("name", ["psum_scatter_q", "all_gather_q", "all_to_all_q"])
def test_small_examples_of_other_collectives(name: str) -> None:
    function = {
        "psum_scatter_q": psum_scatter_q,
        "all_gather_q": all_gather_q,
        "all_to_all_q": functools.partial(all_to_all_q, split_axis=0, concat_axis=0),
    }[name]
    config = Config(**CASES["entropy"])
    shape = (3, 700) if name == "all_gather_q" else (3, N, 700)
    scales = np.array([1, 1e-6, 100], np.float32).reshape(3, *(1,) * (len(shape) - 1))
    x = scales * normal(88, N, *shape)

    def body(rows: Any) -> Any:
        one = lambda v: function(v, axis_name="d", config=config)  # noqa: E731
        return jax.vmap(one)(rows), [one(rows[i]) for i in range(3)]

    mapped, alone = run(body, x)
    for i in range(3):
        assert same_bits(mapped[:, i], alone[i]), i


def test_examples_under_one_key_have_different_indices() -> None:
    x = np.ones((N, 3, 2000), np.float32)
    sums = run(lambda rows: jax.vmap(lambda v: call(v, "randk"))(rows), x)
    places = [set(np.flatnonzero(row).tolist()) for row in sums[0]]
    assert all(len(each) == 3 * 26 + 24 for each in places)  # 5 % of each bucket, rounded up
    assert places[0] != places[1] != places[2] != places[0]


@one_process
@transformed
def test_exported(name: str) -> None:
    program, operand = on_mesh(MESH, lambda v: call(v, name)).jitted, spread(MESH, X, P("d"))
    exported = jax.export.export(program, disabled_checks=cgx_ops.jax.register())(operand)
    loaded = jax.export.deserialize(exported.serialize())
    want = numpy_result("allreduce", X, config_of(name))
    assert all(map(same_bits, jax.jit(loaded.call)(operand), want))
