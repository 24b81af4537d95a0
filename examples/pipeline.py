"""Handwritten digits with a pipeline, whose activations travel in a few bits.

    mpirun -np 2 python examples/pipeline.py         # 32 bits (exact), then 8 and 4

Each rank has one layer of a perceptron. A schedule of torch.distributed.pipelining sends
activations to the next rank, and their gradients back. `compressed()` around its step makes both
travel in `bits` bits. Rank 0 prints a line of JSON per epoch and per result.
"""

import argparse
import json
import time
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from digits import LEARNING_RATE, digits
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from cgx_ops import Communicator, Config
from cgx_ops.torch import compressed

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def layers(width: int, size: int) -> list[nn.Module]:
    """Return the layers of all ranks, with the same weights on all ranks and in every run."""
    torch.manual_seed(0)
    widths = [64, *[width] * (size - 1), 10]
    made = [nn.Linear(*pair) for pair in pairwise(widths)]
    return [*(nn.Sequential(layer, nn.ReLU()) for layer in made[:-1]), made[-1]]


def train(bits: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train one model; return its accuracy, traffic, time and loss curve."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module = layers(arguments.width, size)[rank]
    stage = PipelineStage(module, rank, size, torch.device("cpu"))
    schedule = SCHEDULES[arguments.schedule](
        stage, arguments.microbatches, loss_fn=nn.functional.cross_entropy
    )
    optimizer = torch.optim.SGD(module.parameters(), LEARNING_RATE, momentum=0.9)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.epochs)
    config, shuffle = Config(bits), torch.Generator().manual_seed(1)
    train_x, test_x, train_y, test_y = digits()
    steps, curve = len(train_x) // arguments.batch, list[float]()

    world = dist.group.WORLD
    assert world is not None
    communicator = Communicator.find(world.group_name)
    sent, start = communicator.bytes_sent, time.perf_counter()
    for epoch in range(1, arguments.epochs + 1):
        order = torch.randperm(len(train_x), generator=shuffle)[: steps * arguments.batch]
        losses = list[torch.Tensor]()
        for batch in order.view(steps, -1):
            images = [train_x[batch]] if rank == 0 else []
            labels = train_y[batch] if rank == size - 1 else None
            with compressed(config):
                schedule.step(*images, target=labels, losses=losses)
            optimizer.step()
            optimizer.zero_grad()
        decay.step()
        mean = torch.stack(losses).mean() if losses else torch.zeros(())
        dist.broadcast(mean, src=size - 1)
        curve.append(mean.item())
        if rank == 0:
            print(json.dumps({"bits": bits, "epoch": epoch, "loss": curve[-1]}), flush=True)
    seconds = time.perf_counter() - start
    # gloo sends exact values, and counts no bytes.
    bytes_per_step = (communicator.bytes_sent - sent) / (steps * arguments.epochs)

    stages: list[Any] = [None] * size
    dist.all_gather_object(stages, module)
    model = nn.Sequential(*stages)
    with torch.no_grad():
        accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
    return {"framework": "torch pipeline", "bits": bits, "accuracy": accuracy, "losses": curve,
            "bytes_per_step": bytes_per_step if bits < 32 else None, "seconds": seconds,
            "step_ms": 1e3 * seconds / (steps * arguments.epochs)}  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Digits with a pipeline.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--bits", type=int, nargs="+", default=[32, 8, 4])
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--width", type=int, default=256, help="of the hidden layers")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=4)
    arguments = parser.parse_args()
    dist.init_process_group("cgx")
    for bits in arguments.bits:
        result = train(bits, arguments)
        if dist.get_rank() == 0:
            print(json.dumps(result), flush=True)
    dist.destroy_process_group()
