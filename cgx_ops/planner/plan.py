"""A plan: tensors by name, their bits, and which of them share a message."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Self

from cgx_ops._core.codec import encoded_bytes
from cgx_ops._core.consistency import require_same
from cgx_ops._core.exchange import exchange
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.communicator import Communicator
from cgx_ops.config import Config
from cgx_ops.errors import InvalidArgument, require_integer
from cgx_ops.planner.model import Costs
from cgx_ops.planner.partition import partition
from cgx_ops.rules import Rules, pattern_of

_FORMAT = "cgx_ops plan 1"
_NAME = "cgx_ops.planner.plan"


@dataclass(frozen=True)
class Plan:
    """How the tensors of a model travel. Frozen, comparable and hashable.

    Attributes:
        names: of the tensors, each once.
        numels: values of each.
        bits: of each.
        groups: numbers of the tensors that share a message, in the order in which messages start;
            each tensor is in one.

    Raises:
        InvalidArgument: these do not fit together; it says which.
    """

    names: tuple[str, ...]
    numels: tuple[int, ...]
    bits: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        count = len(self.names)
        if not count == len(self.numels) == len(self.bits):
            raise InvalidArgument(
                f"a plan has {count} names, {len(self.numels)} numels and {len(self.bits)} bits; "
                "there must be one of each for every tensor"
            )
        for name in self.names:
            if not isinstance(name, str):
                raise InvalidArgument(f"a plan has the name {name!r}; names must be text")
        if len(set(self.names)) < count:
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise InvalidArgument(f"a plan has two tensors with the name {twice!r}")
        for field, values in (
            ("names", tuple(self.names)),
            ("numels", _integers("numels", self.numels, 0, 2**63 - 1)),
            ("bits", _integers("bits", self.bits, 1, EXACT_BITS)),
            ("groups", tuple(_integers("groups", group, 0, count - 1) for group in self.groups)),
        ):
            object.__setattr__(self, field, values)
        if sorted(self.order) != list(range(count)) or not all(self.groups):
            raise InvalidArgument(
                f"the groups of a plan are {[list(group) for group in self.groups]}; each of its "
                f"{count} tensors must be in one group, and no group empty"
            )
        for bits in {*self.bits}:
            Config(bits=bits)  # checks them

    @classmethod
    def of(
        cls,
        numels: Mapping[str, int],
        ready: Sequence[float],
        costs: Costs,
        *,
        config: Config | None = None,
        bits: Sequence[int] | None = None,
        margin: float = 1.25,
    ) -> Self:
        """Return the plan with the earliest end under the model, see partition().

        With costs that are exactly right, the best groups end a message just before the next one
        is ready, and one that takes a little longer holds up all that follow. So groups are made
        for somewhat larger costs. For ResNet-50's sizes, from 100 Mbit/s to 10 Gbit/s, that loses
        1 % on average (8 % at most) where costs are right, and gains 3 % (19 % at most) where they
        are 25 % larger; measured ones are those of quiet moments.

        Args:
            numels: values of each tensor, by name.
            ready: seconds until each tensor's gradient is ready, in the same order.
            costs: of a message, as measure() returns them.
            config: its bucket_size, and compressor, make the bytes; its bits are those of all
                tensors, unless there are `bits`. None: Config().
            bits: of each tensor, as allocate_bits() returns them.
            margin: costs are multiplied by it, at least 1; 1: they are right.

        Raises:
            InvalidArgument: the margin is less than 1; see Plan and partition().
        """
        config = Config() if config is None else config
        each = [config.bits] * len(numels) if bits is None else list(bits)
        if len(each) != len(numels):
            raise InvalidArgument(f"there are {len(each)} bits and {len(numels)} tensors")
        counts = list(numels.values())
        sizes = [
            encoded_bytes(n, config.with_own(bits=b)) for n, b in zip(counts, each, strict=True)
        ]
        if not 1 <= margin < math.inf:
            raise InvalidArgument(f"margin is {margin!r}; it must be at least 1")
        careful = Costs(*(margin * cost for cost in astuple(costs)))
        groups = partition(counts, ready, sizes, careful)
        return cls(tuple(numels), tuple(counts), tuple(each), tuple(map(tuple, groups)))

    @property
    def order(self) -> list[int]:
        """The tensors' numbers, in the order in which they are sent."""
        return [i for group in self.groups for i in group]

    @property
    def rules(self) -> Rules:
        """The bits of each tensor, as rules."""
        named = zip(self.names, self.bits, strict=True)
        return Rules((pattern_of(name), bits) for name, bits in named)

    # ---- A file ----------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, for people too: a tensor a line."""
        tensors = [
            json.dumps({"name": name, "numel": numel, "bits": bits})
            for name, numel, bits in zip(self.names, self.numels, self.bits, strict=True)
        ]
        lines = ",\n  ".join(tensors)
        groups = ",\n  ".join(json.dumps(group) for group in self.groups)
        Path(path).write_text(
            f'{{"format": "{_FORMAT}",\n "tensors": [\n  {lines}],\n "groups": [\n  {groups}]}}\n'
        )

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what save() wrote.

        Raises:
            InvalidArgument: it is no plan.
            OSError: it cannot be read.
        """
        try:
            fields = json.loads(Path(path).read_text())
            if fields["format"] != _FORMAT:
                raise ValueError(f"its format is {fields['format']!r}")
            tensors = fields["tensors"]
            return cls(
                tuple(tensor["name"] for tensor in tensors),
                tuple(tensor["numel"] for tensor in tensors),
                tuple(tensor["bits"] for tensor in tensors),
                fields["groups"],
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InvalidArgument(
                f"{path} is no plan ({error}): give a file that Plan.save() wrote, of {_FORMAT!r}"
            ) from None

    # ---- Agreement -------------------------------------------------------------------------------

    def agree(self, communicator: Communicator, *, name: str = _NAME) -> None:
        """Require that all ranks have this plan.

        Collective: every rank calls it, with its own plan, before the plan is used. Without it a
        rank with another plan waits for messages that nobody sends, until the deadline.

        Args:
            communicator: the ranks.
            name: matches the comparison with theirs, where threads make several in any order.

        Raises:
            MismatchError: on every rank; it names the first tensor, in the order of sending, that
                differs, and what two ranks have there.
        """
        require_same(
            "ranks have different plans",
            {f"tensor {place}": entry for place, entry in enumerate(self._entries())},
            lambda mine: exchange(mine, name, communicator),
            "Give all ranks one plan: let rank 0 save it, and the others load it",
        )

    def _entries(self) -> list[str]:
        """Return all that is said of each tensor, in the order of sending."""
        return [
            f"{self.names[i]!r} ({self.numels[i]} values, {self.bits[i]} bits, group {number})"
            for number, group in enumerate(self.groups)
            for i in group
        ]


def _integers(field: str, values: Sequence[int], least: int, most: int) -> tuple[int, ...]:
    """Return entries of a plan's field as Python's integers, which JSON knows."""
    return tuple(
        require_integer(f"a plan's {field}[{i}]", value, least, most)
        for i, value in enumerate(values)
    )
