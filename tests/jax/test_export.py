"""Programs used by later processes: exported, compiled ahead of time, cached."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.jax_cases import (
    SRA,
    Values,
    exchange_expected,
    expected,
    gather_expected,
    mesh_of,
    normal,
    on_mesh,
    same_bits,
    scatter_expected,
    spread,
    use_cpu_devices,
)
from support.launch import mpirun

import cgx_ops.jax
from cgx_ops.jax import all_gather_q, all_to_all_q, psum_q, psum_scatter_q

use_cpu_devices(8)

pytestmark = pytest.mark.timeout(240)

MESH = mesh_of((8,), ("d",))
X, W = normal(1, 8, 8, 100), np.round(4 * normal(2, 8, 8, 100))

Body = Callable[[jax.Array], jax.Array]
# The functions to export, and the rows of their results.
BODIES: dict[str, tuple[Body, Callable[[Values], Any]]] = {
    "psum_q": (
        lambda v: psum_q(v, "d", config=SRA),
        lambda x: [expected(x)] * 8,
    ),
    "psum_q by XLA": (
        lambda v: psum_q(v, "d", config=SRA, carrier="xla"),
        lambda x: [expected(x)] * 8,
    ),
    "psum_scatter_q": (lambda v: psum_scatter_q(v, "d"), scatter_expected),
    "all_gather_q": (lambda v: all_gather_q(v, "d"), lambda x: [gather_expected(x)] * 8),
    "all_to_all_q": (lambda v: all_to_all_q(v, "d", 0, 0), exchange_expected),
}


@pytest.mark.parametrize("name", BODIES)
def test_export_round_trip(name: str) -> None:
    body, want = BODIES[name]
    program, operand = on_mesh(MESH, body).jitted, spread(MESH, X, P("d"))
    with pytest.raises(ValueError, match=r"custom calls whose targets have no compat.*\n?.*@cgx_"):
        jax.export.export(program)(operand)
    exported = jax.export.export(program, disabled_checks=cgx_ops.jax.register())(operand)
    loaded = jax.export.deserialize(exported.serialize(vjp_order=1))
    rows = jax.jit(loaded.call)(operand)
    assert all(same_bits(row, wanted) for row, wanted in zip(rows, want(X), strict=True))
    # The derivative was exported, too; its sums of small integers are exact.
    weights = np.round(4 * normal(3, *rows.shape))
    ours, theirs = (
        jax.jit(jax.grad(lambda v, call=call: (call(v) * weights).sum()))(operand)
        for call in (loaded.call, program)
    )
    assert same_bits(ours, theirs)
    assert np.any(np.asarray(ours))


@pytest.mark.parametrize("name", BODIES)
def test_compiled_ahead_of_time(name: str) -> None:
    body, want = BODIES[name]
    program = on_mesh(MESH, body)
    rows = program.lower(X).compile()(spread(MESH, X, P("d")))
    assert all(same_bits(row, wanted) for row, wanted in zip(rows, want(X), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "devices"),
    [*(pytest.param(*each, marks=pytest.mark.exhaustive) for each in [(1, 8), (2, 1)]), (2, 2)],
)
def test_run_in_other_processes(ranks: int, devices: int, tmp_path: Path) -> None:
    """Export, compile or cache in one launch and run in the next; all lower the same text."""
    environment = {"XLA_FLAGS": ""}
    lowered = set()
    for launch in range(2):
        outputs = mpirun(
            ranks, "run_jax_export.py", tmp_path, devices, env=environment, timeout=110
        )
        lowered |= {tuple(re.findall(r"^lowered .*$", output, re.MULTILINE)) for output in outputs}
        # On CPUs JAX's cache serves process 0 alone: the key includes XLA's topology, which differs
        # between processes, and only process 0 writes.
        counts = re.search(r"from the cache: (\d+), compiled: (\d+)", outputs[0])
        assert counts, outputs[0]
        assert counts.groups() == (("0", "3") if launch == 0 else ("3", "0"))
    assert len(lowered) == 1, lowered
    assert len(lowered.pop()) == 3
