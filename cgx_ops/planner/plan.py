"""A plan: the tensors of a model by name, their bits, and which of them share a message."""

import json
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Self

from cgx_ops._core.consistency import require_same
from cgx_ops._core.exchange import exchange
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.communicator import Communicator
from cgx_ops.config import Config
from cgx_ops.errors import InvalidArgument, require_integer
from cgx_ops.planner.model import Costs
from cgx_ops.planner.partition import partition
from cgx_ops.planner.rates import bits_of, message_bytes, settings_of
from cgx_ops.rules import Rules, pattern_of

_FORMAT = "cgx_ops plan 1"
_NAME = "cgx_ops.planner.plan"


@dataclass(frozen=True)
class Plan:
    """The groups and bits of a model's tensors. Frozen, comparable and hashable.

    Plan.of() computes the groups. The arguments are attributes, too.

    Args:
        names: Names of the tensors, each once.
        numels: Values of each tensor.
        bits: Bits of each tensor: an integer, or for the compressor "entropy" a float, which is the
            rate.
        groups: Indices of the tensors that share a message, in the order in which messages start.
            Each tensor is in one group.

    Raises:
        InvalidArgument: The arguments are inconsistent, or a value is out of its range.

    Example:
        >>> from cgx_ops.planner import Costs, Plan
        >>> numels = {"weight": 1_000_000, "bias": 1000}
        >>> costs = Costs(link_fixed=1e-3, link_per_byte=8e-9)
        >>> plan = Plan.of(numels, ready=[0.1, 0.1], costs=costs)
        >>> plan.groups, plan.bits
        (((0, 1),), (4, 4))
    """

    names: tuple[str, ...]
    numels: tuple[int, ...]
    bits: tuple[float, ...]
    groups: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        count = len(self.names)
        if not count == len(self.numels) == len(self.bits):
            raise InvalidArgument(
                f"the plan has {count} names, {len(self.numels)} numels and {len(self.bits)} bits; "
                "there must be one of each for every tensor"
            )
        for name in self.names:
            if not isinstance(name, str):
                raise InvalidArgument(f"the plan has the name {name!r}; names must be strings")
        if len(set(self.names)) < count:
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise InvalidArgument(f"the plan has two tensors with the name {twice!r}")
        for field, values in (
            ("names", tuple(self.names)),
            ("numels", _integers("numels", self.numels, 0, 2**63 - 1)),
            ("bits", tuple(map(_bits, range(count), self.bits))),
            ("groups", tuple(_integers("groups", group, 0, count - 1) for group in self.groups)),
        ):
            object.__setattr__(self, field, values)
        if sorted(self.order) != list(range(count)) or not all(self.groups):
            raise InvalidArgument(
                f"the groups of a plan are {[list(group) for group in self.groups]}; each of its "
                f"{count} tensors must be in one group, and no group may be empty"
            )

    @classmethod
    def of(
        cls,
        numels: Mapping[str, int],
        ready: Sequence[float],
        costs: Costs,
        *,
        config: Config | None = None,
        bits: Sequence[float] | None = None,
        margin: float = 1.25,
    ) -> Self:
        """Return the plan with the earliest end under the model; see partition().

        With costs that are exactly right, the best groups end a message just before the next one is
        ready. Then one slow message delays all others. So the groups are made for somewhat larger
        costs (`margin`).

        Args:
            numels: Values of each tensor, by name.
            ready: Seconds until each gradient is ready, in the same order.
            costs: Costs of a message, as measure() returns them.
            config: Its compressor and bucket_size determine the bytes; its bits, or its rate, are
                those of all tensors, unless `bits` is given. None: `Config()`.
            bits: Bits of each tensor, as allocate_bits() returns them, or rates, as
                allocate_rates() returns them.
            margin: Factor of the costs, at least 1; 1 means that the costs are exact.

        Raises:
            InvalidArgument: The margin is less than 1; see also Plan and partition().
        """
        config = Config() if config is None else config
        each = (
            [bits_of(config)] * len(numels)
            if bits is None
            else [_bits(i, b) for i, b in enumerate(bits)]
        )
        if len(each) != len(numels):
            raise InvalidArgument(
                f"there are {len(each)} bits for {len(numels)} tensors; give one entry each"
            )
        counts = list(numels.values())
        sizes = [
            message_bytes(n, config.with_own(**settings_of(b)))
            for n, b in zip(counts, each, strict=True)
        ]
        if not 1 <= margin < math.inf:
            raise InvalidArgument(f"margin is {margin!r}; it must be at least 1")
        careful = Costs(*(margin * cost for cost in astuple(costs)))
        groups = partition(counts, ready, sizes, careful)
        return cls(tuple(numels), tuple(counts), tuple(each), tuple(map(tuple, groups)))

    @property
    def order(self) -> list[int]:
        """The indices of the tensors, in the order in which they are sent."""
        return [i for group in self.groups for i in group]

    @property
    def rules(self) -> Rules:
        """The bits or the rate of each tensor, as rules."""
        named = zip(self.names, self.bits, strict=True)
        return Rules((pattern_of(name), settings_of(bits)) for name, bits in named)

    # ---- Files -----------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, one tensor per line.

        Args:
            path: The file.

        Raises:
            OSError: The file cannot be written.
        """
        tensors = [
            json.dumps({"name": name, "numel": numel, **settings_of(bits)})
            for name, numel, bits in zip(self.names, self.numels, self.bits, strict=True)
        ]
        lines = ",\n  ".join(tensors)
        groups = ",\n  ".join(json.dumps(group) for group in self.groups)
        Path(path).write_text(
            f'{{"format": "{_FORMAT}",\n "tensors": [\n  {lines}],\n "groups": [\n  {groups}]}}\n'
        )

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a plan that save() wrote.

        Args:
            path: The file.

        Returns:
            The plan.

        Raises:
            InvalidArgument: The file is not a valid plan.
            OSError: The file cannot be read.
        """
        try:
            fields = json.loads(Path(path).read_text())
            if fields["format"] != _FORMAT:
                raise ValueError(f"its format is {fields['format']!r}")
            tensors = fields["tensors"]
            return cls(
                tuple(tensor["name"] for tensor in tensors),
                tuple(tensor["numel"] for tensor in tensors),
                tuple(map(_bits_in, tensors)),
                fields["groups"],
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InvalidArgument(
                f"{path} is not a valid plan ({error}): pass a file that Plan.save() wrote, in the "
                f"format {_FORMAT!r}"
            ) from None

    # ---- Agreement -------------------------------------------------------------------------------

    def agree(self, communicator: Communicator, *, name: str = _NAME) -> None:
        """Check that all ranks have the same plan. All ranks must call it before they use the plan.

        Without this check, a rank with another plan waits for messages that no rank sends, until
        the timeout.

        Args:
            communicator: The ranks.
            name: Name of the collective. Threads that compare several plans need different names.

        Raises:
            MismatchError: The plans differ. All ranks raise it; the message has the first tensor
                that differs, in the order of sending, and its entries on two ranks.
        """
        require_same(
            "ranks have different plans",
            {f"tensor {place}": entry for place, entry in enumerate(self._entries())},
            lambda mine: exchange(mine, name, communicator),
            "Use one plan on all ranks: save it on rank 0, and load it on the others",
        )

    def _text(self, tensor: int) -> str:
        bits = self.bits[tensor]
        return f"rate {bits}" if isinstance(bits, float) else f"{bits} bits"

    def _entries(self) -> list[str]:
        """Return a description of each tensor, in the order of sending."""
        return [
            f"{self.names[i]!r} ({self.numels[i]} values, {self._text(i)}, group {number})"
            for number, group in enumerate(self.groups)
            for i in group
        ]


def _bits(place: int, bits: float) -> float:
    """Return a tensor's bits as Python's int, or its rate as a float."""
    if isinstance(bits, numbers.Real) and not isinstance(bits, numbers.Integral):
        Config(compressor="entropy", rate=float(bits))  # checks the rate
        return float(bits)
    whole = require_integer(f"a plan's bits[{place}]", bits, 1, EXACT_BITS)
    return Config(bits=whole).bits  # checks the bits


def _bits_in(tensor: Mapping[str, Any]) -> float:
    """Return the bits, or the rate as a float, of a tensor in a file."""
    if "rate" not in tensor:
        return require_integer("bits", tensor["bits"], 1, EXACT_BITS)
    if type(rate := tensor["rate"]) not in (int, float):
        raise ValueError(f"a rate is {rate!r}")
    return float(rate)


def _integers(field: str, values: Sequence[int], least: int, most: int) -> tuple[int, ...]:
    """Return the entries of a plan's field as Python integers."""
    return tuple(
        require_integer(f"a plan's {field}[{i}]", value, least, most)
        for i, value in enumerate(values)
    )
