"""Handwritten digits with FSDP2: sharded weights, with weights and gradients sent in a few bits.

    mpirun -np 2 python examples/fsdp2.py            # 32 bits (exact), then 4 (weights 8)

`fully_shard` wraps every layer. Weights are gathered in 8 bits for the forward and the backward
pass. Gradients are reduced and scattered in `bits` bits. Each rank updates its exact shard. Rank 0
prints a line of JSON per epoch and per result.
"""

import argparse
import hashlib
import json
import time
from typing import Any

import torch
import torch.distributed as dist
from digits import Training, perceptron, same_on_all_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

from cgx_ops import Communicator, Config
from cgx_ops.torch import fsdp  # importing cgx_ops.torch makes the backend "cgx" known


def train(bits: int, weight_bits: int, epochs: int) -> dict[str, Any]:
    """Train one model; return its accuracy, traffic, times and loss curve."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = perceptron()
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer)
    fully_shard(model)
    fsdp.compress(model, Config(bits), Config(weight_bits, rounding="shift"))
    training = Training(model, rank, size, epochs, bits)

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        return loss

    world = dist.group.WORLD
    assert world is not None
    communicator = Communicator.find(world.group_name)
    sent, start = communicator.bytes_sent, time.perf_counter()
    training.run(step, until=epochs)
    seconds = time.perf_counter() - start
    bytes_per_step = (communicator.bytes_sent - sent) / (training.steps * epochs)
    fsdp.compress(model, None, None)  # what was trained is the exact weights
    parameters: list[Any] = list(model.parameters())
    weights = b"".join(p.detach().full_tensor().numpy().tobytes() for p in parameters)
    return {"framework": "torch fsdp2", "bits": bits, "weight_bits": weight_bits,
            "accuracy": training.accuracy(model), "losses": training.curve,
            "bytes_per_step": bytes_per_step, "seconds": seconds,
            "identical": same_on_all_ranks(hashlib.sha256(weights).hexdigest())}  # fmt: skip


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
