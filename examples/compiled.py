"""Handwritten digits with torch.compile: plain all_reduce in the code, a few bits on the wire.

    mpirun -np 2 python examples/compiled.py
    torchrun --nproc-per-node 2 examples/compiled.py      # the same, without MPI

The training step is the same for every backend: it averages each gradient with torch's functional
all_reduce. compress_collectives() around the first step rewrites the graph that torch.compile
makes. The noise comes from torch's generator, so a run that is resumed with the generator's state
has the same bits. Rank 0 prints a line of JSON per epoch and per result. Data and model are those
of digits.py.
"""

import argparse
import json
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from digits import BATCH, Training, digest, perceptron, same_on_all_ranks
from torch import nn
from torch.distributed import _functional_collectives as functional

import cgx_ops
from cgx_ops.torch import compress_collectives


def train(bits: int, epochs: int) -> dict[str, Any]:
    """Train; save half way, and train the second half twice."""
    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert world is not None
    model = perceptron()
    training = Training(model, rank, size, epochs, bits)

    def gradients(weights: dict[str, torch.Tensor], images: torch.Tensor, labels: torch.Tensor):
        def loss_of(weights: dict[str, torch.Tensor]) -> torch.Tensor:
            scores = torch.func.functional_call(model, weights, images)
            return nn.functional.cross_entropy(scores, labels)

        grads, loss = torch.func.grad_and_value(loss_of)(weights)
        return loss, {name: functional.all_reduce(g, "avg", world) for name, g in grads.items()}

    torch._dynamo.reset()
    compiled = torch.compile(gradients, fullgraph=True)

    def step_of(model: nn.Module) -> Any:
        def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            weights = {name: p.detach() for name, p in model.named_parameters()}
            loss, grads = compiled(weights, images, labels)
            for name, parameter in model.named_parameters():
                parameter.grad = grads[name]
            return loss

        return step

    rewrite = nullcontext() if bits == 32 else compress_collectives(cgx_ops.Config(bits=bits))
    with rewrite:
        # A graph is compiled once, so later steps use the rewritten one.
        step_of(model)(training.train_x[:BATCH], training.train_y[:BATCH])
    training.run(step_of(model), until=epochs // 2)
    saved = {name: p.clone() for name, p in model.state_dict().items()}
    saved_training, saved_noise = training.state_dict(), torch.get_rng_state()
    training.run(step_of(model), until=epochs)

    resumed = perceptron()
    resumed.load_state_dict(saved)
    second = Training(resumed, rank, size, epochs, bits)
    second.load_state_dict(saved_training)
    torch.set_rng_state(saved_noise)
    second.run(step_of(resumed), until=epochs)
    return {
        "bits": bits,
        "accuracy": training.accuracy(model),
        "losses": training.curve,
        "rewritten": 0 if bits == 32 else rewrite.rewritten,  # type: ignore[union-attr]
        "identical": same_on_all_ranks(digest(model)),
        "resumed_identical": digest(resumed) == digest(model),
    }


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
