"""Test a DeviceMesh of two hosts with two ranks each, started by torch.multiprocessing.spawn.

    run_spawned_hosts.py HOST       HOST: 0 or 1, whose ranks are 2 HOST and 2 HOST + 1

Runs all-reduces along each axis, then HSDP: shards within a host, replicas across hosts. Each
rank prints one line of JSON.
"""

import hashlib
import json
import socket
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn

import cgx_ops.torch
from cgx_ops import Communicator, Config
from cgx_ops.torch import fsdp

HOSTS = PER_HOST = 2
FOUR = Config(bits=4)
# Sixteen equidistant levels: 4 bits represent these values, and their sums, exactly.
LEVELS = torch.from_numpy(np.tile(np.arange(16, dtype=np.float32), 1000))


def sums(mesh: DeviceMesh) -> dict[str, str]:
    """Add along each axis in 4 bits; return each axis's transport."""
    transports = {}
    for axis in ("hosts", "ranks"):
        group = mesh.get_group(axis)
        x = LEVELS * (1 + dist.get_rank())
        with cgx_ops.torch.compressed(FOUR):
            dist.all_reduce(x, group=group)
        added = sum(1 + rank for rank in dist.get_process_group_ranks(group))
        assert torch.equal(x, LEVELS * added), (axis, x)
        stats = Communicator.find(group.group_name).stats()
        assert stats.ratio > 4, (axis, stats)
        transports[axis] = stats.transport
    return transports


def hybrid_sharded(mesh: DeviceMesh) -> str:
    """Train and return a digest of the full parameters."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fsdp.compress(model, FOUR)
    replicas = Communicator.find(mesh.get_group("hosts").group_name)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(2 + dist.get_rank())
    x = torch.randn(32, 64)
    losses = []
    for _ in range(5):
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        sent = replicas.bytes_sent
        with cgx_ops.torch.compressed(FOUR):
            loss.backward()
        sent = replicas.bytes_sent - sent
        optimizer.step()
        losses.append(loss.item())
        numel = sum(p.to_local().numel() for p in model.parameters())  # type: ignore[operator]
        assert 0 < sent < numel, sent  # exact messages would take four bytes per value
    assert losses[-1] < losses[0]
    hashed = hashlib.sha256()
    for parameter in model.parameters():
        hashed.update(parameter.full_tensor().detach().numpy().tobytes())  # type: ignore[operator]
    return hashed.hexdigest()[:12]


def rank_main(local: int, host: int) -> None:
    rank = PER_HOST * host + local
    dist.init_process_group(
        "cgx", init_method="tcp://h0:29514", rank=rank, world_size=HOSTS * PER_HOST
    )
    mesh = init_device_mesh("cpu", (HOSTS, PER_HOST), mesh_dim_names=("hosts", "ranks"))
    said = {"rank": rank, "host": socket.gethostname(), **sums(mesh)}
    said["weights"] = hybrid_sharded(mesh)
    dist.destroy_process_group()
    # Write in one piece, because the ranks of a host share a pipe.
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    spawn(rank_main, args=(int(sys.argv[1]),), nprocs=PER_HOST)
