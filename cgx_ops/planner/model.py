"""When a step's last gradient is there: the model that plans are made by.

A message passes three resources one after the other: encoding, the link, decoding. Each serves one
message at a time, in order, while the others work on other messages. What a message of n values and
s bytes takes of them:

    encode_fixed + encode_per_value * n        link_fixed + link_per_byte * s
    decode_fixed + decode_per_value * n

The form is that of MergeComp and Cupcake, which know one resource for both codec and link; with
three, encoding hides behind sending. A latency delays every message, and holds up none behind it.

Where gradients are computed on the processors that encode and send, a message also takes

    processor_fixed + processor_per_value * n

from the backward pass: all gradients that become ready later than its own are late by that.

Inside, times are whole femtoseconds: sums are exact, so that equal plans tie on every machine.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from cgx_ops.errors import InvalidArgument

TICKS = 10**15  # of a second
_MOST = 2**62  # ticks, which int64 holds: over an hour


@dataclass(frozen=True)
class Costs:
    """What messages cost on one route, in seconds: each >= 0.

    Attributes:
        encode_fixed: of a message, on the processor, before it can be sent.
        encode_per_value: of each of its values.
        link_fixed: of a message: time in which the link can serve no other.
        link_per_byte: of each byte of the encoded message. An allreduce among W ranks moves
            2(W-1)/W times as many, which is in here.
        decode_fixed: of a message, on the processor, after it came.
        decode_per_value: of each of its values.
        latency: from sending until it is there, beyond what occupies the link.
        processor_fixed: of a message: by how much it delays the backward pass. 0 where a GPU, or
            other processors, compute gradients.
        processor_per_value: of each of its values.

    Raises:
        InvalidArgument: a cost is negative or not finite.
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
                    f"Costs.{field.name} is {seconds!r}; it must be a number of seconds >= 0"
                )


class Ticks(NamedTuple):
    """Costs in whole femtoseconds; fields as in Costs."""

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
    """Return seconds in whole femtoseconds; of more than a step may take, the most."""
    return round(min(seconds * TICKS, _MOST))


class Tensors(NamedTuple):
    """Tensors of a step, checked: as many entries in each list.

    Attributes:
        numels: values of each.
        ready: ticks from the start of the backward pass until its gradient is there.
        bytes: of each, encoded.
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
            InvalidArgument: lists of different lengths, a negative entry, more than 2^62 values or
                bytes in all, or a step of over an hour, which is surely a mistake in a unit.
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
                f"than {_MOST // TICKS} s: costs and ready times are in seconds"
            )
        return found


class Passage(NamedTuple):
    """A message on its way, in seconds from the start of the backward pass; parts as begin and end.

    Attributes:
        ready: when the last of its gradients is there, by as much late as earlier messages hold up.
        encode: while it has the encoder.
        link: while it has the link.
        decode: while it has the decoder, after the latency.
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
        groups: tensors that share a message, by their numbers; messages are sent in this order.
            Each tensor is in one group.
        numels: values of each tensor.
        ready: seconds from the start of the backward pass until each tensor's gradient is there.
        bytes: of each tensor, encoded.
        costs: of a message.

    Returns:
        Seconds from the start of the backward pass; 0 without tensors.

    Raises:
        InvalidArgument: a tensor is in no group or in several, a group is empty; see Tensors.
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
    """Return how each message of a step passes encoder, link and decoder, in seconds.

    Args and errors: see finish(), which is the end of the last one.
    """
    tensors = Tensors.checked(numels, ready, bytes, costs)
    if sorted(i for group in groups for i in group) != list(range(len(numels))):
        raise InvalidArgument(
            f"the groups have the tensors {[list(group) for group in groups]}; each of the "
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
    """Return what finish() does, in ticks, of arguments that were checked."""
    return max((decode[1] for *_, decode in _passages(groups, tensors, each)), default=0)


_Part = tuple[int, int]  # of a passage: its begin and its end


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
