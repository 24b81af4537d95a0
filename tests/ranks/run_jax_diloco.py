"""Rank program: diloco on two processes: its results, its overlap with steps, and its failures.

    mpirun -np 2 python run_jax_diloco.py FILE CHECK...
        mpirun -np 3 python run_jax_diloco.py FILE restores_checkpoint    # after saves_checkpoint

FILE has the last parameters of runs on two devices of one process, shape (2, numel).
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import checks
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from failing import fails
from support import jax_diloco_cases as cases
from support.jax_cases import fetch, mesh_of, normal, on_mesh, spread, use_cpu_devices
from support.jax_diloco_cases import PLAIN, SPARSE, STREAMING, loop_options, trained, weights

import cgx_ops
import cgx_ops.jax
from cgx_ops import Config, Rules
from cgx_ops.jax import consolidate, consolidate_copies, diloco, psum_q

use_cpu_devices(1)
cgx_ops.jax.initialize()
RANK, SIZE = jax.process_index(), jax.process_count()
MESH = mesh_of((SIZE,), ("d",))
FILE = Path(sys.argv[1])
RUNS = {"plain": PLAIN, "streaming": STREAMING, "sparse": SPARSE}


def made(**options: Any) -> Any:
    """Return a loop, its parameters and its state."""
    loop = diloco("d", mesh=MESH, **loop_options(options))
    return loop, loop.replicate(weights()), loop.init(weights())


def flat(params: Any) -> Any:
    return np.concatenate([x.reshape(2, -1) for x in jax.tree.leaves(fetch(params))], 1)


def same_bits_as_two_devices() -> None:
    for name, options in RUNS.items():
        for carrier in ("native", "xla"):
            loop, params, state = made(**options, carrier=carrier, name=f"{name} {carrier}")
            params, state = trained(loop, MESH, (params, state), range(8))
            assert np.array_equal(flat(params), np.load(FILE)[name]), (name, carrier)


def steps_overlap_with_sending() -> None:
    """Check that process 0's next steps run before process 1 sends, with donated parameters.

    If these steps waited for the message of process 0, process 1 would wait for the file until its
    deadline.
    """
    ran = FILE.with_name("ran")
    loop, params, state = made(sync_every=4, fragment_sync_delay=3, name="overlap")
    inner = jax.jit(cases.added, donate_argnums=0)
    for step in range(1, 9):
        params = inner(params, cases.spread_moves(MESH, step, SIZE))
        # The first round compiles. Fragments are sent after step 5 and applied after step 8.
        if step == 5 and RANK == 1:
            deadline = time.monotonic() + 25
            while not ran.exists():
                assert time.monotonic() < deadline, "process 0's steps wait for its message"
                time.sleep(0.001)
        if step == 8 and RANK == 0:
            jax.block_until_ready(params)
            flight = jax.tree.leaves((state.flight.average, state.flight.residual))
            assert not any(x.is_ready() for x in flight)
            ran.touch()
        params, state = loop.outer(params, state)
    assert int(state.flight.fragment) == -1
    check_equal_on_all(state.outer_parameters)


def check_equal_on_all(tree: Any) -> None:
    for leaf in jax.tree.leaves(tree):
        own = np.asarray(leaf.addressable_data(0)).ravel()
        low, high = (cgx_ops.allreduce(own, op, Config(bits=32)) for op in ("min", "max"))
        assert np.array_equal(low, high)


def other_settings() -> None:
    options = dict(STREAMING)
    for key, own in (
        ("sync_every", {"sync_every": 6 + 6 * RANK}),
        ("config", {"bits": 2 + RANK}),
        ("rules", {"rules": Rules([("bias", 32)] if RANK else [])}),
        ("config", {"residual_decay": 1 - RANK / 2}),
        ("the outer optimizer", {"outer_optimizer": optax.sgd(0.5 + RANK)}),
    ):
        loop, params, state = made(**{**options, **own})
        fails(
            cgx_ops.MismatchError, f"process 0 has {key} ",
            lambda loop=loop, params=params, state=state: loop.outer(params, state),
        )  # fmt: skip
    loop, params, state = made(**options)
    other = jax.tree.map(lambda x: x + RANK, weights())
    state = loop.init(other)
    fails(
        cgx_ops.MismatchError,
        "process 0 has the outer parameters",
        lambda: loop.outer(params, state),
    )
    loop, params, state = made(**options)
    trained(loop, MESH, (params, state), range(3))


def failed_synchronization() -> None:
    """Check that nothing changes and training continues if process 1 sends a mismatched message."""
    foreign = on_mesh(MESH, lambda v: psum_q(v, "d", name="failing/2")).jitted
    values = spread(MESH, normal(1, 2, 99), jax.P("d"))
    for delay in (0, 1):
        options = {**STREAMING, "fragment_sync_delay": delay, "name": "failing"}
        loop, params, state = made(**options)
        sent, applied = 6 - delay, 6  # fragment 2, for the first time
        failures = 0
        for step in range(1, 13):
            params = cases.moved(params, cases.spread_moves(MESH, step, SIZE))
            before = parts_of((params, state.outer_parameters, state.residual, state.outer))
            if RANK == 1 and step == sent:
                fails(RuntimeError, "disagree", lambda: jax.block_until_ready(foreign(values)))
                state, failures = loop.skip(state), failures + 1
            elif RANK == 0 and step == applied:
                words = "state = loop.skip(state), in all processes: FAILED_PRECONDITION"
                fails(
                    jax.errors.JaxRuntimeError, words,
                    lambda loop=loop, p=params, s=state: loop.outer(p, s),
                )  # fmt: skip
                state, failures = loop.skip(state), failures + 1
            else:
                params, state = loop.outer(params, state)
                continue
            after = parts_of((params, state.outer_parameters, state.residual, state.outer))
            assert all(map(np.array_equal, before, after))
        assert failures == 1
        assert int(state.step) == 12
        check_equal_on_all(state.outer_parameters)


def skip_on_one_process() -> None:
    """Check that skipping on one process only is reported (as after a lack of memory there)."""
    loop, params, state = made(**{**PLAIN, "sync_every": 1}, name="alone")
    params, state = trained(loop, MESH, (params, state), range(1))
    if RANK == 1:
        os.environ["CGX_TIMEOUT"] = "2"
        words = "not all of the processes [0, 1] compared their outer parameters in time"
        fails(jax.errors.JaxRuntimeError, words, lambda: loop.skip(state))
        os.environ["CGX_TIMEOUT"] = "30"
    loop, params, state = made(**PLAIN, name="both")
    ahead = jax.tree.map(lambda x: x + RANK, state.outer_parameters)
    words = "process 0 has the outer parameters sha256"
    fails(cgx_ops.MismatchError, words, lambda: loop.skip(state._replace(outer_parameters=ahead)))


def parts_of(tree: Any) -> list[Any]:
    """Return this process's shards of the arrays."""
    return [np.array(x.addressable_data(0)) for x in jax.tree.leaves(tree)]


