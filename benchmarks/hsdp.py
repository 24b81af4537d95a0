"""Compare PowerSGD on the replicas of HSDP with PowerSGD under DDP: the loss after equal steps.

    mpirun -np 4 python benchmarks/hsdp.py gpt [--json FILE]

Ranks are 2 replicas of 2 shards. All methods start from the same weights and draw the same batches.
The rate is the number of gradient bytes over that of sent bytes, in compressed steps: for DDP
between all ranks, for HSDP between replicas.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import small_tasks
import torch
import torch.distributed as dist
from small_tasks import Task
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from cgx_ops import Config
from cgx_ops._core.text_table import Table
from cgx_ops.torch import BackendOptions, ddp, fsdp

TASKS = ["digits", "gpt", "characters"]
MESH_DIMS = ("replicate", "shard")
Rate = Callable[[], float]


def exact() -> float:
    return 1.0


def by_ddp(model: nn.Module, rank: int) -> tuple[nn.Module, Rate]:
    wrapped = DistributedDataParallel(model)
    if not rank:
        return wrapped, exact
    state = ddp.PowerSGDState(matrix_approximation_rank=rank, start_powerSGD_iter=10)
    wrapped.register_comm_hook(state, ddp.power_sgd_hook)
    return wrapped, lambda: state.compression_stats()[0]


def by_hsdp(model: nn.Module, settings: Any) -> tuple[nn.Module, Rate]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=MESH_DIMS)
    used = mesh if settings is None else mesh["shard"]
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            fully_shard(module, mesh=used)
    fully_shard(model, mesh=used)
    if settings is None:
        return model, exact
    replicas = mesh["replicate"]
    state = fsdp.compress(model, None, replicas=replicas, replica_gradients=settings).replicas
    assert state is not None
    if isinstance(settings, fsdp.PowerSGD):
        return model, lambda: state.compression_stats()[0]
    ranks = state.communicator()
    begun = ranks.bytes_sent

    def rate() -> float:  # an exact allreduce of two ranks sends each element once
        return 4 * state.compression_stats()[1] / (ranks.bytes_sent - begun)

    return model, rate


METHODS: dict[str, Callable[[nn.Module], tuple[nn.Module, Rate]]] = {
    "DDP, exact": lambda model: by_ddp(model, 0),
    "DDP, PowerSGD of rank 2": lambda model: by_ddp(model, 2),
    "HSDP, exact": lambda model: by_hsdp(model, None),
    "HSDP, PowerSGD of rank 2": lambda model: by_hsdp(model, fsdp.PowerSGD(rank=2, start=10)),
    "HSDP, PowerSGD of rank 1": lambda model: by_hsdp(model, fsdp.PowerSGD(rank=1, start=10)),
    "HSDP, 2 bits with feedback": lambda model: by_hsdp(
        model, Config(bits=2, bucket_size=128, error_feedback=True)
    ),
}


def trained(method: str, task: Task, seed: int, steps: int) -> tuple[float, float]:
    """Return the validation loss after the training, and the compression rate."""
    torch.manual_seed(seed)
    model, rate = METHODS[method](task.model())
    optimizer = torch.optim.SGD(model.parameters(), task.rate, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    for _ in range(steps):
        x, y = task.draw(task.batch, generator)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    with torch.no_grad():
        x, y = task.validation
        return float(nn.functional.cross_entropy(model(x), y)), rate()


def main() -> None:
    parser = argparse.ArgumentParser(description="HSDP with compressed replicas")
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default 3)")
    parser.add_argument("--steps", type=int, help="default: those of the task")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("cgx", pg_options=BackendOptions(Config(bits=32)))
    task: Task = getattr(small_tasks, options.task)()
    steps = options.steps or task.steps
    found = {
        method: [trained(method, task, seed, steps) for seed in range(options.seeds)]
        for method in options.methods
    }
    if dist.get_rank() == 0:
        rows = [
            [method, *(f"{loss:.4f}" for loss, _ in runs), f"{runs[0][1]:.1f}"]
            for method, runs in found.items()
        ]
        seeds = [f"seed {seed}" for seed in range(options.seeds)]
        title = f"{options.task}, validation loss after {steps} steps, 2 replicas of 2 shards"
        Table(title, ["method", *seeds, "rate"], rows).print()
        if options.json:
            Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
