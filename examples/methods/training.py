"""Train a task with several methods and compare them.

1. Training: one model, its optimizer, and its loss curve
2. train(): trains all methods, a few steps of each in turn
3. table_of(), plot(): the results
"""

import argparse
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # draws to files: no display is needed

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from methods import METHODS, Run
from rich.progress import BarColumn, MofNCompleteColumn, Progress
from task import Batch, Task

import cgx_ops
import cgx_ops.torch
from cgx_ops._core.text_table import Table, console
from cgx_ops._core.units import time_text

TURNS = 10
OUT = Path(__file__).resolve().parents[1] / "out"

# ---- 1. one method -------------------------------------------------------------------------------


@dataclass
class Curve:
    """The loss curve and the result of one training.

    Attributes:
        method: name of the method.
        ours: whether cgx_ops averages.
        warmup: number of warm-up steps of the method.
        steps: steps so far, after each turn.
        seconds: training time so far, after each turn.
        losses: held-out loss in nats, after each turn.
        score: held-out score in the end, in percent.
        bytes_per_step: bytes that this rank sent through cgx_ops; 0 if cgx_ops does not average.
        identical: whether the weights of all ranks have equal bits in the end.
    """

    method: str
    ours: bool
    warmup: int
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    score: float = 0
    bytes_per_step: float = 0
    identical: bool = False


