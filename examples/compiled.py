"""Handwritten digits, compiled: the code says all_reduce, what travels are a few bits a value.

    mpirun -np 2 python examples/compiled.py
    torchrun --nproc-per-node 2 examples/compiled.py      # the same, without MPI

The training step is written as for any backend: it averages each gradient with torch's own
functional all_reduce, and knows nothing of cgx. compress_collectives() around the first step
rewrites the graph that torch.compile makes of it. Rank 0 prints a line of JSON per epoch and per
result. Data and model are those of torch_digits.py.
"""

import argparse
import hashlib
import json
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch_digits import BATCH, HIDDEN, LEARNING_RATE, digits

import cgx_ops
from cgx_ops.torch import compress_collectives


def same_on_all_ranks(model: nn.Module) -> bool:
    """Tell whether all ranks hold the same bits."""
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, hashlib.sha256(weights).digest())
    return len(set(everyone)) == 1


def train(bits: int, epochs: int) -> dict[str, Any]:
    """Train one model; return its accuracy, loss curve and the number of rewritten all-reduces."""
    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert world is not None
    train_x, test_x, train_y, test_y = digits()
    torch.manual_seed(0)  # the same weights on all ranks
    model = nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(),
                          nn.Linear(HIDDEN, 10))  # fmt: skip
    names = [name for name, _ in model.named_parameters()]

    def gradients(images: torch.Tensor, labels: torch.Tensor) -> Any:
        weights = {name: p.detach() for name, p in zip(names, model.parameters(), strict=True)}

        def loss_of(weights: dict[str, torch.Tensor]) -> torch.Tensor:
            scores = torch.func.functional_call(model, weights, images)
            return nn.functional.cross_entropy(scores, labels)

        grads, loss = torch.func.grad_and_value(loss_of)(weights)
        return loss, [functional.all_reduce(g, "avg", world) for g in grads.values()]

    torch._dynamo.reset()
    step = torch.compile(gradients, fullgraph=True)
    rewrite = nullcontext() if bits == 32 else compress_collectives(cgx_ops.Config(bits=bits))
    with rewrite:
        step(train_x[:BATCH], train_y[:BATCH])  # compiles; what is compiled stays

    steps = len(train_x) // (size * BATCH)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps * epochs)
    shuffle = torch.Generator().manual_seed(1)
    curve = []
    for epoch in range(epochs):
        order = torch.randperm(len(train_x), generator=shuffle)[: steps * size * BATCH]
        losses = []
        for mine in order.view(steps, size, BATCH)[:, rank]:
            loss, grads = step(train_x[mine], train_y[mine])
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter.grad = grad
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        curve.append(float(np.mean(losses)))
        if rank == 0:
            print(json.dumps({"bits": bits, "epoch": epoch + 1, "loss": curve[-1]}), flush=True)
    with torch.no_grad():
        accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
    rewritten = 0 if bits == 32 else rewrite.rewritten  # type: ignore[union-attr]
    return {"bits": bits, "accuracy": accuracy, "losses": curve, "rewritten": rewritten,
            "identical": same_on_all_ranks(model)}  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Digits in a compiled step, rewritten.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--bits", type=int, nargs="+", default=[32, 4])
    arguments = parser.parse_args()
    dist.init_process_group("cgx")
    for bits in arguments.bits:
        result = train(bits, arguments.epochs)
        if dist.get_rank() == 0:
            print(json.dumps(result), flush=True)
    dist.destroy_process_group()
