"""Which parameters travel otherwise than the rest: the one language of rules by name.

A rule is a regular expression, and fields of Config for the parameters in whose names it is found.
Rules count in order: where several set one field of a parameter, the last decides. What is written
for each framework becomes such rules:

    cgx_ops.jax.psum_q(rules={"bias": 32})            there the first that is found counts, alone
    cgx_ops.torch.layers.Rule("conv*.weight", bits=2)  a part of a name or a glob: expression_of()
    exclude_layer(), set_quantization_bits()          CGX's names make the same Rules
    cgx_ops.torch.fsdp.compress(exact=...)            what is exact where no rule sets the bits

A rule may set every field that a Segment has. One that sets a compressor begins anew: what earlier
rules said for another one is left behind, as with Config.with_own(), but that bits stay exact.
"""

import difflib
import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cgx_ops import _native
from cgx_ops._warnings import warn_once
from cgx_ops.call import Segment
from cgx_ops.config import EXACT_BITS, OF_COMPRESSOR, Config
from cgx_ops.errors import InvalidArgument


@dataclass(frozen=True)
class Rule:
    """What parameters of some names have of their own.

    Attributes:
        expression: it is searched for in a parameter's name.
        overrides: fields of Config by name, of those that a Segment may set: bits, bucket_size,
            compressor, density, and others. Without a compressor among them they are for parameters
            whose own has such fields.

    Raises:
        InvalidArgument (a ValueError): a value is out of its range.
        TypeError: a field that no Segment has.
    """

    expression: re.Pattern[str]
    overrides: Mapping[str, Any]

    def __post_init__(self) -> None:
        Segment(0, 0, **self.overrides)  # knows which fields there are; Config, their values
        checked = _checked(self.overrides)
        own = {field: getattr(checked, field) for field in self.overrides}
        object.__setattr__(self, "overrides", own)

    def matches(self, name: str) -> bool:
        """Tell whether the rule is for the parameter of this name."""
        return self.expression.search(name) is not None


def _checked(own: Mapping[str, Any]) -> Config:
    """Return a Config with these fields, of the first compressor that has them all."""
    refusals: list[InvalidArgument] = []
    for row in _native.COMPRESSORS if "compressor" not in own else [{"name": own["compressor"]}]:
        try:
            return Config(**{"compressor": row["name"], **own})
        except InvalidArgument as error:
            refusals.append(error)
    raise refusals[0]


def overrides(rules: Iterable[Rule], name: str, *, exact: bool = False) -> dict[str, Any]:
    """Return the fields of Config that a parameter has of its own.

    Args:
        rules: in order.
        name: of the parameter; "" if it is unknown.
        exact: whether the parameter travels exact unless a rule sets its bits.
    """
    own: dict[str, Any] = {"bits": EXACT_BITS} if exact else {}
    for rule in rules:
        if not rule.matches(name):
            continue
        compressor = own.get("compressor")
        if rule.overrides.get("compressor", compressor) != compressor:
            exact = own.get("bits") == EXACT_BITS
            own = {field: value for field, value in own.items() if field not in OF_COMPRESSOR}
            own |= {"bits": EXACT_BITS} if exact else {}
        own |= rule.overrides
    return own


def expression_of(pattern: str) -> re.Pattern[str]:
    """Return CGX's way to name layers as an expression.

    Args:
        pattern: a part of the name; with *, ? or [ in it, a glob for the whole name.
    """
    if any(c in pattern for c in "*?["):
        return re.compile(r"\A" + fnmatch.translate(pattern))
    return re.compile(re.escape(pattern))


def warn_of_unmatched(patterns: Iterable[str], names: Iterable[str], where: str = "") -> None:
    """Warn, once, of each pattern that matches no parameter.

    Args:
        patterns: those that match none of the names, as the user wrote them.
        names: of all parameters.
        where: begins the text, such as "psum_q: ".
    """
    named = [name for name in dict.fromkeys(names) if name]
    for pattern in patterns:
        nearest = ", ".join(_nearest(pattern, named)) or "none, the parameters have no names"
        warn_once(
            f"{where}no layer matches '{pattern}': the rule has no effect. Nearest names: {nearest}"
        )


def _nearest(pattern: str, names: list[str], count: int = 4) -> list[str]:
    """Return the names that are most like a pattern, as a whole or in one of their parts."""

    def likeness(name: str) -> float:
        texts = [name, *re.split("[./]", name)]
        return max(
            difflib.SequenceMatcher(None, pattern.lower(), text.lower()).ratio() for text in texts
        )

    return sorted(names, key=likeness, reverse=True)[:count]
