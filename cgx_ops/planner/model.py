"""The model behind plans: when the last gradient of a step is reduced.

A message passes three resources one after the other: encoding, the link, decoding. Each resource
serves one message at a time, in order, while the others work on other messages. A message of n
values and s bytes takes these times:

    encode_fixed + encode_per_value * n        link_fixed + link_per_byte * s
    decode_fixed + decode_per_value * n

MergeComp and Cupcake use the same form with one resource for codec and link. With three, encoding
overlaps sending. The latency delays each message, but blocks no other message.

If the processors that encode and send also compute the gradients, a message takes

    processor_fixed + processor_per_value * n

from the backward pass: all gradients that become ready after its own are late by that time.

Internally, times are integers in femtoseconds. Their sums are exact, so all machines break ties
between equal plans in the same way.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from cgx_ops.errors import InvalidArgument

TICKS = 10**15  # of a second
_MOST = 2**62  # ticks: over an hour, and less than the largest int64


@dataclass(frozen=True)
class Costs:
    """The costs of a message on one route, in seconds; each is >= 0.

    Args:
        encode_fixed: Time on the processor before a message can be sent.
        encode_per_value: The same, for each of its values.
        link_fixed: Time in which the link serves only this message.
        link_per_byte: The same, for each byte of the encoded message. It includes the factor
            2(W-1)/W of an allreduce among W ranks.
        decode_fixed: Time on the processor after the message has arrived.
        decode_per_value: The same, for each of its values.
        latency: Time from sending to arrival in which the link can serve other messages.
        processor_fixed: Time by which a message delays the backward pass. 0 if a GPU, or other
            processors, compute the gradients.
        processor_per_value: The same, for each of its values.

    Raises:
        InvalidArgument: A cost is negative or not finite.

    Example:
        >>> from cgx_ops.planner import Costs
        >>> gigabit = Costs(link_per_byte=8e-9, latency=1e-4)
        >>> gigabit.encode_fixed
        0.0
    """

    encode_fixed: float = 0.0
    encode_per_value: float = 0.0
    link_fixed: float = 0.0
    link_per_byte: float = 0.0
    decode_fixed: float = 0.0
    decode_per_value: float = 0.0
    latency: float = 0.0
    processor_fixed: float = 0.0
    processor_per_value: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            seconds = getattr(self, field.name)
            if not 0 <= seconds < math.inf:
                raise InvalidArgument(
                    f"Costs.{field.name} is {seconds!r}; it must be a finite number of seconds >= 0"
                )


class Ticks(NamedTuple):
    """Costs in whole femtoseconds, with the fields of Costs."""

    encode_fixed: int
    encode_per_value: int
    link_fixed: int
    link_per_byte: int
    decode_fixed: int
    decode_per_value: int
    latency: int
    processor_fixed: int
    processor_per_value: int

    @classmethod
    def of(cls, costs: Costs) -> "Ticks":
        """Return costs in ticks, each rounded to the nearest."""
        return cls(*(ticks(getattr(costs, name)) for name in cls._fields))


def ticks(seconds: float) -> int:
    """Return seconds in whole femtoseconds, at most the longest step."""
    return round(min(seconds * TICKS, _MOST))


class Tensors(NamedTuple):
    """The checked tensors of a step; all lists have the same length.

    Attributes:
        numels: Values of each tensor.
        ready: Ticks from the start of the backward pass until each gradient is ready.
        bytes: Encoded bytes of each tensor.
    """

    numels: list[int]
    ready: list[int]
    bytes: list[int]

    @classmethod
    def checked(
        cls,
        numels: Sequence[int],
        ready: Sequence[float],
        bytes: Sequence[int],  # noqa: A002  (the name of the quantity)
        costs: Costs,
    ) -> "Tensors":
        """Return the tensors.

        Raises:
            InvalidArgument: The lists have different lengths, an entry is negative, there are more
                than 2^62 values or bytes, or the step takes over an hour, which must be a wrong
                unit.
        """
        if not len(numels) == len(ready) == len(bytes):
            raise InvalidArgument(
                f"there are {len(numels)} numels, {len(ready)} ready times and {len(bytes)} bytes; "
                "there must be one of each for every tensor"
            )
        named = {"numels": numels, "ready": ready, "bytes": bytes}
        for name, entries in named.items():
            for i, entry in enumerate(entries):
                if not 0 <= entry < math.inf:
                    raise InvalidArgument(f"{name}[{i}] is {entry!r}; it must be a number >= 0")
            if name != "ready" and sum(entries) > _MOST:
                raise InvalidArgument(f"{name} add up to {sum(entries)}, which is more than 2^62")
        found = cls([int(n) for n in numels], [ticks(r) for r in ready], [int(s) for s in bytes])
        each = Ticks.of(costs)
        total = max(found.ready, default=0) + each.latency
        of_value = each.encode_per_value + each.decode_per_value + each.processor_per_value
        of_message = each.encode_fixed + each.link_fixed + each.decode_fixed + each.processor_fixed
        total += sum(found.numels) * of_value + sum(found.bytes) * each.link_per_byte
        total += len(numels) * of_message
        if total >= _MOST:
            raise InvalidArgument(
                f"these tensors would take {total / TICKS:.3g} s or more; a step must take less "
                f"than {_MOST // TICKS} s: check that costs and ready times are in seconds"
            )
        return found


class Passage(NamedTuple):
    """The times of one message, in seconds from the start of the backward pass.

    Args:
        ready: When the last of its gradients is ready, including delays by earlier messages.
        encode: Begin and end of encoding.
        link: Begin and end of its use of the link.
        decode: Begin and end of decoding, after the latency.

    Example:
        >>> from cgx_ops.planner import Costs, timeline
        >>> [message] = timeline([[0]], [1000], [0.5], [4000], Costs(link_per_byte=1e-4))
        >>> message.ready, message.link
        (0.5, (0.5, 0.9))
    """

    ready: float
    encode: tuple[float, float]
    link: tuple[float, float]
    decode: tuple[float, float]


def finish(
    groups: Sequence[Sequence[int]],
    numels: Sequence[int],
    ready: Sequence[float],
    bytes: Sequence[int],  # noqa: A002  (the name of the quantity)
    costs: Costs,
) -> float:
    """Return when the last gradient of a step is reduced and decoded.

    Args:
        groups: Indices of the tensors of each message, in the order in which messages are sent.
            Each tensor is in one group.
        numels: Values of each tensor.
        ready: Seconds from the start of the backward pass until each gradient is ready.
        bytes: Encoded bytes of each tensor.
        costs: Costs of a message.

    Returns:
        Seconds from the start of the backward pass; 0 without tensors.

    Raises:
        InvalidArgument: A tensor is in no group or in several, a group is empty, the lists have
            different lengths, or a value is out of its range.

    Example:
        >>> from cgx_ops.planner import Costs, finish
        >>> costs = Costs(link_fixed=0.1, link_per_byte=1e-4)
        >>> tensors = [1000, 1000], [0.2, 0.1], [4000, 4000]  # numels, ready, bytes
        >>> finish([[1], [0]], *tensors, costs), finish([[1, 0]], *tensors, costs)
        (1.1, 1.1)
    """
    messages = timeline(groups, numels, ready, bytes, costs)
    return messages[-1].decode[1] if messages else 0.0


def timeline(
    groups: Sequence[Sequence[int]],
    numels: Sequence[int],
    ready: Sequence[float],
    bytes: Sequence[int],  # noqa: A002  (the name of the quantity)
    costs: Costs,
) -> list[Passage]:
    """Return the times of each message of a step; see finish(), which is the end of the last one.

    Args:
        groups: See finish().
        numels: See finish().
        ready: See finish().
        bytes: See finish().
        costs: See finish().

    Returns:
        A Passage for each group.

    Raises:
        InvalidArgument: See finish().

    Example:
        >>> from cgx_ops.planner import Costs, timeline
        >>> costs = Costs(encode_per_value=1e-4, link_per_byte=1e-4)
        >>> first, second = timeline([[1], [0]], [1000, 1000], [0.2, 0.1], [4000, 4000], costs)
        >>> first.encode, first.link, second.link
        ((0.1, 0.2), (0.2, 0.6), (0.6, 1.0))
    """
    tensors = Tensors.checked(numels, ready, bytes, costs)
    if sorted(i for group in groups for i in group) != list(range(len(numels))):
        raise InvalidArgument(
            f"the groups are {[list(group) for group in groups]}; each of the "
            f"{len(numels)} tensors must be in one group"
        )
    if not all(groups):
        raise InvalidArgument("a group is empty; leave it out")

    def seconds(part: tuple[int, int]) -> tuple[float, float]:
        return part[0] / TICKS, part[1] / TICKS

    return [
        Passage(at / TICKS, seconds(encode), seconds(link), seconds(decode))
        for at, encode, link, decode in _passages(groups, tensors, Ticks.of(costs))
    ]


def finish_ticks(groups: Sequence[Sequence[int]], tensors: Tensors, each: Ticks) -> int:
    """Return finish() in ticks, for checked arguments."""
    return max((decode[1] for *_, decode in _passages(groups, tensors, each)), default=0)


_Part = tuple[int, int]  # begin and end of a part of a passage


def _passages(
    groups: Sequence[Sequence[int]], tensors: Tensors, each: Ticks
) -> Iterator[tuple[int, _Part, _Part, _Part]]:
    """Yield the fields of each message's Passage, in ticks."""
    encoded = sent = decoded = late = 0
    for group in groups:
        values = sum(tensors.numels[i] for i in group)
        size = sum(tensors.bytes[i] for i in group)
        ready = max(tensors.ready[i] for i in group) + late
        late += each.processor_fixed + each.processor_per_value * values
        begins = [max(encoded, ready)]
        encoded = begins[-1] + each.encode_fixed + each.encode_per_value * values
        begins.append(max(sent, encoded))
        sent = begins[-1] + each.link_fixed + each.link_per_byte * size
        begins.append(max(decoded, sent + each.latency))
        decoded = begins[-1] + each.decode_fixed + each.decode_per_value * values
        yield ready, (begins[0], encoded), (begins[1], sent), (begins[2], decoded)
