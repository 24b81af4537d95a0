"""torch and jax in one process, imported in either order, use one registry of communicators."""

import importlib.util

import pytest
from support.launch import mpirun

pytestmark = pytest.mark.skipif(
    not (importlib.util.find_spec("torch.nn") and importlib.util.find_spec("jax.numpy")),
    reason="needs torch and jax",
)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("first", [pytest.param("torch", marks=pytest.mark.exhaustive), "jax"])
def test_one_registry(first: str) -> None:
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    outputs = mpirun(2, "run_jax_shared_state.py", first, env=environment, timeout=140)
    for output in outputs:
        assert "ok" in output.splitlines()
