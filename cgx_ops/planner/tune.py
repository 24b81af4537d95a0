"""A plan that is tried: steps by a few plans, and costs that explain what they took.

measure() times messages alone. A framework adds its own: calls into Python, copies, memory that the
kernel has to clear; and ranks that share processors hold each other up. Only a step tells. Phases:

  1. try     steps by the plan of measured costs, with one message, with one for each tensor, and in
             DistributedDataParallel's buckets
  2. explain the costs nearest to the measured ones that foresee these steps
  3. again   the same plans, and that of the costs that were found; the fastest of all is kept, and
             costs that explain all of these steps

Plans are tried in turn, several times: their first steps are slower, and other work comes and goes.

MergeComp times steps, too, and bisects on them for the best cut in two; here a few of them correct
a model that knows the best of all groups.
"""

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields

from cgx_ops._core.codec import encoded_bytes
from cgx_ops.communicator import Communicator
from cgx_ops.config import Config
from cgx_ops.errors import InvalidArgument
from cgx_ops.planner import baselines
from cgx_ops.planner.measure import largest
from cgx_ops.planner.model import Costs, Tensors, Ticks, finish_ticks, ticks
from cgx_ops.planner.plan import Plan

# Costs that are wrong by one factor, as far as steps can tell.
_PARTS = (
    ("encode_fixed", "encode_per_value", "decode_fixed", "decode_per_value"),
    ("link_fixed", "link_per_byte", "latency"),
    ("processor_fixed",),
    ("processor_per_value",),
)
_ROUNDS = 3  # in which plans are tried in turn
# Of the search, in powers of two: all of these, then smaller and smaller steps around the best.
_COARSE, _FINE = (0, 1, -1, 2, 3), (1 / 2, 1 / 4, 1 / 8, 1 / 16)
# Steps that are foreseen 2 % better are worth costs that are off by a factor of two.
_FAITH = 0.02**2


@dataclass(frozen=True)
class Tuned:
    """What was found.

    Attributes:
        plan: the fastest of those that were tried.
        costs: that explain the steps.
        tried: each plan with the seconds of a step: the median, the slowest rank's.
    """

    plan: Plan
    costs: Costs
    tried: tuple[tuple[Plan, float], ...]


def tune(
    communicator: Communicator,
    numels: Mapping[str, int],
    ready: Sequence[float],
    costs: Costs,
    seconds_of: Callable[[Plan], float],
    *,
    before: float = 0.0,
    config: Config | None = None,
    bits: Sequence[int] | None = None,
) -> Tuned:
    """Return the plan that is the fastest in steps of the real training, the same on all ranks.

    Collective: every rank calls it with the same arguments. At most five plans are tried, six times
    each, the last one three times.

    Args:
        communicator: of the ranks that share the plan.
        numels: values of each tensor, by name.
        ready: seconds until each tensor's gradient is ready; see Plan.of().
        costs: of a message, as measure() returns them.
        seconds_of: trains a few steps by a plan and returns what one took on this rank: the median,
            without those by which the plan comes into force (two after PlannedAllreduceState's
            replan(); compiling, in JAX). Every rank calls it for the same plans.
        before: seconds of such a step until its backward pass starts, for all ranks alike.
        config: how values travel, and their bits; see Plan.of().
        bits: of each tensor; see Plan.of().

    Raises:
        InvalidArgument: a step took no time, or less than `before`; see Plan.of().
    """
    config = Config() if config is None else config

    def plan_by(costs: Costs) -> Plan:
        return Plan.of(numels, ready, costs, config=config, bits=bits)

    first = plan_by(costs)
    usual = [
        Plan(first.names, first.numels, first.bits, tuple(map(tuple, groups)))
        for groups in (
            baselines.whole(ready),
            baselines.per_tensor(ready),
            baselines.ddp_buckets(first.numels, ready),
        )
    ]
    samples: dict[Plan, list[float]] = {}

    def attempt(plans: Iterable[Plan]) -> dict[Plan, float]:
        """Return the seconds of a step by each plan, all attempts so far together."""
        for plan in [*plans] * _ROUNDS:
            (seconds,) = largest(communicator, [seconds_of(plan)]).tolist()
            if not before < seconds:
                raise InvalidArgument(
                    f"a step took {seconds:.3g} s, and {before:.3g} s before its backward pass: "
                    "seconds_of returns the seconds of a whole step"
                )
            samples.setdefault(plan, []).append(seconds)
        return {plan: statistics.median(found) for plan, found in samples.items()}

    sizes = [
        encoded_bytes(n, config.with_own(bits=b))
        for n, b in zip(first.numels, first.bits, strict=True)
    ]
    tensors = Tensors.checked(first.numels, ready, sizes, costs)

    def costs_of(tried: Mapping[Plan, float]) -> Costs:
        steps = [(plan.groups, seconds - before) for plan, seconds in tried.items()]
        return Costs(*largest(communicator, astuple(explained(steps, tensors, costs))).tolist())

    tried = attempt(dict.fromkeys([first, *usual]))
    tried = attempt(dict.fromkeys([*tried, plan_by(costs_of(tried))]))
    fastest = min(tried, key=tried.__getitem__)
    return Tuned(fastest, costs_of(tried), tuple(tried.items()))


def explained(
    steps: Sequence[tuple[Sequence[Sequence[int]], float]], tensors: Tensors, costs: Costs
) -> Costs:
    """Return the costs that foresee steps best, among those that are near the given ones.

    Codec, link, and both processor costs are each multiplied by a factor. A search finds the least
    sum of the squares of how far steps are from what they took, and of how far the factors are from
    1, in powers of two.

    Args:
        steps: groups, and the seconds from the start of the backward pass to the last gradient.
        tensors: of all these steps.
        costs: what factors apply to.
    """

    def scaled(powers: Sequence[float]) -> Costs:
        factor = {n: 2.0**p for part, p in zip(_PARTS, powers, strict=True) for n in part}
        return Costs(*(factor[f.name] * getattr(costs, f.name) for f in fields(Costs)))

    def error(powers: Sequence[float]) -> float:
        each = Ticks.of(scaled(powers))
        off = [finish_ticks(groups, tensors, each) / ticks(s) - 1 for groups, s in steps]
        return sum(e * e for e in off) + _FAITH * sum(p * p for p in powers)

    best = min(itertools.product(_COARSE, repeat=len(_PARTS)), key=error)
    for step in _FINE:
        around = itertools.product((0, step, -step), repeat=len(best))
        near = [tuple(p + c for p, c in zip(best, changes, strict=True)) for changes in around]
        best = min(near, key=error)
    return scaled(best)
