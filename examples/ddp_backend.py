"""Handwritten digits with DistributedDataParallel on the backend "cgx": two changed lines.

    mpirun -np 2 python examples/ddp_backend.py
    torchrun --nproc-per-node 2 examples/ddp_backend.py      # the same, without MPI

The lines are `import cgx_ops.torch` and `init_process_group("cgx")`. Then the variable
CGX_COMPRESSION_QUANTIZATION_BITS sets the bits of gradients (unset: exact), and exclude_layer()
keeps layers exact. Vectors are exact by default. This program sets the variable for each run. Rank
0 prints a line of JSON per epoch and per result.
"""

import argparse
import json
import os

import torch
import torch.distributed as dist
from digits import Training, digest, perceptron, same_on_all_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ops.torch


def main() -> None:
    """Train at each number of bits, in a new process group."""
    parser = argparse.ArgumentParser(description="Digits with DDP on the backend cgx.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--bits", type=int, nargs="+", default=[32, 4])
    arguments = parser.parse_args()
    for bits in arguments.bits:
        os.environ["CGX_COMPRESSION_QUANTIZATION_BITS"] = str(bits)
        dist.init_process_group("cgx")
        module = perceptron()
        cgx_ops.torch.register_model([(name, p.numel()) for name, p in module.named_parameters()])
        cgx_ops.torch.exclude_layer("4.weight")  # the last layer: small, and sensitive
        model = DistributedDataParallel(module)
        training = Training(model, dist.get_rank(), dist.get_world_size(), arguments.epochs, bits)

        def step(
            images: torch.Tensor, labels: torch.Tensor, model: nn.Module = model
        ) -> torch.Tensor:
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            return loss

        training.run(step, until=arguments.epochs)
        stats = cgx_ops.stats()["0"]  # torch's name of the default group
        result = {
            "bits": bits,
            "accuracy": training.accuracy(module),
            "losses": training.curve,
            "bytes_per_step": stats.bytes_sent / (training.steps * arguments.epochs),
            "identical": same_on_all_ranks(digest(module)),
        }
        if dist.get_rank() == 0:
            print(json.dumps(result), flush=True)
        cgx_ops.torch.forget_models()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
