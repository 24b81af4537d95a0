"""Compare the planner's predictions and groups with measured steps.

    python benchmarks/hosts.py --hosts 2 --rate 1gbit -- python benchmarks/planned_steps.py

Gradients of ResNet-50's sizes become ready one after the other, the last layer's first, while the
processor rests: only what the planner decides is timed. Phases:

    measure   the costs of messages among these ranks (cgx_ops.planner.measure)
    groups    the usual ones and the planned one; the model's time for each
    steps     all groupings in turn, round after round: each message starts when it is ready
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

import cgx_ops
from cgx_ops import Communicator, Config
from cgx_ops._core.arrays import Array
from cgx_ops._core.codec import encoded_bytes
from cgx_ops._core.text_table import Table
from cgx_ops._core.units import time_text
from cgx_ops.bench.report import Report
from cgx_ops.planner import Costs, Plan, baselines, finish, measure, timeline
from cgx_ops.planner.plot import draw

_EXACT = Config(bits=32)
_STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # of ResNet-50: channels, blocks


def resnet50() -> dict[str, int]:
    """Return the number of values of each parameter, in the model's order."""
    return dict(_resnet50())


def _resnet50() -> Iterator[tuple[str, int]]:
    def convolution(name: str, inputs: int, outputs: int, width: int) -> Iterator[tuple[str, int]]:
        yield f"{name}.weight", outputs * inputs * width * width
        yield f"{name}.norm.weight", outputs
        yield f"{name}.norm.bias", outputs

    yield from convolution("stem", 3, 64, 7)
    inputs = 64
    for stage, (channels, blocks) in enumerate(_STAGES):
        for block in range(blocks):
            name = f"{stage}.{block}"
            yield from convolution(f"{name}.1", inputs, channels, 1)
            yield from convolution(f"{name}.2", channels, channels, 3)
            yield from convolution(f"{name}.3", channels, 4 * channels, 1)
            if block == 0:
                yield from convolution(f"{name}.shortcut", inputs, 4 * channels, 1)
            inputs = 4 * channels
    yield "head.weight", 1000 * inputs
    yield "head.bias", 1000


class Step(NamedTuple):
    """Tensors of a step: names and numels, when they are ready, their bytes."""

    numels: dict[str, int]
    ready: list[float]
    sizes: list[int]

    @classmethod
    def of(cls, numels: dict[str, int], backward: float, config: Config) -> "Step":
        count = len(numels)
        ready = [backward * (count - i) / count for i in range(count)]
        return cls(numels, ready, [encoded_bytes(n, config) for n in numels.values()])


class Timed:
    """One grouping: its messages, and the times of its steps."""

    def __init__(self, name: str, groups: Sequence[Sequence[int]], step: Step) -> None:
        numels = list(step.numels.values())
        self.name, self.groups = name, groups
        self.ready = [max(step.ready[i] for i in group) for group in groups]
        random = np.random.default_rng(0)
        self.values: list[Array] = [
            random.standard_normal(sum(numels[i] for i in group), np.float32) for group in groups
        ]
        self.results = [np.empty_like(values) for values in self.values]
        self.seconds: list[float] = []
        self.in_flight: list[tuple[float, float]] = []  # of each message of the last step

    def run(self, world: Communicator, config: Config) -> None:
        """Time a step; the slowest rank's time counts."""
        world.allreduce(np.zeros(1, np.float32), "max", _EXACT)  # they meet
        start = time.perf_counter()
        requests, started, ended = [], [], []
        for i, (ready, values) in enumerate(zip(self.ready, self.values, strict=True)):
            time.sleep(max(0.0, start + ready - time.perf_counter()))
            name, out = f"{self.name}/{i}", self.results[i]
            started.append(time.perf_counter() - start)
            requests.append(world.allreduce_async(values, config=config, out=out, name=name))
        for request in requests:
            request.wait()
            ended.append(time.perf_counter() - start)
        self.in_flight = list(zip(started, ended, strict=True))
        taken = np.array([time.perf_counter() - start], np.float32)
        self.seconds.append(float(world.allreduce(taken, "max", _EXACT)[0]))


def groupings(
    numels: dict[str, int], ready: list[float], costs: Costs, config: Config
) -> dict[str, Sequence[Sequence[int]]]:
    """Return the usual groups, then the planned ones, by name."""
    counts = list(numels.values())
    sizes = [encoded_bytes(n, config) for n in counts]
    return {
        "per tensor": baselines.per_tensor(ready),
        "whole": baselines.whole(ready),
        "DDP, 1 and 25 MiB": baselines.ddp_buckets(counts, ready),
        "best two (MergeComp)": baselines.two_groups(counts, ready, sizes, costs),
        "planned": Plan.of(numels, ready, costs, config=config).groups,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Planned and usual groups, predicted and timed.")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--backward", type=float, default=0.1, help="seconds (default 0.1)")
    parser.add_argument("--rounds", type=int, default=7, help="of timed steps (default 7)")
    parser.add_argument("--plot", metavar="FILE", help="draw the last planned step there")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    options = parser.parse_args()
    world, config = cgx_ops.init(), Config(bits=options.bits)
    step = Step.of(resnet50(), options.backward, config)
    costs = measure(world, config, spare_processors=True)
    by_name = groupings(step.numels, step.ready, costs, config)
    contenders = [Timed(name, groups, step) for name, groups in by_name.items()]
    for turn in range(1 + options.rounds):
        first = turn % len(contenders)  # so that none always follows the same one
        for contender in contenders[first:] + contenders[:first]:
            contender.run(world, config)
    if world.rank == 0:
        report = _report(step, costs, contenders, world, options)
        for table in report.tables:
            table.print()
        if options.json:
            report.write(options.json)
        if options.plot:
            planned = contenders[-1]
            case = list(step.numels.values()), step.ready, step.sizes, costs
            title = f"{report.tables[0].title}; planned: {len(planned.groups)} messages"
            draw(options.plot, title, timeline(planned.groups, *case), planned.in_flight)


def _report(
    step: Step,
    costs: Costs,
    contenders: Sequence[Timed],
    world: Communicator,
    options: argparse.Namespace,
) -> Report:
    planned = statistics.median(contenders[-1].seconds[1:])
    results, rows = [], []
    for contender in contenders:
        case = list(step.numels.values()), step.ready, step.sizes, costs
        predicted = finish(contender.groups, *case)
        seconds = statistics.median(contender.seconds[1:])  # the first step takes memory
        results.append(
            {
                "groups": contender.name, "messages": len(contender.groups),
                "predicted_s": predicted, "seconds": seconds, "least_s": min(contender.seconds[1:]),
            }
        )  # fmt: skip
        rows.append(
            [
                contender.name, str(len(contender.groups)), time_text(predicted),
                time_text(seconds), f"{predicted / seconds:.2f}", f"{seconds / planned:.2f}",
            ]
        )  # fmt: skip
    table = Table(
        f"{len(step.numels)} tensors, {sum(step.numels.values()) / 1e6:.1f} M values, "
        f"{options.bits} bits, {world.size} ranks; backward {time_text(options.backward)}",
        ["groups", "messages", "predicted", "measured", "ratio", "to planned"],
        rows,
        notes=[f"Medians of {options.rounds} steps, interleaved; {costs}"],
    )
    settings = {"ranks": world.size, "transport": world.transport, **vars(options)}
    return Report("planned_steps", settings, results, [table])


if __name__ == "__main__":
    main()
