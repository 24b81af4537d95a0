"""Planned and usual groups in training steps of PyTorch or JAX: predicted beside measured.

    python benchmarks/hosts.py --rate 1gbit -- python benchmarks/planned_training.py torch
    python benchmarks/hosts.py --rate 1gbit -- python benchmarks/planned_training.py jax

The model of ddp_step.py and jax_step.py: 25.2 million parameters, 100.8 with --layers 96. Phases:

    ready     when gradients are there: in torch recorded by hooks, in JAX estimated
    costs     of messages among these ranks (cgx_ops.planner.measure)
    tune      a few plans in steps; costs that explain these, and the best plan (planner.tune)
    steps     all groupings in turn, round after round, each with its plan: in torch the
              backward pass of DistributedDataParallel, whose buckets are joined to groups; in JAX
              jax_step.py's whole step, and so the rest of it is in predictions
"""

import argparse
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from planned_steps import groupings
from steps import LAYERS, WIDTH, Step, calibrate, publish, where

import cgx_ops
from cgx_ops import Config
from cgx_ops._core.codec import encoded_bytes
from cgx_ops._core.text_table import Table
from cgx_ops._core.units import time_text
from cgx_ops.bench.measure import Summary, Timed, measure
from cgx_ops.bench.peers import MpiRanks
from cgx_ops.bench.report import Report
from cgx_ops.planner import Costs, Plan, finish, tune
from cgx_ops.planner import measure as measure_costs

_TRIAL_SECONDS = 3  # spent on steps by a plan that is tried, unless --trials takes less
_BACKWARD_SHARE = 2 / 3  # of a step's multiplications, and so of one that computes only


class Training(NamedTuple):
    """A training step of a framework.

    Attributes:
        numels: values of each parameter, by name.
        ready: seconds from the start of the backward pass until each gradient is there.
        before: seconds that are timed before the backward pass starts.
        step_of: returns a step that reduces by a plan.
    """

    numels: dict[str, int]
    ready: list[float]
    before: float
    step_of: Callable[[Plan], Timed]


# ---- PyTorch -------------------------------------------------------------------------------------


def torch_training(layers: int, seconds: float, config: Config) -> Training:
    import torch
    import torch.distributed as dist
    from ddp_step import perceptron, step_of
    from torch.nn.parallel import DistributedDataParallel

    import cgx_ops.torch
    from cgx_ops.torch import ddp
    from cgx_ops.torch.ddp import Arrivals

    torch.set_num_threads(1)
    dist.init_process_group("cgx")

    def alone(batch: int) -> Step:
        return step_of(perceptron(layers), batch)

    batch = calibrate(alone, seconds / _BACKWARD_SHARE, first=32)
    inputs = torch.randn(batch, WIDTH)
    module = perceptron(layers)
    with Arrivals(module) as arrivals:
        for _ in range(10):
            MPI.COMM_WORLD.Barrier()
            module(inputs).square().mean().backward()

    numels = arrivals.numels
    state = ddp.PlannedAllreduceState(plan_in([range(len(numels))], numels, config), config=config)
    options: Any = {"bucket_cap_mb": 1e-5}  # a bucket for each tensor
    model = DistributedDataParallel(module, **options)
    model.register_comm_hook(state, ddp.planned_allreduce_hook)  # type: ignore[arg-type]
    losses: list[torch.Tensor] = []

    def forward() -> None:
        model.zero_grad()
        losses[:] = [model(inputs).square().mean()]

    def backward() -> None:
        losses[0].backward()

    for _ in range(2):  # DistributedDataParallel makes its buckets after the first
        forward()
        backward()

    def planned(plan: Plan) -> Timed:
        def begin() -> None:
            state.plan = plan  # between steps, and on all ranks: what replan() does two steps later
            forward()

        return Timed(backward, begin)

    return Training(numels, arrivals.ready(cgx_ops.init()), 0.0, planned)


# ---- JAX -----------------------------------------------------------------------------------------


