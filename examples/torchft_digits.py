"""Fault-tolerant training with torchft: replicas are killed and come back.

    python examples/torchft_digits.py --method ddp        # 4 bits
    python examples/torchft_digits.py --method feedback   # 2 bits with error feedback
    python examples/torchft_digits.py --method diloco     # pseudo-gradients in 4 bits

The supervisor starts torchft's lighthouse and three replicas. The second one kills itself in a
phase of a step (kill -9), and is started again for the next phase. The others continue. At
the end all replicas are equal to the bit. Prints a line of JSON per event. Needs torchft.
"""

# pyright: reportMissingImports=false, reportPrivateImportUsage=false
import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torchft
from digits import BATCH, digest, digits, perceptron
from torch import nn
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

from cgx_ops import Config
from cgx_ops.torch import BackendOptions
from cgx_ops.torch.integrations.torchft import DistributedDataParallel, ProcessGroup

PHASES = ("forward", "backward", "allreduce", "commit", "optimizer")
REPLICAS, VICTIM, AFTER, LAST = 3, 1, 10, 40  # steps with all replicas before a kill, and at last
TIMEOUT = timedelta(seconds=30)
CONFIGS = {
    "ddp": Config(bits=4),
    "feedback": Config(bits=2, compressor="levels"),
    "diloco": Config(bits=4),
}


# ---- a replica -----------------------------------------------------------------------------------


def manage(
    group: ProcessGroup, model: nn.Module, optimizer: torch.optim.Optimizer, replica: int,
    lighthouse: str, store: torch.distributed.TCPStore, **options: Any,
) -> torchft.Manager:  # fmt: skip
    """Return a Manager that transfers model and optimizer to replicas that join."""

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return torchft.Manager(
        group, load, save, timeout=TIMEOUT, quorum_timeout=TIMEOUT, rank=0, world_size=1,
        store_addr="localhost", store_port=store.port, lighthouse_addr=lighthouse,
        replica_id=f"replica_{replica}", hostname="localhost",
        **({"min_replica_size": 2} | options),
    )  # fmt: skip


def serve_store() -> torch.distributed.TCPStore:
    """Serve a store, as long as the result is referenced."""
    return torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def train(method: str, replica: int, lighthouse: str, folder: Path, phase: str) -> None:
    """Train until the supervisor names the last step."""
    compress = "all" if method == "diloco" else "gradients"
    group = ProcessGroup(BackendOptions(CONFIGS[method], compress=compress), TIMEOUT)
    model = perceptron()
    inner = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    store, options = serve_store(), {"use_async_quorum": method != "diloco"}
    manager = manage(group, model, inner, replica, lighthouse, store, **options)
    fault = Fault(phase, manager, model, inner)
    images, _, labels, _ = digits()
    random = torch.Generator().manual_seed(os.getpid())

    def loss_of(network: nn.Module) -> torch.Tensor:
        batch = torch.randint(len(images), (BATCH,), generator=random)
        return nn.functional.cross_entropy(network(images[batch]), labels[batch])

    def report(loss: torch.Tensor) -> bool:
        """Print the step; return whether it was the last one."""
        step, size = manager.current_step(), manager.num_participants()
        fault.count(size)
        print(json.dumps({"step": step, "size": size, "loss": loss.item()}), flush=True)
        last = folder / "last"
        return last.exists() and step >= int(last.read_text())

    if method == "diloco":
        outer = torch.optim.SGD(model.parameters(), 0.7, momentum=0.9, nesterov=True)
        with DiLoCo(manager, [model], inner, outer, sync_every=5):
            finished = False
            while not finished:
                inner.zero_grad()
                loss = loss_of(model)
                loss.backward()
                before = manager.current_step()
                inner.step()  # averages pseudo-gradients every 5 steps
                finished = manager.current_step() > before and report(loss)
    else:
        network = DistributedDataParallel(manager, model, group)
        optimizer = torchft.Optimizer(manager, inner)
        finished = False
        while not finished:
            optimizer.zero_grad()  # starts the quorum
            loss = loss_of(network)
            loss.backward()
            optimizer.step()  # if the quorum commits
            finished = report(loss)
    print(json.dumps({"digest": digest(model)}), flush=True)
    time.sleep(1)  # others may still ask this replica's server
    manager.shutdown(wait=False)
    os._exit(0)  # torchft's threads may wait for the lighthouse


