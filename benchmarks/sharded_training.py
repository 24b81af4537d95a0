"""Losses of FSDP2 models in few bits, beside exact training, from the same seeds.

    mpirun -np 4 python sharded_training.py [--hosts 1] [--json FILE]

A transformer of about 1.5 million parameters predicts the next character of Python's standard
library, with AdamW. The ranks count as two hosts, or as --hosts. HSDP has one replica on each host,
but at least two.
"""

import argparse
import os
import statistics
import time
from dataclasses import asdict, dataclass

import small_tasks
import torch
import torch.distributed as dist
from mpi4py import MPI
from sharded_models import SETTINGS, Setting, sharded
from torch import nn

from cgx_ops._core.text_table import Table
from cgx_ops.bench.report import Report

CONTEXT, WIDTH, LAYERS, BATCH = 48, 160, 5, 4
STEPS, RATE = 500, 0.003


@dataclass(frozen=True)
class Found:
    """The loss of one training on held-out texts, in nats."""

    setting: str
    seed: int
    loss: float
    seconds: float


def train(task: small_tasks.Task, setting: Setting, replicas: int, seed: int, steps: int) -> Found:
    """Train one model; the ranks have different batches."""
    model = sharded(task.model, setting, replicas, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    start = time.perf_counter()
    for _ in range(steps):
        texts, labels = task.draw(task.batch, generator)
        nn.functional.cross_entropy(model(texts), labels).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - start
    texts, labels = task.validation
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(texts), labels).item()
    return Found(setting.name, seed, loss, seconds)


def table_of(found: list[Found]) -> Table:
    losses = {(each.setting, each.seed): each.loss for each in found}
    seeds = sorted({each.seed for each in found})
    rows = []
    for setting in dict.fromkeys(each.setting for each in found):
        own = [losses[setting, seed] for seed in seeds]
        above = [losses[setting, seed] - losses[found[0].setting, seed] for seed in seeds]
        spread = statistics.stdev(above) if len(seeds) > 1 else 0.0
        mean = statistics.mean(above)
        rows.append([setting, f"{statistics.mean(own):.3f}", f"{mean:+.3f} ± {spread:.3f}"])
    columns = ["setting", "loss", "above exact, mean and deviation over seeds"]
    return Table(f"FSDP2, {len(seeds)} seeds", columns, rows, text_columns=1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare losses of FSDP2 models in few bits.")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--hosts", type=int, default=2, help="of the ranks (default 2)")
    names = [setting.name for setting in SETTINGS]
    parser.add_argument(
        "--settings", nargs="+", choices=names, default=names, help="exact is always included"
    )
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    exact, *others = SETTINGS
    settings = [exact, *(setting for setting in others if setting.name in options.settings)]
    replicas = max(options.hosts, 2)
    torch.set_num_threads(1)
    ranks = MPI.COMM_WORLD
    os.environ["CGX_HOST_ID"] = str(ranks.rank * options.hosts // ranks.size)
    dist.init_process_group("cgx")
    task = small_tasks.code(CONTEXT, WIDTH, LAYERS, BATCH)
    found = []
    for seed in options.seeds:
        for setting in settings:
            found.append(train(task, setting, replicas, seed, options.steps))
            if dist.get_rank() == 0:
                print(found[-1], flush=True)
    if dist.get_rank() == 0:
        table = table_of(found)
        table.print()
        if options.json:
            used = {"ranks": ranks.size, "hosts": options.hosts, "steps": options.steps}
            used["rate"] = RATE
            results = [asdict(each) for each in found]
            Report("sharded_training", used, results, [table]).write(options.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
