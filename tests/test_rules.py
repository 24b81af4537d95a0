"""cgx_ops.rules: the one language by which parameters get settings of their own."""

import fnmatch
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgx_ops import Config, InvalidArgument
from cgx_ops.rules import EXACT_BITS, Rule, expression_of, overrides

# Few letters, so that patterns are often found; those that expressions and globs know.
NAMES = st.text("ab.1\n", max_size=8)
PATTERNS = st.text("ab.1*?[]!-^$(+|\\\n", min_size=1, max_size=6)
OVERRIDES = st.fixed_dictionaries(
    {},
    optional={
        "bits": st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 32]),
        "bucket_size": st.integers(1, 2**40),
    },
)
EXPRESSIONS = st.sampled_from(["a", "b", r"a\.", "^1", "a|b", "1$", "", "never"])


def rule(expression: str, **own: Any) -> Rule:
    return Rule(re.compile(expression), own)


# ---- order ---------------------------------------------------------------------------------------


def test_the_last_rule_that_sets_a_field_decides_it() -> None:
    rules = [rule("conv", bits=2, bucket_size=64), rule("conv1", bits=8), rule("fc", bits=1)]
    assert overrides(rules, "conv1.weight") == {"bits": 8, "bucket_size": 64}
    assert overrides(rules, "conv2.weight") == {"bits": 2, "bucket_size": 64}
    assert overrides(rules, "bias") == {}


def test_a_compressor_begins_anew() -> None:
    topk = rule("w", compressor="topk", density=0.1)
    assert overrides([rule("w", bits=2, bucket_size=8), topk], "w") == {
        "bucket_size": 8, "compressor": "topk", "density": 0.1,
    }  # fmt: skip
    assert overrides([topk, rule("w", compressor="topk", value_bits=4)], "w") == {
        "compressor": "topk", "density": 0.1, "value_bits": 4,
    }  # fmt: skip
    assert overrides([topk, rule("w", compressor="levels", bits=2)], "w") == {
        "compressor": "levels", "bits": 2,
    }  # fmt: skip
    assert overrides([topk], "w", exact=True) == {**topk.overrides, "bits": EXACT_BITS}


def test_fields_are_for_compressors_that_have_them() -> None:
    """A rule without a compressor is for parameters whose own has such fields."""
    assert rule("w", density=0.1).overrides == {"density": 0.1}
    assert rule("w", bits=1, rounding="nearest").overrides == {"bits": 1, "rounding": "nearest"}
    for own in ({"density": 0.1, "clip": True}, {"compressor": "topk", "clip": True}):
        with pytest.raises(InvalidArgument):
            rule("w", **own)


@given(st.lists(st.tuples(EXPRESSIONS, OVERRIDES), max_size=6), NAMES, st.booleans())
def test_every_field_is_decided_by_itself(
    given_rules: list[tuple[str, dict[str, int]]], name: str, exact: bool
) -> None:
    rules = [rule(expression, **own) for expression, own in given_rules]
    got = overrides(rules, name, exact=exact)
    for field in ("bits", "bucket_size"):
        found = [own[field] for e, own in given_rules if field in own and re.search(e, name)]
        default = EXACT_BITS if exact and field == "bits" else None
        assert got.get(field) == (found[-1] if found else default)
    assert got.keys() <= {"bits", "bucket_size"}


@given(st.lists(st.tuples(EXPRESSIONS, st.integers(1, 8)), max_size=6), NAMES)
def test_read_backwards_the_first_that_is_found_decides(
    given_rules: list[tuple[str, int]], name: str
) -> None:
    rules = [rule(expression, bits=bits) for expression, bits in given_rules]
    first = next((bits for e, bits in given_rules if re.search(e, name)), None)
    assert overrides(reversed(rules), name).get("bits") == first


def test_rules_win_over_what_is_exact_by_default() -> None:
    assert overrides([], "norm", exact=True) == {"bits": EXACT_BITS}
    assert overrides([rule("norm", bits=8)], "norm", exact=True) == {"bits": 8}
    assert overrides([rule("norm", bucket_size=8)], "norm", exact=True) == {
        "bits": EXACT_BITS,
        "bucket_size": 8,
    }


# ---- patterns ------------------------------------------------------------------------------------


@given(PATTERNS, NAMES)
def test_a_pattern_is_a_part_of_the_name_or_a_glob_for_all_of_it(pattern: str, name: str) -> None:
    glob = any(c in pattern for c in "*?[")
    want = fnmatch.fnmatchcase(name, pattern) if glob else pattern in name
    assert Rule(expression_of(pattern), {}).matches(name) == want


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("layer1", "layer10.weight", True),
        ("layer1.*", "layer10.weight", False),
        ("ayer1.*", "layer1.weight", False),  # a glob is for the whole name
        ("layer1.weigh?", "layer1.weights", False),
        ("a.b", "axb", False),  # a point is a point
        ("a|b", "a", False),
        ("b", "", False),
    ],
)
def test_patterns(pattern: str, name: str, matches: bool) -> None:
    assert Rule(expression_of(pattern), {}).matches(name) == matches


# ---- what is checked -----------------------------------------------------------------------------


def test_values_are_checked_as_config_checks_them() -> None:
    class Four:  # an integer of some library
        def __index__(self) -> int:
            return 4

    assert type(rule("a", bits=Four()).overrides["bits"]) is int
    bad: list[tuple[str, Any]] = [("bits", 9), ("bits", None), ("bits", True), ("bucket_size", 0)]
    for field, value in bad:
        with pytest.raises(InvalidArgument) as refused:
            rule("a", **{field: value})
        with pytest.raises(InvalidArgument) as by_config:
            Config(**{field: value})
        assert str(refused.value) == str(by_config.value)


@pytest.mark.parametrize("field", ["algorithm", "seed", "offset", "typo"])
def test_fields_that_no_segment_has_are_refused(field: str) -> None:
    with pytest.raises(TypeError, match=field):
        rule("a", **{field: 1})


def test_what_a_rule_was_made_of_may_change() -> None:
    own = {"bits": 4}
    made = Rule(re.compile("a"), own)
    own["bits"] = 99
    assert overrides([made], "a") == {"bits": 4}
    overrides([made], "a")["bits"] = 5
    assert overrides([made], "a") == {"bits": 4}
