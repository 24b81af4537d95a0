"""JAX processes that lose one of them: the others save, and a smaller job continues.

    python examples/jax_elastic.py                         # 3 processes; one is killed at step 20
    python examples/jax_elastic.py --processes 4 --kill 15 30

JAX cannot change the processes of a running job. So a launcher starts a job again, with as many
processes as have survived. Gradients travel in 2 bits with error feedback. When a process is
killed, the collective of the others raises within CGX_TIMEOUT. Each of them then saves its last two
states, because one may be a step ahead of another. The next job continues from the last step that
all of them have. Residuals become their mean, so the pending correction of the survivors is kept.

The launcher prints a line of JSON for each report of process 0 and for each job.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import NamedSharding, P, lax
from jax.sharding import AxisType
from jax_digits import HIDDEN, LEARNING_RATE, MOMENTUM, digits, loss_of
from jax_shared import BATCH, digest, on_mesh, use_cpu_devices

import cgx_ops.jax
from cgx_ops import Config

LOST_A_PEER = 75  # exit status of a process that saved its state (EX_TEMPFAIL)
# More processes than cores start late, and a peer may be stopped for a while.
ENVIRONMENT = {"CGX_TIMEOUT": "30", "OMP_NUM_THREADS": "1"}
Leaves = list[Any]

# ---- a process -----------------------------------------------------------------------------------


class Training:
    """A model and its optimizer on a mesh of all devices.

    Attributes:
        states: the last two steps: their number, and weights and optimizer state after it.
    """

    def __init__(self) -> None:
        self.mesh = jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))
        self.optimizer = optax.chain(
            cgx_ops.jax.average_gradients(
                "data", config=Config(bits=2, compressor="levels"), mesh=self.mesh
            ),
            optax.sgd(LEARNING_RATE, MOMENTUM),
        )
        like = jax.eval_shape(_first_weights)
        self.specs = (
            jax.tree.map(lambda _: P(), like),
            cgx_ops.jax.state_specs(self.optimizer, like, "data"),
        )
        self.shardings = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.specs)
        # Without donate_argnums: a failed step leaves its arguments as they were.
        self._step = jax.jit(
            jax.shard_map(
                self._on_device, mesh=self.mesh, in_specs=(*self.specs, P("data"), P("data")),
                out_specs=(*self.specs, P()),
            )
        )  # fmt: skip
        self.states: list[tuple[int, Any]] = []

    def begin(self, folder: Path) -> None:
        """Continue from the states of an earlier job, or begin."""

        def first() -> Any:
            weights = _first_weights()
            return weights, self.optimizer.init(weights)

        step, state = 0, jax.jit(first, out_shardings=self.shardings)()
        if saved := sorted(folder.glob("*.npz")):
            step, leaves = joined([load(file) for file in saved], self.is_per_device())
            state = jax.tree.unflatten(jax.tree.structure(state), leaves)
            weights, optimizer = state
            optimizer = cgx_ops.jax.consolidate(optimizer, self.mesh.size)
            state = jax.tree.map(on_mesh, (weights, optimizer), self.shardings)
        self.states = [(step, state)]

    def is_per_device(self) -> list[bool]:
        """Return for each leaf of a state whether it differs between devices."""
        specs = jax.tree.leaves(self.specs, is_leaf=lambda x: isinstance(x, P))
        return [bool(spec) and spec[0] == "data" for spec in specs]

    def step(self) -> float:
        """Train for a step, and wait for it; return the loss."""
        number, state = self.states[-1]
        images, _, labels, _ = digits()
        spread, size = NamedSharding(self.mesh, P("data")), self.mesh.size * BATCH
        chosen = np.random.default_rng([1, number]).permutation(len(images))[:size]
        batch = (on_mesh(part[chosen], spread) for part in (images, labels))
        *state, loss = jax.block_until_ready(self._step(*state, *batch))
        self.states = [self.states[-1], (number + 1, tuple(state))]
        return float(loss)

    def _on_device(self, weights: Any, state: Any, images: Any, labels: Any) -> Any:
        copies = lax.pcast(weights, "data", to="varying")
        loss, gradients = jax.value_and_grad(loss_of)(copies, images, labels)
        updates, state = self.optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, lax.pmean(loss, "data")

    def save(self, file: Path) -> None:
        """Save this process's part of the last two states."""
        arrays = {}
        for step, state in self.states:
            leaves = jax.tree.leaves(state)
            arrays |= {f"{step} {i}": x.addressable_data(0) for i, x in enumerate(leaves)}
        part = file.with_suffix(".part")
        with part.open("wb") as to:
            np.savez(to, **arrays)
        part.rename(file)  # a file that exists is complete


