"""Measure why compressed gradients train worse under AdamW: the second moment collects their noise.

    PYTHONPATH=examples/methods python benchmarks/adamw_noise.py --json FILE

Both parts train the language model of examples/methods. Two ranks are threads of this process.

1. moments: exact AdamW trains. Beside it, the same gradients are averaged with each codec, and
   Adam's moments of these averages are compared with the exact ones. The codecs do not change the
   training, so all of them see the same gradients.
2. frozen: Adam trains with exact gradients for a fifth of the steps, and with compressed ones from
   then on. The second moment either goes on or stays as it is, as in 1-bit Adam. With a frozen one
   Adam is linear in the gradients, so error feedback can make up for what a step lost.
"""

import argparse
import itertools
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from characters import characters
from task import Task, risen_cosine

from cgx_ops import Communicator, Config, Segment
from cgx_ops._core.table import Table
from cgx_ops.bench.report import Report

Floats = npt.NDArray[np.float32]

RANKS = 2
BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 0.01  # as in adamw.py


def levels(bits: int, feedback: bool) -> Config:
    return Config(bits, compressor="levels", rotation=32, error_feedback=feedback)


CODECS: dict[str, Config] = {
    "8 bits": Config(8),
    "4 bits": Config(4),
    "2 bits": Config(2),
    "4 bits nearest": Config(4, rounding="nearest", error_feedback=False),
    "4 bits nearest, feedback": Config(4, rounding="nearest", error_feedback=True),
    "2 bits rotated levels": levels(2, False),
    "2 bits rotated levels, feedback": levels(2, True),
    "1 bit rotated levels, feedback": levels(1, True),
    "topk 1 %, feedback": Config(
        compressor="topk", density=0.01, bucket_size=4096, error_feedback=True
    ),
}
FROZEN_AFTER = 0.2  # of the steps
FROZEN = (
    "exact",
    "2 bits",
    "2 bits rotated levels",
    "2 bits rotated levels, feedback",
    "1 bit rotated levels, feedback",
)


class Moments:
    """Adam's moments."""

    def __init__(self, numel: int) -> None:
        self._m, self.v = np.zeros(numel, np.float32), np.zeros(numel, np.float32)
        self._steps = self._of_v = 0

    def update(self, gradient: Floats, frozen: bool = False) -> Floats:
        """Return Adam's step; `frozen` leaves the second moment as it is."""
        self._steps += 1
        self._m += (1 - BETAS[0]) * (gradient - self._m)
        if not frozen:
            self._of_v += 1
            self.v += (1 - BETAS[1]) * (gradient**2 - self.v)
        m = self._m / (1 - BETAS[0] ** self._steps)
        v = self.v / (1 - BETAS[1] ** self._of_v)
        # As in OneBitAdam, elements without a second moment do not move.
        return np.where(v == 0, 0, m / (np.sqrt(v) + EPS)).astype(np.float32)


class Averager:
    """Averages gradients of all ranks with a codec; vectors travel exact, as in the DDP hook."""

    def __init__(self, comms: list[Communicator], model: torch.nn.Module, config: Config) -> None:
        self._comms, self._config, self._pool = comms, config, ThreadPoolExecutor(RANKS)
        self._segments, end = list[Segment](), 0
        for p in model.parameters():
            own = Config(bits=32) if p.dim() <= 1 else None
            self._segments.append(Segment(end, p.numel(), own))
            end += p.numel()
        self._residuals = [np.zeros(end, np.float32) for _ in range(RANKS)]

    def mean(self, gradients: list[Floats]) -> Floats:
        def one(rank: int) -> Floats:
            return self._comms[rank].allreduce(
                gradients[rank],
                "avg",
                self._config,
                segments=self._segments,
                residual=self._residuals[rank] if self._config.keeps_residuals else None,
            )

        return next(iter(self._pool.map(one, range(RANKS))))


