"""Measure why compressed gradients train worse under AdamW: the second moment collects their noise.

    python benchmarks/adamw_noise.py --json FILE [--plot FILE]

Both parts train the transformer of small_tasks.py, on two ranks, which are threads of this process:

1. moments: exact AdamW trains. At every step each codec averages the same gradients, and Adam's
   moments of these averages are compared with the exact ones. The codecs do not change the
   training.
2. frozen: Adam trains with exact gradients for a fifth of the steps, and with compressed ones from
   then on. The second moment either goes on or is frozen, as 1-bit Adam does. With a frozen one the
   step is linear in the gradients, so that error feedback can correct it later.
"""

import argparse
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import documents
import numpy as np
import numpy.typing as npt
import plots
import torch
from adamw_training import EXACT, FROZEN_AFTER, METHODS, RANKS, Averager, Moments, Training
from small_tasks import Task, gpt

from cgx_ops import Communicator
from cgx_ops._core.text_table import Table
from cgx_ops.bench.report import Report

CODECS = {
    name: method.config
    for name, method in METHODS.items()
    if method.sends == "gradients" and name != EXACT
}
FROZEN = (EXACT, "2 bits rotated levels", "2 bits rotated levels, feedback")


def matrices(model: torch.nn.Module) -> npt.NDArray[np.bool_]:
    """Return a mask of the elements that are compressed."""
    return np.concatenate([np.full(p.numel(), p.dim() > 1) for p in model.parameters()])


# ---- 1. moments ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """The averages and moments of a codec against the exact ones, means over the measured steps.

    Attributes:
        codec, seed: of the measurement.
        error: |average - exact| / |exact|, L2 norms.
        root_v: root mean square of sqrt(v), over that of the exact gradients.
        fifths: median of sqrt(v) over the exact one, in five groups of elements of equal size,
            ordered by the exact v.
        along: length of Adam's step along the exact one: <step, exact> / |exact|^2.
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
        used = chosen & (exact.v > 0)  # rows of the embedding that no batch had are left out
        order = np.argsort(exact.v[used]) if measured else None
        for name, averager in averagers.items():
            average = averager.mean(gradients)
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
    for name in dict.fromkeys(each.codec for each in found):
        mine = [each for each in found if each.codec == name]
        rows.append(
            [
                name,
                mean([each.error for each in mine]),
                mean([each.root_v for each in mine]),
                mean([each.along for each in mine]),
            ]
        )
    columns = ["gradients", "error", "sqrt(v)", "step"]
    notes = [
        "Ratios to exact AdamW on the same gradients. Error: L2 norm of the error of the averaged "
        "gradient. sqrt(v): root mean square. Step: length of Adam's step along the exact one."
    ]
    return Table("Adam's moments of compressed gradients", columns, rows, notes=notes)


# ---- 2. frozen -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """A held-out loss; `frozen`: whether the second moment is, after the exact steps."""

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
    averager = Averager(comms, training.model, METHODS[codec].config)
    moments = Moments(training.numel)
    for step in range(steps):
        gradients = training.gradients()
        if step < FROZEN_AFTER * steps:
            update = moments.update(np.mean(gradients, 0))
        else:
            update = moments.update(averager.mean(gradients), frozen)
        training.step(update)
    return Trained(codec, frozen, seed, training.result()[0])


def table_of_trained(found: list[Trained]) -> Table:
    def losses(codec: str, frozen: bool) -> dict[int, float]:
        mine = [each for each in found if (each.gradients, each.frozen) == (codec, frozen)]
        return {each.seed: each.loss for each in mine}

    def cell(codec: str, frozen: bool) -> str:
        exact = losses(EXACT, False)
        more = [loss - exact[seed] for seed, loss in losses(codec, frozen).items()]
        deviation = f" ± {statistics.stdev(more):.3f}" if len(more) > 1 else ""
        return f"{statistics.mean(more):+.3f}{deviation}"

    rows = [[codec, cell(codec, False), cell(codec, True)] for codec in FROZEN]
    exact = losses(EXACT, False).values()
    seeds = f"mean and standard deviation of {len(exact)} seeds" if len(exact) > 1 else "one seed"
    notes = [
        "Held-out loss (nats) minus that of exact gradients with a v that goes on "
        f"({statistics.mean(exact):.3f}); {seeds}. The first {FROZEN_AFTER:.0%} of the steps are "
        "exact in all trainings."
    ]
    columns = ["gradients", "v goes on", "v frozen"]
    return Table("Adam with a frozen second moment", columns, rows, notes=notes)


def measure(options: argparse.Namespace) -> Report:
    """Make both measurements; the report is written after each seed."""
    comms, task = Communicator.local(RANKS), gpt()
    compared, trained = list[Compared](), list[Trained]()
    settings = {"ranks": RANKS, "rate": options.rate, "steps": options.steps}
    report = Report("adamw_noise", settings, [], [])
    for seed in options.seeds:
        of_run = seed, options.rate, options.steps
        compared += compare(comms, task, *of_run)
        for codec, frozen in itertools.product(FROZEN, (False, True)):
            trained.append(train(comms, task, codec, frozen, *of_run))
            print(trained[-1], flush=True)
        rows = [asdict(each) for each in (*compared, *trained)]
        tables = [table_of_moments(compared), table_of_trained(trained)]
        report = Report("adamw_noise", settings, rows, tables)
        if options.json:
            report.write(options.json)
    for comm in comms:
        comm.close()
    return report


def read(path: Path) -> Report:
    """Read a report of --json, and make its tables again."""
    report = Report.read(path)
    compared = [Compared(**each) for each in report.results if "codec" in each]
    trained = [Trained(**each) for each in report.results if "gradients" in each]
    return replace(report, tables=[table_of_moments(compared), table_of_trained(trained)])


def main() -> None:
    parser = argparse.ArgumentParser(description="Adam's second moment of compressed gradients")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rate", type=float, default=8e-3, help="of learning (default 8e-3)")
    parser.add_argument("--steps", type=int, default=200, help="of a training (default 200)")
    parser.add_argument(
        "--again", type=Path, metavar="FILE", help="measure nothing; read a report of --json"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument("--plot", metavar="FILE", help="also draw the second moments")
    parser.add_argument(
        "--docs", type=Path, metavar="PAGE", help="also put the moments between the page's markers"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = read(options.again) if options.again else measure(options)
    for table in report.tables:
        table.print()
    if options.plot:
        plots.adamw_noise(report).savefig(options.plot, dpi=100)
    if options.docs:
        documents.insert(options.docs, {"moments": documents.body_of(report.tables[0])})


if __name__ == "__main__":
    main()
