"""Rank program: what goes wrong on a mesh of two processes, and what works afterwards.

    run_jax_errors.py CASE

Prints the error that the case is about, then "ok".
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax_cases import expected, mesh_of, normal, on_mesh, rows_of_processes, same_bits

import cgx_ops.jax
from cgx_ops.jax import psum_q


def error_of(call: Callable[[], Any]) -> str:
    """Return and print the type and text of what `call` raises."""
    try:
        jax.block_until_ready(call())
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        print(text, flush=True)
        return text
    raise AssertionError("no error")


def all_is_well() -> None:
    x = normal(1, 2, 3000)
    mesh = mesh_of((2,), ("d",))
    step = on_mesh(mesh, lambda v: psum_q(v, "d", algorithm="sra", name="well"))
    row = step(rows_of_processes(mesh, x[jax.process_index()])).addressable_data(0)
    assert same_bits(np.asarray(row)[0], expected(x))
    print("ok", flush=True)


def mismatch() -> None:
    """The ranks disagree about bits, under one name: both are told, and go on."""
    cgx_ops.jax.initialize()
    mesh = mesh_of((2,), ("d",))
    operand = rows_of_processes(mesh, normal(0, 3000))
    bits = 4 + jax.process_index()
    text = error_of(lambda: on_mesh(mesh, lambda v: psum_q(v, "d", bits=bits, name="g"))(operand))
    assert "'g#0'" in text
    assert "bits" in text
    all_is_well()


def late() -> None:
    """One rank never calls: the other is told within the deadline (CGX_TIMEOUT, 3 s here)."""
    cgx_ops.jax.initialize()
    all_is_well()  # makes the communicator
    if jax.process_index() == 0:
        mesh = mesh_of((2,), ("d",))
        operand = rows_of_processes(mesh, normal(0, 3000))
        start = time.monotonic()
        text = error_of(lambda: on_mesh(mesh, lambda v: psum_q(v, "d", name="lonely"))(operand))
        assert "DEADLINE_EXCEEDED" in text
        assert "lonely" in text
        assert time.monotonic() - start < 10
        # This process goes on, alone.
        assert float(jnp.arange(4.0).sum()) == 6
    else:
        time.sleep(6)
    print("ok", flush=True)


def initialize_twice() -> None:
    cgx_ops.jax.initialize()
    text = error_of(cgx_ops.jax.initialize)
    assert "initialized already" in text
    all_is_well()


def initialize_late_on_one_rank() -> None:
    """One rank has a backend already: both are told which."""
    cgx_ops.init()
    if cgx_ops.rank() == 1:
        jax.devices()
    text = error_of(cgx_ops.jax.initialize)
    assert "rank 1: an XLA backend is running already" in text
    print("ok", flush=True)


def not_initialized() -> None:
    """Without initialize() each process sums over its own devices, and says so."""
    import warnings

    x = normal(3, 1, 100)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = np.asarray(on_mesh(mesh_of((1,), ("d",)), lambda v: psum_q(v, "d"))(x))
    assert same_bits(rows, x)
    assert any("cgx_ops.jax.initialize" in str(warning.message) for warning in caught)
    print("ok", flush=True)


CASES = {
    f.__name__: f
    for f in (
        mismatch,
        late,
        initialize_twice,
        initialize_late_on_one_rank,
        not_initialized,
    )
}

jax.config.update("jax_platforms", "cpu")
CASES[sys.argv[1]]()