def jax_training(layers: int, seconds: float, config: Config) -> Training:
    import jax
    from jax_step import step_of, weights_of

    import cgx_ops.jax
    from cgx_ops.jax import estimated_ready, numels_of, pmean_q

    jax.config.update("jax_platforms", "cpu")
    cgx_ops.jax.initialize()
    mesh = jax.make_mesh((jax.device_count(),), ("data",), (jax.sharding.AxisType.Auto,))
    batch = calibrate(partial(step_of, mesh, layers), seconds / _BACKWARD_SHARE, first=32)
    kept = [weights_of(mesh, layers)]  # one model for all plans: they would not fit side by side

    def planned(plan: Plan) -> Timed:
        def average(gradients: Any) -> Any:
            return pmean_q(gradients, "data", bits=config.bits, fuse=plan)

        return Timed(step_of(mesh, layers, batch, average, kept))

    alone = {"alone": Timed(step_of(mesh, layers, batch))}
    seconds = Summary.of(measure(alone, MpiRanks(MPI.COMM_WORLD), rounds=7)["alone"]).median
    backward = _BACKWARD_SHARE * seconds
    weights = [(np.empty((WIDTH, WIDTH), np.float32), np.empty(WIDTH, np.float32))] * layers
    ready = estimated_ready(weights, backward)
    return Training(numels_of(weights), ready, seconds - backward, planned)


# ---- both ----------------------------------------------------------------------------------------


def plan_in(groups: Iterable[Iterable[int]], numels: dict[str, int], config: Config) -> Plan:
    """Return the plan of these groups, in the bits of the config."""
    bits = (config.bits,) * len(numels)
    return Plan(tuple(numels), tuple(numels.values()), bits, tuple(map(tuple, groups)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("framework", choices=["torch", "jax"])
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"default {LAYERS}")
    parser.add_argument("--backward", type=float, default=0.1, help="seconds, about (default 0.1)")
    parser.add_argument("--rounds", type=int, default=9, help="of timed steps (default 9)")
    parser.add_argument("--trials", type=int, default=7, help="steps of each try (default 7)")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    options = parser.parse_args()
    config = Config(bits=options.bits, rounding="nearest")
    make = {"torch": torch_training, "jax": jax_training}[options.framework]
    training = make(options.layers, options.backward, config)
    numels, counts = training.numels, list(training.numels.values())
    step_of, ranks = cache(training.step_of), MpiRanks(MPI.COMM_WORLD)
    costs = measure_costs(cgx_ops.init(), config)

    def seconds_of(plan: Plan) -> float:
        samples = measure({"": step_of(plan)}, ranks, rounds=options.trials, budget=_TRIAL_SECONDS)
        return Summary.of(samples[""]).median

    tuned = tune(
        cgx_ops.init(), numels, training.ready, costs, seconds_of,
        before=training.before, config=config,
    )  # fmt: skip
    plans = {
        name: plan_in(groups, numels, config)
        for name, groups in groupings(numels, training.ready, costs, config).items()
    } | {"tuned": tuned.plan}
    timed = {name: step_of(plan) for name, plan in plans.items()}
    samples = measure(timed, ranks, rounds=options.rounds)
    found = {name: Summary.of(seconds) for name, seconds in samples.items()}
    sizes = [encoded_bytes(n, config) for n in counts]

    def predicted(plan: Plan, costs: Costs) -> float:
        return training.before + finish(plan.groups, counts, training.ready, sizes, costs)

    results, rows = [], []
    for name, plan in plans.items():
        seconds = {"predicted_s": predicted(plan, costs), "tuned_s": predicted(plan, tuned.costs)}
        summary, ratio = found[name], found[name].median / found["tuned"].median
        quartiles = f"{time_text(summary.lower)} - {time_text(summary.upper)}"
        results.append(
            {
                "groups": name, "messages": len(plan.groups), **seconds,
                "seconds": summary.median, "lower": summary.lower, "upper": summary.upper,
            }
        )  # fmt: skip
        rows.append(
            [
                name, str(len(plan.groups)), *map(time_text, seconds.values()),
                time_text(summary.median), quartiles,
                *(f"{s / summary.median:.2f}" for s in seconds.values()), f"{ratio:.2f}",
            ]
        )  # fmt: skip
    table = Table(
        f"{options.framework}, {sum(counts) / 1e6:.1f} M parameters, {options.bits} bits; last "
        f"gradient after {time_text(max(training.ready))}",
        [
            "groups", "messages", "predicted", "by tuned costs", "measured", "quartiles", "ratio",
            "by tuned costs", "to tuned",
        ],
        rows,
        notes=[
            f"Medians of {options.rounds} interleaved steps, the slowest rank's; {costs}; tuned: "
            f"{tuned.costs}; tried: "
            + ", ".join(f"{len(plan.groups)} in {time_text(s)}" for plan, s in tuned.tried)
        ],
    )  # fmt: skip
    settings = {**where(), **vars(options), "before_s": training.before}
    publish(Report("planned_training", settings, results, [table]), options.json)


if __name__ == "__main__":
    main()
