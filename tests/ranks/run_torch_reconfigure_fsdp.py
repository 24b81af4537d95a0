"""Rank program: FSDP2 or HSDP in a group that changes its members, from torch 2.14 on.

    RANK=... WORLD_SIZE=4 run_torch_reconfigure_fsdp.py FOLDER
    RANK=... WORLD_SIZE=5 run_torch_reconfigure_fsdp.py FOLDER hsdp

All processes but the last one train for STEPS steps with gradients in 1 bit with error feedback and
with weights as differences, and save a checkpoint after half of them. Both of these trainings must
end with the same weights and residuals, to the bit:

1. interrupted: the group is aborted between two steps and reconfigured to the same processes. The
   same model continues.
2. replaced: the last of them is killed in backward, and the new process takes its place. All make
   the model again, HSDP's mesh too, and load the checkpoint.

HSDP has two replicas, averaged by PowerSGD. With FSDP2 the new process ends finally, and 0 and 1
continue from a checkpoint for any number of ranks.
"""

import hashlib
import itertools
import os
import signal
import sys
from pathlib import Path
from typing import Any

import run_torch_reconfigure as group
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from cgx_ops import Config
from cgx_ops.torch import fsdp
from cgx_ops.torch.averaging.power_sgd.state import Factors
from cgx_ops.torch.averaging.residuals import Residuals

dist = group.dist
RANK, STEPS = group.RANK, 8
HSDP = sys.argv[2:] == ["hsdp"]
*FIRST, NEW = range(group.SIZE)
VICTIM, DIES = FIRST[-1], 6  # the process that is killed, and in which step
REPLACED, FEWER = [*FIRST[:-1], NEW], FIRST[:2]
MESHES = itertools.count()
GRADIENTS = Config(bits=1, compressor="levels", bucket_size=64)  # with feedback, because biased
CHECKPOINT, FOR_ANY = (str(Path(group.FOLDER, name)) for name in ("half", "for any number"))


class Training:
    """A sharded model, its optimizer and its state of compression."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(33, 33), nn.Tanh()) for _ in range(3)]
        self.model: Any = nn.Sequential(*layers)
        self.groups = list[Any]()
        shards: dict[str, Any] = {}
        replicas: dict[str, Any] = {}
        if HSDP:
            # DTensor would find the groups of an earlier mesh with equal ranks and names.
            names = [f"{name} {next(MESHES)}" for name in ("replicas", "shards")]
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(*names,))
            self.groups = mesh.get_all_groups()
            shards = {"mesh": mesh[names[1]]}
            factors = fsdp.PowerSGD(rank=2, min_compression_rate=1)
            replicas = {"replicas": mesh[names[0]], "replica_gradients": factors}
        for module in (*layers, self.model):
            fully_shard(module, **shards)
        self.state = fsdp.compress(self.model, GRADIENTS, fsdp.Differences(), **replicas)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def run(self, begin: int, end: int) -> float:
        """Train these steps, and return the last loss."""
        loss = torch.zeros(())
        for step in range(begin, end):
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            x = torch.randn(16, 33, generator=generator)
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.model(x), x.roll(1, 1))
            loss.backward()
            self.optimizer.step()
        return loss.item()

    def save(self, folder: str) -> None:
        save(self._parts(), checkpoint_id=folder)

    def load(self, folder: str) -> None:
        parts = self._parts()
        load(parts, checkpoint_id=folder)
        self.model.load_state_dict(parts["model"])
        set_optimizer_state_dict(self.model, self.optimizer, parts["optimizer"])

    def _parts(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
            "cgx": self.state,
        }

    def weights(self) -> torch.Tensor:
        return torch.cat([each.full_tensor().flatten() for each in self.model.parameters()])

    def digest(self) -> str:
        """Return a hash of all weights, and of this rank's residuals, factors and counts."""
        found: list[object] = [self.weights().tolist()]
        for path, leaf in tree_flatten_with_path(self.state.state_dict())[0]:
            if "next_stats_report" not in keystr(path):  # counts what this process has logged
                found.append(plain(leaf))
        return hashlib.sha256(repr(found).encode()).hexdigest()


def plain(leaf: Any) -> object:
    """Return a part of a state without addresses of objects."""
    if isinstance(leaf, Residuals):
        return {name: residual.tolist() for name, residual in leaf.tensors.items()}
    if isinstance(leaf, Factors):
        return {name: q.tolist() for name, q in leaf.q.items()}
    if isinstance(leaf, DTensor):
        leaf = leaf.to_local()
    return leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf


def die_in_backward(training: Training) -> None:
    """Let the victim die when the gradients of later layers have been reduced."""

    def die(*unused: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    training.model[0].register_full_backward_pre_hook(die)


def replaced() -> Training:
    """Train until a process dies, and with the new one in its place; return the training."""
    if RANK in FIRST:
        group.connect(3, FIRST)
        training = Training()
        training.load(CHECKPOINT)
        training.run(STEPS // 2, DIES)
        if RANK == VICTIM:
            die_in_backward(training)
        with group.fails():
            try:
                training.run(DIES, STEPS)
            finally:  # ends the collectives of ranks that share no group with the lost one
                for each in training.groups:
                    dist.destroy_process_group(each)
    group.connect(4, REPLACED)
    training = Training()
    training.load(CHECKPOINT)
    training.run(STEPS // 2, STEPS)
    assert training.digest() == group.store.get(f"want {dist.get_rank()}").decode()
    return training


def main() -> None:
    dist.init_process_group(
        "cgx", rank=RANK, world_size=group.SIZE, store=group.store, timeout=group.LIMIT,
        enable_reconfigure=True,
    )  # fmt: skip
    if RANK in FIRST:
        group.connect(1, FIRST)
        training = Training()
        training.run(0, STEPS // 2)
        training.save(CHECKPOINT)
        training.run(STEPS // 2, STEPS)
        want = training.digest()
        group.store.set(f"want {RANK}", want)
        residuals = [
            leaf.tensors
            for leaf in tree_leaves(training.state.state_dict())
            if isinstance(leaf, Residuals)
        ]
        assert any(each.any() for tensors in residuals for each in tensors.values())
        assert training.state.base_nbytes > 0

        if not HSDP:  # whose mesh would have to be made again
            training = Training()
            training.run(0, DIES)
            group.backend().abort()
            group.connect(2, FIRST)
            training.run(DIES, STEPS)
            assert training.digest() == want, "interrupted"

    training = replaced()
    if HSDP:
        group.meet("replaced", REPLACED)
        print("OK", flush=True)
        return
    training.state.consolidate()
    training.save(FOR_ANY)
    weights = training.weights()
    group.meet("saved", REPLACED)
    if RANK not in FEWER:
        print("OK", flush=True)
        return
    group.connect(5, FEWER)
    training = Training()
    training.state.consolidate()
    training.load(FOR_ANY)
    assert torch.equal(training.weights(), weights)
    loss = training.run(STEPS, STEPS + 40)
    print(f"loss {loss:.3f}")
    assert loss < 0.9  # a model that returns zeros has 1
    dist.destroy_process_group()
    print("OK", flush=True)


if __name__ == "__main__":
    main()
