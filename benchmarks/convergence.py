"""Time to the same loss: every method on three models, on hosts with slow links.

    python benchmarks/convergence.py [--seeds 0 1 2] [--json FILE] [--plot FILE] [--docs PAGE]
    python benchmarks/convergence.py --again FILE --docs docs/explanation/methods.md

The losses of a method do not depend on the link, and the time of a step does not depend on the
loss. So both are measured separately:

1. curves: the examples (examples/methods) train with every method and several seeds, on ranks of
   this machine. --curves FOLDER stores the curves, and a second run reuses them.
2. steps: method_steps.py times a step of every method, interleaved, on hosts with slow links.
3. outcomes: the number of steps to the target loss, times the seconds of a step.

The target is the loss that exact averages (gloo's) have with the same seed after TARGET of all
steps. Between two points a curve is a straight line.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import documents
import hosts
from plots import losses
from rich.console import Console

from cgx_ops._core.text_table import Table
from cgx_ops._core.units import time_text
from cgx_ops.bench.report import Report

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples" / "methods"
TASKS = ("images", "characters", "boxes")
EXACT, DEFAULT, TARGET = "gloo", "4 bits", 0.6
# The methods of the page; the report has all of them.
ON_PAGE = (
    EXACT, "gloo, fp16", "gloo, PowerSGD", "8 bits", DEFAULT, "levels, 2 bits", "levels, 1 bit",
    "ternary", "topk 1 %", "PowerSGD", "1-bit Adam", "SigNUM", "SparseLoCo",
)  # fmt: skip
WARM, ALONE = "warm-up of ", "compute alone"  # as method_steps.py has it
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES)}

Curves = dict[str, list[dict[str, Any]]]  # by method, a curve for each seed


@dataclass(frozen=True)
class Cell:
    """A task, the number of hosts, and the rate of their links ("1gbit")."""

    task: str
    hosts: int
    rate: str


@dataclass(frozen=True)
class Outcome:
    """The result of a method in a cell.

    Attributes:
        method: its name.
        ours: whether cgx_ops averages.
        step: seconds of a step, after the warm-up.
        alone: seconds of a step that averages nothing.
        reached: steps to the target, median of the seeds; None if most seeds did not reach it.
        seconds: time to the target; None as `reached`.
        score, spread: final score in percent, mean and standard deviation of the seeds.
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
    """Return the names of all methods in examples/methods."""
    program = [sys.executable, str(EXAMPLES / "methods.py")]
    return subprocess.run(program, capture_output=True, text=True, check=True).stdout.splitlines()


# ---- 1. curves -----------------------------------------------------------------------------------


def train(
    task: str, ranks: int, seed: int, methods: Sequence[str], steps: int | None, folder: Path
) -> list[dict[str, Any]]:
    """Return the curves of one seed; train the methods that the folder lacks."""
    stored = folder / f"{task}-{ranks}-{steps or 'own'}-{seed}.json"
    found = json.loads(stored.read_text()) if stored.exists() else []
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
        stored.write_text(json.dumps(found))
    return [each for each in found if each["method"] in methods]


def crossing(curve: dict[str, Any], target: float) -> float | None:
    """Return the steps until a curve first reaches the target; None if it does not."""
    points = list(zip(curve["steps"], curve["losses"], strict=True))
    if points[0][1] <= target:
        return points[0][0]
    for (step, loss), (later, lower) in itertools.pairwise(points):
        if lower <= target:
            return step + (later - step) * (loss - target) / (loss - lower)
    return None


# ---- 2. steps ------------------------------------------------------------------------------------


def time_steps(cell: Cell, methods: Sequence[str], budget: float) -> dict[str, float]:
    """Return the seconds of a step of each method, and of a step of its warm-up."""
    with tempfile.TemporaryDirectory() as folder, hosts.Hosts(cell.hosts, rate=cell.rate) as made:
        path = Path(folder, "steps.json")
        words = [sys.executable, str(ROOT / "benchmarks" / "method_steps.py"), cell.task]
        words += ["--methods", *methods, "--budget", f"{budget:g}", "--json", str(path)]
        made.mpirun(1, words, env=_ENVIRONMENT, timeout=600 + 3 * budget)
        return {each["method"]: each["median"] for each in Report.read(path).results}


# ---- 3. both together ----------------------------------------------------------------------------


def outcomes(curves: Curves, seconds: dict[str, float]) -> list[Outcome]:
    """Return the result of each method, given the seconds of a step."""
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
    """Return the table of a task on `count` hosts; `cells` has the outcomes by rate."""
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
            f"Steps and times are those to the loss that gloo has after {TARGET:.0%} of all steps. "
            "Speed-up: over gloo. Score: final, mean and standard deviation of the seeds. "
            f"A step that averages nothing takes {alone}."
        ],
    )


def winners_table(found: dict[Cell, list[Outcome]]) -> Table:
    """Return the fastest of the others, DEFAULT and the fastest of ours in each cell."""

    def fastest(several: Iterable[Outcome]) -> Outcome | None:
        reached = [o for o in several if o.seconds]
        return min(reached, key=lambda o: o.seconds or 0, default=None)

    def cells(own: Outcome | None, theirs: Outcome | None) -> list[str]:
        if own is None or not own.seconds:
            return ["-", ""]
        ratio = f"{theirs.seconds / own.seconds:.2f}" if theirs and theirs.seconds else ""
        return [time_text(own.seconds), ratio]

    rows = []
    for cell, each in found.items():
        theirs = fastest(o for o in each if not o.ours)
        ours = fastest(o for o in each if o.ours)
        rows.append(
            [
                *(cell.task, str(cell.hosts), cell.rate),
                *(theirs.method if theirs else "none", cells(theirs, None)[0]),
                *cells(fastest(o for o in each if o.method == DEFAULT), theirs),
                *(ours.method if ours else "none", *cells(ours, theirs)),
            ]
        )
    columns = ["task", "hosts", "link", "others' best", "time", DEFAULT, "ratio"]
    columns += ["ours, best", "time", "ratio"]
    return Table("The fastest in each cell", columns, rows, text_columns=4)


