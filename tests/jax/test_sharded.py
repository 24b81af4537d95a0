"""value_and_grad in plain jax.jit: on sharded arrays, without the user's shard_map.

Compares with jax.value_and_grad in the same jit, whose gradients XLA's partitioner reduces: bits=32
up to rounding, 4 bits bit for bit with pmean_q and psum_scatter_q.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.jax_cases import mesh_of, use_cpu_devices

from cgx_ops import Rules
from cgx_ops.jax import pmean_q, psum_scatter_q, value_and_grad

use_cpu_devices(8)

WIDTH, BATCH = 64, 16


def loss_of(weights: dict[str, Any], batch: jax.Array) -> jax.Array:
    hidden = jnp.tanh(batch @ weights["in"]["kernel"] + weights["in"]["bias"])
    return ((hidden @ weights["out"] - batch) ** 2).mean()


def weights() -> dict[str, Any]:
    random = np.random.default_rng(1)
    return {
        "in": {
            "kernel": random.standard_normal((WIDTH, 2 * WIDTH), np.float32) / 8,
            "bias": random.standard_normal(2 * WIDTH).astype(np.float32),
        },
        "out": random.standard_normal((2 * WIDTH, WIDTH), np.float32) / 8,
    }


BATCHES = np.random.default_rng(2).standard_normal((BATCH, WIDTH), np.float32)
SHARED: Any = P()
FSDP = {"in": {"kernel": P("data"), "bias": P()}, "out": P(None, "data")}
TENSOR = {"in": {"kernel": P(None, "model"), "bias": P("model")}, "out": P("model")}
BOTH = {"in": {"kernel": P("data", "model"), "bias": P("model")}, "out": P("model", "data")}
TOGETHER = {
    "in": {"kernel": P(("data", "model")), "bias": P(("data", "model"))},
    "out": P(None, ("data", "model")),
}
MODEL_FIRST = {"in": {"kernel": P(("model", "data")), "bias": P("model")}, "out": P("model")}


def mesh(data: int, model: int) -> Mesh:
    return mesh_of((data, model), ("data", "model"), jax.devices()[: data * model])


def placed(on: Mesh, specs: Any) -> tuple[Any, jax.Array]:
    tree = jax.tree.broadcast(specs, weights(), is_leaf=lambda node: isinstance(node, P))
    put = jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(on, spec)),
                       weights(), tree)  # fmt: skip
    return put, jax.device_put(BATCHES, NamedSharding(on, P("data")))


LAYOUTS = [
    pytest.param(4, 1, SHARED, id="shared"),
    pytest.param(4, 1, FSDP, id="fsdp"),
    pytest.param(4, 2, SHARED, id="shared, model left to the compiler"),
    pytest.param(2, 2, TENSOR, id="tensor"),
    pytest.param(2, 2, BOTH, id="fsdp and tensor"),
    pytest.param(2, 2, TOGETHER, id="fsdp and tensor in one dimension"),
    pytest.param(2, 2, MODEL_FIRST, id="tensor and fsdp in one dimension"),
]


# Daily, each layout by one of both.
@pytest.mark.parametrize(
    ("data", "model", "specs", "by"),
    [
        pytest.param(
            *layout.values,
            by,
            id=f"{by}-{layout.id}",
            marks=[] if i % 2 == j else pytest.mark.slow,
        )
        for i, layout in enumerate(LAYOUTS)
        for j, by in enumerate(("argument", "set_mesh"))
    ],
)
def test_exact_gradients_equal_the_partitioners(data: int, model: int, specs: Any, by: str) -> None:
    on = mesh(data, model)
    params, batch = placed(on, specs)
    given: dict[str, Any] = {"mesh": on} if by == "argument" else {}
    ours = value_and_grad(loss_of, "data", in_specs=(specs, P("data")), bits=32, **given)
    with jax.set_mesh(on):
        value, gradients = jax.jit(ours)(params, batch)
        wanted_value, wanted = jax.jit(jax.value_and_grad(loss_of))(params, batch)
    np.testing.assert_allclose(value, wanted_value, rtol=1e-6)
    for ours_leaf, leaf, weight in zip(
        *map(jax.tree.leaves, (gradients, wanted, params)), strict=True
    ):
        # Sums of at most 128 products and 16 examples, in other orders: eps times their number
        # times the largest gradient is a generous bound.
        bound = float(144 * np.finfo(np.float32).eps * jnp.abs(leaf).max())
        np.testing.assert_allclose(ours_leaf, leaf, atol=bound)
        if specs is not MODEL_FIRST:
            assert ours_leaf.sharding.is_equivalent_to(weight.sharding, weight.ndim)


@pytest.mark.parametrize("key", [None, 7])
def test_shared_weights_have_the_bits_of_pmean_q(key: int | None) -> None:
    on = mesh(4, 1)
    params, batch = placed(on, SHARED)
    keys = None if key is None else jax.random.key(key)
    knobs: dict[str, Any] = {
        "bits": 4,
        "rules": Rules([("bias", 32)], exact_vectors=False),
        "name": "shared",
    }

    def by_hand(params: Any, batch: jax.Array, key: Any) -> Any:
        mine = jax.tree.map(lambda w: lax.pcast(w, "data", to="varying"), params)
        return pmean_q(jax.grad(loss_of)(mine, batch), "data", key=key, **knobs)

    def ours(params: Any, batch: jax.Array, key: Any) -> Any:
        specs = (SHARED, P("data"))
        return value_and_grad(loss_of, "data", in_specs=specs, mesh=on, key=key, **knobs)(
            params, batch
        )[1]

    specs = (P(), P("data"), P())
    wanted = jax.jit(jax.shard_map(by_hand, mesh=on, in_specs=specs, out_specs=P()))
    for a, b in zip(
        *map(jax.tree.leaves, (jax.jit(ours)(params, batch, keys), wanted(params, batch, keys))),
        strict=True,
    ):
        assert np.array_equal(a, b)


def test_sharded_weights_have_the_bits_of_psum_scatter_q() -> None:
    on = mesh(4, 1)
    params, batch = placed(on, FSDP)

    def by_hand(params: Any, batch: jax.Array) -> Any:
        whole = lax.all_gather(params["out"], "data", axis=1, tiled=True)
        kernel = lax.all_gather(params["in"]["kernel"], "data", axis=0, tiled=True)
        bias = lax.pcast(params["in"]["bias"], "data", to="varying")
        tree = {"in": {"kernel": kernel, "bias": bias}, "out": whole}
        gradient = jax.grad(loss_of)(tree, batch)["out"] / 4
        return psum_scatter_q(gradient, "data", scatter_dimension=1, tiled=True, bits=4)

    wanted = jax.jit(
        jax.shard_map(by_hand, mesh=on, in_specs=(FSDP, P("data")), out_specs=P(None, "data"))
    )(params, batch)
    ours = value_and_grad(loss_of, "data", in_specs=(FSDP, P("data")), mesh=on, bits=4)
    _, gradients = jax.jit(ours)(params, batch)
    assert np.array_equal(gradients["out"], wanted)


def test_arguments_are_those_of_jax_value_and_grad() -> None:
    on = mesh(4, 1)
    params, batch = placed(on, SHARED)

    def with_aux(batch: jax.Array, params: Any) -> tuple[jax.Array, jax.Array]:
        return loss_of(params, batch), batch.max()

    ours = value_and_grad(
        with_aux, "data", argnums=(1,), has_aux=True, in_specs=(P("data"), P()), mesh=on, bits=32
    )
    (value, aux), (gradients,) = jax.jit(ours)(batch, params)
    np.testing.assert_allclose(value, loss_of(weights(), jnp.asarray(BATCHES)), rtol=1e-5)
    parts = BATCHES.reshape(4, -1).max(axis=1)
    np.testing.assert_allclose(aux, parts.mean(), rtol=1e-6)
    assert jax.tree.structure(gradients) == jax.tree.structure(params)


def test_auxiliary_results_that_are_equal_on_some_devices() -> None:
    """Average over both data axes what varies over none, one or both of them."""
    on = mesh_of((2, 2), ("x", "y"), jax.devices()[:4])

    def fun(weight: jax.Array, rows: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        total, y = rows.sum(), lax.axis_index("y")
        return weight * total + y, {"none": jnp.float32(3), "x": total, "both": total + y}

    ours = value_and_grad(fun, ("x", "y"), has_aux=True, in_specs=(P(), P("x")), mesh=on, bits=32)
    (value, aux), gradient = jax.jit(ours)(jnp.float32(2), np.array([1, 5], np.float32))
    assert (float(value), float(gradient)) == (6.5, 3)
    assert jax.tree.map(float, aux) == {"none": 3, "x": 3, "both": 3.5}


@pytest.mark.parametrize("argnums", [-1, (-1,)])
def test_arguments_may_be_counted_from_the_last(argnums: Any) -> None:
    on = mesh(4, 1)

    def last(batch: jax.Array, params: Any) -> jax.Array:
        return loss_of(params, batch)

    def gradients(argnums: Any) -> Any:
        ours = value_and_grad(
            last, "data", argnums, in_specs=(P("data"), FSDP), mesh=on, bits=4, name="last"
        )
        return jax.tree.leaves(jax.jit(ours)(BATCHES, placed(on, FSDP)[0])[1])

    assert all(map(np.array_equal, gradients(argnums), gradients(1)))


def test_several_arguments_are_one_tree_as_in_a_shard_map() -> None:
    """Check that equal gradients of two arguments get different noise, and rules apply to both."""
    on, key = mesh(4, 1), jax.random.key(3)
    both = {"dense": weights()["out"], "exact": weights()["out"]}
    knobs: dict[str, Any] = {
        "bits": 2,
        "key": key,
        "rules": Rules([(r"^1\.exact$", 32)], exact_vectors=False),
    }

    def loss(a: Any, b: Any, batch: jax.Array) -> jax.Array:
        total = a["dense"] + a["exact"] + b["dense"] + b["exact"]
        return (batch @ total.T).mean()

    def body(a: Any, b: Any, batch: jax.Array) -> Any:
        return value_and_grad(loss, "data", (0, 1), **knobs)(a, b, batch)[1]

    specs = (P(), P(), P("data"))
    ours = value_and_grad(loss, "data", (0, 1), in_specs=specs, mesh=on, **knobs)
    _, gradients = jax.jit(ours)(both, both, BATCHES)
    wanted = jax.jit(jax.shard_map(body, mesh=on, in_specs=specs, out_specs=P()))
    pairs = zip(*map(jax.tree.leaves, (gradients, wanted(both, both, BATCHES))), strict=True)
    assert all(np.array_equal(*pair) for pair in pairs)
    a, b = gradients
    exact = BATCHES.mean(axis=0) / (2 * WIDTH)  # of every row
    # A mean of 16 examples in another order, of magnitudes below 5.
    bound = 16 * 2.0**-24 * 5 / (2 * WIDTH)
    np.testing.assert_allclose(b["exact"], np.broadcast_to(exact, (2 * WIDTH, WIDTH)), atol=bound)
    leaves = [a["dense"], a["exact"], b["dense"], b["exact"]]
    assert not any(np.array_equal(x, y) for i, x in enumerate(leaves) for y in leaves[:i])


def test_weights_sharded_over_one_data_axis_of_two() -> None:
    """Check the remedy of the error: name only that axis."""
    on = mesh(2, 2)
    params, _ = placed(on, FSDP)
    ours = value_and_grad(loss_of, "data", in_specs=(FSDP, P(("model", "data"))), mesh=on, bits=32)
    _, gradients = jax.jit(ours)(params, BATCHES)
    wanted = jax.grad(loss_of)(weights(), jnp.asarray(BATCHES))
    for leaf, exact in zip(*map(jax.tree.leaves, (gradients, wanted)), strict=True):
        bound = float(144 * np.finfo(np.float32).eps * jnp.abs(exact).max())  # as above
        np.testing.assert_allclose(leaf, exact, atol=bound)


def test_plain_jit_without_specs_raises() -> None:
    with pytest.raises(NameError, match=r"in plain jax.jit use .* with in_specs"):
        jax.jit(value_and_grad(loss_of, "data"))(weights(), BATCHES)


def test_invalid_calls() -> None:
    on = mesh(2, 2)
    params, batch = placed(on, SHARED)
    with pytest.raises(ValueError, match="mesh is given without in_specs"):
        value_and_grad(loss_of, "data", mesh=on)
    with pytest.raises(TypeError, match="2 arguments but 1 in_specs"):
        value_and_grad(loss_of, "data", mesh=on, in_specs=(P(),))(params, batch)
    with pytest.raises(ValueError, match="carrier='xla' with weights that are sharded over"):
        value_and_grad(
            loss_of,
            "data",
            mesh=on,
            in_specs=(FSDP, P("data")),
            carrier="xla",
        )(params, batch)
    with pytest.raises(TypeError, match=r"argnums is \(0, 2\), and the call has 2 positional"):
        value_and_grad(loss_of, "data", (0, 2), in_specs=(SHARED, P("data")), mesh=on)(
            params, batch
        )
    with pytest.raises(ValueError, match=r"the same on all devices of .'data'.*without psum"):
        value_and_grad(
            lambda w, x: lax.pmean(loss_of(w, x), "data"),
            "data", in_specs=(SHARED, P("data")), mesh=on,
        )(params, batch)  # fmt: skip
    both = ("data", "model")
    with pytest.raises(ValueError, match=r"over all of these axes.*pass only that one"):
        value_and_grad(loss_of, both, mesh=on, in_specs=(FSDP, P(both)))(params, batch)
