"""Time a training step of every method of examples/methods, interleaved, on the ranks of mpirun.

    PYTHONPATH=examples/methods python benchmarks/hosts.py --rate 1gbit -- \
      python benchmarks/method_steps.py images [--json FILE]

convergence.py runs this on its links. A method with a warm-up is measured twice: WARM + its name is
its first step, repeated. For a method that averages every N steps, N steps are one sample. ALONE is
a step without averaging.
"""

import argparse
import functools
import itertools
from dataclasses import asdict, dataclass

import torch.distributed as dist
from boxes import boxes
from characters import characters
from images import images
from methods import METHODS, SYNC_EVERY, Alone, Method, Prepared, Run
from mpi4py import MPI
from steps import publish, where
from torch import nn
from training import Training, start

from cgx_ops._core.text_table import Table
from cgx_ops._core.units import parse_rate, time_text
from cgx_ops.bench.measure import Summary, Timed, measure
from cgx_ops.bench.peers import MpiRanks
from cgx_ops.bench.report import Report

TASKS = {"images": images, "characters": characters, "boxes": boxes}
WARM = "warm-up of "
ALONE = "compute alone"
_PRIMING = 4  # steps until DDP's buckets stand and PowerSGD has begun
_ENDLESS = 1 << 20


@dataclass(frozen=True)
class Step:
    """Seconds of a method's step on the slowest rank: median and quartiles.

    For a method that averages every N steps it is the mean of N steps.
    """

    method: str
    median: float
    lower: float
    upper: float
    rounds: int


def _no_average(model: nn.Module, run: Run) -> Prepared:
    return Alone(model), run.optimizer(model)


METHODS[ALONE] = Method(_no_average, every=SYNC_EVERY)


def run(training: Training, steps: int) -> None:
    for _ in range(steps):
        training.step()


def main() -> None:
    parser = argparse.ArgumentParser(description="A training step of every method")
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--rounds", type=int, default=9, help="at most (default 9)")
    parser.add_argument("--budget", type=float, default=60, help="seconds (default 60)")
    parser.add_argument("--link-rate", type=parse_rate, help="of each host, as in 1gbit")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    options = parser.parse_args()
    task, group = TASKS[options.task](), start()
    timed, steps = {}, {}
    for method, warm in itertools.product(dict.fromkeys([ALONE, *options.methods]), (False, True)):
        if warm and not METHODS[method].warms:
            continue
        training = Training(method, Run(task, group, 0, _ENDLESS if warm else 0), task.steps)
        every = METHODS[method].every
        run(training, max(_PRIMING, every))
        timed[WARM * warm + method] = Timed(functools.partial(run, training, every))
        steps[WARM * warm + method] = every
    ranks = MpiRanks(MPI.COMM_WORLD)
    samples = measure(timed, ranks, rounds=options.rounds, budget=options.budget)
    found = [
        Step(name, **asdict(Summary.of([each / steps[name] for each in seconds])))
        for name, seconds in samples.items()
    ]
    rows = [
        [each.method, time_text(each.median), f"{time_text(each.lower)} - {time_text(each.upper)}"]
        for each in found
    ]
    settings = {**where(), "task": task.name, "link_rate": options.link_rate}
    title = f"A step of {task.name}, {settings['ranks']} ranks on {settings['hosts']} hosts"
    table = Table(title, ["method", "step", "quartiles"], rows)
    publish(Report("method steps", settings, [asdict(s) for s in found], [table]), options.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
