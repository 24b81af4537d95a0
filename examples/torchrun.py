"""Handwritten digits under torchrun, on gloo, without MPI: torch's own collectives carry the bytes.

    torchrun --nproc-per-node 2 examples/torchrun.py

What differs from any other script is one line: the gradients, in one list, go through
`quantized_allreduce_coalesced(..., carrier="c10d")`, which sends them as uint8 through all_to_all
and all_gather of the default group, across hosts as well. Rank 0 prints a line of JSON per epoch
and per result. Data and model are those of torch_digits.py.
"""

import argparse
import json
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from compiled import same_on_all_ranks
from torch import nn
from torch_digits import BATCH, HIDDEN, LEARNING_RATE, digits

import cgx_ops.torch  # noqa: F401  defines torch.ops.cgx


def train(bits: int, epochs: int) -> dict[str, Any]:
    """Train one model; return its accuracy and loss curve."""
    rank, size = dist.get_rank(), dist.get_world_size()
    train_x, test_x, train_y, test_y = digits()
    torch.manual_seed(0)  # the same weights on all ranks
    model = nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(),
                          nn.Linear(HIDDEN, 10))  # fmt: skip
    steps = len(train_x) // (size * BATCH)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps * epochs)
    shuffle = torch.Generator().manual_seed(1)
    curve = []
    for epoch in range(epochs):
        order = torch.randperm(len(train_x), generator=shuffle)[: steps * size * BATCH]
        losses = []
        for mine in order.view(steps, size, BATCH)[:, rank]:
            loss = nn.functional.cross_entropy(model(train_x[mine]), train_y[mine])
            optimizer.zero_grad()
            loss.backward()
            parameters = list(model.parameters())
            averages = torch.ops.cgx.quantized_allreduce_coalesced(
                [p.grad for p in parameters], bits=bits, op="avg", carrier="c10d"
            )
            for parameter, average in zip(parameters, averages, strict=True):
                parameter.grad = average
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        curve.append(float(np.mean(losses)))
        if rank == 0:
            print(json.dumps({"bits": bits, "epoch": epoch + 1, "loss": curve[-1]}), flush=True)
    with torch.no_grad():
        accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
    return {"bits": bits, "accuracy": accuracy, "losses": curve,
            "identical": same_on_all_ranks(model)}  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Digits under torchrun.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--bits", type=int, nargs="+", default=[32, 4])
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    for bits in arguments.bits:
        result = train(bits, arguments.epochs)
        if dist.get_rank() == 0:
            print(json.dumps(result), flush=True)
    dist.destroy_process_group()
