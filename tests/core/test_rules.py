"""cgx_ops.Rules: settings of parameters by name, in all APIs."""

import fnmatch
import pickle
import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgx_ops import Config, InvalidArgument, Rules
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.rules import require_rules, rule_of_part

CONFIG = Config(bits=4)
EXACT = Config(bits=EXACT_BITS)
# Few letters, so that patterns often match, and characters that are special in regular expressions
# and globs.
NAMES = st.text("ab.1\n", max_size=8)
PATTERNS = st.text("ab.1*?[]!-^$(+|\\\n", min_size=1, max_size=6)
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "bits": st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 32]),
        "bucket_size": st.integers(1, 2**40),
    },
)
EXPRESSIONS = st.sampled_from(["a", "b", r"a\.", "^1", "a|b", "1$", "", "never"])


def own(
    rules: list[tuple[str, Any]], name: str, *, dimensions: int = 2, config: Config = CONFIG
) -> dict[str, Any]:
    return Rules(rules).overrides(name, dimensions, config)


# ---- order ---------------------------------------------------------------------------------------


def test_first_rule_that_sets_a_field_wins() -> None:
    rules: list[tuple[str, Any]] = [
        ("fc", 1), ("conv1", 8), ("conv", {"bits": 2, "bucket_size": 64}),
    ]  # fmt: skip
    assert own(rules, "conv1.weight") == {"bits": 8, "bucket_size": 64}
    assert own(rules, "conv2.weight") == {"bits": 2, "bucket_size": 64}
    assert own(rules, "weight") == {}


def test_compressor_ends_the_search_for_its_fields() -> None:
    topk = ("w", {"compressor": "topk", "density": 0.1})
    assert own([topk, ("w", {"bits": 2, "bucket_size": 8})], "w") == {
        "bucket_size": 8, "compressor": "topk", "density": 0.1,
    }  # fmt: skip
    # A rule before it sets the fields that it leaves open.
    assert own([("w", {"value_bits": 4}), topk], "w") == {
        "compressor": "topk", "density": 0.1, "value_bits": 4,
    }  # fmt: skip
    levels = ("w", {"compressor": "levels", "bits": 2})
    assert own([levels, topk], "w") == {"compressor": "levels", "bits": 2}
    assert own([("w", 32), topk], "w") == {"bits": 32, "compressor": "topk", "density": 0.1}


def test_compressor_in_a_rule_compresses_except_vectors() -> None:
    topk = [("w", {"compressor": "topk"})]
    assert own(topk, "w") == {"compressor": "topk"}
    assert own(topk, "w", config=EXACT) == {"compressor": "topk", "bits": 4}
    assert own(topk, "w", dimensions=1) == {"compressor": "topk", "bits": EXACT_BITS}
    both = [("w", {"compressor": "levels", "bits": 2})]
    assert own(both, "w", dimensions=1, config=EXACT) == {"compressor": "levels", "bits": 2}
    assert Rules(topk).of("w", 2, EXACT) == Config(compressor="topk")


@given(st.lists(st.tuples(EXPRESSIONS, SETTINGS), max_size=6), NAMES, st.integers(0, 3))
def test_fields_are_resolved_independently(
    rules: list[tuple[str, Mapping[str, int]]], name: str, dimensions: int
) -> None:
    got = own(rules, name, dimensions=dimensions)
    for field in ("bits", "bucket_size"):
        found = [each[field] for e, each in rules if field in each and re.search(e, name)]
        default = EXACT_BITS if dimensions <= 1 and field == "bits" else None
        assert got.get(field) == (found[0] if found else default)
    assert got.keys() <= {"bits", "bucket_size"}


def test_rate_in_a_rule_compresses_vectors_too() -> None:
    entropy = {"compressor": "entropy", "rate": 1.5}
    for dimensions in (0, 1, 2):
        assert own([("w", entropy)], "w", dimensions=dimensions) == entropy
        assert Rules([("w", entropy)]).of("w", dimensions, Config(bits=8)) == Config(**entropy)
        assert Rules([("w", entropy)]).of("w", dimensions, EXACT) == Config(**entropy)
    config = Config(compressor="entropy", rate=3)
    rules = Rules([("norm", 32), ("w", {"rate": 0.5})])
    assert rules.of("w", 1, config).rate == 0.5
    assert rules.of("norm", 1, config).bits == rules.of("bias", 1, config).bits == EXACT_BITS
    with pytest.raises(InvalidArgument, match=r"parameter 'w': rate is 0.5, which .*'uniform'"):
        rules.of("w", 2, CONFIG)


def test_vectors_are_exact_unless_their_bits_are_set() -> None:
    for dimensions in (0, 1):
        assert own([], "norm", dimensions=dimensions) == {"bits": EXACT_BITS}
        assert own([("norm", 8)], "norm", dimensions=dimensions) == {"bits": 8}
        assert own([("norm", {"bucket_size": 8})], "norm", dimensions=dimensions) == {
            "bits": EXACT_BITS,
            "bucket_size": 8,
        }
        assert Rules(exact_vectors=False).of("norm", dimensions, CONFIG) == CONFIG


def test_rules_before_others() -> None:
    rules = Rules([("a", 2)], exact_vectors=False)
    assert rules.with_first(("a", 8), rule_of_part("b*", bits=1)).rules[2:] == rules.rules
    assert rules.with_first(("a", 8)).of("a", 1, CONFIG).bits == 8
    assert rules.with_first(("b", 8)).of("a", 1, CONFIG).bits == 2
    assert rules == Rules([("a", 2)], exact_vectors=False)  # the rules are unchanged


# ---- patterns ------------------------------------------------------------------------------------


