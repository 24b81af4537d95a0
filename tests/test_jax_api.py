"""What all calls of cgx_ops.jax have in common: names, roundings, settings by rules, examples."""

import doctest
import importlib
import pkgutil
from typing import Any

import jax
import numpy as np
import pytest
from jax_cases import SRA, expected, mesh_of, normal, on_mesh, same_bits, seed_of, use_cpu_devices

import cgx_ops.jax
from cgx_ops import Config, Rules
from cgx_ops.jax import psum_q

use_cpu_devices(8)

KEY, MESH = jax.random.key(11), mesh_of((8,), ("d",))
X = normal(6, 8, 4096)


def total(**options: Any) -> Any:
    return np.asarray(on_mesh(MESH, lambda v: psum_q(v, "d", **options))(X))[0]


def test_no_function_has_the_name_of_a_module() -> None:
    modules = {module.name for module in pkgutil.iter_modules(cgx_ops.jax.__path__)}
    assert not modules & set(cgx_ops.jax.__all__)


@pytest.mark.parametrize("name", ["psum", "scatter_gather", "allreduce", "gradients", "optimizer"])
def test_examples_of_docstrings(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"cgx_ops.jax.{name}")).failed == 0


@pytest.mark.parametrize("carrier", ["native", "xla"])
def test_rounding_is_obeyed(carrier: Any) -> None:
    """As a keyword, in the config and in a rule."""
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
