"""Averages in JAX have the same bits for every default dtype, precision and promotion setting."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import jax
import pytest
from support import jax_diloco_cases as loops
from support import jax_optimizer_cases as cases
from support.jax_cases import fetch, normal, use_cpu_devices

from cgx_ops.jax import (
    average_gradients,
    compressed_adamw,
    deep_gradient,
    diloco,
    power_sgd,
    signum,
)

use_cpu_devices(8)

pytestmark = pytest.mark.timeout(120)

N, STEPS = 4, 4
WEIGHTS = {"a": normal(0, 24, 30), "b": normal(1, 30, 20), "bias": normal(2, 30)}
LEVELS: dict[str, Any] = {"bits": 1, "compressor": "levels", "bucket_size": 64}

METHODS: dict[str, Callable[[Any], Any]] = {
    "average_gradients": lambda mesh: average_gradients("d", mesh=mesh, **LEVELS),
    "with a key": lambda mesh: average_gradients("d", key=jax.random.key(3), mesh=mesh, bits=2),
    "over XLA": lambda mesh: average_gradients("d", mesh=mesh, carrier="xla", **LEVELS),
    "power_sgd": lambda mesh: power_sgd("d", rank=2, start=1, mesh=mesh, **LEVELS),
    "power_sgd, cold": lambda mesh: power_sgd("d", rank=2, warm_start=False, mesh=mesh),
    "batched": lambda mesh: power_sgd("d", rank=2, batched=True, factor_bits=8, mesh=mesh),
    "deep_gradient": lambda mesh: deep_gradient("d", density=0.1, clip=2.0, mesh=mesh),
    "compressed_adamw": lambda mesh: compressed_adamw(
        "d", learning_rate=0.01, warmup_steps=2, mesh=mesh
    ),
    "signum": lambda mesh: signum("d", learning_rate=0.01, mesh=mesh),
}

SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "x64": lambda: jax.enable_x64(True),
    "bfloat16 products": lambda: jax.default_matmul_precision("bfloat16"),
    "strict dtypes": lambda: jax.numpy_dtype_promotion("strict"),
    "strict ranks": lambda: jax.numpy_rank_promotion("raise"),
}


def all_settings() -> AbstractContextManager[Any]:
    stack = ExitStack()
    for setting in SETTINGS.values():
        stack.enter_context(setting())
    return stack


in_settings = pytest.mark.parametrize(
    "setting",
    [
        pytest.param(all_settings, id="all"),
        *(pytest.param(x, id=what, marks=pytest.mark.slow) for what, x in SETTINGS.items()),
    ],
)


def rows(step: int) -> dict[str, Any]:
    return {n: normal(100 * step + i, N, *x.shape) for i, (n, x) in enumerate(WEIGHTS.items())}


def trained(name: str) -> Any:
    """Return the updates and the state after some steps."""
    mesh = cases.mesh_with(N)
    optimizer = METHODS[name](mesh)
    step, state = cases.program_of(optimizer, WEIGHTS, mesh), None
    state, updates = cases.placed(optimizer, WEIGHTS, mesh), None
    for i in range(STEPS):
        updates, state = step(WEIGHTS, state, rows(i))
    return fetch((updates, state))


@pytest.mark.parametrize("name", METHODS)
@in_settings
def test_steps(name: str, setting: Callable[[], AbstractContextManager[Any]]) -> None:
    want = trained(name)
    with setting():
        assert loops.all_same(trained(name), want)


@pytest.mark.parametrize("kind", ["PLAIN", "STREAMING", "SPARSE"])
@in_settings
def test_outer_loops(kind: str, setting: Callable[[], AbstractContextManager[Any]]) -> None:
    def looped() -> Any:
        mesh = cases.mesh_with(N)
        loop = diloco("d", mesh=mesh, **loops.loop_options(getattr(loops, kind)))
        return fetch(loops.trained(loop, mesh, loops.started(loop), range(1, 7)))

    want = looped()
    with setting():
        assert loops.all_same(looped(), want)


@pytest.mark.parametrize("name", ["power_sgd", "batched"])
def test_products_are_float32(name: str) -> None:
    """Check the lowered products; on CPUs XLA always multiplies in float32."""
    mesh = cases.mesh_with(N)
    optimizer = METHODS[name](mesh)
    with jax.default_matmul_precision("bfloat16"):
        step, state = cases.program_of(optimizer, WEIGHTS, mesh), optimizer.init(WEIGHTS)
        text = step.lower(WEIGHTS, state, rows(0)).as_text()
    products = re.findall(r"stablehlo\.dot_general.*", text)
    assert len(products) > 3
    assert all("precision = [HIGHEST, HIGHEST]" in product for product in products)
