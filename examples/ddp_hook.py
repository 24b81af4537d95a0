"""Handwritten digits with DistributedDataParallel and the quantized hook, saved and resumed.

    mpirun -np 2 python examples/ddp_hook.py

The hook's state goes into the checkpoint beside the model and the optimizer, as PyTorch's PowerSGD
state does: half way through it is saved, and a second model that continues from there ends with the
same weights, to the bit. Rank 0 prints a line of JSON per epoch and per result.
"""

import argparse
import io
import json
from typing import Any

import torch
import torch.distributed as dist
from digits import Training, digest, perceptron, same_on_all_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cgx_ops import Config
from cgx_ops.torch.ddp import QuantizedAllreduceState, quantized_allreduce_hook


def train(model: DistributedDataParallel, training: Training, until: int) -> None:
    """Train up to an epoch."""

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        return loss

    training.run(step, until)


def run(bits: int, epochs: int) -> dict[str, Any]:
    """Train; save half way, and train the second half twice."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(perceptron())
    state = QuantizedAllreduceState(config=Config(bits=bits))
    model.register_comm_hook(state, quantized_allreduce_hook)
    training = Training(model, rank, size, epochs, bits)
    train(model, training, until=epochs // 2)

    checkpoint = io.BytesIO()
    saved = {"model": model.state_dict(), "training": training.state_dict()}
    saved |= {"comm_hook": quantized_allreduce_hook, "comm_hook_state": state}
    torch.save(saved, checkpoint)
    train(model, training, until=epochs)

    checkpoint.seek(0)
    loaded = torch.load(checkpoint)
    resumed = DistributedDataParallel(perceptron())
    resumed.load_state_dict(loaded["model"])
    resumed.register_comm_hook(loaded["comm_hook_state"], loaded["comm_hook"])
    second = Training(resumed, rank, size, epochs, bits)
    second.load_state_dict(loaded["training"])
    train(resumed, second, until=epochs)
    return {
        "bits": bits,
        "accuracy": training.accuracy(model.module),
        "losses": training.curve,
        "identical": same_on_all_ranks(digest(model)),
        "resumed_identical": digest(resumed) == digest(model),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Digits with DDP and the quantized hook.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--bits", type=int, nargs="+", default=[32, 4])
    arguments = parser.parse_args()
    dist.init_process_group("cgx")
    for bits in arguments.bits:
        result = run(bits, arguments.epochs)
        if dist.get_rank() == 0:
            print(json.dumps(result), flush=True)
    dist.destroy_process_group()
