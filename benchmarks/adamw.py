"""Compare AdamW with compressed gradients to exact AdamW: held-out losses of small models.

    python benchmarks/adamw.py --json FILE
    python benchmarks/adamw.py --again FILE [FILE ...] --plot FILE --docs PAGE

Models of small_tasks.py train: two perceptrons, a transformer, and with "--tasks code" a larger
one. The methods are those of adamw_training.py.

1. Exact AdamW trains at every rate of --rates, with every seed.
2. The rate with the lowest mean held-out loss is the best rate.
3. Every other method trains at the best rate and, by default, at a third of it.

The file is written after each training. A second run with the same file continues there.
"""

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import documents
import plots
import torch
from adamw_training import BETAS, EXACT, METHODS, RANKS, Trained, train
from small_tasks import characters, code, digits, gpt

from cgx_ops import Communicator
from cgx_ops._core.text_table import Table
from cgx_ops.bench.report import Report

TASKS = {"gpt": gpt, "digits": digits, "characters": characters, "code": code}
BY_DEFAULT = ("gpt", "digits", "characters")  # code takes a minute and a half for each training

Found = list[Trained]


def wanted(found: Found, options: argparse.Namespace) -> Iterator[tuple[str, str, int, float]]:
    """Yield task, method, seed and rate of every training, exact ones first."""
    for task, seed, rate in itertools.product(options.tasks, options.seeds, options.rates):
        yield task, EXACT, seed, rate
    for task, seed, method in itertools.product(options.tasks, options.seeds, options.methods):
        best = best_rate(found, task)
        yield task, method, seed, best
        if options.third:
            yield task, method, seed, best / 3


def of(found: Found, task: str, method: str, rate: float) -> Found:
    """Return the trainings of a method at a rate, by seed."""
    mine = [t for t in found if (t.task, t.method) == (task, method)]
    return sorted((t for t in mine if math.isclose(t.rate, rate)), key=lambda each: each.seed)


def best_rate(found: Found, task: str) -> float:
    """Return the rate at which exact AdamW has the lowest mean loss."""
    rates = {t.rate for t in found if (t.task, t.method) == (task, EXACT)}
    return min(rates, key=lambda r: statistics.fmean(t.loss for t in of(found, task, EXACT, r)))


def compared_rates(found: Found, task: str) -> list[float]:
    """Return the best rate, and a third of it if a method was trained there."""
    best = best_rate(found, task)
    return [rate for rate in (best, best / 3) if any(of(found, task, m, rate) for m in METHODS)]


def differences(found: Found, task: str, method: str, rate: float) -> list[float]:
    """Return by seed how much more a method loses than exact AdamW at the same rate."""
    exact = {t.seed: t.loss for t in of(found, task, EXACT, rate)}
    return [t.loss - exact[t.seed] for t in of(found, task, method, rate) if t.seed in exact]


def spread(values: Sequence[float], form: str = "+.3f") -> str:
    """Return the mean and the standard deviation as text, or how many trainings diverged."""
    wrong = sum(not math.isfinite(value) for value in values)
    if wrong:
        return f"{wrong} of {len(values)} diverge"
    deviation = statistics.stdev(values) if len(values) > 1 else 0
    return f"{statistics.mean(values):{form}} ± {deviation:.3f}" if values else ""


def table_of(found: Found, task: str) -> Table:
    """Return the table of a task: a row for each method."""
    rates, rows, counts = compared_rates(found, task), [], set[int]()
    for method in METHODS:
        trained = [of(found, task, method, rate) for rate in rates]
        if not trained[0]:
            continue
        counts |= {len(each) for each in trained} - {0}
        if method == EXACT:
            cells = [spread([t.loss for t in each], ".3f") for each in trained]
        else:
            cells = [spread(differences(found, task, method, rate)) for rate in rates]
        score = f"{statistics.fmean(t.score for t in trained[0]):.1f}"
        rows.append([method, f"{trained[0][0].bits:.1f}", *cells, score])
    tried = sorted({t.rate for t in found if (t.task, t.method) == (task, EXACT)})
    losses = [spread([t.loss for t in of(found, task, EXACT, r)], ".3f") for r in tried]
    grid = ", ".join(f"{rate:g}: {loss}" for rate, loss in zip(tried, losses, strict=True))
    seeds = " to ".join(map(str, sorted({min(counts), max(counts)}))) if counts else "no"
    notes = [
        f"Held-out loss (nats) after {found[0].steps} steps, mean and deviation of {seeds} "
        "seeds: that of exact AdamW, and how much more the others lose with the same seed and "
        "rate. Bits: sent by a rank in a step for each parameter, warm-up included. "
        f" Score: held-out accuracy at the best rate. Exact AdamW by rate: {grid}."
    ]
    columns = ["method", "bits", *(f"rate {rate:.2g}" for rate in rates), "score %"]
    return Table(f"AdamW: {task}", columns, rows, notes=notes)


