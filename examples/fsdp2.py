"""Handwritten digits with FSDP2: weights sharded over the ranks, all that travels in a few bits.

    mpirun -np 2 python examples/fsdp2.py            # 32 bits (exact), then 4 (weights 8)

Every layer is a module of its own for `fully_shard`. Its weights are gathered in 8 bits for forward
and for backward, its gradients are reduced and scattered in `bits` bits, and every rank updates its
exact shard. Rank 0 prints a line of JSON per epoch and per result.
"""

import argparse
import hashlib
import json
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch_digits import BATCH, HIDDEN, LEARNING_RATE, digits

from cgx_ops import Communicator, Config
from cgx_ops.torch import fsdp  # importing cgx_ops.torch makes the backend "cgx" known


def same_on_all_ranks(model: nn.Module) -> bool:
    """Tell whether all ranks get the same bits when they gather the exact weights."""
    parameters: list[Any] = list(model.parameters())
    weights = b"".join(p.detach().full_tensor().numpy().tobytes() for p in parameters)
    digest = hashlib.sha256(weights).hexdigest()
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    return len(set(digests)) == 1


def train(bits: int, weight_bits: int, epochs: int) -> dict[str, Any]:
    """Train one model; return its accuracy, traffic, times and loss curve."""
    rank, size = dist.get_rank(), dist.get_world_size()
    train_x, test_x, train_y, test_y = digits()
    torch.manual_seed(0)  # the same weights on all ranks
    model = nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(),
                          nn.Linear(HIDDEN, 10))  # fmt: skip
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer)
    fully_shard(model)
    fsdp.compress(model, Config(bits), Config(weight_bits, rounding="shift"))

    steps = len(train_x) // (size * BATCH)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps * epochs)
    shuffle = torch.Generator().manual_seed(1)
    world = dist.group.WORLD
    assert world is not None
    communicator = Communicator.find(world.group_name)
    curve, sent, start = [], communicator.bytes_sent, time.perf_counter()
    for epoch in range(epochs):
        order = torch.randperm(len(train_x), generator=shuffle)[: steps * size * BATCH]
        losses = []
        for mine in order.view(steps, size, BATCH)[:, rank]:
            loss = nn.functional.cross_entropy(model(train_x[mine]), train_y[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        curve.append(float(np.mean(losses)))
        if rank == 0:
            print(json.dumps({"bits": bits, "epoch": epoch + 1, "loss": curve[-1]}), flush=True)
    seconds = time.perf_counter() - start
    bytes_per_step = (communicator.bytes_sent - sent) / (steps * epochs)
    fsdp.compress(model, None, None)  # what was trained is the exact weights
    with torch.no_grad():
        accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
    return {"framework": "torch fsdp2", "bits": bits, "weight_bits": weight_bits,
            "accuracy": accuracy, "losses": curve, "bytes_per_step": bytes_per_step,
            "seconds": seconds, "identical": same_on_all_ranks(model)}  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Digits with FSDP2.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--bits", type=int, nargs="+", default=[32, 4])
    parser.add_argument("--weight-bits", type=int, default=8)
    arguments = parser.parse_args()
    dist.init_process_group("cgx")
    for bits in arguments.bits:
        result = train(bits, 32 if bits == 32 else arguments.weight_bits, arguments.epochs)
        if dist.get_rank() == 0:
            print(json.dumps(result), flush=True)
    dist.destroy_process_group()