class Training:
    """One method on one task."""

    def __init__(self, method: str, run: Run, steps: int) -> None:
        of = METHODS[method]
        torch.manual_seed(run.seed)
        self._task, self._gloo = run.task, run.gloo
        self._model, self._optimizer = of.prepare(run.task.model(), run)
        self._schedule = run.task.schedule(self._optimizer, steps)
        self._generator = torch.Generator().manual_seed(1000 * run.seed + dist.get_rank())
        self._sent = 0
        self.curve = Curve(method, of.ours, run.warmup if of.warms else 0)

    def step(self) -> None:
        """Take one step."""
        batch = self._task.draw(self._task.batch // dist.get_world_size(), self._generator)
        self._optimizer.zero_grad()
        self._task.loss(self._model, batch).backward()
        self._optimizer.step()
        self._schedule.step()

    def turn(self, steps: int) -> None:
        """Take some steps, and add a point to the curve."""
        before, begin = bytes_sent(), time.perf_counter()
        for _ in range(steps):
            self.step()
        seconds = time.perf_counter() - begin
        self._sent += bytes_sent() - before
        curve = self.curve
        curve.steps.append(steps + (curve.steps[-1] if curve.steps else 0))
        curve.seconds.append(seconds + (curve.seconds[-1] if curve.seconds else 0))
        loss, curve.score = self._held()
        curve.losses.append(loss)
        curve.bytes_per_step = self._sent / curve.steps[-1]

    def end(self) -> Curve:
        """Return the curve after the last step; compares the weights of all ranks."""
        weights = b"".join(p.detach().numpy().tobytes() for p in self._model.parameters())
        digests: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(digests, hashlib.sha256(weights).hexdigest(), self._gloo)
        self.curve.identical = len(set(digests)) == 1
        return self.curve

    @torch.no_grad()
    def _held(self) -> tuple[float, float]:
        """Return the held-out loss and score; each rank computes a part."""
        rank, size = dist.get_rank(), dist.get_world_size()
        mine: Batch = tuple(part[rank::size] for part in self._task.held)
        self._model.eval()
        model = self._model.module
        found = torch.tensor([self._task.loss(model, mine), self._task.score(model, mine)])
        self._model.train()
        dist.all_reduce(found, group=self._gloo)
        loss, score = (found / size).tolist()
        return loss, score


def bytes_sent() -> int:
    """Return the bytes that this rank has sent for the default process group."""
    stats = cgx_ops.stats()
    return stats["0"].bytes_sent if "0" in stats else 0  # torch's name of it


# ---- 2. all methods ------------------------------------------------------------------------------


def start() -> dist.ProcessGroup:
    """Start torch.distributed over the backend "cgx"; return a group of all ranks over gloo."""
    torch.set_num_threads(1)
    dist.init_process_group("cgx")
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group


def train(run: Run, methods: Sequence[str], steps: int) -> list[Curve]:
    """Train with each method; rank 0 shows the progress if it writes to a terminal."""
    trainings = [Training(method, run, steps) for method in methods]
    columns = "{task.description:<16}", BarColumn(), MofNCompleteColumn(), "{task.fields[loss]}"
    output = console()
    shown = dist.get_rank() == 0 and output.is_terminal
    with Progress(*columns, console=output, disable=not shown) as progress:
        bars = [progress.add_task(method, total=steps, loss="") for method in methods]
        for turn in range(TURNS):
            count = steps * (turn + 1) // TURNS - steps * turn // TURNS
            for training, bar in zip(trainings, bars, strict=True):
                if count:
                    training.turn(count)
                    loss = f"loss {training.curve.losses[-1]:.3f}"
                    progress.update(bar, advance=count, loss=loss)
    return [training.end() for training in trainings]


# ---- 3. results ----------------------------------------------------------------------------------


def table_of(task: Task, curves: Sequence[Curve]) -> Table:
    """Return a row for each method."""
    rows = [
        [
            curve.method,
            f"{curve.losses[-1]:.3f}",
            f"{curve.score:.1f}",
            f"{curve.bytes_per_step:,.0f}" if curve.bytes_per_step else "",
            time_text(curve.seconds[-1] / curve.steps[-1]),
            "identical" if curve.identical else "DIFFER",
        ]
        for curve in curves
    ]
    columns = ["method", "loss", task.scored, "bytes/step", "a step", "weights"]
    notes = ["Loss and score are on held-out examples. bytes/step: sent by rank 0."]
    title = f"{task.name}, {dist.get_world_size()} ranks, {curves[0].steps[-1]} steps"
    return Table(title, columns, rows, notes=notes)


def plot(task: Task, curves: Sequence[Curve], path: Path) -> None:
    """Draw losses against steps, and against seconds."""
    figure, panels = plt.subplots(1, 2, figsize=(12, 5), sharey=True, layout="constrained")
    for panel, across in zip(panels, ("steps", "seconds"), strict=True):
        for index, curve in enumerate(curves):
            style = ("-", "--", ":")[index // 10 % 3]  # there are ten colors
            panel.semilogy(getattr(curve, across), curve.losses, style, label=curve.method)
        panel.set(xlabel=across, title=task.name)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("held-out loss, nats")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main(task: Task) -> None:
    """Train a task with the methods of the command line; rank 0 prints a table and draws a plot."""
    parser = argparse.ArgumentParser(description=f"{task.name}, trained with several methods")
    parser.add_argument(
        "--methods", nargs="+", metavar="METHOD", choices=[*METHODS, "all"],
        default=["exact", "4 bits", "PowerSGD"],
        help=f"all, or some of: {'; '.join(METHODS)}; default: exact, 4 bits, PowerSGD".replace(
            "%", "%%"
        ),
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=task.steps, help=f"default {task.steps}")
    parser.add_argument("--warmup", type=int, help="warm-up steps; default: an eighth of --steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the plot and results")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps is {arguments.steps}; it must be at least 1")
    methods = list(METHODS) if "all" in arguments.methods else arguments.methods
    warmup = arguments.steps // 8 if arguments.warmup is None else arguments.warmup
    run = Run(task, start(), arguments.seed, warmup)
    curves = train(run, methods, arguments.steps)
    if dist.get_rank() == 0:
        arguments.out.mkdir(parents=True, exist_ok=True)
        table_of(task, curves).print()
        plot(task, curves, arguments.out / f"{task.name}.png")
        results = json.dumps([asdict(curve) for curve in curves])
        (arguments.out / f"{task.name}.json").write_text(results)
        print(f"Loss curves: {arguments.out / f'{task.name}.png'}")
    dist.destroy_process_group()
