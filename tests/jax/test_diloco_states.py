"""diloco's states: checkpoints, other device counts, missing entries; two processes.

Inner steps add jax_diloco_cases.moves(), independent of the parameters.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P
from jax.sharding import AxisType
from support import jax_diloco_cases as cases
from support import launch
from support.jax_cases import fetch, normal, same_bits, use_cpu_devices
from support.jax_diloco_cases import (
    PLAIN,
    SHAPES,
    SPARSE,
    STREAMING,
    all_same,
    leaf_of,
    loop_options,
    started,
    trained,
)
from support.jax_optimizer_cases import mesh_with, restored

from cgx_ops import Rules
from cgx_ops.jax import DiLoCoState, consolidate, consolidate_copies, diloco

use_cpu_devices(8)

pytestmark = pytest.mark.timeout(120)
slow = pytest.mark.slow

# ---- 1. states -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [5, pytest.param(4, marks=slow)])
def test_checkpoint(stop: int, tmp_path: Path) -> None:
    """Save by orbax with a fragment in flight (5) and without, and resume bit for bit."""
    mesh, loop = mesh_with(4), diloco("d", mesh=mesh_with(4), **loop_options(STREAMING))
    params, state = trained(loop, mesh, started(loop), range(stop))
    assert int(state.flight.fragment) == (2 if stop == 5 else -1)
    saved, kept = restored((params, state), tmp_path)
    assert isinstance(kept, DiLoCoState)
    want = trained(loop, mesh, (params, state), range(stop, stop + 7))
    other = diloco("d", mesh=mesh, **loop_options(STREAMING))
    got = trained(other, mesh, (saved, kept), range(stop, stop + 7))
    assert all_same(got, want)
    assert got[1].residual["head"]["kernel"].sharding.spec == P("d")


def test_resume_on_other_device_count() -> None:
    """Check that the pending correction is preserved, with a fragment in flight too."""
    mesh, loop = mesh_with(4), diloco("d", mesh=mesh_with(4), **loop_options(STREAMING))
    params, state = trained(loop, mesh, started(loop), range(5))
    few, after = consolidate_copies(params, devices=3), consolidate(state, devices=3)
    for old, new in ((params, few), (state.residual, after.residual)):
        for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
            assert b.shape[0] == 3
            assert np.allclose(fetch(a).mean(0, np.float64), fetch(b)[1], atol=1e-6)
    assert int(after.flight.fragment) == 2
    assert jax.tree.leaves(after.flight.residual)[0].shape[0] == 3
    assert consolidate_copies(np.arange(4), 2).tolist() == [0, 0]
    fewer = mesh_with(3)
    other = diloco("d", mesh=fewer, **loop_options(STREAMING))
    params, state = trained(other, fewer, jax.device_get((few, after)), range(5, 14))
    for name in SHAPES:
        assert np.isfinite(fetch(leaf_of(params, name))).all()
    with pytest.raises(ValueError, match="consolidate_copies: devices is 0"):
        consolidate_copies(params, 0)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_leaves_without_a_mean(axis_type: AxisType) -> None:
    """Integers and keys take the first device's value; Explicit is jax.make_mesh's default."""
    mesh = jax.make_mesh((4,), ("d",), (axis_type,), devices=jax.devices()[:4])
    loop = diloco("d", sync_every=2, mesh=mesh)
    weights = {"w": np.ones((8, 8), np.float32), "count": np.int32(3), "key": jax.random.key(1)}
    state = loop.init(weights)

    def row(n: int) -> dict[str, jax.Array]:
        return {"w": n * jnp.ones((8, 8)), "count": jnp.int32(n), "key": jax.random.key(n)}

    own = jax.tree.map(lambda *rows: jnp.stack(rows), *map(row, range(1, 5)))
    params = jax.device_put(own, jax.NamedSharding(mesh, P("d")))
    whole = jax.NamedSharding(mesh, P())
    saved = jax.jit(lambda p: consolidate_copies(p, 2), out_shardings=whole)(params)
    for got in (saved, consolidate_copies(params, 2), loop.restart(params, state)):
        assert np.all(got["count"] == 1)
        assert (got["key"] == jax.random.key(1)).all()
    assert np.all(saved["w"] == 2.5)


@pytest.mark.parametrize(
    ("old", "new", "devices", "words"),
    [
        ({}, {}, 2, r"residual\['a'\] is of shape \(4, 40\), but of shape \(2, 40\) in .*consolid"),
        ({}, {"fragment_sync_delay": 1}, 4, r"flight\.fragment is missing, but of shape \(\) in"),
        ({}, {"fragments": 2}, 4, r"outer\[1\].*\['b'\] is missing, but of shape \(40,\) in"),
        ({}, {"outer_optimizer": optax.sgd(1.0)}, 4, r"outer\[0\].*\['a'\] is .*, but missing in"),
        ({"error_feedback": False}, {}, 4, r"residual\['a'\] is missing, but of shape \(4, 40\)"),
    ],
)
def test_states_of_other_loops(old: Any, new: Any, devices: int, words: str) -> None:
    """Check states of other loops; other device counts must not silently drop residuals."""
    w = {"a": np.ones(40, np.float32), "b": np.ones(40, np.float32)}
    state = jax.device_get(diloco("d", mesh=mesh_with(4), **loop_options(PLAIN, **old)).init(w))
    loop = diloco("d", mesh=mesh_with(devices), **loop_options(PLAIN, **new))
    with pytest.raises(ValueError, match=r"diloco: state\." + words):
        loop.outer(loop.replicate(w), state)


@pytest.mark.parametrize("delay", [0, 1])
def test_leaves_that_become_exact_send_their_residuals(delay: int) -> None:
    mesh, w, owed = mesh_with(4), {"w": np.zeros(40, np.float32)}, normal(1, 4, 40)
    options = {"sync_every": 2, "fragment_sync_delay": delay, "outer_optimizer": optax.sgd(1.0)}
    lossy, exact = (
        diloco("d", mesh=mesh, bits=bits, rules=Rules(exact_vectors=False), **options)
        for bits in (4, 32)
    )
    rows = jax.NamedSharding(mesh, P("d"))
    for outer in (exact.outer, jax.jit(exact.outer)):
        state = lossy.init(w)._replace(residual={"w": jax.device_put(owed, rows)})
        params = exact.replicate(w)
        for _ in range(3):
            params, state = outer(params, state)
        assert np.allclose(fetch(state.outer_parameters["w"]), -owed.mean(0), atol=1e-6)
        assert not fetch(state.residual["w"]).any()


def test_restart_and_skip() -> None:
    """Restart from the outer parameters; a skipped fragment is sent one round later."""
    mesh, loop = mesh_with(4), diloco("d", mesh=mesh_with(4), **loop_options(STREAMING))
    params, state = trained(loop, mesh, started(loop), range(5))
    params = cases.moved(params, cases.spread_moves(mesh, 5, 4))
    before = fetch((params, state.outer_parameters, state.residual))
    skipped = loop.skip(state)
    assert int(skipped.step) == 6
    assert all_same(before, (params, skipped.outer_parameters, skipped.residual))
    again = fetch(loop.restart(params, state))
    for name in SHAPES:
        rows = leaf_of(again, name)
        assert all(same_bits(row, leaf_of(before[1], name)) for row in rows)
    # No fragment was in flight when step 6 would have applied one.
    params, state = trained(loop, mesh, (params, skipped), range(6, 11))
    assert same_bits(
        leaf_of(state.outer_parameters, "head/kernel"), leaf_of(before[1], "head/kernel")
    )
    params, state = trained(loop, mesh, (params, state), [11])
    assert (
        fetch(leaf_of(state.outer_parameters, "head/kernel")) != leaf_of(before[1], "head/kernel")
    ).any()


def test_no_launch_without_a_due_synchronization(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = diloco("d", mesh=mesh_with(4), **loop_options(PLAIN, sync_every=3))
    params, state = started(loop)
    monkeypatch.setattr(loop, "_done", None)
    for step in (1, 2):
        after, state = loop.outer(params, state)
        assert after is params
        assert int(state.step) == step
    with pytest.raises(TypeError):  # the launch would call this
        loop.outer(params, state)


# ---- 2. processes --------------------------------------------------------------------------------


PROGRAM = "run_jax_diloco.py"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CGX_TIMEOUT": "30"}


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    """Test overlap, mismatched settings, and failed synchronizations of both processes or one."""
    names = ["steps_overlap_with_sending", "other_settings", "failed_synchronization"]
    names += ["skip_on_one_process"]
    file = tmp_path / "run.npz"
    outputs = launch.mpirun(2, PROGRAM, file, *names, env=ENVIRONMENT, timeout=100)
    launch.check_ok(outputs, names)


@slow
def test_bits_of_two_processes(tmp_path: Path) -> None:
    """Compare with two devices of one process, bit for bit, for both carriers."""
    mesh, ends = mesh_with(2), {}
    for name, options in (("plain", PLAIN), ("streaming", STREAMING), ("sparse", SPARSE)):
        loop = diloco("d", mesh=mesh, **loop_options(options))
        params, _ = trained(loop, mesh, started(loop), range(8))
        ends[name] = np.concatenate([x.reshape(2, -1) for x in jax.tree.leaves(fetch(params))], 1)
    np.savez(tmp_path / "run.npz", **ends)
    name = "same_bits_as_two_devices"
    outputs = launch.mpirun(2, PROGRAM, tmp_path / "run.npz", name, env=ENVIRONMENT, timeout=100)
    launch.check_ok(outputs, [name])


@pytest.mark.exhaustive
def test_resume_on_other_process_count(tmp_path: Path) -> None:
    for processes, name in ((2, "saves_checkpoint"), (3, "restores_checkpoint")):
        file = tmp_path / "run.npz"
        outputs = launch.mpirun(processes, PROGRAM, file, name, env=ENVIRONMENT, timeout=60)
        launch.check_ok(outputs, [name])


@slow
def test_lost_process(tmp_path: Path) -> None:
    ulfm = ("--with-ft", "ulfm")
    survivor, _ = launch.mpirun(
        2, PROGRAM, tmp_path / "none", "lost_process", env=ENVIRONMENT, timeout=100,
        mpirun_args=ulfm, check=False,
    )  # fmt: skip
    assert "ok all" in survivor.splitlines(), survivor
