"""Train on handwritten digits in PyTorch, with several ranks and compressed gradients.

    mpirun -np 2 python examples/torch_digits.py            # 32 bits (exact), then 4

Each rank trains on its own part of each batch. `AverageGradient` returns its input unchanged in the
forward pass, and averages the gradient over all ranks in the backward pass.
torch.compile(fullgraph=True) compiles it like any other operator. Rank 0 prints a line of JSON for
each epoch and each result.
"""

import argparse
import hashlib
import json
import time
from typing import Any

import numpy as np
import torch
from digits import Training, perceptron
from torch import nn

import cgx_ops
import cgx_ops.torch  # defines torch.ops.cgx


class AverageGradient(torch.autograd.Function):
    """Return a weight unchanged, and average its gradient over all ranks in `bits` bits."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, bits: int) -> torch.Tensor:
        ctx.bits = bits
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.ops.cgx.quantized_allreduce(gradients[0], bits=ctx.bits, op="avg"), None


def same_on_all_ranks(model: nn.Module) -> bool:
    """Return whether the weights of all ranks have equal bits.

    It compares the minimum and maximum of each byte of a hash over the ranks.
    """
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    digest = np.frombuffer(hashlib.sha256(weights).digest(), np.uint8).astype(np.float32)
    low, high = (cgx_ops.allreduce(digest, op, cgx_ops.Config(bits=32)) for op in ("min", "max"))
    return bool((low == high).all())


def train(world: cgx_ops.Communicator, bits: int, epochs: int) -> dict[str, Any]:
    """Train one model; return its accuracy, traffic, times and loss curve."""
    model = perceptron()  # seeds torch's generator: the same rounding in every run
    training = Training(model, world.rank, world.size, epochs, bits)

    @torch.compile(fullgraph=True)
    def loss_of(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        weights = {k: AverageGradient.apply(w, bits) for k, w in model.named_parameters()}
        scores = torch.func.functional_call(model, weights, images)
        return nn.functional.cross_entropy(scores, labels)

    first_step, sent, start = 0.0, world.bytes_sent, time.perf_counter()

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        nonlocal first_step
        loss = loss_of(images, labels)
        loss.backward()
        first_step = first_step or time.perf_counter() - start  # it compiles
        return loss

    training.run(step, until=epochs)
    seconds = time.perf_counter() - start - first_step
    bytes_per_step = (world.bytes_sent - sent) / (training.steps * epochs)
    return {"framework": "torch", "bits": bits, "accuracy": training.accuracy(model),
            "losses": training.curve, "bytes_per_step": bytes_per_step, "first_step": first_step,
            "seconds": seconds, "identical": same_on_all_ranks(model)}  # fmt: skip


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