def saves_checkpoint() -> None:
    """Save a consolidated checkpoint with fragment 2 in flight, and the residuals."""
    loop, params, state = made(**STREAMING, name="saved")
    params, state = trained(loop, MESH, (params, state), range(5))
    whole = jax.jit(
        lambda p, s: (consolidate_copies(p, 1), consolidate(s, 1)),
        out_shardings=jax.NamedSharding(MESH, jax.P()),
    )
    saved = whole(params, state)
    owed = jax.tree.map(lambda x: x.mean(0, np.float64), fetch(residuals_of(params, state)))
    for mean, one in zip(*map(jax.tree.leaves, (owed, fetch(residuals_of(*saved)))), strict=True):
        assert np.abs(mean - one[0]).max() <= 2.0**-22 * np.abs(mean).max()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(FILE.with_name("saved"), saved)


def restores_checkpoint() -> None:
    loop, params, state = made(**STREAMING, name="saved")
    like = jax.eval_shape(lambda p, s: (consolidate_copies(p, 1), consolidate(s, 1)), params, state)
    everywhere = jax.NamedSharding(MESH, jax.P())
    like = jax.tree.map(lambda x: x.update(sharding=everywhere), like)
    with ocp.StandardCheckpointer() as checkpointer:
        saved = checkpointer.restore(FILE.with_name("saved"), like)
    specs = loop.copy_specs(weights()), loop.state_specs(weights())
    params, state = jax.jit(
        lambda p, s: (consolidate_copies(p, SIZE), consolidate(s, SIZE)),
        out_shardings=jax.tree.map(lambda spec: jax.NamedSharding(MESH, spec), specs),
    )(*saved)
    for one, all_of in zip(
        *(jax.tree.leaves(fetch(residuals_of(*x))) for x in (saved, (params, state))), strict=True
    ):
        assert all_of.shape[0] == SIZE
        assert (all_of == one).all()
    assert int(state.step) == 5
    assert int(state.flight.fragment) == 2
    before = parts_of(state.outer_parameters)
    params, state = trained(loop, MESH, (params, state), range(5, 14))
    check_equal_on_all(state.outer_parameters)
    assert all(
        np.abs(a - b).max() > 0.01
        for a, b in zip(before, parts_of(state.outer_parameters), strict=True)
    )


def residuals_of(params: Any, state: Any) -> Any:
    return params, state.residual, state.flight.residual


def lost_process() -> None:
    """Check that a lost process leaves the other's parameters unchanged and asks for a restart."""
    loop, params, state = made(sync_every=1, name="lost")
    params, state = trained(loop, MESH, (params, state), range(2))
    before = parts_of((params, state))
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    words = "restart all processes from the last checkpoint"
    for _ in range(2):  # the first error is the loss, the second the connections closed by it
        fails(jax.errors.JaxRuntimeError, words, lambda: loop.outer(params, state))
    assert all(map(np.array_equal, before, parts_of((params, state))))
    print("ok all", flush=True)
    os._exit(0)  # JAX's own service would wait for the other process


checks.run(
    checks.named(
        same_bits_as_two_devices, steps_overlap_with_sending, other_settings,
        failed_synchronization, skip_on_one_process, saves_checkpoint, restores_checkpoint,
        lost_process,
    ),
    sys.argv[2:],
)  # fmt: skip
