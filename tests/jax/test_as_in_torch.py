"""Methods of both frameworks: 50 steps on two ranks from equal weights give the same results.

1. hooks: the losses of one model
2. optimizers: the parameters after 50 given gradients
3. outer loops: all bits after 50 given moves

ranks/run_torch_losses.py produces torch's results.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support import launch
from support import torch_cases as tc
from support.jax_cases import fetch, same_bits, use_cpu_devices
from support.jax_optimizer_cases import mesh_with

from cgx_ops import Config, Rules
from cgx_ops.jax import (
    compressed_adamw,
    deep_gradient,
    diloco,
    power_sgd,
    signum,
    sparse_loco,
    state_specs,
)

use_cpu_devices(8)

EXACT: Any = {"bias": 32}
SPARSE: dict[str, Any] = {"density": 0.02, "warmup_steps": 20, "clip": 2.0}
HOOKS: dict[str, Callable[[Any], Any]] = {
    "power_sgd": lambda mesh: optax.chain(
        power_sgd("d", rank=2, start=2, bits=32, mesh=mesh), optax.sgd(0.02)
    ),
    "deep_gradient": lambda mesh: optax.chain(
        deep_gradient("d", mesh=mesh, **SPARSE), optax.sgd(0.01)
    ),
    "deep_gradient, nesterov": lambda mesh: optax.chain(
        deep_gradient("d", nesterov=True, mesh=mesh, **SPARSE), optax.sgd(0.01)
    ),
}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "compressed_adamw": lambda mesh: compressed_adamw(
        "d",
        0.01,
        warmup_steps=10,
        refreshes=2,
        rules=Rules([("bias", 32)]),
        config=Config(compressor="levels", bits=1, algorithm="sra"),
        mesh=mesh,
    ),
    "signum": lambda mesh: signum("d", 0.002, weight_decay=0.01, mesh=mesh),
}


# The products are exact, so that fusing them with sums changes no bits.
HALVES = optax.sgd(0.5, momentum=0.5, nesterov=True)
OUTER_LOOPS: dict[str, Callable[[Any], Any]] = {
    "diloco": lambda mesh: diloco(
        "d", sync_every=5, bits=4, bucket_size=64, outer_optimizer=HALVES,
        mesh=mesh,
    ),
    "streaming": lambda mesh: diloco(
        "d", sync_every=6, fragments=3, fragment_sync_delay=1, fragment_update_alpha=0.5,
        bits=2, compressor="levels", bucket_size=64, outer_optimizer=HALVES,
        mesh=mesh,
    ),
    "sparse_loco": lambda mesh: sparse_loco(
        "d", sync_every=5, density=1 / 32, mesh=mesh
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def torchs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of torch's runs, all made in one launch."""
    folder = tmp_path_factory.mktemp("losses")
    program = "run_torch_losses.py"
    launch.check_ok(launch.mpirun(2, program, folder, env=tc.ENVIRONMENT, timeout=200))
    return folder


def loss_of(p: Any, x: jax.Array) -> jax.Array:
    y = x
    for layer in ("0", "2", "4"):
        y = y @ p[f"{layer}.weight"].T + p[f"{layer}.bias"]
        y = jnp.tanh(y) if layer != "4" else y
    return jnp.square(y - x[:, :8]).sum(1).mean()


@pytest.mark.slow
@pytest.mark.timeout(270)
@pytest.mark.parametrize("name", HOOKS)
def test_losses(name: str, torchs: Path) -> None:
    run = np.load(torchs / f"{name}.npz")
    params = {leaf: run[leaf] for leaf in run.files if leaf not in ("batches", "losses")}
    mesh = mesh_with(2)
    optimizer = HOOKS[name](mesh)
    specs = state_specs(optimizer, params, "d")

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), specs, P("d")), out_specs=(P(), specs, P("d")))
    def step(p: Any, state: Any, x: jax.Array) -> Any:
        copies = lax.pcast(p, "d", to="varying")
        loss, gradients = jax.value_and_grad(loss_of)(copies, x[0])
        updates, state = optimizer.update(gradients, state, p)
        return optax.apply_updates(p, updates), state, loss[None]

    state: Any = optimizer.init(params)
    for batch, losses in zip(run["batches"], run["losses"], strict=True):
        params, state, found = step(params, state, batch)
        assert np.abs(fetch(found) - losses).max() <= 1e-4 * np.abs(losses).max()
    assert run["losses"][-1].mean() < 0.8 * run["losses"][0].mean()
    if name == "power_sgd":
        assert {q.shape for q in jax.tree.leaves(state[0].q)} == {(24, 2)}


def tree_of(run: Any, kind: str) -> Any:
    """Return torch's tensors as a tree: "0.weight" becomes ["0"]["weight"]."""
    tree: dict[str, Any] = {}
    for key in run.files:
        if key.startswith(f"{kind}/"):
            layer, leaf = key.removeprefix(f"{kind}/").split(".")
            tree.setdefault(layer, {})[leaf] = run[key]
    return tree


@pytest.mark.slow
@pytest.mark.timeout(270)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, torchs: Path) -> None:
    # Own gradients would amplify the last bits that the frameworks round differently: a sign that
    # differs moves a weight, which changes all later gradients.
    run = np.load(torchs / f"{name}.npz")
    mesh = mesh_with(2)
    optimizer = OPTIMIZERS[name](mesh)
    params, given = tree_of(run, "first"), tree_of(run, "given")
    specs = state_specs(optimizer, params, "d")

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), specs, P("d")), out_specs=(P(), specs))
    def step(p: Any, state: Any, gradients: Any) -> Any:
        own = jax.tree.map(lambda g: g[0], gradients)
        updates, state = optimizer.update(own, state, p)
        return optax.apply_updates(p, updates), state

    state: Any = optimizer.init(params)
    for i in range(50):
        params, state = step(params, state, jax.tree.map(lambda g, i=i: g[i], given))
    first, want = tree_of(run, "first"), tree_of(run, "params")
    for x, mine, theirs in zip(*map(jax.tree.leaves, (first, params, want)), strict=True):
        # A step rounds the weight by at most 2^-24 of it in each framework. The update's roundings
        # are less than another 2^-24, because it is below a tenth of the weights.
        largest = np.maximum(np.abs(theirs), np.abs(theirs - x)).max()
        assert np.abs(fetch(mine) - theirs).max() <= 50 * 3 * 2**-24 * largest
        assert np.abs(theirs - x).max() > 0.01


@pytest.mark.slow
@pytest.mark.timeout(270)
@pytest.mark.parametrize("name", OUTER_LOOPS)
def test_outer_loops(name: str, torchs: Path) -> None:
    run = np.load(torchs / f"{name}.npz")
    mesh = mesh_with(2)
    loop = OUTER_LOOPS[name](mesh)

    first, moves = tree_of(run, "first"), tree_of(run, "given")
    params, state = loop.replicate(first), loop.init(first)
    for step in range(50):
        params = jax.tree.map(lambda p, m, i=step: p + m[i] / 8, params, moves)
        params, state = loop.outer(params, state)
    kinds = {"params": params, "outer": state.outer_parameters, "residual": state.residual}
    for kind, found in kinds.items():
        want, got = tree_of(run, kind), fetch(found)
        assert want, kind
        for layer, leaves in want.items():
            for leaf, x in leaves.items():
                mine = got[layer][leaf]
                assert same_bits(mine, x.reshape(mine.shape)), (kind, layer, leaf)
