"""Which parameters travel otherwise than the rest: the one language of rules by name.

A rule is a regular expression, and fields of Config for the parameters in whose names it is found.
Rules count in order: where several set one field of a parameter, the last decides. What is written
for each framework becomes such rules:

    cgx_ops.jax.psum_q(rules={"bias": 32})            there the first that is found counts, alone
    cgx_ops.torch.layers.Rule("conv*.weight", bits=2)  a part of a name or a glob: expression_of()
    exclude_layer(), set_quantization_bits()          CGX's names make the same Rules
    cgx_ops.torch.fsdp.compress(exact=...)            what is exact where no rule sets the bits

A field that is new in Config and in Segment can be set by rules as soon as it is there.
"""

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cgx_ops.call import Segment
from cgx_ops.config import Config

EXACT_BITS = 32


@dataclass(frozen=True)
class Rule:
    """What parameters of some names have of their own.

    Attributes:
        expression: it is searched for in a parameter's name.
        overrides: fields of Config by name, of those that a Segment may set: bits, bucket_size.

    Raises:
        InvalidArgument (a ValueError): a value is out of its range.
        TypeError: a field that no Segment has.
    """

    expression: re.Pattern[str]
    overrides: Mapping[str, Any]

    def __post_init__(self) -> None:
        Segment(0, 0, **self.overrides)  # knows which fields there are; Config, their values
        checked = replace(Config(), **self.overrides)
        own = {field: getattr(checked, field) for field in self.overrides}
        object.__setattr__(self, "overrides", own)

    def matches(self, name: str) -> bool:
        """Tell whether the rule is for the parameter of this name."""
        return self.expression.search(name) is not None


def overrides(rules: Iterable[Rule], name: str, *, exact: bool = False) -> dict[str, Any]:
    """Return the fields of Config that a parameter has of its own.

    Args:
        rules: in order.
        name: of the parameter; "" if it is unknown.
        exact: whether the parameter travels exact unless a rule sets its bits.
    """
    own: dict[str, Any] = {"bits": EXACT_BITS} if exact else {}
    for rule in rules:
        if rule.matches(name):
            own.update(rule.overrides)
    return own


def expression_of(pattern: str) -> re.Pattern[str]:
    """Return CGX's way to name layers as an expression.

    Args:
        pattern: a part of the name; with *, ? or [ in it, a glob for the whole name.
    """
    if any(c in pattern for c in "*?["):
        return re.compile(r"\A" + fnmatch.translate(pattern))
    return re.compile(re.escape(pattern))
