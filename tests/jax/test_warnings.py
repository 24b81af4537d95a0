"""Warnings about likely mistakes in JAX programs, shown once, while they are traced."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support.jax_cases import mesh_of, use_cpu_devices

from cgx_ops import Rules, planner
from cgx_ops.jax import (
    allreduce_q,
    average_gradients,
    compress_grads,
    compressed_adamw,
    deep_gradient,
    diloco,
    numels_of,
    pmean_q,
    power_sgd,
    psum_q,
    psum_scatter_q,
    state_specs,
    value_and_grad,
)

use_cpu_devices(8)

MESH = mesh_of((4, 2), ("a", "b"))
WEIGHTS = {"layers": [{"kernel": np.ones((32, 8), np.float32), "bias": np.ones(32, np.float32)}]}
RULES = Rules([("bias", 32), ("Kernal", 32), ("0.biases$", 32)], exact_vectors=False)
BATCH = np.ones((8, 8), np.float32)


def warned(call: Callable[[], object]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    return [each for each in seen if each.category is UserWarning]


def in_mesh(body: Callable[..., Any], *operands: Any, checked: bool = True) -> Any:
    specs = (P(), P(("a", "b")))[: len(operands)]
    mapped = jax.shard_map(body, mesh=MESH, in_specs=specs, out_specs=P(), check_vma=checked)
    return jax.jit(mapped)(*operands)


def loss_of(weights: Any, batch: Any) -> jax.Array:
    layer = weights["layers"][0]
    return (batch @ layer["kernel"].T + layer["bias"]).sum()


# ---- rules without a leaf ------------------------------------------------------------------------


def of_varying(reduce: Any) -> Callable[[], object]:
    def body(weights: Any) -> Any:
        return reduce(lax.pcast(weights, ("a", "b"), to="varying"), ("a", "b"), rules=RULES)

    return lambda: in_mesh(body, WEIGHTS)


def of_grad(weights: Any) -> Any:
    loss = lambda w: loss_of(compress_grads(w, ("a", "b"), rules=RULES), BATCH)  # noqa: E731
    return jax.grad(loss)(weights)


CALLS: dict[str, Callable[[], object]] = {
    "psum_q": of_varying(psum_q),
    "pmean_q": of_varying(pmean_q),
    "allreduce_q": lambda: allreduce_q(WEIGHTS, rules=RULES),
    "compress_grads": lambda: in_mesh(of_grad, WEIGHTS),
    "value_and_grad": lambda: in_mesh(
        lambda w, x: value_and_grad(loss_of, ("a", "b"), rules=RULES)(w, x)[1], WEIGHTS, BATCH
    ),
}
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "average_gradients": (average_gradients, {}),
    "power_sgd": (power_sgd, {}),
    "deep_gradient": (deep_gradient, {"density": 0.01}),
    "compressed_adamw": (compressed_adamw, {"learning_rate": 0.1, "warmup_steps": 2}),
}


@pytest.mark.parametrize("caller", CALLS)
def test_calls_warn_of_unmatched_rules(caller: str) -> None:
    seen = warned(CALLS[caller])
    check_rules(caller, seen)
    assert {each.filename for each in seen} == {__file__}, "shown at the user's line"


@pytest.mark.parametrize("caller", OPTIMIZERS)
def test_optimizers_warn_of_unmatched_rules(caller: str) -> None:
    pytest.importorskip("optax")
    make, more = OPTIMIZERS[caller]
    optimizer = make(("a", "b"), rules=RULES, mesh=MESH, **more)

    def step(weights: Any) -> Any:
        own = lax.pcast(weights, ("a", "b"), to="varying")
        return optimizer.update(own, optimizer.init(weights), weights)[0]

    # state_specs() calls init with a tree that is not the weights.
    assert not warned(lambda: state_specs(optimizer, WEIGHTS, ("a", "b")))
    check_rules(caller, warned(lambda: in_mesh(step, WEIGHTS)))
    assert not warned(lambda: in_mesh(lambda w: step(w), WEIGHTS)), "shown once"


def test_outer_loops_warn_of_unmatched_rules() -> None:
    pytest.importorskip("optax")
    loop = diloco(("a", "b"), sync_every=2, rules=RULES, mesh=MESH)
    check_rules("diloco", warned(lambda: loop.init(WEIGHTS)))


def check_rules(caller: str, seen: list[warnings.WarningMessage]) -> None:
    begin = f"{caller}: no layer matches "
    nearest = "the rule has no effect. Nearest names: layers.0."
    assert [str(each.message) for each in seen] == [
        f"{begin}'Kernal': {nearest}kernel, layers.0.bias",
        f"{begin}'0.biases$': {nearest}bias, layers.0.kernel",
    ]


def test_no_nearest_names_without_leaf_names() -> None:
    (seen,) = warned(
        lambda: allreduce_q(
            np.ones(50, np.float32), rules=Rules([("bias", 32)], exact_vectors=False)
        )
    )
    assert str(seen.message).endswith("Nearest names: none, the parameters have no names")


def test_matching_rules_do_not_warn() -> None:
    """Also send parts of the tree, and use rules made from a plan."""
    optax = pytest.importorskip("optax")
    numels = numels_of(WEIGHTS)
    costs = planner.Costs(*[1e-6] * len(planner.Costs.__dataclass_fields__))
    plan = planner.Plan.of(numels, [0.0] * len(numels), costs)

    def step(weights: Any, batch: Any) -> Any:
        own = lax.pcast(weights, ("a", "b"), to="varying")
        gradients = jax.grad(loss_of)(own, batch)
        optimizer = power_sgd(
            ("a", "b"), rules=Rules([("bias", 32)], exact_vectors=False), mesh=MESH
        )
        updates, _ = optimizer.update(gradients, optimizer.init(weights))
        mean = pmean_q(gradients, ("a", "b"), rules=plan.rules, fuse=plan)
        return optax.apply_updates(updates, mean)

    assert not warned(lambda: in_mesh(step, WEIGHTS, BATCH))


# ---- gradients that JAX has summed ---------------------------------------------------------------


@pytest.mark.parametrize("reduce", [psum_q, pmean_q])
def test_warns_of_gradients_summed_by_jax(reduce: Any) -> None:
    def step(weights: Any, batch: Any) -> Any:
        return reduce(jax.grad(loss_of)(weights, batch), ("a", "b"), bits=8)

    results: list[Any] = []
    (seen,) = warned(lambda: results.append(in_mesh(step, WEIGHTS, BATCH)))
    text = str(seen.message)
    where = "x['layers'][0]['bias'] is the same on all devices of ['a', 'b']"
    assert text.startswith(f"{reduce.__name__}: {where}"), text
    assert "cgx_ops.jax.compress_grads" in text, text
    assert seen.filename == __file__
    # Equal values have no quantization error, so the results are those of lax.psum and lax.pmean.
    times = 8 if reduce is psum_q else 1
    assert (np.asarray(results[0]["layers"][0]["bias"]) == 8 * times).all()
    assert not warned(lambda: in_mesh(lambda w, x: step(w, 2 * x), WEIGHTS, BATCH)), "shown once"


def test_warns_of_scattered_gradients_summed_by_jax() -> None:
    def step(weights: Any, batch: Any) -> Any:
        gradients = jax.grad(loss_of)(weights, batch)
        own = psum_scatter_q(gradients, ("a", "b"), tiled=True)
        return jax.tree.map(lambda block: lax.psum(block, ("a", "b")), own)

    (seen,) = warned(lambda: in_mesh(step, WEIGHTS, BATCH))
    assert str(seen.message).startswith("psum_scatter_q: x['layers'][0]['bias'] is the same on all")


def test_warning_names_only_axes_with_equal_values() -> None:
    def body(x: Any) -> Any:
        return pmean_q(lax.pcast(x, "a", to="varying"), ("a", "b"))

    (seen,) = warned(lambda: in_mesh(body, np.ones(64, np.float32)))
    assert "x is the same on all devices of ['b']" in str(seen.message)


def test_correct_uses_do_not_warn() -> None:
    pytest.importorskip("optax")

    def step(weights: Any, batch: Any) -> Any:
        axes = ("a", "b")
        own = jax.grad(loss_of)(lax.pcast(weights, axes, to="varying"), batch)
        shared = lambda w: lax.pmean(loss_of(compress_grads(w, axes), batch), axes)  # noqa: E731
        optimizer = average_gradients(axes, mesh=MESH)
        updates, _ = optimizer.update(own, optimizer.init(weights))
        trees = (
            pmean_q(own, axes), jax.grad(shared)(weights), updates,
            value_and_grad(loss_of, axes)(weights, batch)[1],
        )  # fmt: skip
        return jax.tree.map(lambda *xs: sum(xs), *trees)

    assert not warned(lambda: in_mesh(step, WEIGHTS, BATCH))


def test_axes_of_one_device_do_not_warn() -> None:
    mesh = mesh_of((8, 1), ("a", "one"))
    mapped = jax.shard_map(
        lambda x: pmean_q(lax.pcast(x, "a", to="varying"), ("a", "one")),
        mesh=mesh, in_specs=P(), out_specs=P(),
    )  # fmt: skip
    assert not warned(lambda: jax.jit(mapped)(np.ones(64, np.float32)))


def test_unchecked_types_do_not_warn() -> None:
    body = lambda w, x: pmean_q(jax.grad(loss_of)(w, x), ("a", "b"))  # noqa: E731
    assert not warned(lambda: in_mesh(body, WEIGHTS, BATCH, checked=False))