def _by_place(found: dict[Cell, list[Outcome]]) -> dict[Cell, dict[str, Outcome]]:
    """Return the outcomes of the methods of the page, by name."""
    return {
        cell: {o.method: o for o in each if o.method in ON_PAGE} for cell, each in found.items()
    }


def speedups_table(found: dict[Cell, list[Outcome]]) -> Table:
    """Return the speed-ups over gloo to the target loss, on the smallest number of hosts."""
    count = min(cell.hosts for cell in found)
    cells = {c: each for c, each in _by_place(found).items() if c.hosts == count}

    def speedup(outcomes_of: dict[str, Outcome], method: str) -> str:
        own, theirs = outcomes_of[method].seconds, outcomes_of[EXACT].seconds
        return f"{theirs / own:.2f}" if own and theirs else "-"

    methods = next(iter(cells.values()))
    rows = [[m, *(speedup(each, m) for each in cells.values())] for m in methods]
    columns, task = ["method"], ""
    for cell in cells:
        columns.append(cell.rate if cell.task == task else f"{cell.task}, {cell.rate}")
        task = cell.task
    return Table(
        f"Speed-up over gloo to the same loss, {count} hosts",
        columns,
        rows,
        notes=["A dash: most seeds did not reach the loss."],
    )


def scores_table(found: dict[Cell, list[Outcome]]) -> Table:
    """Return the final scores minus those of gloo, by task and number of hosts."""
    cells = {(c.task, c.hosts): each for c, each in _by_place(found).items()}

    def score(outcomes_of: dict[str, Outcome], method: str) -> str:
        own, exact = outcomes_of[method], outcomes_of[EXACT]
        if method == EXACT:
            return f"{own.score:.1f} ± {own.spread:.1f}"
        return f"{own.score - exact.score:+.1f}"

    methods = next(iter(cells.values()))
    return Table(
        "Final scores",
        ["method", *(f"{task}, {hosts}" for task, hosts in cells)],
        [[m, *(score(each, m) for each in cells.values())] for m in methods],
        notes=[
            "Percentage points above (+) or below (-) gloo; the row of gloo has its score with "
            "the standard deviation of the seeds. The number after the task is that of the hosts."
        ],
    )


def read(path: Path) -> dict[Cell, list[Outcome]]:
    """Return the outcomes of a report, without methods that no longer exist."""
    found: dict[Cell, list[Outcome]] = {}
    methods = set(all_methods())
    for each in Report.read(path).results:
        if each["method"] in methods:
            cell = Cell(each.pop("task"), each.pop("hosts"), each.pop("rate"))
            found.setdefault(cell, []).append(Outcome(**each))
    return found


def measure(options: argparse.Namespace) -> dict[Cell, list[Outcome]]:
    """Train and time all methods in all cells."""
    methods = list(dict.fromkeys([EXACT, *(options.methods or all_methods())]))
    console = Console(highlight=False, markup=False)
    found: dict[Cell, list[Outcome]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.curves or Path(scratch)
        for task, count in itertools.product(options.tasks, options.hosts):
            curves: Curves = {}
            for seed in options.seeds:
                console.print(f"{task}, {count} ranks, seed {seed}")
                for curve in train(task, count, seed, methods, options.steps, folder):
                    curves.setdefault(curve["method"], []).append(curve)
            curves = {method: curves[method] for method in methods}  # the exact one first
            for rate in options.rates:
                console.print(f"{task}, {count} hosts, {rate}")
                cell = Cell(task, count, rate)
                found[cell] = outcomes(curves, time_steps(cell, [*curves], options.budget))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to the same loss on slow links")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--methods", nargs="+", help="default: all")
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=["1gbit", "100mbit"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="steps of a training (default: the example's)")
    parser.add_argument("--budget", type=float, default=60, help="seconds of timing (default 60)")
    parser.add_argument("--curves", type=Path, metavar="FOLDER", help="store and reuse the curves")
    parser.add_argument(
        "--again", type=Path, metavar="FILE", help="measure nothing; read a report of --json"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    parser.add_argument("--plot", metavar="FILE", help="also draw losses against time")
    parser.add_argument(
        "--docs", type=Path, metavar="PAGE", help="also put the tables between the page's markers"
    )
    options = parser.parse_args()
    found = read(options.again) if options.again else measure(options)
    fastest, speedups, scores = winners_table(found), speedups_table(found), scores_table(found)
    places = dict.fromkeys((cell.task, cell.hosts) for cell in found)
    tables = [fastest]
    for task, count in places:
        cells = {c.rate: o for c, o in found.items() if (c.task, c.hosts) == (task, count)}
        tables.append(time_table(task, count, cells))
    for table in (*tables, speedups, scores):
        table.print()
    results = [asdict(c) | asdict(o) for c, each in found.items() for o in each]
    report = Report("convergence", {"seeds": options.seeds}, results, tables)
    if options.json:
        report.write(options.json)
    if options.plot:
        losses(report).savefig(options.plot, dpi=100)
    if options.docs:
        blocks = {"fastest": fastest, "speed-ups": speedups, "scores": scores}
        bodies = {name: documents.body_of(table) for name, table in blocks.items()}
        documents.insert(options.docs, bodies)


if __name__ == "__main__":
    main()