def _first_weights() -> Any:
    keys = jax.random.split(jax.random.key(0), 3)
    return [
        (jax.random.normal(key, (n, m)) * (2 / n) ** 0.5, jnp.zeros(m))
        for key, n, m in zip(keys, (64, HIDDEN, HIDDEN), (HIDDEN, HIDDEN, 10), strict=True)
    ]


def load(file: Path) -> dict[int, Leaves]:
    """Return the states of a file by step, as leaves in the order of the tree."""
    found: dict[int, Leaves] = {}
    with np.load(file) as arrays:
        for name in arrays.files:
            found.setdefault(int(name.split()[0]), []).append(arrays[name])
    return found


def joined(saved: list[dict[int, Leaves]], is_per_device: list[bool]) -> tuple[int, Leaves]:
    """Return the last step that all processes saved, and its state over all of them.

    Args:
        saved: what each process saved, by step.
        is_per_device: for each leaf, whether it has an axis over the devices.

    Raises:
        ValueError: no step is common to all, or replicated values differ.
    """
    common = set.intersection(*(set(states) for states in saved))
    if not common:
        raise ValueError(f"no step is in all files: {[sorted(each) for each in saved]}")
    step, leaves = max(common), []
    states = [each[step] for each in saved]
    for *parts, differs in zip(*states, is_per_device, strict=True):
        if not differs and any(part.tobytes() != parts[0].tobytes() for part in parts):
            raise ValueError(f"step {step}: replicated values differ between processes")
        leaves.append(np.concatenate(parts) if differs else parts[0])
    return step, leaves


def work(rank: int, processes: int, port: int, steps: int, old: Path, new: Path) -> None:
    """Train as one process of a job; exit with LOST_A_PEER after a failed step."""
    use_cpu_devices(1)
    cgx_ops.jax.initialize(f"127.0.0.1:{port}", processes, rank)
    training = Training()
    training.begin(old)
    first = training.states[-1][0]
    report = lambda **facts: print(json.dumps(facts), flush=True) if rank == 0 else None  # noqa: E731
    report(resumed=first, processes=processes)
    try:
        for step in range(first, steps):
            report(step=step + 1, loss=training.step())
    except jax.errors.JaxRuntimeError as error:
        training.save(new / f"{rank}.npz")
        print(f"process {rank}: {str(error).splitlines()[-1]}", file=sys.stderr, flush=True)
        sys.exit(LOST_A_PEER)
    report(finished=steps, digest=digest(training.states[-1][1][0]))


# ---- the launcher --------------------------------------------------------------------------------


def launch(processes: int, steps: int, kills: list[int], folder: Path) -> None:
    """Run jobs until one has trained for all steps, each with the survivors of the last one."""
    old, kills = folder / "0", sorted(kills)
    old.mkdir()
    for job in range(1, processes + 1):
        new = folder / str(job)
        new.mkdir()
        statuses = run_job(processes, steps, kills[:1], old, new)
        survivors = statuses.count(LOST_A_PEER)
        print(json.dumps({"job": job, "statuses": statuses}), flush=True)
        if 0 in statuses:  # a process has trained for all steps
            return
        if not survivors or survivors != len(list(new.glob("*.npz"))):
            sys.exit(f"job {job} ended with statuses {statuses}")
        processes, old, kills = survivors, new, kills[1:]
    sys.exit("no process is left")


def run_job(processes: int, steps: int, kills: list[int], old: Path, new: Path) -> list[int]:
    """Run a job; kill its last process after a step. Return the statuses of all processes."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    members = []
    for rank in range(processes):
        command = [sys.executable, __file__, "--work", *map(str, (rank, processes, port, steps))]
        members.append(
            subprocess.Popen(
                [*command, str(old), str(new)], env=os.environ | ENVIRONMENT, text=True,
                stdout=subprocess.PIPE if rank == 0 else None,
            )
        )  # fmt: skip
    try:
        assert members[0].stdout is not None
        for line in members[0].stdout:
            if not line.startswith("{"):
                continue
            print(line, end="", flush=True)
            if json.loads(line).get("step") in kills:
                members[-1].send_signal(signal.SIGKILL)  # in one of its next steps
        return [member.wait(timeout=60) for member in members]
    finally:
        for member in members:
            member.kill()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Digits in JAX, with processes that are lost.")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kill", type=int, nargs="*", default=[20], help="one per job, at a step")
    parser.add_argument("--folder", type=Path, help="where to save; by default a temporary one")
    parser.add_argument("--work", nargs=6, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        rank, processes, port, steps = map(int, arguments.work[:4])
        work(rank, processes, port, steps, *map(Path, arguments.work[4:]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            launch(
                arguments.processes, arguments.steps, arguments.kill,
                arguments.folder or Path(temporary),
            )  # fmt: skip
