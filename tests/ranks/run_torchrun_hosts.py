"""Rank program: torchrun on several hosts, without MPI: DDP, FSDP2, subgroups, and a restart.

    torchrun --nnodes 2 ... run_torchrun_hosts.py [NOTE]

NOTE: a file that does not exist yet. The last rank creates it and ends in the middle of its
training, so that torchrun restarts all ranks. Prints one line of JSON: the host, the
transport, the compression ratio, and digests of values that must be equal on all ranks.
"""

import hashlib
import json
import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import cgx_ops
import cgx_ops.torch
from cgx_ops import Communicator, Config
from cgx_ops.torch import BackendOptions, fsdp

OPTIONS = BackendOptions(Config(bits=4))


def digest(module: torch.nn.Module) -> str:
    """Return a digest of the full parameters, sharded or not."""
    hashed = hashlib.sha256()
    for parameter in module.parameters():
        whole = getattr(parameter, "full_tensor", lambda parameter=parameter: parameter)()
        hashed.update(whole.detach().numpy().tobytes())
    return hashed.hexdigest()[:12]


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))


def train(module: torch.nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    torch.manual_seed(2 + dist.get_rank())
    x = torch.randn(32, 64)
    losses = []
    for _ in range(5):
        loss = (module(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_all() -> dict[str, object]:
    ddp = DistributedDataParallel(model())
    losses = train(ddp)
    assert losses[-1] < losses[0]
    sharded = model()
    fully_shard(sharded)
    fsdp.compress(sharded, Config(bits=4))
    losses = train(sharded)
    assert losses[-1] < losses[0]
    return {"ddp": digest(ddp), "fsdp": digest(sharded)}


def main() -> None:
    dist.init_process_group("cgx", pg_options=OPTIONS)
    rank, size = dist.get_rank(), dist.get_world_size()
    begun_before = not sys.argv[1:] or Path(sys.argv[1]).exists()
    first = train_all()
    if not begun_before:
        if rank == size - 1:
            Path(sys.argv[1]).touch()
            os._exit(3)
        train_all()  # raises, because a rank is lost
    comm = Communicator.find(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    stats = comm.stats()
    pair = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        x = torch.full((5000,), float(rank))
        dist.all_reduce(x, group=pair)
        assert (x == size - 1).all()
    dist.destroy_process_group()
    dist.init_process_group("cgx", pg_options=OPTIONS)  # again, over the same store
    again = train_all()
    dist.destroy_process_group()
    assert "MPI" not in os.environ.get("COMMUNICATOR_TYPE", "")
    said = {"rank": rank, "host": socket.gethostname(), "transport": stats.transport}
    said |= {
        "ratio": stats.ratio,
        "first": first,
        "again": again,
        "ranks": cgx_ops.size(),  # the launcher's ranks, because the group is destroyed
    }
    # Write in one piece, because the ranks of a host share a pipe.
    sys.stdout.write(json.dumps(said) + "\n")


main()
