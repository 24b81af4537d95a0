"""Bytes that adaptive bits save at the error of uniform bits, and their cost in accuracy.

    PYTHONPATH=examples/methods mpirun -n 2 python benchmarks/adaptive_bits.py [--steps 400]

The three models of examples/methods train with uniform bits and with each budget of
planner.AdaptiveBits, with several seeds. All methods of a task and seed take turns. Bytes are those
of the last turn, when the bits have settled. Losses and scores are on held-out examples. With
--rate, the compressor is "entropy", and rates adapt: the bytes stay, and the error is less.
"""

import argparse
import statistics
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from boxes import boxes
from characters import characters
from images import images
from methods import METHODS, Method, Prepared, Run, parallel
from torch import nn
from training import Training, bytes_sent, start

from cgx_ops import Config
from cgx_ops._core.text_table import Table
from cgx_ops.bench.report import Report
from cgx_ops.planner import AdaptiveBits
from cgx_ops.torch import ddp

TASKS = {"images": images, "characters": characters, "boxes": boxes}
_UNIFORM = "uniform"
_BUDGETS: tuple[Literal["squared", "norm", "clusters"], ...] = ("squared", "norm", "clusters")
_TURNS = 10


@dataclass
class Found:
    """The result of one training, and the bytes per step of its last turn."""

    task: str
    method: str
    seed: int
    steps: int
    bits: float
    changes: int
    bytes_per_step: float
    loss: float
    score: float
    identical: bool


def main() -> None:
    parser = argparse.ArgumentParser(description="Bits that follow gradients, against uniform ones")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--bits", type=int, default=4, help="uniform (default 4)")
    parser.add_argument("--rate", type=float, help='of "entropy", instead of --bits')
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each (default 3)")
    parser.add_argument("--steps", type=int, default=400, help="of each training (default 400)")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    options = parser.parse_args()
    group, found = start(), list[Found]()
    for name in options.tasks:
        for seed in range(options.seeds):
            found += _trained(name, Run(TASKS[name](), group, seed, 0), options)
    if dist.get_rank() == 0:
        table = _table(found, options)
        table.print()
        if options.json:
            settings = {"ranks": dist.get_world_size(), **vars(options)}
            Report("adaptive_bits", settings, [vars(one) for one in found], [table]).write(
                options.json
            )
    dist.destroy_process_group()


def _trained(name: str, run: Run, options: argparse.Namespace) -> list[Found]:
    """Train a task with one seed and all methods, a few steps of each in turn."""
    states: dict[str, ddp.QuantizedAllreduceState] = {}
    methods = _methods(options)
    for method in methods:
        METHODS[method] = _method(method, options, states)
    trainings = {method: Training(method, run, options.steps) for method in methods}
    steps, sent = options.steps // _TURNS, dict.fromkeys(trainings, 0)
    for _ in range(_TURNS):
        for method, training in trainings.items():
            before = bytes_sent()
            training.turn(steps)
            sent[method] = bytes_sent() - before
    found = []
    for method, training in trainings.items():
        curve, adaptive = training.end(), states[method].adaptive
        bits = float(options.rate or options.bits) if adaptive is None else adaptive.mean_bits
        found.append(
            Found(
                name, method, run.seed, options.steps, bits, adaptive.changes if adaptive else 0,
                sent[method] / steps, curve.losses[-1], curve.score, curve.identical,
            )
        )  # fmt: skip
    return found


def _methods(options: argparse.Namespace) -> list[str]:
    budgets = _BUDGETS if options.rate is None else _BUDGETS[:2]  # "clusters" are for bits
    return [_UNIFORM, *budgets]


def _method(
    name: str, options: argparse.Namespace, states: dict[str, ddp.QuantizedAllreduceState]
) -> Method:
    def prepare(model: nn.Module, run: Run) -> Prepared:
        wrapped = parallel(model)
        every = 10 * max(1, options.steps // (10 * _TURNS))
        adaptive = (
            None if name == _UNIFORM else AdaptiveBits(every=every, samples=10, budget=name)  # pyright: ignore[reportArgumentType]
        )
        config = (
            Config(options.bits)
            if options.rate is None
            else Config(compressor="entropy", rate=options.rate)
        )
        state = ddp.QuantizedAllreduceState(config=config, seed=run.seed, adaptive=adaptive)
        wrapped.register_comm_hook(state, ddp.quantized_allreduce_hook)
        states[name] = state
        return wrapped, run.optimizer(wrapped)

    return Method(prepare)


def _table(found: list[Found], options: argparse.Namespace) -> Table:
    rows, sections = [], []
    for task in options.tasks:
        sections.append(len(rows))
        uniform = [one for one in found if (one.task, one.method) == (task, _UNIFORM)]
        for method in _methods(options):
            ones = [one for one in found if (one.task, one.method) == (task, method)]
            sent = statistics.mean(one.bytes_per_step for one in ones)
            saved = 1 - sent / statistics.mean(one.bytes_per_step for one in uniform)
            rows.append(
                [
                    task, method, f"{statistics.mean(one.bits for one in ones):.2f}",
                    f"{sent:,.0f}", f"{saved:.1%}",
                    _spread([one.loss for one in ones]), _spread([one.score for one in ones]),
                    "identical" if all(one.identical for one in ones) else "DIFFER",
                ]
            )  # fmt: skip
    title = f"Adaptive bits against uniform {options.rate or options.bits}: {options.steps} steps, "
    title += f"{options.seeds} seeds, {dist.get_world_size()} ranks"
    columns = ["task", "bits", "bits a value", "bytes/step", "saved", "loss", "score", "weights"]
    notes = ["Loss, score: mean over seeds, ± half the range."]
    return Table(title, columns, rows, 2, sections[1:], notes)


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f} ±{(max(values) - min(values)) / 2:.3f}"


if __name__ == "__main__":
    main()
