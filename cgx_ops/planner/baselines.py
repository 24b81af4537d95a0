"""Groupings that need no plan, or little of one: what a plan is compared with."""

from collections.abc import Sequence

from cgx_ops.planner.model import Costs, Tensors, Ticks, finish_ticks
from cgx_ops.planner.partition import by_readiness

MIB = 1 << 20


def per_tensor(ready: Sequence[float]) -> list[list[int]]:
    """Return a group for each tensor, in order of readiness (seconds)."""
    return [[i] for i in by_readiness(ready)]


def whole(ready: Sequence[float]) -> list[list[int]]:
    """Return one group of all tensors; none without tensors."""
    return [by_readiness(ready)] if ready else []


def ddp_buckets(
    numels: Sequence[int], ready: Sequence[float], *, first_mib: float = 1, others_mib: float = 25
) -> list[list[int]]:
    """Return DistributedDataParallel's buckets of float32 gradients, from the second step on.

    A bucket is closed by the tensor with which it reaches its limit.

    Args:
        numels: values of each tensor.
        ready: seconds.
        first_mib: limit of the first bucket, in MiB.
        others_mib: of all others (bucket_cap_mb).
    """
    groups: list[list[int]] = [[]]
    size = 0
    for i in by_readiness(ready):
        groups[-1].append(i)
        size += 4 * numels[i]
        if size >= MIB * (first_mib if len(groups) == 1 else others_mib):
            groups.append([])
            size = 0
    return [group for group in groups if group]


def two_groups(
    numels: Sequence[int],
    ready: Sequence[float],
    bytes: Sequence[int],  # noqa: A002  (the name of the quantity)
    costs: Costs,
) -> list[list[int]]:
    """Return the best cut in two, or one group: what MergeComp's published code looks for.

    That bisects on timed steps; this tries every cut under the model, so it is no worse.

    Args and errors: see partition().
    """
    tensors, each = Tensors.checked(numels, ready, bytes, costs), Ticks.of(costs)
    order = by_readiness(ready)
    cuts = [[order[:at], order[at:]] for at in range(1, len(order))]
    candidates = [*([[order]] if order else []), *cuts]
    return min(candidates, key=lambda groups: finish_ticks(groups, tensors, each), default=[])
