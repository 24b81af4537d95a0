"""psum_q and pmean_q on eight devices: values are bitwise equal to the oracle's."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support.jax_cases import (
    SRA,
    expected,
    fetch,
    has_part_in,
    mesh_of,
    normal,
    on_mesh,
    same_bits,
    seed_of,
    spread,
    use_cpu_devices,
    with_config,
)

from cgx_ops import Config
from cgx_ops.jax import pmean_q, psum_q

use_cpu_devices(8)

pytestmark = [pytest.mark.timeout(120), pytest.mark.mpirun]

BF16 = ml_dtypes.bfloat16


def check_rows(rows: Any, want: Any) -> None:
    """Require that every device has the expected bits."""
    rows = np.asarray(rows)
    for row in rows:
        assert same_bits(row, want)


# Daily runs test each number of bits with each dtype, in alternating modes.
@pytest.mark.parametrize(
    ("bits", "dtype", "check_vma"),
    [
        pytest.param(*each, marks=[] if i // 2 % 2 == i % 2 else pytest.mark.exhaustive)
        for i, each in enumerate(
            itertools.product([1, 3, 4, 8, 32], [np.float32, np.float16, BF16], [True, False])
        )
    ],
)
def test_equals_the_oracle(bits: int, dtype: Any, check_vma: bool) -> None:
    x = normal(bits, 8, 5000, dtype=dtype)
    program = on_mesh(
        mesh_of((8,), ("d",)),
        lambda v: psum_q(v, "d", bits=bits, bucket_size=100, config=SRA),
        check_vma,
    )
    check_rows(program(x), expected(x, bits=bits, bucket_size=100))


@pytest.mark.parametrize("algorithm", ["one_shot", "sra", "ring"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_algorithms_and_devices(ranks: int, algorithm: Any) -> None:
    x = normal(1, ranks, 3001)
    mesh = mesh_of((ranks,), ("d",), jax.devices()[:ranks])
    if not has_part_in(mesh):
        return
    rows = on_mesh(mesh, lambda v: psum_q(v, "d", config=Config(algorithm=algorithm)))(x)
    check_rows(rows, expected(x, algorithm=algorithm))


@pytest.mark.parametrize("numel", [1, 15, 16, 17, 511, 512, 513])
def test_sizes_around_a_bucket(numel: int) -> None:
    x = normal(2, 8, numel)
    rows = on_mesh(mesh_of((8,), ("d",)), lambda v: psum_q(v, "d", config=SRA))(x)
    check_rows(rows, expected(x))


def test_auto_selects_an_order_independent_algorithm() -> None:
    x = normal(3, 8, 20000)
    rows = np.asarray(on_mesh(mesh_of((8,), ("d",)), lambda v: psum_q(v, "d"))(x))
    candidates = [expected(x, algorithm="sra"), expected(x, algorithm="one_shot")]
    assert any(same_bits(rows[0], want) for want in candidates)
    check_rows(rows, rows[0])


def test_every_knob_reaches_the_core() -> None:
    x = normal(4, 8, 1000)
    knobs: dict[str, Any] = {
        "bits": 2, "bucket_size": 64, "gather_bits": 8, "skip_incomplete_buckets": True
    }  # fmt: skip
    mesh = mesh_of((8,), ("d",))
    rows = on_mesh(mesh, lambda v: psum_q(v, "d", **with_config(algorithm="sra", **knobs)))(x)
    check_rows(rows, expected(x, **knobs))
    exact = on_mesh(
        mesh, lambda v: psum_q(v, "d", config=Config(algorithm="sra", minimal_size=1001))
    )(x)
    check_rows(exact, expected(x, minimal_size=1001))
    assert not same_bits(exact, rows)


def test_mean() -> None:
    x = normal(5, 8, 4096)
    rows = on_mesh(mesh_of((8,), ("d",)), lambda v: pmean_q(v, "d", config=SRA))(x)
    check_rows(rows, expected(x, op="avg"))


@pytest.mark.parametrize("typed", [True, False])
def test_a_key_rounds_stochastically(typed: bool) -> None:
    x = normal(6, 8, 4096)
    key = jax.random.key(11) if typed else jax.random.PRNGKey(11)

    def body(v: jax.Array) -> jax.Array:
        return psum_q(v, "d", key=key, config=SRA)

    rows = on_mesh(mesh_of((8,), ("d",)), body)(x)
    check_rows(rows, expected(x, seeds=[seed_of(key)] * 8))


def test_devices_may_have_different_keys() -> None:
    x = normal(7, 8, 4096)
    keys = jax.random.split(jax.random.key(3), 8)
    body = lambda v, key: psum_q(v, "d", key=key, config=SRA)  # noqa: E731
    for check_vma in (True, False):
        rows = on_mesh(mesh_of((8,), ("d",)), body, check_vma)(x, keys)
        check_rows(rows, expected(x, seeds=[seed_of(key) for key in keys]))


def test_another_key_gives_different_noise() -> None:
    x = normal(8, 8, 4096)
    program = on_mesh(
        mesh_of((8,), ("d",)),
        lambda v, s: psum_q(v, "d", key=jax.random.key(s), config=SRA),
    )
    a, b, again = (np.asarray(program(x, np.full(8, s, np.int32))) for s in (1, 2, 1))
    assert not same_bits(a, b)
    assert same_bits(a, again)


def test_pytree_leaves_are_compressed_separately() -> None:
    tree = {"a": normal(9, 8, 700), "b": [normal(10, 8, 3, 40), normal(11, 8, 2, dtype=BF16)]}
    key = jax.random.key(5)
    program = on_mesh(mesh_of((8,), ("d",)), lambda t: psum_q(t, "d", key=key, config=SRA))
    sums = program(tree)
    for leaf, (got, x) in enumerate(zip(jax.tree.leaves(sums), jax.tree.leaves(tree), strict=True)):
        check_rows(got, expected(x, seeds=[seed_of(key, leaf)] * 8))


def test_scalars_and_empty_arrays() -> None:
    x = normal(12, 8)
    mesh = mesh_of((8,), ("d",))
    check_rows(on_mesh(mesh, lambda v: psum_q(v, "d", config=SRA))(x), expected(x))
    for check_vma in (True, False):
        empty = on_mesh(mesh, lambda v: psum_q(v, "d"), check_vma)(np.zeros((8, 0, 3), np.float32))
        assert empty.shape == (8, 0, 3)


def test_python_scalars_are_arrays() -> None:
    program = on_mesh(mesh_of((8,), ("d",)), lambda v: psum_q(2.5, "d") + 0 * v)
    assert np.asarray(program(np.zeros(8, np.float32))).tolist() == [20.0] * 8


def test_nan_and_inf_propagate() -> None:
    x = normal(13, 8, 2048)
    x[3, 700] = np.nan
    x[5, 1900] = np.inf
    rows = np.asarray(on_mesh(mesh_of((8,), ("d",)), lambda v: psum_q(v, "d", config=SRA))(x))
    check_rows(rows, expected(x))
    assert np.isnan(rows[:, 512:1024]).all()
    assert not np.isfinite(rows[:, 1536:]).any()
    assert np.isfinite(rows[:, :512]).all()


def test_denormals_survive_xla() -> None:
    x = normal(14, 8, 1024) * np.float32(1e-40)
    check_rows(
        on_mesh(mesh_of((8,), ("d",)), lambda v: psum_q(v, "d", config=SRA))(x),
        expected(x),
    )


# ---- meshes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axes", ["a", "b", ("a", "b"), ("b", "a")])
def test_axes_of_a_mesh(axes: Any, check_vma: bool) -> None:
    x = normal(15, 8, 2000)
    mesh = mesh_of((2, 4), ("a", "b"))
    rows = np.asarray(on_mesh(mesh, lambda v: psum_q(v, axes, config=SRA), check_vma)(x))
    grid = np.arange(8).reshape(2, 4)
    groups = {
        "a": grid.T,
        "b": grid,
        ("a", "b"): [grid.reshape(-1)],
        ("b", "a"): [grid.T.reshape(-1)],
    }
    for group in groups[axes]:
        check_rows(rows[group], expected(x[group], at=group))


def test_devices_of_the_mesh_in_another_order() -> None:
    x = normal(16, 8, 2000)
    order = np.array([3, 1, 7, 0, 2, 6, 5, 4])
    devices = np.array(jax.devices())[order]
    for axis, groups in (
        ("a", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("b", [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ):
        mesh = jax.sharding.Mesh(devices.reshape(2, 4), ("a", "b"))
        rows = np.asarray(on_mesh(mesh, lambda v, a=axis: psum_q(v, a, config=SRA))(x))
        for group in groups:
            check_rows(rows[group], expected(x[group], at=order[group].tolist()))


def test_axis_of_one_device_changes_nothing() -> None:
    x = normal(17, 8, 100)
    mesh = mesh_of((8, 1), ("d", "one"))
    for check_vma in (True, False):
        check_rows(on_mesh(mesh, lambda v: psum_q(v, "one", bits=1), check_vma)(x)[:1], x[0])
        rows = on_mesh(mesh, lambda v: psum_q(v, ("d", "one"), config=SRA), check_vma)(x)
        check_rows(rows, expected(x))


def test_abstract_and_explicit_meshes() -> None:
    x = normal(18, 8, 1000)
    mesh = jax.make_mesh((8,), ("d",), (jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        operand = jax.device_put(x, jax.NamedSharding(mesh, P("d")))
        program = jax.jit(
            jax.shard_map(
                lambda v: psum_q(v[0], "d", config=SRA),
                in_specs=P("d"),
                out_specs=P(),
            )
        )
        assert same_bits(program(operand), expected(x))


def test_eager_shard_map_and_closed_over_values() -> None:
    x = normal(19, 8, 1000)
    mesh = mesh_of((8,), ("d",))
    eager = on_mesh(mesh, lambda v: psum_q(v, "d", config=SRA), check_vma=True)
    check_rows(eager.eagerly(x), expected(x))
    same = np.stack([x[0]] * 8)
    closed = on_mesh(mesh, lambda v: psum_q(jnp.asarray(x[0]), "d", config=SRA) + 0 * v, True)
    assert np.array_equal(np.asarray(closed(np.zeros((8, 1), np.float32)))[0], expected(same))


def test_checked_types_need_no_cast() -> None:
    x = normal(20, 8, 1000)
    mesh = mesh_of((8,), ("d",))
    program = jax.jit(
        jax.shard_map(
            lambda v: psum_q(v[0], "d", config=SRA),
            mesh=mesh,
            in_specs=P("d"),
            out_specs=P(),
        )
    )
    assert same_bits(program(spread(mesh, x, P("d"))), expected(x))
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(
            jax.shard_map(
                lambda v: v[0] + psum_q(v[0], "d"), mesh=mesh, in_specs=P("d"), out_specs=P()
            )
        )(spread(mesh, x, P("d")))


def test_unused_results_and_equal_calls_are_kept() -> None:
    mesh = mesh_of((8,), ("d",))

    def body(v: jax.Array) -> jax.Array:
        psum_q(v, "d")
        return psum_q(v, "d", config=SRA) + psum_q(v, "d", config=SRA)

    x = normal(21, 8, 1000)
    program = on_mesh(mesh, body)
    check_rows(program(x), 2 * expected(x))
    text = program.lower(x).compile().as_text()
    assert text.count('custom_call_target="cgx_psum_q"') == 2


def test_donated_operand() -> None:
    x = normal(22, 8, 1000)
    mesh = mesh_of((8,), ("d",))
    program = jax.jit(
        jax.shard_map(
            lambda v: psum_q(v, "d", config=SRA),
            mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False,
        ),
        donate_argnums=0,
    )  # fmt: skip
    operand = jax.device_put(x, jax.NamedSharding(mesh, P("d")))
    check_rows(fetch(program(operand)), expected(x))


def test_exported_and_called() -> None:
    x = normal(23, 8, 1000)
    mesh = mesh_of((8,), ("d",))
    program = on_mesh(mesh, lambda v: psum_q(v, "d", config=SRA))
    operand = jax.device_put(x, jax.NamedSharding(mesh, P("d")))
    allowed = [jax.export.DisabledSafetyCheck.custom_call("cgx_psum_q")]
    exported = jax.export.export(program.jitted, disabled_checks=allowed)(operand)
    check_rows(fetch(jax.jit(exported.call)(operand)), expected(x))


def test_sum_close_to_exact() -> None:
    x = normal(24, 8, 4096)
    rows = np.asarray(
        on_mesh(mesh_of((8,), ("d",)), lambda v: (psum_q(v, "d", bits=8), lax.psum(v, "d")))(x)[0]
    )
    exact = x.astype(np.float64).sum(0)
    assert np.abs(rows[0] - exact).max() < 0.2
