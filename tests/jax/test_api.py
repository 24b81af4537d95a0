"""Properties of all calls of cgx_ops.jax: names, roundings, settings by rules."""

import inspect
import pkgutil
from typing import Any, Unpack

import jax
import numpy as np
import pytest
from support.jax_cases import (
    SRA,
    expected,
    mesh_of,
    normal,
    on_mesh,
    same_bits,
    seed_of,
    use_cpu_devices,
)

import cgx_ops.jax
from cgx_ops import Config, Rules
from cgx_ops._core import tables
from cgx_ops.config import Keywords
from cgx_ops.jax import average_gradients, psum_q

use_cpu_devices(8)

KEY, MESH = jax.random.key(11), mesh_of((8,), ("d",))
X = normal(6, 8, 4096)

FOR_GRADIENTS: list[Any] = [
    cgx_ops.jax.compress_grads, cgx_ops.jax.value_and_grad, cgx_ops.jax.average_gradients,
    cgx_ops.jax.power_sgd, cgx_ops.jax.deep_gradient, cgx_ops.jax.compressed_adamw,
    cgx_ops.jax.diloco,
]  # fmt: skip
CALLS: list[Any] = [
    psum_q, cgx_ops.jax.pmean_q, cgx_ops.jax.allreduce_q, cgx_ops.jax.psum_scatter_q,
    cgx_ops.jax.all_gather_q, cgx_ops.jax.all_to_all_q, *FOR_GRADIENTS,
]  # fmt: skip


def total(**options: Any) -> Any:
    return np.asarray(on_mesh(MESH, lambda v: psum_q(v, "d", **options))(X))[0]


def test_no_function_has_the_name_of_a_module() -> None:
    modules = {module.name for module in pkgutil.iter_modules(cgx_ops.jax.__path__)}
    assert not modules & set(cgx_ops.jax.__all__)


def test_unknown_keywords() -> None:
    with pytest.raises(TypeError, match=r"average_gradients\(\) got an unexpected .* 'algorithm'"):
        average_gradients("d", algorithm="sra")  # pyright: ignore


def test_all_calls_take_the_same_options() -> None:
    """Check that all calls but signum accept `config` and its keywords, as in torch and numpy."""
    for call in CALLS:
        taken = inspect.signature(call).parameters
        fields = {row["name"] for row in tables.CONFIG_FIELDS}
        if call is cgx_ops.jax.deep_gradient:  # has its own options
            fields -= {"density", "clip"}
        assert not taken.keys() & fields
        assert taken["config"].default is None
        assert taken["keywords"].annotation == Unpack[Keywords]
        rules = taken.get("rules")
        exact = call in FOR_GRADIENTS  # vectors
        assert rules is None or rules.default == Rules(exact_vectors=exact)


@pytest.mark.parametrize("carrier", ["native", "xla"])
def test_rounding_is_applied(carrier: Any) -> None:
    """Test the keyword, the config and a rule."""
    seeds = [seed_of(KEY)] * 8
    shift = expected(X, seeds=seeds, rounding="shift")
    options = {"key": KEY, "carrier": carrier}
    assert same_bits(total(config=SRA, rounding="shift", **options), shift)
    if carrier == "xla":
        return
    assert same_bits(total(config=SRA, rounding="nearest", **options), expected(X))
    in_config = Config(algorithm="sra", rounding="shift")
    assert same_bits(total(config=in_config, **options), shift)
    assert same_bits(
        total(config=in_config, rounding="stochastic", **options), expected(X, seeds=seeds)
    )
    rules = Rules([("", {"rounding": "shift"})], exact_vectors=False)
    assert same_bits(total(config=SRA, rules=rules, **options), shift)


def test_residuals_by_rules() -> None:
    """Check that rules set feedback and its decay for each leaf."""
    rules = Rules([("a", {"error_feedback": False}), ("b", {"residual_decay": 0.5})])
    optimizer = average_gradients("d", bits=2, rules=rules, mesh=MESH)
    tree = {name: normal(i, 8, 40, 30) for i, name in enumerate("abc")}
    state: Any = optimizer.init({name: leaf[0] for name, leaf in tree.items()})
    kept = {name: leaf is not None for name, leaf in state.residual.items()}
    assert kept == {"a": False, "b": True, "c": True}

    def step(scale: float) -> Any:
        old = {
            name: None if x is None else scale * tree[name] for name, x in state.residual.items()
        }
        given = {name: x for name, x in old.items() if x is not None}

        def body(rows: Any, lost: Any) -> Any:
            residual = {"a": None} | {name: e[None] for name, e in lost.items()}
            return optimizer.update(rows, state._replace(residual=residual))[0]

        return on_mesh(MESH, body)(tree, given)

    whole, half = step(1.0), step(0.5)
    again = on_mesh(
        MESH, lambda v, e: cgx_ops.jax.pmean_q(v, "d", bits=2, residual=e)[0]
    )(tree["b"], 0.5 * tree["b"])  # fmt: skip
    assert same_bits(whole["b"], again)
    assert same_bits(whole["a"], half["a"])
    assert not same_bits(whole["c"], half["c"])
