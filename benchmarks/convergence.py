"""Time to the same loss: every method on three examples, on hosts joined by slow links.

    python benchmarks/convergence.py [--seeds 0 1 2] [--json FILE] [--plot FILE] [--docs FILE]

A method's losses do not depend on the link, and the time of its steps does not depend on the loss.
So each is measured where it is cheap:

  1. curves: the examples (examples/methods) train with every method, from several seeds, on ranks
     of this machine; --curves keeps them, and what is there is not trained again
  2. steps: method_steps.py times a step of every method, interleaved, on hosts with slow links
  3. both together: the steps to the target, times the time of each

The target is the loss that exact averages (gloo's) have with the same seed after TARGET of all
steps. It is reached where the straight line between two points of a curve crosses it.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import hosts
from plots import losses
from rich.console import Console

from cgx_ops._core.table import Table
from cgx_ops._core.units import time_text
from cgx_ops.bench.report import Report

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples" / "methods"
TASKS = ("images", "characters", "boxes")
EXACT, TARGET = "gloo", 0.6
WARM, ALONE = "warm-up of ", "compute alone"  # as method_steps.py has it
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES)}

Curves = dict[str, list[dict[str, Any]]]  # of each method, each seed's, as examples write them


@dataclass(frozen=True)
class Cell:
    """A task on so many hosts, with links of a rate ("1gbit")."""

    task: str
    hosts: int
    rate: str


@dataclass(frozen=True)
class Outcome:
    """What became of a method in a cell.

    Attributes:
        method: its name.
        ours: whether cgx_ops averages.
        step: seconds, after its warm-up.
        alone: seconds of a step that averages nothing.
        reached: steps until the target, the median of the seeds; None: most did not reach it.
        seconds: until then; None as `reached`.
        score, spread: percent in the end, mean and standard deviation of the seeds.
        curve: seconds and losses of the first seed.
    """

    method: str
    ours: bool
    step: float
    alone: float
    reached: float | None
    seconds: float | None
    score: float
    spread: float
    curve: list[tuple[float, float]]


def all_methods() -> list[str]:
    """Return the names of what the examples compare."""
    program = [sys.executable, str(EXAMPLES / "methods.py")]
    return subprocess.run(program, capture_output=True, text=True, check=True).stdout.splitlines()


# ---- 1. curves -----------------------------------------------------------------------------------


def train(
    task: str, ranks: int, seed: int, methods: Sequence[str], steps: int | None, folder: Path
) -> list[dict[str, Any]]:
    """Return the curves of one seed; methods that the folder lacks are trained."""
    kept = folder / f"{task}-{ranks}-{steps or 'own'}-{seed}.json"
    found = json.loads(kept.read_text()) if kept.exists() else []
    missing = [method for method in methods if method not in {each["method"] for each in found}]
    if missing:
        mpirun = [str(Path(sys.executable).parent / "mpirun"), "-n", str(ranks)]
        mpirun += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        with tempfile.TemporaryDirectory() as out:
            words = [sys.executable, str(EXAMPLES / f"{task}.py"), "--methods", *missing]
            words += [
                "--seed",
                str(seed),
                "--out",
                out,
                *(["--steps", str(steps)] if steps else []),
            ]
            subprocess.run(
                [*mpirun, "--oversubscribe", "--bind-to", "none", *words],
                env={**os.environ, **_ENVIRONMENT},
                stdout=subprocess.DEVNULL,
                check=True,
                timeout=3600,
            )
            found += json.loads((Path(out) / f"{task}.json").read_text())
        folder.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(found))
    return [each for each in found if each["method"] in methods]


def crossing(curve: dict[str, Any], target: float) -> float | None:
    """Return the steps until a curve has the target for the first time; None: it never has."""
    points = list(zip(curve["steps"], curve["losses"], strict=True))
    if points[0][1] <= target:
        return points[0][0]
    for (step, loss), (later, lower) in itertools.pairwise(points):
        if lower <= target:
            return step + (later - step) * (loss - target) / (loss - lower)
    return None


# ---- 2. steps ------------------------------------------------------------------------------------


def time_steps(cell: Cell, methods: Sequence[str], budget: float) -> dict[str, float]:
    """Return the seconds of a step of each method, and of one of its warm-up."""
    with tempfile.TemporaryDirectory() as folder, hosts.Hosts(cell.hosts, rate=cell.rate) as made:
        path = Path(folder, "steps.json")
        words = [sys.executable, str(ROOT / "benchmarks" / "method_steps.py"), cell.task]
        words += ["--methods", *methods, "--budget", f"{budget:g}", "--json", str(path)]
        made.mpirun(1, words, env=_ENVIRONMENT, timeout=600 + 3 * budget)
        return {each["method"]: each["median"] for each in Report.read(path).results}


# ---- 3. both together ----------------------------------------------------------------------------


def outcomes(curves: Curves, seconds: dict[str, float]) -> list[Outcome]:
    """Return what became of each method, given the seconds of a step."""
    targets = [curve["losses"][round(TARGET * len(curve["losses"])) - 1] for curve in curves[EXACT]]
    found = []
    for method, mine in curves.items():

        def time(steps: float, method: str = method, warmup: int = mine[0]["warmup"]) -> float:
            warm = min(steps, warmup)
            return warm * seconds.get(WARM + method, 0) + (steps - warm) * seconds[method]

        crossings = [crossing(*each) for each in zip(mine, targets, strict=True)]
        reached = sorted(steps for steps in crossings if steps is not None)
        missed = [float("inf")] * (len(crossings) - len(reached))
        middle = statistics.median_high([*reached, *missed])
        steps = None if middle == float("inf") else middle
        scores = [curve["score"] for curve in mine]
        points = zip(mine[0]["steps"], mine[0]["losses"], strict=True)
        found.append(
            Outcome(
                method,
                mine[0]["ours"],
                seconds[method],
                seconds[ALONE],
                steps,
                None if steps is None else time(steps),
                statistics.mean(scores),
                statistics.stdev(scores) if len(scores) > 1 else 0,
                [(time(step), loss) for step, loss in points],
            )
        )
    return found


def time_table(task: str, count: int, cells: dict[str, list[Outcome]]) -> Table:
    """Return the table of a task on so many hosts, whose outcomes are given by rate."""
    exact = {rate: found[0].seconds for rate, found in cells.items()}
    first = next(iter(cells.values()))
    rows = []
    for index, outcome in enumerate(first):
        row = [outcome.method, "" if outcome.reached is None else f"{outcome.reached:.0f}"]
        for rate, found in cells.items():
            own, theirs = found[index].seconds, exact[rate]
            row.append(time_text(found[index].step))
            row.append("not reached" if own is None else time_text(own))
            row.append(f"{theirs / own:.2f}" if own and theirs else "")
        difference = f"{outcome.score - first[0].score:+.2f}"
        rows.append([*row, f"{outcome.score:.2f}", f"{outcome.spread:.2f}", difference])
    columns = ["method", "steps"]
    for rate in cells:
        columns += [f"a step, {rate}", "to the loss", "speed-up"]
    alone = ", ".join(f"{time_text(each[0].alone)} at {rate}" for rate, each in cells.items())
    ours = next((index for index, outcome in enumerate(first) if outcome.ours), len(first))
    return Table(
        f"{task}, {count} hosts: time to the same loss",
        [*columns, "score %", "+-", "to exact"],
        rows,
        sections=[ours],
        notes=[
            f"Steps, times: until the loss that gloo has after {TARGET:.0%} of all steps. "
            "Speed-up: over gloo. Score: in the end, mean and standard deviation of the seeds. "
            f"A step that averages nothing takes {alone}."
        ],
    )


def winners_table(found: dict[Cell, list[Outcome]]) -> Table:
    """Return the best of ours and of the others in each cell."""
    rows = []
    for cell, outcomes_of in found.items():
        row = [cell.task, str(cell.hosts), cell.rate]
        best: list[float] = []
        for ours in (False, True):
            several = [o for o in outcomes_of if o.ours == ours and o.seconds]
            if not several:
                row += ["none", ""]
                continue
            winner = min(several, key=lambda o: o.seconds or 0)
            best.append(winner.seconds or 0)
            row += [winner.method, time_text(best[-1])]
        rows.append([*row, f"{best[0] / best[1]:.2f}" if len(best) == 2 else ""])
    columns = ["task", "hosts", "link", "others' best", "time", "ours", "time", "ratio"]
    return Table("The fastest in each cell", columns, rows, text_columns=4)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to the same loss on slow links")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--methods", nargs="+", help="default: all")
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=["1gbit", "100mbit"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="of a training; default: the example's own")
    parser.add_argument("--budget", type=float, default=60, help="seconds of steps (default 60)")
    parser.add_argument("--curves", type=Path, metavar="FOLDER", help="keeps what was trained")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    parser.add_argument("--plot", metavar="FILE", help="also draw losses against time")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="also write the tables there")
    options = parser.parse_args()
    methods = list(dict.fromkeys([EXACT, *(options.methods or all_methods())]))
    console = Console(highlight=False, markup=False)
    found: dict[Cell, list[Outcome]] = {}
    tables: list[Table] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.curves or Path(scratch)
        for task, count in itertools.product(options.tasks, options.hosts):
            curves: Curves = {}
            for seed in options.seeds:
                console.print(f"{task}, {count} ranks, seed {seed}")
                for curve in train(task, count, seed, methods, options.steps, folder):
                    curves.setdefault(curve["method"], []).append(curve)
            curves = {method: curves[method] for method in methods}  # the exact one first
            by_rate = {}
            for rate in options.rates:
                console.print(f"{task}, {count} hosts, {rate}")
                cell = Cell(task, count, rate)
                found[cell] = by_rate[rate] = outcomes(
                    curves, time_steps(cell, [*curves], options.budget)
                )
            tables.append(time_table(task, count, by_rate))
    tables.insert(0, winners_table(found))
    for table in tables:
        table.print()
    results = [asdict(c) | asdict(o) for c, each in found.items() for o in each]
    report = Report("convergence", {"seeds": options.seeds}, results, tables)
    if options.json:
        report.write(options.json)
    if options.plot:
        losses(report).savefig(options.plot, dpi=100)
    if options.docs:
        head = "# Methods, measured\n\nWritten by `python benchmarks/convergence.py --docs`."
        options.docs.write_text("\n\n".join([head, *(each.markdown() for each in tables)]) + "\n")


if __name__ == "__main__":
    main()
