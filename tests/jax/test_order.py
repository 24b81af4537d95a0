"""Many calls that XLA starts in any order, on the devices of one process."""

import concurrent.futures
import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.jax_cases import (
    PROGRAMS,
    Values,
    mesh_of,
    on_mesh,
    order_expected,
    order_inputs,
    same_bits,
    use_cpu_devices,
)

use_cpu_devices(8)

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def case() -> tuple[Values, Values]:
    inputs = order_inputs(8)
    return inputs, order_expected(inputs)


@functools.cache
def step_of(program: str) -> Any:
    """Return a program compiled once for all tests of this file."""
    return on_mesh(mesh_of((8,), ("d",)), PROGRAMS[program])


def check(program: str, case: tuple[Values, Values], launches: int) -> None:
    inputs, want = case
    for _ in range(launches):
        for row in np.asarray(step_of(program)(inputs)):
            assert same_bits(row, want[: len(row)])


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_few_launches(program: str, case: tuple[Values, Values]) -> None:
    check(program, case, 3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_hundred_launches(program: str, case: tuple[Values, Values]) -> None:
    check(program, case, 100)


@pytest.mark.slow
def test_launches_queue_up_behind_each_other(case: tuple[Values, Values]) -> None:
    inputs, want = case
    step = step_of("independent")
    operand = jax.device_put(inputs)
    for result in [step(operand) for _ in range(5)]:
        assert same_bits(np.asarray(result)[0], want)


@pytest.mark.parametrize(
    "programs",
    [
        pytest.param(["mixed"] * 4, marks=pytest.mark.exhaustive),
        pytest.param(["mixed", "inner_jit", "unrolled", "independent"], marks=pytest.mark.slow),
    ],
    ids=["one_function", "own_functions"],
)
def test_launches_from_several_threads(programs: list[str]) -> None:
    """Check that threads of one process need no agreement: runs have separate names.

    Each thread has different values, so a call matched with another thread's gives a wrong result.
    """
    inputs = order_inputs(8)[..., :16384]
    want = order_expected(inputs)
    mesh = mesh_of((8,), ("d",))
    sharding = jax.NamedSharding(mesh, P("d"))
    operands = [jax.device_put(np.roll(inputs, i, axis=1), sharding) for i in range(len(programs))]
    steps = {program: on_mesh(mesh, PROGRAMS[program]) for program in programs}

    def work(thread: int) -> None:
        for _ in range(5):
            for row in np.asarray(steps[programs[thread]](operands[thread])):
                assert same_bits(row, np.roll(want, thread, axis=0)[: len(row)])

    with concurrent.futures.ThreadPoolExecutor(len(programs)) as pool:
        list(pool.map(work, range(len(programs))))
