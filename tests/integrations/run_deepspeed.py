"""Rank program: DeepSpeed's engine over the backend "cgx"; a second run resumes halfway.

run_deepspeed.py FOLDER STAGE: a stage of ZeRO.
"""

# pyright: reportMissingImports=false, reportArgumentType=false
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from common import BATCH, EPOCHS, examples, network, report
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import cgx_ops.torch
from cgx_ops import Config


def train(folder: Path, stage: int, first: int = 0) -> tuple[nn.Module, list[float]]:
    """Train from epoch `first`, with its checkpoint unless it is 0."""
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    model = network()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    if first:
        engine.load_checkpoint(str(folder))
    data = examples()
    sampler = DistributedSampler(data)
    losses = []
    for epoch in range(first, EPOCHS):
        if epoch == EPOCHS // 2 and not first:
            engine.save_checkpoint(str(folder))
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for points, labels in DataLoader(data, batch_size=BATCH, sampler=sampler):
            loss = nn.functional.cross_entropy(engine(points), labels)
            engine.backward(loss)
            engine.step()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(float(total))
    return model, losses


def main(folder: Path, stage: int) -> None:
    options = cgx_ops.torch.BackendOptions(Config(bits=4, rounding="nearest"), compress="all")
    dist.init_process_group("cgx", pg_options=options)
    model, losses = train(folder, stage)
    report(losses, model, train(folder, stage, EPOCHS // 2)[0])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
