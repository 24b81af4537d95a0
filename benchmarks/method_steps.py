"""A training step of every method of examples/methods, interleaved, on the ranks of mpirun.

    PYTHONPATH=examples/methods python benchmarks/hosts.py --rate 1gbit -- \
      python benchmarks/method_steps.py images [--json FILE]

convergence.py runs this on its links. A method whose first steps are others than the rest is
measured twice: WARM + its name is the first of all its steps, over and over.
"""

import argparse
import itertools
from dataclasses import asdict, dataclass

import torch.distributed as dist
from boxes import boxes
from characters import characters
from images import images
from methods import METHODS, Run
from mpi4py import MPI
from steps import publish, where
from training import Training, start

from cgx_ops.bench.allreduce import parse_rate
from cgx_ops.bench.measure import Summary, Timed, measure
from cgx_ops.bench.peers import MpiRanks
from cgx_ops.bench.report import Report, Table, time_text

TASKS = {"images": images, "characters": characters, "boxes": boxes}
WARM = "warm-up of "
_PRIMING = 4  # steps until DDP's buckets stand and PowerSGD has begun
_ENDLESS = 1 << 20


@dataclass(frozen=True)
class Step:
    """How long a method's step takes: median and quartiles, in seconds of the slowest rank."""

    method: str
    median: float
    lower: float
    upper: float
    rounds: int


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
    timed = {}
    for method, warm in itertools.product(options.methods, (False, True)):
        if warm and not METHODS[method].warms:
            continue
        training = Training(method, Run(task, group, 0, _ENDLESS if warm else 0), task.steps)
        for _ in range(_PRIMING):
            training.step()
        timed[WARM * warm + method] = Timed(training.step)
    ranks = MpiRanks(MPI.COMM_WORLD)
    samples = measure(timed, ranks, rounds=options.rounds, budget=options.budget)
    found = [Step(name, **asdict(Summary.of(seconds))) for name, seconds in samples.items()]
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