class Training:
    """A model, its batches and its schedule; a step is whatever the caller has Adam make of it."""

    def __init__(self, task: Task, seed: int, rate: float, steps: int) -> None:
        torch.manual_seed(seed)
        self._task, self.model = task, task.model()
        # SGD with weight decay, given Adam's step as the gradient, is AdamW.
        self._optimizer = torch.optim.SGD(self.model.parameters(), rate, weight_decay=DECAY)
        self._schedule = risen_cosine(self._optimizer, steps)
        self._generators = [torch.Generator().manual_seed(1000 * seed + r) for r in range(RANKS)]
        self.numel = sum(p.numel() for p in self.model.parameters())

    def gradients(self) -> list[Floats]:
        found = []
        for generator in self._generators:
            self._optimizer.zero_grad()
            batch = self._task.draw(self._task.batch // RANKS, generator)
            self._task.loss(self.model, batch).backward()
            parts = [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
            found.append(torch.cat(parts).numpy())
        return found

    def step(self, update: Floats) -> None:
        end = 0
        for p in self.model.parameters():
            p.grad = torch.from_numpy(update[end : end + p.numel()]).view_as(p)
            end += p.numel()
        self._optimizer.step()
        self._schedule.step()

    @torch.no_grad()
    def loss(self) -> float:
        return self._task.loss(self.model, self._task.held).item()


def matrices(model: torch.nn.Module) -> npt.NDArray[np.bool_]:
    """Return which elements are compressed."""
    return np.concatenate([np.full(p.numel(), p.dim() > 1) for p in model.parameters()])


# ---- 1. moments ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """A codec's averages and moments against the exact ones; means over the measured steps.

    Attributes:
        codec, seed: which.
        error: |average - exact| / |exact|, L2 norms.
        root_v: the root mean square of sqrt(v), over that of the exact gradients.
        fifths: the median of sqrt(v) over the exact one, for fifths of the elements, the smallest
            exact v first.
        along: how far Adam's step goes along the exact one: <step, exact> / |exact|^2.
    """

    codec: str
    seed: int
    error: float
    root_v: float
    fifths: list[float]
    along: float


def compare(
    comms: list[Communicator], task: Task, seed: int, rate: float, steps: int
) -> list[Compared]:
    training = Training(task, seed, rate, steps)
    chosen = matrices(training.model)
    exact = Moments(training.numel)
    moments = {name: Moments(training.numel) for name in CODECS}
    averagers = {name: Averager(comms, training.model, c) for name, c in CODECS.items()}
    rows: dict[str, list[list[float]]] = {name: [] for name in CODECS}
    for step in range(steps):
        gradients = training.gradients()
        mean = np.mean(gradients, 0)
        update = exact.update(mean)
        measured = step > steps // 5 and step % 10 == 0
        used = chosen & (exact.v > 0)  # an embedding's row that no batch had counts for nothing
        order = np.argsort(exact.v[used]) if measured else None
        for name, averager in averagers.items():
            average = averager.mean([g.copy() for g in gradients])
            own = moments[name].update(average)
            if order is None:
                continue
            ratios = np.sqrt(moments[name].v[used] / exact.v[used])
            rows[name].append(
                [
                    float(np.linalg.norm((average - mean)[chosen]) / np.linalg.norm(mean[chosen])),
                    float(np.sqrt(moments[name].v[chosen].sum() / exact.v[chosen].sum())),
                    float(own[used] @ update[used] / (update[used] @ update[used])),
                    *(float(np.median(part)) for part in np.array_split(ratios[order], 5)),
                ]
            )
        training.step(update)
    found = []
    for name, each in rows.items():
        error, root_v, along, *fifths = np.mean(each, 0).tolist()
        found.append(Compared(name, seed, error, root_v, fifths, along))
    return found


def table_of_moments(found: list[Compared]) -> Table:
    def mean(of: Sequence[float]) -> str:
        return f"{statistics.mean(of):.2f}"

    rows = []
    for name in CODECS:
        mine = [each for each in found if each.codec == name]
        rows.append(
            [
                name,
                mean([each.error for each in mine]),
                mean([each.root_v for each in mine]),
                *(mean([each.fifths[i] for each in mine]) for i in (0, 2, 4)),
                mean([each.along for each in mine]),
            ]
        )
    columns = ["codec", "error", "sqrt(v)", "smallest", "middle", "largest", "step"]
    notes = [
        "All are ratios to the exact gradients and Adam's state of them, on one training. Error: "
        "L2 norm. sqrt(v): root mean square. Smallest, middle, largest: its median in the fifths "
        "of the elements with the smallest, middle and largest v. Step: length along exact Adam's."
    ]
    return Table("Adam's moments of compressed gradients", columns, rows, notes=notes)


# ---- 2. frozen -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """A held-out loss; `frozen`: whether the second moment was, after the exact steps."""

    gradients: str
    frozen: bool
    seed: int
    loss: float


def train(
    comms: list[Communicator],
    task: Task,
    codec: str,
    frozen: bool,
    seed: int,
    rate: float,
    steps: int,
) -> Trained:
    training = Training(task, seed, rate, steps)
    averager = Averager(comms, training.model, CODECS.get(codec, Config(32)))
    moments = Moments(training.numel)
    for step in range(steps):
        gradients = training.gradients()
        if step < FROZEN_AFTER * steps:
            update = moments.update(np.mean(gradients, 0))
        else:
            update = moments.update(averager.mean(gradients), frozen)
        training.step(update)
    return Trained(codec, frozen, seed, training.loss())


def table_of_trained(found: list[Trained]) -> Table:
    def losses(codec: str, frozen: bool) -> dict[int, float]:
        mine = [each for each in found if (each.gradients, each.frozen) == (codec, frozen)]
        return {each.seed: each.loss for each in mine}

    def cell(codec: str, frozen: bool) -> str:
        exact = losses("exact", False)
        more = [loss - exact[seed] for seed, loss in losses(codec, frozen).items()]
        deviation = statistics.stdev(more) if len(more) > 1 else 0
        return f"{statistics.mean(more):+.3f} ± {deviation:.3f}"

    rows = [[codec, cell(codec, False), cell(codec, True)] for codec in FROZEN]
    exact = losses("exact", False).values()
    notes = [
        "Held-out loss (nats) minus that of exact gradients whose second moment goes on "
        f"({statistics.mean(exact):.3f}): mean and standard deviation of {len(exact)} seeds. "
        f"The first {FROZEN_AFTER:.0%} of the steps are exact everywhere."
    ]
    columns = ["gradients", "v goes on", "v frozen"]
    return Table("Adam with a frozen second moment", columns, rows, notes=notes)


def main() -> None:
    parser = argparse.ArgumentParser(description="Adam's second moment of compressed gradients")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rate", type=float, default=3e-3, help="of learning (default 3e-3)")
    parser.add_argument("--steps", type=int, default=300, help="of a training (default 300)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    comms, task = Communicator.local(RANKS), characters()
    compared, trained = list[Compared](), list[Trained]()
    for seed in options.seeds:
        settings = seed, options.rate, options.steps
        compared += compare(comms, task, *settings)
        for codec, frozen in itertools.product(FROZEN, (False, True)):
            trained.append(train(comms, task, codec, frozen, *settings))
            print(trained[-1], flush=True)
    for comm in comms:
        comm.close()
    tables = [table_of_moments(compared), table_of_trained(trained)]
    for table in tables:
        table.print()
    if options.json:
        rows = [asdict(each) for each in (*compared, *trained)]
        Report("adamw_noise", {"ranks": RANKS, **vars(options), "json": ""}, rows, tables).write(
            options.json
        )


if __name__ == "__main__":
    main()
