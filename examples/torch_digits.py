"""Handwritten digits in PyTorch: several ranks, whose gradients travel in a few bits.

    mpirun -np 2 python examples/torch_digits.py            # 32 bits (exact), then 4

Every rank takes its own part of each batch. `AverageGradient` is the identity on the way forward;
on the way back it averages the gradient over all ranks. torch.compile(fullgraph=True) takes it into
the backward graph like any other operator. Rank 0 prints a line of JSON per epoch and per result.
"""

import argparse
import hashlib
import json
import time
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import cgx_ops
import cgx_ops.torch  # defines torch.ops.cgx

HIDDEN, BATCH, LEARNING_RATE = 256, 32, 0.1


class AverageGradient(torch.autograd.Function):
    """The identity; its gradient is averaged over all ranks, sent in `bits` bits a value."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, bits: int) -> torch.Tensor:
        ctx.bits = bits
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.ops.cgx.quantized_allreduce(gradients[0], bits=ctx.bits, op="avg"), None


def digits() -> list[torch.Tensor]:
    """Return train and test images (n, 64) in [0, 1], train and test labels (n,)."""
    images, labels = load_digits(return_X_y=True)
    images = images.astype(np.float32) / 16
    parts = train_test_split(images, labels, test_size=1 / 3, random_state=0, stratify=labels)
    return [torch.from_numpy(part) for part in parts]


def same_on_all_ranks(model: nn.Module) -> bool:
    """Tell whether all ranks hold the same bits: each hash byte's least value is its greatest."""
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    digest = np.frombuffer(hashlib.sha256(weights).digest(), np.uint8).astype(np.float32)
    low, high = (cgx_ops.allreduce(digest, op, cgx_ops.Config(bits=32)) for op in ("min", "max"))
    return bool((low == high).all())


def train(world: cgx_ops.Communicator, bits: int, epochs: int) -> dict[str, Any]:
    """Train one model; return its accuracy, traffic, times and loss curve."""
    train_x, test_x, train_y, test_y = digits()
    torch.manual_seed(0)  # the same weights on all ranks, and the same rounding in every run
    model = nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(),
                          nn.Linear(HIDDEN, 10))  # fmt: skip

    @torch.compile(fullgraph=True)
    def loss_of(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        weights = {k: AverageGradient.apply(w, bits) for k, w in model.named_parameters()}
        scores = torch.func.functional_call(model, weights, images)
        return nn.functional.cross_entropy(scores, labels)

    steps = len(train_x) // (world.size * BATCH)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps * epochs)
    shuffle = torch.Generator().manual_seed(1)
    curve, first_step, sent, start = [], 0.0, world.bytes_sent, time.perf_counter()
    for epoch in range(epochs):
        order = torch.randperm(len(train_x), generator=shuffle)[: steps * world.size * BATCH]
        losses = []
        for mine in order.view(steps, world.size, BATCH)[:, world.rank]:
            loss = loss_of(train_x[mine], train_y[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            first_step = first_step or time.perf_counter() - start  # it compiles
        curve.append(float(np.mean(losses)))
        if world.rank == 0:
            print(json.dumps({"bits": bits, "epoch": epoch + 1, "loss": curve[-1]}), flush=True)
    seconds = time.perf_counter() - start - first_step
    bytes_per_step = (world.bytes_sent - sent) / (steps * epochs)
    with torch.no_grad():
        accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
    return {"framework": "torch", "bits": bits, "accuracy": accuracy, "losses": curve,
            "bytes_per_step": bytes_per_step, "first_step": first_step, "seconds": seconds,
            "identical": same_on_all_ranks(model)}  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Digits in PyTorch.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--bits", type=int, nargs="+", default=[32, 4])
    arguments = parser.parse_args()
    communicator = cgx_ops.init()
    for bits in arguments.bits:
        result = train(communicator, bits, arguments.epochs)
        if communicator.rank == 0:
            print(json.dumps(result), flush=True)
