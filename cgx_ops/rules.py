"""Rules: compression settings by parameter name, the same for PyTorch and JAX.

    Rules([("bias|norm", 32), ("embedding", {"compressor": "topk", "density": 0.01})])

A pattern is a regular expression that is searched for in the parameter's path. The parts of a path
are separated by '.': "layers.0.bias". For each field of Config, the first matching rule that sets
the field decides. Once a rule has set the compressor, later rules no longer set fields that belong
to a compressor.
"""

import difflib
import fnmatch
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cgx_ops._core import tables
from cgx_ops._core.tables import EXACT_BITS, OF_COMPRESSOR
from cgx_ops._core.user_warnings import warn_once
from cgx_ops.config import Config
from cgx_ops.errors import InvalidArgument

# All tensors of a message share one algorithm.
_FIELDS = tuple(row["name"] for row in tables.CONFIG_FIELDS if row["name"] != "algorithm")
_EXAMPLE = "Rules([('bias|norm', 32), ('embedding', {'compressor': 'topk', 'density': 0.01})])"

# A rule that sets one of these decides how many bits its parameters get.
_OF_BITS = {"bits", "compressor", "rate", "rounding", "rotation"}

_compiled = functools.lru_cache(maxsize=4096)(re.compile)


@dataclass(frozen=True)
class Rule:
    """One checked rule.

    Attributes:
        pattern: The regular expression.
        settings: Pairs of a field of Config and its value.
        written: The pattern as the user wrote it, if that was a glob or a part of a name.
    """

    pattern: str
    settings: tuple[tuple[str, Any], ...]
    written: str = ""

    @property
    def label(self) -> str:
        """The pattern as the user wrote it."""
        return self.written or self.pattern

    def matches(self, name: str) -> bool:
        """Return whether the rule applies to the parameter with this name."""
        return _compiled(self.pattern).search(name) is not None


