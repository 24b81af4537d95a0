"""Training to convergence with DDP: loss against wall time, for ways to average gradients.

    python benchmarks/hosts.py --rate 1gbit -- python benchmarks/convergence.py [--json FILE]

Two tasks (TASKS), both on what every installation has:

    digits      scikit-learn's handwritten digits, a perceptron of 1.1 million parameters
    characters  the next character of Python's own help texts (pydoc_data.topics) from the CONTEXT
                before it, a perceptron of 2.2 million parameters

All contenders start from the same weights and see the same batches; Adam, its rate falling to 0.
They take turns, a few steps each, so that noise meets all alike; a contender's time is the sum of
its own turns. After each turn the validation loss is taken, outside the time.

Times are compared at the lowest loss that all contenders reached.
"""

import argparse
import itertools
import pydoc_data.topics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import ddp_contenders
import torch
import torch.distributed as dist
from mpi4py import MPI
from sklearn.datasets import load_digits
from steps import publish, where
from torch import nn

from cgx_ops.bench.allreduce import parse_rate
from cgx_ops.bench.report import Report, Table, time_text

CONTENDERS = ("gloo", "gloo, fp16 hook", "gloo, PowerSGD rank 4", "cgx 4 bits")
TURNS = 20
CONTEXT = 16

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs, labels


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        name: of it.
        model: makes the model, after torch.manual_seed().
        draw: returns a batch of so many examples, by a generator.
        validation: examples that no batch has.
        batch: examples a rank and step.
        steps: of the whole training.
        rate: Adam's, at first.
    """

    name: str
    model: Callable[[], nn.Module]
    draw: Callable[[int, torch.Generator], Batch]
    validation: Batch
    batch: int
    steps: int
    rate: float


@dataclass(frozen=True)
class Point:
    """A contender's validation loss (nats) after some steps and seconds of training."""

    task: str
    contender: str
    step: int
    seconds: float
    loss: float


# ---- Tasks ---------------------------------------------------------------------------------------


def perceptron(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def digits() -> Task:
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    held, rest = order[:360], order[360:]

    def draw(count: int, generator: torch.Generator) -> Batch:
        chosen = rest[torch.randint(len(rest), (count,), generator=generator)]
        return x[chosen], y[chosen]

    return Task(
        "digits",
        lambda: perceptron(64, 1024, 1024, 10),
        draw,
        (x[held], y[held]),
        batch=32,
        steps=200,
        rate=1e-3,
    )


def characters() -> Task:
    text = "\n".join(pydoc_data.topics.topics.values())
    alphabet = {character: index for index, character in enumerate(sorted(set(text)))}
    codes = torch.tensor([alphabet[character] for character in text])
    train, held = codes.tensor_split([len(codes) * 9 // 10])

    def windows(source: torch.Tensor, count: int, generator: torch.Generator) -> Batch:
        begins = torch.randint(len(source) - CONTEXT, (count, 1), generator=generator)
        window = source[begins + torch.arange(CONTEXT + 1)]
        return window[:, :-1], window[:, -1]

    embedding, hidden = 64, 1024
    return Task(
        "characters",
        lambda: nn.Sequential(
            nn.Embedding(len(alphabet), embedding),
            nn.Flatten(),
            *perceptron(CONTEXT * embedding, hidden, hidden, len(alphabet)),
        ),
        lambda count, generator: windows(train, count, generator),
        windows(held, 2048, torch.Generator().manual_seed(0)),
        batch=128,
        steps=320,
        rate=1e-3,
    )


TASKS = {"digits": digits, "characters": characters}


# ---- Training ------------------------------------------------------------------------------------


class Training:
    """One contender on one task."""

    def __init__(self, task: Task, wrap: ddp_contenders.Wrap) -> None:
        torch.manual_seed(0)
        self._task = task
        self._model = wrap(task.model())
        self._optimizer = torch.optim.Adam(self._model.parameters(), task.rate)
        self._schedule = torch.optim.lr_scheduler.LinearLR(self._optimizer, 1, 0, task.steps)
        self._generator = torch.Generator().manual_seed(1 + dist.get_rank())
        self.seconds = 0.0

    def run(self, steps: int) -> None:
        """Make some steps; their time is added to `seconds`, on the slowest rank."""
        MPI.COMM_WORLD.Barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            inputs, labels = self._task.draw(self._task.batch, self._generator)
            self._optimizer.zero_grad()
            nn.functional.cross_entropy(self._model(inputs), labels).backward()
            self._optimizer.step()
            self._schedule.step()
        self.seconds += MPI.COMM_WORLD.allreduce(time.perf_counter() - begin, MPI.MAX)

    @torch.no_grad()
    def loss(self) -> float:
        """Return the validation loss; weights are equal on all ranks, and so is it."""
        inputs, labels = self._task.validation
        return nn.functional.cross_entropy(self._model(inputs), labels).item()


def train(
    task: Task, contenders: dict[str, ddp_contenders.Wrap], turns: int, budget: float
) -> list[Point]:
    """Train all contenders, in turns, of which none begins after `budget` seconds of training."""
    trainings = {name: Training(task, contenders[name]) for name in CONTENDERS}
    points = [Point(task.name, name, 0, 0.0, each.loss()) for name, each in trainings.items()]
    for turn in range(turns):
        if sum(each.seconds for each in trainings.values()) > budget:
            break
        for name, each in trainings.items():
            each.run(task.steps // TURNS)
            step = (turn + 1) * (task.steps // TURNS)
            points.append(Point(task.name, name, step, each.seconds, each.loss()))
    return points


# ---- Report --------------------------------------------------------------------------------------


def table_of(task: str, points: list[Point]) -> Table:
    """Return the times at the lowest loss that all contenders reached."""
    curves = {
        name: [point for point in points if (point.task, point.contender) == (task, name)]
        for name in CONTENDERS
    }
    target = max(min(point.loss for point in curve) for curve in curves.values())
    seconds = {
        name: next(point.seconds for point in curve if point.loss <= target)
        for name, curve in curves.items()
    }
    exact = seconds[CONTENDERS[0]]
    rows = [
        [
            name,
            str(curve[-1].step),
            time_text(curve[-1].seconds),
            f"{curve[-1].loss:.3f}",
            time_text(seconds[name]),
            f"{exact / seconds[name]:.2f}",
        ]
        for name, curve in curves.items()
    ]
    columns = ["contender", "steps", "time", "last loss", f"time to {target:.3f}", "speed-up"]
    notes = [
        "Loss: nats, on examples that were held back; the target is the lowest that all reached. "
        "Speed-up: of the time to it, over the first contender."
    ]
    return Table(f"Training to convergence: {task}", columns, rows, notes=notes)


def main() -> None:
    parser = argparse.ArgumentParser(description="Loss against wall time, with DDP")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS], help="default: all")
    parser.add_argument("--turns", type=int, default=TURNS, help=f"at most {TURNS}, the whole")
    parser.add_argument("--budget", type=float, default=120, help="seconds a task (default 120)")
    parser.add_argument("--link-rate", type=parse_rate, help="of each host, as in 1gbit")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    contenders = ddp_contenders.start()
    points: list[Point] = []
    tables: list[Table] = []
    for task in (TASKS[name]() for name in arguments.tasks):
        points += train(task, contenders, arguments.turns, arguments.budget)
        tables.append(table_of(task.name, points))
    settings = {**where(), "link_rate": arguments.link_rate}
    report = Report("convergence", settings, [asdict(point) for point in points], tables)
    publish(report, arguments.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
