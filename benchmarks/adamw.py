"""Train with AdamW and compressed gradients: held-out loss against exact AdamW.

    PYTHONPATH=examples/methods mpirun -n 2 python benchmarks/adamw.py --json FILE

Three steps for each task of examples/methods:

1. Exact AdamW trains at every rate of --rates, with every seed.
2. The rate with the lowest mean held-out loss is the best rate.
3. Every other method trains at the best rate and at a third of it.

The file is written after each training. A second run with the same file continues there.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from boxes import boxes
from characters import characters
from images import images
from methods import METHODS, Method, Prepared, Run, codec, own_gradients, power_sgd
from task import Task, risen_cosine
from torch import nn
from training import TURNS, Training, start

from cgx_ops import Config
from cgx_ops._core.table import Table
from cgx_ops.bench.report import Report
from cgx_ops.torch.optim import OneBitAdam

TASKS = {"characters": characters, "images": images, "boxes": boxes}
STEPS = {"characters": 300, "images": 250, "boxes": 250}
EXACT = "exact"
BETAS, DECAY = (0.9, 0.95), 0.01
FROZEN_AFTER = 0.2  # of the steps: 1-bit Adam's warm-up


def adamw(parameters: Any, rate: float, _: float) -> torch.optim.Optimizer:
    """Return AdamW with the settings of this benchmark."""
    return torch.optim.AdamW(parameters, rate, BETAS, weight_decay=DECAY)


def one_bit_adam(config: Config) -> Method:
    """Return 1-bit Adam, whose momentum is averaged with a Config."""

    def prepare(model: nn.Module, run: Run) -> Prepared:
        wrapped = own_gradients(model)
        return wrapped, OneBitAdam(
            wrapped.parameters(),
            run.task.rate,
            BETAS,
            weight_decay=DECAY,
            warmup_steps=run.warmup,
            config=config,
            seed=run.seed,
        )

    return Method(prepare, warms=True)


def levels(bits: int, feedback: bool) -> Method:
    """Return gradients in "levels", rotated."""
    return codec(Config(bits, compressor="levels", rotation=32, error_feedback=feedback))


COMPARED: dict[str, Method] = {
    EXACT: codec(Config(32)),
    "4 bits": codec(Config(4)),
    "2 bits rotated levels, feedback": levels(2, True),
    "2 bits rotated levels": levels(2, False),
    "1-bit Adam": one_bit_adam(Config(1, compressor="levels")),
    "1-bit Adam, exact momentum": one_bit_adam(Config(32)),
    "8 bits": codec(Config(8)),
    "2 bits": codec(Config(2)),
    "4 bits nearest": codec(Config(4, rounding="nearest", error_feedback=False)),
    "4 bits nearest, feedback": codec(Config(4, rounding="nearest", error_feedback=True)),
    "1 bit rotated levels, feedback": levels(1, True),
    "PowerSGD rank 4": Method(power_sgd),
    "topk 1 %, feedback": codec(
        Config(compressor="topk", density=0.01, bucket_size=4096, error_feedback=True)
    ),
}
METHODS.update(COMPARED)


@dataclass(frozen=True)
class Trained:
    """The result of one training.

    Attributes:
        task, method, seed, rate, steps: of the training.
        loss: held-out loss in the end, in nats.
        score: held-out accuracy in the end, in percent.
        bits: sent by a rank in a step, for each parameter.
        curve: held-out losses, after each tenth of the steps.
    """

    task: str
    method: str
    seed: int
    rate: float
    steps: int
    loss: float
    score: float
    bits: float
    curve: list[float]


Found = list[Trained]


def train(task: Task, group: Any, method: str, seed: int, rate: float, steps: int) -> Trained:
    """Train a task with one method. Collective."""
    warmup = round(FROZEN_AFTER * steps)
    own = replace(task, optimizer=adamw, rate=rate, schedule=risen_cosine)
    training = Training(method, Run(own, group, seed, warmup), steps)
    for turn in range(TURNS):
        training.turn(steps * (turn + 1) // TURNS - steps * turn // TURNS)
    curve = training.end()
    if not curve.identical:
        raise RuntimeError(f"{task.name}, {method}: the ranks' weights differ")
    count = sum(p.numel() for p in task.model().parameters())
    bits = 8 * curve.bytes_per_step / count
    return Trained(
        task.name, method, seed, rate, steps, curve.losses[-1], curve.score, bits, curve.losses
    )


def of(found: Found, task: str, method: str, rate: float) -> Found:
    """Return the trainings of a method at a rate, by seed."""
    mine = [t for t in found if (t.task, t.method, t.rate) == (task, method, rate)]
    return sorted(mine, key=lambda each: each.seed)


def best_rate(found: Found, task: str, rates: Sequence[float]) -> float:
    """Return the rate at which exact AdamW has the lowest mean loss."""
    return min(rates, key=lambda r: statistics.mean(t.loss for t in of(found, task, EXACT, r)))


def wanted(found: Found, options: argparse.Namespace) -> Iterator[tuple[str, str, int, float]]:
    """Yield task, method, seed and rate of every training, exact ones first."""
    for task, seed, rate in itertools.product(options.tasks, options.seeds, options.rates):
        yield task, EXACT, seed, rate
    for seed, task, method in itertools.product(options.seeds, options.tasks, options.methods):
        best = best_rate(found, task, options.rates)
        yield task, method, seed, best
        yield task, method, seed, best / 3


# ---- tables --------------------------------------------------------------------------------------


def differences(found: Found, task: str, method: str, rate: float, base: float) -> list[float]:
    """Return by seed how much more a method loses at a rate than exact AdamW at `base`."""
    exact = {t.seed: t.loss for t in of(found, task, EXACT, base)}
    return [t.loss - exact[t.seed] for t in of(found, task, method, rate) if t.seed in exact]


def spread(values: Sequence[float], form: str = "+.3f") -> str:
    """Return the mean and the standard deviation as text."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0
    return f"{statistics.mean(values):{form}} ± {deviation:.3f}" if values else ""


