"""Group tensors into messages so that a step ends as early as possible under the model.

  1. Order the tensors by readiness, and merge neighbors if there are too many.
  2. Search: for the first j tensors, find all groupings that may be part of the best one. Then
     walk back from the best grouping of all tensors.

With many tensors the search has rounds. The first round merges neighbors until there are 100.
Later rounds have more tensors, and search only for groupings that end a thousandth earlier. Such a
grouping hardly ever exists, and to find that out takes a hundredth of the time of a full search.

MergeComp makes one cut; Cupcake's recursion stores one grouping for each j. That is not optimal
with several resources: a later group may need a grouping that frees the encoder early although it
frees the link late. So this search stores the Pareto front: all groupings that no other one beats
in all of these: when the encoder, the link and the decoder are free, and the number of groups. (The
delay of gradients by earlier messages follows from the number of groups.)
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cgx_ops.planner.model import Costs, Tensors, Ticks

ROUNDS = (100, 200, 400)  # largest number of tensors in each round
_EARLIER = 0.001  # share of the finish

_Times = npt.NDArray[np.int64]


def partition(
    numels: Sequence[int],
    ready: Sequence[float],
    bytes: Sequence[int],  # noqa: A002  (the name of the quantity)
    costs: Costs,
) -> list[list[int]]:
    """Return the groups of tensors with the earliest finish(), contiguous in order of readiness.

    The result depends only on the arguments, to the bit. Ranks with equal arguments need not
    communicate. For up to 100 tensors no grouping ends earlier, and ties go to the fewest groups.
    For up to 400 tensors no grouping ends earlier by more than a thousandth. More tensors are first
    merged with neighbors into units of at most 1/200 of the bytes (or one tensor).

    Args:
        numels: Values of each tensor.
        ready: Seconds from the start of the backward pass until each gradient is ready, in any
            order.
        bytes: Encoded bytes of each tensor.
        costs: Costs of a message.

    Returns:
        Lists of indices of tensors, in the order in which the messages start.

    Raises:
        InvalidArgument: The lists have different lengths, or a value is out of its range.

    Example:
        >>> from cgx_ops.planner import Costs, partition
        >>> numels = [1000, 1000, 1000]
        >>> ready = [0.3, 0.2, 0.1]
        >>> partition(numels, ready, [500] * 3, Costs(link_fixed=1.0, link_per_byte=1e-6))
        [[2, 1, 0]]
        >>> partition(numels, ready, [500] * 3, Costs(link_fixed=0.01, link_per_byte=1e-4))
        [[2], [1], [0]]
    """
    tensors, each = Tensors.checked(numels, ready, bytes, costs), Ticks.of(costs)
    order = by_readiness(ready)
    groups: list[list[int]] = []
    enough = None  # the first round finds the optimum
    for most in ROUNDS:
        units = merged(order, tensors.bytes, most)
        joined = Tensors(
            [sum(tensors.numels[i] for i in unit) for unit in units],
            [max(tensors.ready[i] for i in unit) for unit in units],
            [sum(tensors.bytes[i] for i in unit) for unit in units],
        )
        best = _best(joined, each, enough)
        if best is not None:
            enough = int(best.finish() * (1 - _EARLIER))
            groups = _groups(units, best.cuts())
        if len(order) <= most:
            break
    return groups


# ---- 1. order ------------------------------------------------------------------------------------


def by_readiness(ready: Sequence[float]) -> list[int]:
    """Return the indices of the tensors in the order in which they become ready."""
    return sorted(range(len(ready)), key=lambda i: (ready[i], i))


def merged(order: Sequence[int], bytes: Sequence[int], most: int) -> list[list[int]]:  # noqa: A002
    """Return each tensor alone, or neighbors merged if there are more than `most`."""
    if len(order) <= most:
        return [[i] for i in order]
    # Two neighboring units together exceed the limit, so there are at most `most` units.
    limit = 2 * sum(bytes) / (most - 1)
    units: list[list[int]] = []
    size = 0
    for i in order:
        if units and size + bytes[i] <= limit:
            units[-1].append(i)
            size += bytes[i]
        else:
            units.append([i])
            size = bytes[i]
    return units


# ---- 2. search -----------------------------------------------------------------------------------


def _groups(units: list[list[int]], cuts: list[int]) -> list[list[int]]:
    """Return the units between cuts, joined."""
    return [
        [i for unit in units[start:end] for i in unit]
        for start, end in zip([0, *cuts], [*cuts, len(units)], strict=True)
    ]


def _best(tensors: Tensors, each: Ticks, enough: int | None) -> "_Ways | None":
    """Return the search result if a grouping ends at `enough` ticks or earlier, else None."""
    if not tensors.numels:
        return None
    if enough is None:
        # Cupcake's recursion, with one grouping for each j, is near the optimum. Its finish
        # bounds the search: of many thousands of groupings only a few end earlier.
        good = _Ways(tensors, each)
        good.search(width=1)
        enough = good.finish()
    best = _Ways(tensors, each, enough)
    best.search()
    return best if best.complete() else None


class _Ways:
    """Groupings of the first tensors that may be part of the best grouping of all.

    Attributes:
        rows: By grouping: when encoder, link and decoder are free (ticks), and the number of
            groups.
        ends: How many tensors each grouping contains.
        sources: The grouping that each one extends by one group; -1 for the empty grouping.
    """

    def __init__(self, tensors: Tensors, each: Ticks, enough: int | None = None) -> None:
        self.tensors, self.each, self.enough = tensors, each, enough
        self.count = len(tensors.numels)
        self.values = np.array([0, *np.cumsum(tensors.numels, dtype=np.int64)])
        self.sizes = np.array([0, *np.cumsum(tensors.bytes, dtype=np.int64)])
        self.rows = np.zeros((1, 4), np.int64)
        self.ends, self.sources = np.zeros(1, np.int64), np.full(1, -1)

    def search(self, width: int | None = None) -> None:
        """Find groupings of more and more tensors; at most `width` for each number of them."""
        for end in range(1, self.count + 1):
            new, finish = self._longer(end)
            useful = np.arange(len(new))
            if self.enough is not None:
                useful = np.flatnonzero(finish <= self.enough)
            kept = useful[_front(new[useful], width)]
            self.rows = np.concatenate([self.rows, new[kept]])
            self.ends = np.concatenate([self.ends, np.full(len(kept), end)])
            self.sources = np.concatenate([self.sources, kept])

    def _longer(self, end: int) -> tuple[_Times, _Times]:
        """Return each grouping extended by one group, up to tensor `end`.

        Returns:
            Rows, and the earliest time at which the last of all tensors is decoded.
        """
        new = np.empty_like(self.rows)
        latency = self.each.latency
        ready = self.tensors.ready[end - 1] + self._late(self.rows, self.ends)
        new[:, 0] = np.maximum(self.rows[:, 0], ready)
        new[:, 0] += self._encode(self.ends, end)
        new[:, 1] = np.maximum(self.rows[:, 1], new[:, 0]) + self._link(self.ends, end)
        new[:, 2] = np.maximum(self.rows[:, 2], new[:, 1] + latency)
        new[:, 2] += self._decode(self.ends, end)
        new[:, 3] = self.rows[:, 3] + 1
        if end == self.count:
            return new, new[:, 2]
        # A resource that is free before the next message needs it counts as free at that time.
        new[:, 0] = np.maximum(new[:, 0], self.tensors.ready[end] + self._late(new, end))
        first_encoded = new[:, 0] + self._encode(end, end + 1)
        new[:, 1] = np.maximum(new[:, 1], first_encoded)
        first_sent = new[:, 1] + self._link(end, end + 1)
        new[:, 2] = np.maximum(new[:, 2], first_sent + latency)
        # Lower bounds: the rest is one message, or the last tensor is sent without waiting.
        rest, last = (end, self.count), (self.count - 1, self.count)
        after_link = latency + self._decode(*last)
        finish = new[:, 2] + self._decode(*rest)
        finish = np.maximum(finish, new[:, 1] + self._link(*rest) + after_link)
        after_encode = self._link(*last) + after_link
        return new, np.maximum(finish, new[:, 0] + self._encode(*rest) + after_encode)

    def _late(self, rows: _Times, end: _Times | int) -> _Times:
        """Return the delay that the messages of these groupings, up to `end`, cause."""
        return (
            self.each.processor_fixed * rows[:, 3]
            + self.each.processor_per_value * self.values[end]
        )

    def _encode(self, start: _Times | int, end: int) -> _Times:
        values = self.values[end] - self.values[start]
        return self.each.encode_fixed + self.each.encode_per_value * values

    def _link(self, start: _Times | int, end: int) -> _Times:
        return self.each.link_fixed + self.each.link_per_byte * (
            self.sizes[end] - self.sizes[start]
        )

    def _decode(self, start: _Times | int, end: int) -> _Times:
        values = self.values[end] - self.values[start]
        return self.each.decode_fixed + self.each.decode_per_value * values

    def complete(self) -> bool:
        """Return whether there is a grouping of all tensors."""
        return bool(self.ends[-1] == self.count)

    def finish(self) -> int:
        """Return when the best grouping of all tensors ends, in ticks."""
        return int(self.rows[self._best(), 2])

    def cuts(self) -> list[int]:
        """Walk back from the best grouping; return where its groups begin, without the first."""
        way, starts = self._best(), []
        while self.ends[way] > 0:
            way = self.sources[way]
            starts.append(int(self.ends[way]))
        return starts[-2::-1]  # in rising order, without the 0

    def _best(self) -> int:
        complete = np.flatnonzero(self.ends == self.count)
        return int(complete[np.lexsort((self.rows[complete, 3], self.rows[complete, 2]))[0]])


def _front(rows: _Times, width: int | None) -> npt.NDArray[np.int64]:
    """Return the indices of the rows on the Pareto front.

    Args:
        rows: Rows of _Ways.
        width: Return at most so many rows, those with the earliest free link first; None: all.
    """
    order = np.lexsort((rows[:, 3], rows[:, 2], rows[:, 0], rows[:, 1]))
    front: list[int] = []
    while len(order) and len(front) != width:
        # No row after the first dominates it, because of the order.
        front.append(order[0])
        order = order[(rows[order] < rows[order[0]]).any(axis=1)]
    return np.array(front, np.int64)
