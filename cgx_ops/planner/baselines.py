"""Groups that need no plan, or little of one, for comparison with a plan."""

from collections.abc import Sequence

from cgx_ops.planner.model import Costs, Tensors, Ticks, finish_ticks
from cgx_ops.planner.partition import by_readiness

MIB = 1 << 20


def per_tensor(ready: Sequence[float]) -> list[list[int]]:
    """Return one group per tensor, in order of readiness (seconds)."""
    return [[i] for i in by_readiness(ready)]


def whole(ready: Sequence[float]) -> list[list[int]]:
    """Return one group of all tensors, or no group without tensors."""
    return [by_readiness(ready)] if ready else []


def ddp_buckets(
    numels: Sequence[int], ready: Sequence[float], *, first_mib: float = 1, others_mib: float = 25
) -> list[list[int]]:
    """Return DistributedDataParallel's buckets of float32 gradients, as of the second step.

    A bucket is complete once it reaches its limit.

    Args:
        numels: Values of each tensor.
        ready: Seconds until each gradient is ready.
        first_mib: Limit of the first bucket, in MiB.
        others_mib: Limit of the other buckets (bucket_cap_mb).
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
    """Return the best cut into two groups, or one group: what MergeComp's published code searches.

    MergeComp bisects on timed steps. This function tries all cuts under the model, so its result is
    at least as good.

    Args:
        numels: See partition().
        ready: See partition().
        bytes: See partition().
        costs: See partition().
    """
    tensors, each = Tensors.checked(numels, ready, bytes, costs), Ticks.of(costs)
    order = by_readiness(ready)
    cuts = [[order[:at], order[at:]] for at in range(1, len(order))]
    candidates = [*([[order]] if order else []), *cuts]
    return min(candidates, key=lambda groups: finish_ticks(groups, tensors, each), default=[])