def table_of(found: Found, rates: Sequence[float], task: str) -> Table:
    """Return the table of a task: a row for each method."""
    best = best_rate(found, task, rates)
    exact = of(found, task, EXACT, best)
    rows, counts = [], set[int]()
    for method in COMPARED:
        mine = of(found, task, method, best)
        if not mine:
            continue
        counts.add(len(mine))
        third = of(found, task, method, best / 3)
        rows.append(
            [
                method,
                f"{mine[0].bits:.2f}",
                spread([t.loss for t in mine], ".3f"),
                spread(differences(found, task, method, best, best)),
                spread([t.loss for t in third], ".3f"),
                spread(differences(found, task, method, best / 3, best / 3)),
                f"{statistics.mean(t.score for t in mine):.1f}",
            ]
        )
    tried = ", ".join(
        f"{rate:g}: {spread([t.loss for t in of(found, task, EXACT, rate)], '.3f')}"
        for rate in rates
    )
    columns = ["method", "bits", f"loss at {best:g}", "to exact"]
    columns += [f"loss at {best / 3:.2g}", "to exact", "score %"]
    notes = [
        f"Held-out loss (nats) after {exact[0].steps} steps: mean and standard deviation of "
        f"{'-'.join(map(str, sorted({min(counts), max(counts)})))} seeds. To exact: differences "
        "of the same seed and rate. Bits: sent by a rank in a step for each parameter, "
        "1-bit Adam's warm-up included. Score: held-out, at the best rate. "
        f"Exact AdamW by rate: {tried}."
    ]
    return Table(f"AdamW: {task}", columns, rows, notes=notes)


def report_of(found: Found, options: argparse.Namespace) -> Report:
    """Return the report of what is there so far."""
    settings = {"ranks": 2, "rates": options.rates, "betas": BETAS, "weight_decay": DECAY}
    tables = [
        table_of(found, options.rates, task)
        for task in options.tasks
        if all(of(found, task, EXACT, rate) for rate in options.rates)
    ]
    return Report("adamw", settings, [asdict(each) for each in found], tables)


def main() -> None:
    parser = argparse.ArgumentParser(description="AdamW with compressed gradients, against exact")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["characters", "images"])
    parser.add_argument("--methods", nargs="+", choices=COMPARED, default=[*COMPARED])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-3, 2e-3, 3e-3, 6e-3])
    parser.add_argument("--steps", type=int, help=f"of a training; default: {STEPS}")
    parser.add_argument("--json", type=Path, required=True, help="results; continued if it exists")
    parser.add_argument("--again", action="store_true", help="only print the tables of the file")
    options = parser.parse_args()
    found: Found = []
    if options.json.exists():
        found = [Trained(**each) for each in json.loads(options.json.read_text())["results"]]
    if not options.again:
        group, tasks = start(), {name: TASKS[name]() for name in options.tasks}
        dist.barrier(group)  # every rank has read the file
        for name, method, seed, rate in wanted(found, options):
            if seed in {t.seed for t in of(found, name, method, rate)}:
                continue
            steps = options.steps or STEPS[name]
            found.append(train(tasks[name], group, method, seed, rate, steps))
            if dist.get_rank() == 0:
                report_of(found, options).write(options.json)
                print(f"{name}, seed {seed}, {rate:.2g}: {found[-1].loss:.4f} {method}", flush=True)
        last = dist.get_rank() != 0
        dist.destroy_process_group()
        if last:
            return
    for table in report_of(found, options).tables:
        table.print()


if __name__ == "__main__":
    main()