def summary_of(found: Found) -> Table:
    """Return one table of all tasks, at their best rates and a third of them."""
    tasks = list(dict.fromkeys(each.task for each in found))
    places = [(task, rate) for task in tasks for rate in compared_rates(found, task)]
    rows = []
    trained = {each.method for each in found}
    for method in (each for each in METHODS if each in trained):
        cells = []
        for task, rate in places:
            mine = of(found, task, method, rate)
            if method == EXACT:
                cells.append(spread([t.loss for t in mine], ".3f"))
            else:
                cells.append(spread(differences(found, task, method, rate)))
        bits = [t.bits for t in found if (t.task, t.method) == (tasks[0], method)]
        rows.append([method, f"{bits[0]:.1f}" if bits else "", *cells])
    seeds = ", ".join(
        f"{len({t.seed for t in found if t.task == task and t.method != EXACT})} of {task}"
        for task in tasks
    )
    notes = [
        "Held-out loss (nats) of exact AdamW, and how much more the others lose with the same seed "
        f"and rate: mean ± standard deviation of the seeds ({seeds}). Bits: sent by a rank in a "
        f"step of {tasks[0]} for each parameter, warm-up included."
    ]
    columns = ["method", "bits", *(f"{task}, {rate:.2g}" for task, rate in places)]
    return Table("AdamW: held-out loss against exact", columns, rows, notes=notes)


def report_of(found: Found) -> Report:
    """Return the report of the trainings so far."""
    tasks = list(dict.fromkeys(each.task for each in found))
    best = {task: best_rate(found, task) for task in tasks}
    settings = {"ranks": RANKS, "best": best, "betas": BETAS}
    tables = [table_of([t for t in found if t.task == task], task) for task in tasks]
    tables.append(summary_of(found))
    return Report("adamw", settings, [asdict(each) for each in found], tables)


def read(paths: Sequence[Path]) -> Found:
    """Return the trainings in reports, without doubles; those of a task have equal lengths."""
    rows = [Trained(**row) for path in paths for row in json.loads(path.read_text())["results"]]
    lengths = {(t.task, t.steps) for t in rows}
    if len(lengths) > len({task for task, _ in lengths}):
        raise SystemExit(f"Trainings of different lengths cannot be compared: {sorted(lengths)}.")
    return list({(t.task, t.method, t.seed, t.rate): t for t in rows}.values())


def main() -> None:
    parser = argparse.ArgumentParser(description="AdamW with compressed gradients, against exact")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*BY_DEFAULT])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rates", nargs="+", type=float, default=[3e-3, 6e-3, 1.2e-2, 2.4e-2])
    parser.add_argument(
        "--third",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also train at a third of the best rate",
    )
    parser.add_argument("--steps", type=int, help="of a training (default: the task's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="results; continued if there")
    parser.add_argument(
        "--again", type=Path, nargs="+", metavar="FILE", help="train nothing; read these reports"
    )
    parser.add_argument("--plot", metavar="FILE", help="also draw the losses")
    parser.add_argument(
        "--docs", type=Path, metavar="PAGE", help="also put the tables between the page's markers"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    exists = options.json and options.json.exists() and not options.again
    found = read(options.again or ([options.json] if exists else []))
    if not options.again:
        comms = Communicator.local(RANKS)
        tasks = {name: TASKS[name]() for name in options.tasks}
        for name, method, seed, rate in wanted(found, options):
            if seed in {t.seed for t in of(found, name, method, rate)}:
                continue
            steps = options.steps or tasks[name].steps
            found.append(train(comms, tasks[name], method, seed, rate, steps))
            print(f"{name}, seed {seed}, {rate:.2g}: {found[-1].loss:.4f} {method}", flush=True)
            if options.json:
                report_of(found).write(options.json)
        for comm in comms:
            comm.close()
    report = report_of(found)
    for table in report.tables:
        table.print()
    if options.json:
        report.write(options.json)
    if options.plot:
        plots.adamw(report).savefig(options.plot, dpi=100)
    if options.docs:
        documents.insert(options.docs, {"adamw": documents.body_of(summary_of(found))})


if __name__ == "__main__":
    main()
