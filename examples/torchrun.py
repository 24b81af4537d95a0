"""Handwritten digits under torchrun and gloo, without MPI: torch's collectives send the bytes.

    torchrun --nproc-per-node 2 examples/torchrun.py

One line differs from an uncompressed script: `quantized_allreduce_coalesced(..., carrier="c10d")`
averages the list of gradients. It sends them as uint8 by all_to_all and all_gather of the default
group, which works across hosts, too. Rank 0 prints a line of JSON per epoch and per result. Data
and model are those of digits.py.
"""

import argparse
import json
from typing import Any

import torch
import torch.distributed as dist
from digits import Training, digest, perceptron, same_on_all_ranks
from torch import nn

import cgx_ops.torch  # noqa: F401  defines torch.ops.cgx


def train(bits: int, epochs: int) -> dict[str, Any]:
    """Train one model; return its accuracy and loss curve."""
    model = perceptron()
    parameters = list(model.parameters())
    training = Training(model, dist.get_rank(), dist.get_world_size(), epochs, bits)

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        averages = torch.ops.cgx.quantized_allreduce_coalesced(
            [p.grad for p in parameters], bits=bits, op="avg", carrier="c10d"
        )
        for parameter, average in zip(parameters, averages, strict=True):
            parameter.grad = average
        return loss

    training.run(step, until=epochs)
    return {"bits": bits, "accuracy": training.accuracy(model), "losses": training.curve,
            "identical": same_on_all_ranks(digest(model))}  # fmt: skip


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
