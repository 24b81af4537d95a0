"""Which tensors share a message: the groups with which a step ends earliest under the model.

  1. order: tensors as their gradients become ready; neighbours are merged if there are too many
  2. search: for the first j tensors, every way to group them that may still be part of the best;
     then back from the best way for all of them

Many tensors are searched in rounds. In the first, neighbours are merged until there are 100; each
later one has more of them, and looks only for what ends a thousandth earlier. There is hardly ever
such a way, and to find that out takes a hundredth of the time that the best one would.

MergeComp cuts once, Cupcake's recursion keeps one way for each j. With several resources that is
not enough: a later group may prefer the way that freed the encoder early, although the link was
freed late. So all ways are kept of which no other is better in everything (a Pareto front): when
the encoder, the link and the decoder are free, and how many groups there are. (How late gradients
become by what messages take from the backward pass follows from the last.)
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cgx_ops.planner.model import Costs, Tensors, Ticks

ROUNDS = (100, 200, 400)  # tensors that are searched at most
_EARLIER = 0.001  # a share of the finish

_Times = npt.NDArray[np.int64]


def partition(
    numels: Sequence[int],
    ready: Sequence[float],
    bytes: Sequence[int],  # noqa: A002  (the name of the quantity)
    costs: Costs,
) -> list[list[int]]:
    """Return the groups of tensors with the earliest finish(), contiguous in order of readiness.

    The answer depends on the arguments alone, to the bit: ranks that have the same ones need not
    talk. Of up to 100 tensors no grouping ends earlier, and of those that end equally early it is
    one with the fewest groups. Of up to 400 none ends earlier by more than a thousandth. Above,
    neighbours are merged beforehand to at most 1/200 of the bytes each (or one tensor), and the
    same holds for what is left.

    Args:
        numels: values of each tensor.
        ready: seconds from the start of the backward pass until each tensor's gradient is there,
            in any order.
        bytes: of each tensor, encoded.
        costs: of a message.

    Returns:
        Lists of the tensors' numbers, in the order in which the messages start.

    Raises:
        InvalidArgument: see Tensors.checked.
    """
    tensors, each = Tensors.checked(numels, ready, bytes, costs), Ticks.of(costs)
    order = by_readiness(ready)
    groups: list[list[int]] = []
    enough = None  # the first round finds the best there is
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
    """Return the numbers of the tensors in the order in which they become ready."""
    return sorted(range(len(ready)), key=lambda i: (ready[i], i))


def merged(order: Sequence[int], bytes: Sequence[int], most: int) -> list[list[int]]:  # noqa: A002
    """Return tensors one by one, or neighbours together where there are more than `most`."""
    if len(order) <= most:
        return [[i] for i in order]
    # Two neighbouring units exceed the limit, or they were one: so there are `most` at most.
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
    """Return ways with the best one that ends at `enough` ticks or earlier, if there is one."""
    if not tensors.numels:
        return None
    if enough is None:
        # Cupcake's recursion, which keeps one way for each j, is near the best. What ends later
        # than that need not be looked at: it leaves a few ways of many thousands.
        good = _Ways(tensors, each)
        good.search(width=1)
        enough = good.finish()
    best = _Ways(tensors, each, enough)
    best.search()
    return best if best.complete() else None


class _Ways:
    """Ways to group the first tensors, as far as they may become the best for all.

    Attributes:
        rows: of each way: when encoder, link and decoder are free (ticks), and its groups.
        ends: how many tensors it has grouped.
        sources: the way that it is with one group more; -1 for the way without any.
    """

    def __init__(self, tensors: Tensors, each: Ticks, enough: int | None = None) -> None:
        self.tensors, self.each, self.enough = tensors, each, enough
        self.count = len(tensors.numels)
        self.values = np.array([0, *np.cumsum(tensors.numels, dtype=np.int64)])
        self.sizes = np.array([0, *np.cumsum(tensors.bytes, dtype=np.int64)])
        self.rows = np.zeros((1, 4), np.int64)
        self.ends, self.sources = np.zeros(1, np.int64), np.full(1, -1)

    def search(self, width: int | None = None) -> None:
        """Find the ways for more and more tensors, `width` for each number of them, or all."""
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
        """Return each way with one group more, up to tensor `end`.

        Returns:
            Rows, and when the last tensor of all is decoded at the earliest.
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
        # A resource that is free before the next message can use it is as good as free then.
        new[:, 0] = np.maximum(new[:, 0], self.tensors.ready[end] + self._late(new, end))
        first_encoded = new[:, 0] + self._encode(end, end + 1)
        new[:, 1] = np.maximum(new[:, 1], first_encoded)
        first_sent = new[:, 1] + self._link(end, end + 1)
        new[:, 2] = np.maximum(new[:, 2], first_sent + latency)
        # At best the rest is one message, or nothing holds up the very last tensor.
        rest, last = (end, self.count), (self.count - 1, self.count)
        after_link = latency + self._decode(*last)
        finish = new[:, 2] + self._decode(*rest)
        finish = np.maximum(finish, new[:, 1] + self._link(*rest) + after_link)
        after_encode = self._link(*last) + after_link
        return new, np.maximum(finish, new[:, 0] + self._encode(*rest) + after_encode)

    def _late(self, rows: _Times, end: _Times | int) -> _Times:
        """Return by how much these ways' messages, up to tensor `end`, delay what follows."""
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
        """Tell whether there is a way for all tensors."""
        return bool(self.ends[-1] == self.count)

    def finish(self) -> int:
        """Return when the best way for all tensors ends, in ticks."""
        return int(self.rows[self._best(), 2])

    def cuts(self) -> list[int]:
        """Walk back from the best way; return where its groups begin, but for the first."""
        way, starts = self._best(), []
        while self.ends[way] > 0:
            way = self.sources[way]
            starts.append(int(self.ends[way]))
        return starts[-2::-1]  # from the front, and without the 0

    def _best(self) -> int:
        complete = np.flatnonzero(self.ends == self.count)
        return int(complete[np.lexsort((self.rows[complete, 3], self.rows[complete, 2]))[0]])


def _front(rows: _Times, width: int | None) -> npt.NDArray[np.int64]:
    """Return the numbers of rows of which no other is at most as large in every column.

    width: so many of them at most, those where the link is free first.
    """
    order = np.lexsort((rows[:, 3], rows[:, 2], rows[:, 0], rows[:, 1]))
    front: list[int] = []
    while len(order) and len(front) != width:
        # What is better than the first would come before it.
        front.append(order[0])
        order = order[(rows[order] < rows[order[0]]).any(axis=1)]
    return np.array(front, np.int64)