@dataclass(frozen=True, init=False)
class Rules:
    """Compression settings by parameter name. Immutable, hashable, picklable; equal on all ranks.

    For each field of Config, the first rule that matches the parameter and sets the field decides.

    Args:
        rules: Pairs of a pattern and settings, the highest priority first. The pattern is a regular
            expression that is searched for in the parameter's path, such as "layers.0.bias".
            Settings are bits (1 to 8, or 32 for exact), or a dict with fields of Config except
            `algorithm`.
        exact_vectors: Whether parameters with at most one dimension (biases, norms) are sent exact
            unless a rule sets their bits or rate. They are small, and sensitive to compression.

    Attributes:
        rules: The checked rules.
        exact_vectors: The argument.

    Raises:
        InvalidArgument: A pattern is not a regular expression, a field is unknown, or a value is
            out of its range (a ValueError).
        TypeError: `rules` does not consist of pairs, or `exact_vectors` is not a bool.

    Example:
        >>> from cgx_ops import Config, Rules
        >>> rules = Rules([("head", 8), ("bias|norm", 32), ("", {"bucket_size": 512})])
        >>> config = rules.of("layers.0.head.weight", 2, Config(bits=4))
        >>> config.bits, config.bucket_size
        (8, 512)
    """

    rules: tuple[Rule, ...]
    exact_vectors: bool

    def __init__(
        self,
        rules: Iterable[tuple[str, int | Mapping[str, Any]]] = (),
        *,
        exact_vectors: bool = True,
    ) -> None:
        """Check the rules; see the class."""
        if type(exact_vectors) is not bool:
            raise TypeError(f"exact_vectors is {exact_vectors!r}; it must be True or False")
        if isinstance(rules, str | Mapping) or not isinstance(rules, Iterable):
            raise TypeError(f"rules is {rules!r}; give pairs: {_EXAMPLE}")
        object.__setattr__(self, "rules", tuple(map(_checked_rule, rules)))
        object.__setattr__(self, "exact_vectors", exact_vectors)

    def __repr__(self) -> str:
        """Return a call that creates equal rules."""
        pairs = [(rule.pattern, dict(rule.settings)) for rule in self.rules]
        return f"Rules({pairs}, exact_vectors={self.exact_vectors})"

    def __bool__(self) -> bool:
        """Return whether there are any rules."""
        return bool(self.rules)

    def with_first(self, *rules: Rule | tuple[str, int | Mapping[str, Any]]) -> "Rules":
        """Return a copy with more rules of higher priority.

        Args:
            *rules: Pairs of a pattern and settings, the highest priority first.

        Raises:
            InvalidArgument: A rule is not valid; see Rules.
            TypeError: A rule is not a pair.
        """
        made = Rules(exact_vectors=self.exact_vectors)
        checked = (rule if isinstance(rule, Rule) else _checked_rule(rule) for rule in rules)
        object.__setattr__(made, "rules", (*checked, *self.rules))
        return made

    def of(self, name: str, dimensions: int, config: Config) -> Config:
        """Return the Config of one parameter.

        Args:
            name: The parameter's path; "" if it is unknown.
            dimensions: Number of dimensions of its shape.
            config: The fields that no rule sets.

        Raises:
            InvalidArgument: Settings of several rules, or of a rule and `config`, exclude each
                other.
        """
        return _of(self, name, dimensions, config)

    def overrides(self, name: str, dimensions: int, config: Config) -> dict[str, Any]:
        """Return the fields that rules set for one parameter.

        Args:
            name: See of().
            dimensions: See of().
            config: See of().
        """
        found: dict[str, Any] = {}
        of_compressor = True  # whether fields of the compressor may still be set
        for rule in self.rules:
            if not rule.matches(name):
                continue
            for field, value in rule.settings:
                if of_compressor or field not in (*OF_COMPRESSOR, "compressor"):
                    found.setdefault(field, value)
            of_compressor = of_compressor and "compressor" not in found
        if self.exact_vectors and dimensions <= 1 and "rate" not in found:
            found.setdefault("bits", EXACT_BITS)
        return _with_bits(found, config)

    def fix_bits(self, name: str, dimensions: int, config: Config) -> bool:
        """Return whether rules set the bits, the rate or the encoding of one parameter.

        Args:
            name: See of().
            dimensions: See of().
            config: See of().
        """
        return not _OF_BITS.isdisjoint(self.overrides(name, dimensions, config))

    def match(self, name: str) -> bool:
        """Return whether any rule applies to the parameter with this name.

        Args:
            name: The parameter's path.
        """
        return any(rule.matches(name) for rule in self.rules)

    @property
    def compressors(self) -> set[str]:
        """The compressors that rules set."""
        return {
            value for rule in self.rules for field, value in rule.settings if field == "compressor"
        }

    def may_keep_residuals(self, config: Config) -> bool:
        """Return whether some parameter, with any name, may use error feedback.

        Args:
            config: The fields that no rule sets.
        """

        def keeps(rule: Rule) -> bool:
            try:
                return config.with_own(**_with_bits(dict(rule.settings), config)).keeps_residuals
            except InvalidArgument:  # another rule may set the compressor that this one needs
                return True

        return config.keeps_residuals or any(map(keeps, self.rules))

    def warn_of_unmatched(self, names: Iterable[str], where: str = "") -> None:
        """Warn, once per pattern, about each rule that matches none of a model's parameters.

        Args:
            names: The paths of all parameters.
            where: Start of the text, such as "psum_q: ".
        """
        names = list(names)
        named = [name for name in dict.fromkeys(names) if name]
        for label in self.unmatched(names):
            nearest = ", ".join(_nearest(label, named)) or "none, the parameters have no names"
            warn_once(
                f"{where}no layer matches '{label}': the rule has no effect. "
                f"Nearest names: {nearest}"
            )

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Return the patterns that match none of these names.

        Args:
            names: The paths of all parameters.
        """
        names = list(names)
        return [rule.label for rule in self.rules if not any(map(rule.matches, names))]


@functools.lru_cache(maxsize=16384)  # hooks call this in every step
def _of(rules: Rules, name: str, dimensions: int, config: Config) -> Config:
    try:
        return config.with_own(**rules.overrides(name, dimensions, config))
    except InvalidArgument as error:
        matching = ", ".join(repr(rule.label) for rule in rules.rules if rule.matches(name))
        raise InvalidArgument(f"rules {matching} for parameter '{name}': {error}") from None


def pattern_of(name: str) -> str:
    """Return the pattern that matches only the parameter with this name."""
    return rf"\A{re.escape(name)}\Z"


def rule_of_part(pattern: str, **settings: Any) -> Rule:
    """Return a rule from a pattern in CGX's notation.

    Args:
        pattern: A part of the name; if it contains *, ? or [, a glob for the whole name.
        **settings: Fields of Config.
    """
    is_glob = any(c in pattern for c in "*?[")
    expression = r"\A" + fnmatch.translate(pattern) if is_glob else re.escape(pattern)
    return Rule(expression, _checked_rule((expression, settings)).settings, pattern)


def require_rules(rules: Any, where: str = "") -> Rules:
    """Return the argument, or raise TypeError unless it is a Rules."""
    if rules is None:
        raise TypeError(
            f"{where}rules is None; give cgx_ops.Rules(...). To compress vectors too: "
            "Rules(exact_vectors=False)"
        )
    if not isinstance(rules, Rules):
        raise TypeError(f"{where}rules is {rules!r}; give cgx_ops.{_EXAMPLE}")
    return rules


def _with_bits(own: dict[str, Any], config: Config) -> dict[str, Any]:
    """Return settings with bits, if they set a compressor and `config` is exact."""
    if "compressor" in own and config.bits == EXACT_BITS:
        own.setdefault("bits", Config().bits)
    return own


def _checked_rule(pair: Any) -> Rule:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise TypeError(f"{pair!r} is not a pair of a pattern and settings; e.g. {_EXAMPLE}")
    pattern, given = pair
    try:
        if not isinstance(pattern, str):
            raise TypeError(f"a pattern is a str, not {type(pattern).__name__}")
        _compiled(pattern)
    except (re.error, TypeError) as error:
        raise InvalidArgument(
            f"the pattern {pattern!r} of a rule is not a regular expression ({error}). It is "
            "searched for in a parameter's path, so a part of the path needs no '*'"
        ) from None
    own = dict(given) if isinstance(given, Mapping) else {"bits": given}
    if unknown := sorted(map(str, own.keys() - set(_FIELDS))):
        raise InvalidArgument(
            f"the rule {pattern!r} sets {', '.join(unknown)}, which rules cannot set; "
            f"accepted: {', '.join(_FIELDS)}"
        )
    for field, value in own.items():
        if value is None:
            raise InvalidArgument(
                f"the rule {pattern!r} sets {field} to {value!r}; give a value, or leave it out"
            )
    try:
        config = _checked_settings(own)
    except InvalidArgument as error:
        raise InvalidArgument(f"the rule {pattern!r}: {error}") from None
    return Rule(pattern, tuple((field, getattr(config, field)) for field in own))


def _checked_settings(own: Mapping[str, Any]) -> Config:
    """Return a Config with these fields, for the first compressor that accepts them all."""
    refusals: list[InvalidArgument] = []
    for row in (
        tables.COMPRESSORS.values() if "compressor" not in own else [{"name": own["compressor"]}]
    ):
        try:
            return Config(**{"compressor": row["name"], **own})
        except InvalidArgument as error:
            refusals.append(error)
    raise refusals[0]


def _nearest(pattern: str, names: list[str], count: int = 4) -> list[str]:
    """Return the names most similar to a pattern, as a whole or in one of their parts."""

    def likeness(name: str) -> float:
        texts = [name, *name.split(".")]
        return max(
            difflib.SequenceMatcher(None, pattern.lower(), text.lower()).ratio() for text in texts
        )

    return sorted(names, key=likeness, reverse=True)[:count]