class Fault:
    """Kills this process in a phase of a step, once all replicas have made some steps together."""

    def __init__(
        self, phase: str, manager: torchft.Manager, model: nn.Module, inner: torch.optim.Optimizer
    ) -> None:
        self.phase, self.together = phase, 0
        layer = model.get_submodule("2")
        layer.register_forward_pre_hook(lambda *_: self.at("forward"))
        layer.register_full_backward_hook(lambda *_: self.at("backward"))
        inner.register_step_pre_hook(lambda *_: self.at("optimizer"))
        for method, phase in (("wait_quorum", "allreduce"), ("should_commit", "commit")):
            setattr(manager, method, self.before(getattr(manager, method), phase))

    def count(self, size: int) -> None:
        self.together = self.together + 1 if size == REPLICAS else 0

    def before(self, function: Any, phase: str) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if phase == self.phase and self.together >= AFTER:
                time.sleep(0.05)  # the others are in the allreduce, and wait
            self.at(phase)
            return function(*arguments, **keywords)

        return call

    def at(self, phase: str) -> None:
        if phase == self.phase and self.together >= AFTER:
            os.kill(os.getpid(), signal.SIGKILL)


# ---- the supervisor ------------------------------------------------------------------------------


def lines(folder: Path, replica: int) -> list[dict[str, Any]]:
    """Return what a replica has printed in all of its lives."""
    text = (folder / f"{replica}.log").read_text()
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("}\n")]


def steps(folder: Path, replica: int) -> list[dict[str, Any]]:
    return [line for line in lines(folder, replica) if "step" in line]


def supervise(method: str, deadline: float) -> None:
    lighthouse = LighthouseServer(  # waits 10 s for replicas that are slow, 1 s for lost ones
        bind="[::]:0", min_replicas=2, join_timeout_ms=10_000, quorum_tick_ms=50,
        heartbeat_timeout_ms=1000,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def start(replica: int, phase: str = "") -> subprocess.Popen[bytes]:
            command = [
                sys.executable,
                __file__,
                "--method",
                method,
                "--replica",
                replica,
                "--lighthouse",
                lighthouse.address(),
                "--folder",
                name,
                "--die-in",
                phase,
            ]
            log = (folder / f"{replica}.log").open("a")
            return subprocess.Popen(
                list(map(str, command)), stdout=log, stderr=(folder / f"{replica}.err").open("a")
            )  # fmt: skip

        replicas = [start(i, PHASES[0] * (i == VICTIM)) for i in range(REPLICAS)]
        try:
            for phase, following in zip(PHASES, (*PHASES[1:], ""), strict=True):
                status = replicas[VICTIM].wait(deadline - time.monotonic())
                assert status == -signal.SIGKILL, (folder / f"{VICTIM}.err").read_text()
                print(json.dumps({"killed in": phase, **steps(folder, 0)[-1]}), flush=True)
                replicas[VICTIM] = start(VICTIM, following)
            killed = len(steps(folder, VICTIM))
            while len(steps(folder, VICTIM)) == killed:  # it has not come back yet
                assert time.monotonic() < deadline, "the last replica did not come back"
                time.sleep(0.1)
            (folder / "new").write_text(str(steps(folder, 0)[-1]["step"] + LAST))
            (folder / "new").rename(folder / "last")
            for replica in replicas:
                assert replica.wait(deadline - time.monotonic()) == 0
        finally:
            for replica in replicas:
                replica.kill()
                replica.wait()
        digests = [lines(folder, i)[-1]["digest"] for i in range(REPLICAS)]
        losses = [step["loss"] for step in steps(folder, 0)]
        first, last = (sum(part) / len(part) for part in (losses[:10], losses[-LAST // 2 :]))
        facts = {"method": method, "first": first, "last": last, "steps": len(losses),
                 "identical": len(set(digests)) == 1}  # fmt: skip
        print(json.dumps(facts), flush=True)
    lighthouse.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Digits with torchft.")
    parser.add_argument("--method", choices=CONFIGS, default="ddp")
    parser.add_argument("--timeout", type=float, default=300, help="seconds")
    for name in ("--replica", "--lighthouse", "--folder", "--die-in"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.replica is None:
        supervise(given.method, time.monotonic() + given.timeout)
    else:
        folder = Path(given.folder)
        train(given.method, int(given.replica), given.lighthouse, folder, given.die_in)
