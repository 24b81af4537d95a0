"""Rank program: a loop with Accelerate over the backend "cgx"; a second run resumes halfway.

run_accelerate.py FOLDER [power_sgd]: uses Accelerate's own PowerSGD (torch's) instead.
"""

# pyright: reportMissingImports=false, reportArgumentType=false
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import (
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
)
from common import BATCH, EPOCHS, examples, network, report
from torch import nn
from torch.utils.data import DataLoader

import cgx_ops.torch

_POWER_SGD = DistributedDataParallelKwargs(
    comm_hook=DDPCommunicationHookType.POWER_SGD,
    comm_state_option={"matrix_approximation_rank": 4, "start_powerSGD_iter": 2},
)


def train(folder: Path, first: int = 0, power_sgd: bool = False) -> tuple[nn.Module, list[float]]:
    """Train from epoch `first`, with its checkpoint unless it is 0."""
    dataloader_config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
    handlers = [_POWER_SGD] if power_sgd else []
    accelerator = Accelerator(
        cpu=True, dataloader_config=dataloader_config, kwargs_handlers=handlers
    )
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(examples(), batch_size=BATCH, shuffle=True)

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if state := cgx_ops.torch.hook_state(model):
        accelerator.register_for_checkpointing(state)
    if first:
        accelerator.load_state(str(folder))
    losses = []
    for epoch in range(first, EPOCHS):
        if epoch == EPOCHS // 2 and not first:
            accelerator.save_state(str(folder))
        loader.set_epoch(epoch)
        total = torch.zeros(())
        for points, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(points), labels)
            accelerator.backward(loss)
            optimizer.step()
            total += loss.detach() / len(loader)
        losses.append(float(accelerator.reduce(total, "mean")))
    accelerator.wait_for_everyone()  # a barrier with device_ids
    return model, losses


def main(folder: Path, power_sgd: bool) -> None:
    dist.init_process_group("cgx")
    model, losses = train(folder, power_sgd=power_sgd)
    if power_sgd:
        (stats,) = cgx_ops.stats().values()
        steps = EPOCHS * len(examples()) // (2 * BATCH)
        plain = steps * 4 * sum(p.numel() for p in model.parameters())
        report(losses, model, model, ratio=plain / stats.bytes_sent)
    else:
        report(losses, model, train(folder, EPOCHS // 2)[0])


if __name__ == "__main__":
    main(Path(sys.argv[1]), "power_sgd" in sys.argv)