@given(PATTERNS, NAMES)
def test_cgx_patterns_match_parts_or_globs(pattern: str, name: str) -> None:
    glob = any(c in pattern for c in "*?[")
    want = fnmatch.fnmatchcase(name, pattern) if glob else pattern in name
    rule = rule_of_part(pattern, bits=2)
    assert rule.matches(name) == want
    assert rule.label == pattern


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("layer1", "layer10.weight", True),
        ("layer1.*", "layer10.weight", False),
        ("ayer1.*", "layer1.weight", False),  # a glob must match the whole name
        ("layer1.weigh?", "layer1.weights", False),
        ("a.b", "axb", False),  # a dot matches only a dot
        ("a|b", "a", False),
        ("b", "", False),
    ],
)
def test_parts_and_globs(pattern: str, name: str, matches: bool) -> None:
    assert rule_of_part(pattern, bits=2).matches(name) == matches


def test_unmatched() -> None:
    rules = Rules([("conv", 2), ("typo", 3), (r"\.weight$", 4)]).with_first(rule_of_part("b*s"))
    assert rules.unmatched(["conv.weight"]) == ["b*s", "typo"]
    assert rules.match("conv.bias") and not rules.match("norm.bias")


# ---- validation ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (9, "the rule 'a': Config.bits is 9"),
        (True, "bits is True"),
        (None, "sets bits to None; give a value"),
        ("four", "bits is 'four'"),
        (Config(bits=4), "bits is Config"),
        ({"bits": 0}, "bits is 0"),
        ({"bucket_size": 0}, "bucket_size is 0"),
        ({"compressor": "lz4"}, "compressor is 'lz4'; it must be one of"),
        ({"density": 1.5}, "density is 1.5; it must be"),
        ({"compressor": "levels", "density": 0.1}, "belongs to topk"),
        ({"compressor": "levels", "bits": 7}, "from 1 to 4, or 32"),
        ({"density": 0.1, "rotation": 32}, "does not support"),
        (
            {"typo": 1, "seed": 2},
            "sets seed, typo, which rules cannot set; accepted: bits, bucket_size",
        ),
        ({"algorithm": "ring"}, "sets algorithm"),
    ],
)
def test_invalid_settings(what: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        Rules([("a", what)])


@pytest.mark.parametrize("pattern", ["*.weight", "(", 3, None])
def test_invalid_patterns(pattern: Any) -> None:
    says = re.escape(f"the pattern {pattern!r} of a rule is not a regular expression")
    with pytest.raises(InvalidArgument, match=says):
        Rules([(pattern, 4)])


@pytest.mark.parametrize("rules", [{"bias": 32}, "bias", 4, [("bias",)], ["bi"], [4]])
def test_invalid_pairs(rules: Any) -> None:
    with pytest.raises(TypeError, match=r"give pairs: Rules\(\[|not a pair .* Rules\(\["):
        Rules(rules)


def test_invalid_rules() -> None:
    with pytest.raises(TypeError, match=r"f: rules is \{'a': 4\}; give cgx_ops.Rules\(\["):
        require_rules({"a": 4}, "f: ")
    with pytest.raises(TypeError, match=r"f: rules is None; .*Rules\(exact_vectors=False\)"):
        require_rules(None, "f: ")
    with pytest.raises(TypeError, match="exact_vectors is 1; it must be True or False"):
        Rules(exact_vectors=1)  # type: ignore[arg-type]


def test_incompatible_settings() -> None:
    rules = Rules([("head.proj", 8), ("head", {"compressor": "levels"})])
    says = "rules 'head.proj', 'head' for parameter 'head.proj.weight': .*from 1 to 4"
    with pytest.raises(InvalidArgument, match=says):
        rules.of("head.proj.weight", 2, CONFIG)
    with pytest.raises(InvalidArgument, match=r"rules 'a' for parameter 'a.b': .*does not support"):
        Rules([("a", {"density": 0.1})]).of("a.b", 2, CONFIG)
    # Another rule may set the compressor.
    both = Rules([("a.b", {"density": 0.1}), ("a", {"compressor": "topk"})])
    assert both.of("a.b", 2, CONFIG).density == 0.1


def test_may_keep_residuals() -> None:
    assert not Rules([("a", 8)]).may_keep_residuals(CONFIG)
    assert Rules([("a", {"compressor": "levels"})]).may_keep_residuals(CONFIG)
    assert Rules([("a", {"error_feedback": True})]).may_keep_residuals(CONFIG)
    assert Rules([("a", {"density": 0.1})]).may_keep_residuals(CONFIG)  # if another rule sets topk


def test_values_are_plain_and_rules_equal_hashable_and_picklable() -> None:
    class Four:  # an integer type of another library
        def __index__(self) -> int:
            return 4

    settings: dict[str, Any] = {"bits": Four()}
    rules = Rules([("a", settings)])
    settings["bits"] = 99
    assert rules.overrides("a", 2, CONFIG) == {"bits": 4}
    assert type(rules.overrides("a", 2, CONFIG)["bits"]) is int
    rules.overrides("a", 2, CONFIG)["bits"] = 5
    same = Rules([("a", 4)])
    assert (rules, hash(rules)) == (same, hash(same)) and rules != Rules([("a", 4)] * 2)
    assert pickle.loads(pickle.dumps(rules)) == rules
    assert eval(repr(rules), {"Rules": Rules}) == rules
    with pytest.raises(AttributeError):
        rules.exact_vectors = False  # type: ignore[misc]


def test_compressors() -> None:
    """Check for any config: a rule may need the compressor that another one sets."""
    rules = Rules([("a.b", {"density": 0.1}), ("a", {"compressor": "topk"}), ("c", 8)])
    assert rules.compressors == {"topk"}
    assert rules.of("a.b", 2, CONFIG) == Config(compressor="topk", density=0.1)
