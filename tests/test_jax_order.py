"""Order does not matter: many calls that XLA starts as it likes, on the devices of one process."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_cases import (
    PROGRAMS,
    Values,
    independent,
    mesh_of,
    on_mesh,
    order_expected,
    order_inputs,
    same_bits,
    use_cpu_devices,
)

from cgx_ops.jax import psum_q

use_cpu_devices(8)

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def case() -> tuple[Values, Values]:
    inputs = order_inputs(8)
    return inputs, order_expected(inputs)


def check(program: str, case: tuple[Values, Values], launches: int) -> None:
    inputs, want = case
    step = on_mesh(mesh_of((8,), ("d",)), PROGRAMS[program])
    for _ in range(launches):
        for row in np.asarray(step(inputs)):
            assert same_bits(row, want[: len(row)])


@pytest.mark.parametrize("program", PROGRAMS)
def test_ten_launches(program: str, case: tuple[Values, Values]) -> None:
    check(program, case, 10)


@pytest.mark.exhaustive
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_hundred_launches(program: str, case: tuple[Values, Values]) -> None:
    check(program, case, 100)


def test_launches_queue_up_behind_each_other(case: tuple[Values, Values]) -> None:
    inputs, want = case
    step = on_mesh(mesh_of((8,), ("d",)), independent)
    operand = jax.device_put(inputs)
    for result in [step(operand) for _ in range(5)]:
        assert same_bits(np.asarray(result)[0], want)


def test_launches_from_several_threads() -> None:
    """In one process runs have names of their own, so threads need no agreement."""
    x = np.random.default_rng(0).standard_normal((8, 16, 4096), np.float32)

    def body(v: jax.Array) -> jax.Array:
        return jnp.stack([psum_q(v[i], "d") for i in range(16)])

    step = on_mesh(mesh_of((8,), ("d",)), body)
    want = np.asarray(step(x))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for result in pool.map(lambda _: np.asarray(step(x)), range(40)):
            assert same_bits(result, want)
