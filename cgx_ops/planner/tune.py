"""Tune a plan in real steps, and find the costs that explain them.

measure() times messages alone. A framework adds its own costs: calls into Python, copies, memory
that the kernel clears. Ranks that share processors delay each other. Only real steps show this:

  1. Try steps with the plan of the measured costs, with one message, with one message per tensor,
     and with DistributedDataParallel's buckets.
  2. Find the costs nearest to the measured ones that predict these steps.
  3. Try the same plans and the plan of the new costs; return the fastest plan, and the costs that
     explain all steps.

Each plan is tried several times, in turn, because first steps are slower, and other work on the
machine varies. MergeComp also times steps: it bisects on them for the best cut in two.
"""

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields

from cgx_ops.communicator import Communicator
from cgx_ops.config import Config
from cgx_ops.errors import InvalidArgument
from cgx_ops.planner import baselines
from cgx_ops.planner.measure import largest
from cgx_ops.planner.model import Costs, Tensors, Ticks, finish_ticks, ticks
from cgx_ops.planner.plan import Plan
from cgx_ops.planner.rates import message_bytes, settings_of

# Each group of costs is multiplied by one factor; steps do not separate its members.
_PARTS = (
    ("encode_fixed", "encode_per_value", "decode_fixed", "decode_per_value"),
    ("link_fixed", "link_per_byte", "latency"),
    ("processor_fixed",),
    ("processor_per_value",),
)
_ROUNDS = 3  # in each one, all plans are tried in turn
# The search in powers of two: first all of _COARSE, then smaller steps around the best.
_COARSE, _FINE = (0, 1, -1, 2, 3), (1 / 2, 1 / 4, 1 / 8, 1 / 16)
# A 2 % better prediction of the steps is worth a factor of two in the costs.
_FAITH = 0.02**2


@dataclass(frozen=True)
class Tuned:
    """The result of tune().

    Args:
        plan: The fastest plan that was tried.
        costs: The costs that explain the steps.
        tried: Each plan with the seconds of its step: the median, on the slowest rank.

    Example:
        >>> from cgx_ops.planner import Costs, Plan, Tuned
        >>> plan = Plan(("weight",), (1000,), (4,), ((0,),))
        >>> tuned = Tuned(plan, Costs(), ((plan, 0.25),))
        >>> tuned.tried[0][1]
        0.25
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
    bits: Sequence[float] | None = None,
) -> Tuned:
    """Return the fastest plan in real training steps, equal on all ranks.

    All ranks must call it with the same arguments. It tries at most five plans, six times each (the
    last one three times).

    Args:
        communicator: The ranks that share the plan.
        numels: Values of each tensor, by name.
        ready: Seconds until each gradient is ready; see Plan.of().
        costs: Costs of a message, as measure() returns them.
        seconds_of: Function that trains a few steps with a plan and returns the seconds of one step
            on this rank: the median, without steps before the plan applies (two after
            PlannedAllreduceState.replan(), compilation in JAX). All ranks call it with the same
            plans.
        before: Seconds of such a step until its backward pass starts, equal on all ranks.
        config: The compression and the bits; see Plan.of().
        bits: Bits or rates of each tensor; see Plan.of().

    Returns:
        The fastest plan, the costs that explain the steps, and all plans that were tried.

    Raises:
        InvalidArgument: A step took no time, or less than `before`; see also Plan.of().

    Example:
        >>> from cgx_ops import Communicator
        >>> from cgx_ops.planner import Costs, tune
        >>> [comm] = Communicator.local(1)
        >>> costs = Costs(link_fixed=1e-3, link_per_byte=8e-9)
        >>> def seconds_of(plan):  # in training: apply the plan, time a few steps
        ...     return 0.01 + 0.001 * len(plan.groups)
        >>> tuned = tune(comm, {"a": 10_000, "b": 20_000}, [0.002, 0.001], costs, seconds_of)
        >>> len(tuned.plan.groups)  # one message is fastest
        1
        >>> comm.close()
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
        """Return the seconds of a step with each plan, over all attempts so far."""
        for plan in [*plans] * _ROUNDS:
            (seconds,) = largest(communicator, [seconds_of(plan)]).tolist()
            if not before < seconds:
                raise InvalidArgument(
                    f"a step took {seconds:.3g} s, but `before` is {before:.3g} s: "
                    "seconds_of must return the seconds of a whole step"
                )
            samples.setdefault(plan, []).append(seconds)
        return {plan: statistics.median(found) for plan, found in samples.items()}

    sizes = [
        message_bytes(n, config.with_own(**settings_of(b)))
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
    """Return the costs that predict steps best, among those near the given costs.

    One factor each multiplies the costs of the codec, the costs of the link, and both processor
    costs. The search minimizes the squared relative errors of the steps, plus a small penalty for
    factors far from 1 (as squared powers of two).

    Args:
        steps: Groups, and the seconds from the start of the backward pass to the last gradient.
        tensors: The tensors of all these steps.
        costs: The costs to multiply.
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
