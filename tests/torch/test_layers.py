"""cgx_ops.torch.averaging.layers: which layers are sent with how many bits."""

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import cgx_ops.torch as torch_cgx
from cgx_ops import Config, InvalidArgument, Rules, Segment
from cgx_ops.torch.averaging import layers
from cgx_ops.torch.averaging.layers import Layer, layer_name, segments_of

CONFIG = Config(bits=4, bucket_size=512)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    torch_cgx.forget_models()


def bits(rules: Rules, name: str, dimensions: int = 2) -> int:
    return rules.of(name, dimensions, CONFIG).bits


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("bn", "layer1.bn2.weight", True),
        ("bn", "layer1.conv.weight", False),
        ("layer1", "layer10.weight", True),  # a part of the name, as in CGX
        ("layer1.*", "layer10.weight", False),
        ("layer1.*", "layer1.weight", True),
        ("*.bias", "a.b.bias", True),
        ("*.bias", "bias", False),
        ("layer[12].weight", "layer2.weight", True),
        ("BN", "bn.weight", False),
    ],
)
def test_patterns_of_cgx(pattern: str, name: str, matches: bool) -> None:
    torch_cgx.exclude_layer(pattern)
    assert layers.process_rules().match(name) == matches


def test_last_call_of_cgx_wins() -> None:
    torch_cgx.set_quantization_bits("conv", 2)
    torch_cgx.set_quantization_bucket_size("conv", 64)
    torch_cgx.set_quantization_bits("conv1", 8)
    found = layers.process_rules().of("conv1.weight", 4, CONFIG)
    assert found == Config(bits=8, bucket_size=64)
    torch_cgx.exclude_layer("conv")
    assert bits(layers.process_rules(), "conv1.weight") == 32


def test_segments_have_the_layers_offsets() -> None:
    found = [Layer("a", 2, 100), Layer("b", 1, 10), Layer("c", 3, 7)]
    rules = Rules([("c", {"bits": 1, "bucket_size": 16})])
    assert segments_of(rules, found, [0, 100, 128], CONFIG) == [
        Segment(0, 100, CONFIG),
        Segment(100, 10, CONFIG.with_own(bits=32)),
        Segment(128, 7, CONFIG.with_own(bits=1, bucket_size=16)),
    ]


def test_compressor_of_a_single_layer() -> None:
    rules = Rules(
        [
            ("emb.weight", {"value_bits": 8}),
            ("emb", {"compressor": "topk", "density": 0.05, "bucket_size": 4096}),
            ("head.proj", {"compressor": "sign"}),
            ("head", {"compressor": "levels", "bits": 2}),
        ]
    )
    base = Config(bits=8, bucket_size=128, rounding="stochastic", minimal_size=20)
    for name, own in {
        "emb.weight": Config(
            compressor="topk", density=0.05, value_bits=8, bucket_size=4096, minimal_size=20
        ),
        "head.weight": Config(bits=2, compressor="levels", bucket_size=128, minimal_size=20),
        "head.proj": Config(compressor="sign", bucket_size=128, minimal_size=20),
        "other": base,
    }.items():
        layer = Layer(name, 2, 1000)
        assert rules.of(name, 2, base) == own
        assert segments_of(rules, [layer], [0], base)[0].config == own
    # A compressor alone leaves vectors exact, also under explicit feedback.
    for config in (base, Config(bits=2, compressor="levels", error_feedback=True)):
        own = rules.of("emb.bias", 1, config)
        assert (own.bits, own.compressor, own.keeps_residuals) == (32, "topk", False)


def test_torch_compile_does_not_change_names() -> None:
    """Check registered names and the names in patterns."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1] = torch.compile(model[1])  # type: ignore[call-overload]
    compiled: nn.Module = torch.compile(model)  # type: ignore[assignment]
    assert "_orig_mod.1._orig_mod.weight" in dict(compiled.named_parameters())
    names = [layer_name(name) for name, _ in compiled.named_parameters()]
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]
    torch_cgx.register_model(compiled)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_cgx.set_quantization_bits("_orig_mod.1._orig_mod.*", 2)
    assert layers.process_rules().unmatched(names) == []


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: torch_cgx.exclude_layer(""), "exclude_layer: .* part of a layer's name"),
        (lambda: torch_cgx.exclude_layer(0), "the pattern is 0"),  # type: ignore[arg-type]
        (lambda: torch_cgx.set_quantization_bits("a", 9), "bits is 9"),
        (lambda: torch_cgx.set_quantization_bits("a", 0), "bits is 0"),
        (lambda: torch_cgx.set_quantization_bucket_size("a", 0), "bucket_size is 0"),
    ],
)
def test_bad_arguments_of_cgx(call: Callable[[], None], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        call()
    assert not layers.process_rules()


# ---- names of CGX --------------------------------------------------------------------------------


def test_the_readmes_script_runs() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4))
    torch_cgx.register_model([(name, p.numel()) for name, p in model.named_parameters()])
    torch_cgx.exclude_layer("bias")
    torch_cgx.exclude_layer("1.")
    torch_cgx.set_quantization_bits("2.weight", 8)
    torch_cgx.set_quantization_bucket_size("0.weight", 128)
    rules = layers.process_rules()
    assert bits(rules, "2.weight") == 8
    assert bits(rules, "2.bias") == 32
    assert rules.of("0.weight", 4, CONFIG).bucket_size == 128
    torch_cgx.forget_models()
    assert bits(layers.process_rules(), "2.weight") == 4


def test_mistakes_raise_or_warn() -> None:
    torch_cgx.register_model([("fc.weight", 20), ("fc.bias", 4)])
    with pytest.raises(InvalidArgument, match=r"'fc.weight' was registered with 20 .* now has 30"):
        torch_cgx.register_model([("fc.weight", 30)])
    with pytest.raises(InvalidArgument, match="'a' is listed twice"):
        torch_cgx.register_model([("a", 1), ("a", 1)])
    with pytest.raises(InvalidArgument, match="'a' has 'many' elements"):
        torch_cgx.register_model([("a", "many")])  # type: ignore[list-item]
    with pytest.warns(UserWarning, match="no layer matches 'conv'.*fc.weight, fc.bias"):
        torch_cgx.exclude_layer("conv")


def test_a_rule_set_before_registration_is_checked_then() -> None:
    torch_cgx.exclude_layer("conv")
    with pytest.warns(UserWarning, match="no layer matches 'conv'"):
        torch_cgx.register_model(nn.Linear(3, 4))


def test_a_layer_without_elements_is_registered() -> None:
    torch_cgx.register_model([("empty", 0)])
    with pytest.raises(InvalidArgument, match="'bad' has -1 elements"):
        torch_cgx.register_model([("bad", -1)])


def test_rules_of_the_process_need_not_match_in_every_model() -> None:
    torch_cgx.register_model([("critic.weight", 12)])
    torch_cgx.exclude_layer("critic")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "no layer matches")
        with pytest.warns(UserWarning, match="not registered"):
            layers.check_model([Layer("generator.weight", 2, 12)], layers.process_rules())
    torch_cgx.forget_models()
    with pytest.warns(UserWarning, match="no layer matches 'critic'"):
        layers.check_model([Layer("generator.weight", 2, 12)], Rules([("critic", 2)]))


def test_unmatched_rule_warns_once() -> None:
    """The warning has no user line, because the model's first step makes the check."""
    torch_cgx.register_model([("weight", 12)])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch_cgx.exclude_layer("conv")
        layers.check_model([Layer("weight", 2, 12)], layers.process_rules())
    text = "no layer matches 'conv': the rule has no effect. Nearest names: weight"
    assert [str(each.message) for each in told] == [
        text,
        f"DistributedDataParallel: {text}",
    ]


def test_trained_model_is_compared_with_the_registered_one() -> None:
    torch_cgx.register_model([("weight", 12), ("bias", 4)])
    layers.check_model([Layer("weight", 2, 12), Layer("bias", 1, 4)], layers.process_rules())
    with pytest.raises(InvalidArgument, match=r"'weight' was registered with 12 .* has 13"):
        layers.check_model([Layer("weight", 2, 13)], layers.process_rules())
    with pytest.warns(UserWarning, match="1 of 2 layers were not registered, for example 'other'"):
        layers.check_model([Layer("weight", 2, 12), Layer("other", 2, 12)], layers.process_rules())


def test_import_defines_the_names_of_torch_cgx() -> None:
    assert torch.ops.cgx.quantized_allreduce is not None
    for name in ("register_model", "exclude_layer", "set_quantization_bits"):
        assert name in torch_cgx.__all__


def test_patterns_keep_dots_and_drop_wrappers() -> None:
    """A leading dot separates parts; the name of a wrapper alone would match every layer."""
    torch_cgx.exclude_layer(".bias")
    assert not layers.process_rules().match("bias_proj.weight")
    assert layers.process_rules().match("head.bias")
    for pattern in ("0._checkpoint_wrapped_module.up.*", "0.up.*", "0._orig_mod.up"):
        torch_cgx.forget_models()
        torch_cgx.exclude_layer(pattern)
        assert layers.process_rules().match("0.up.weight"), pattern
    for pattern in ("_checkpoint_wrapped_module", "_orig_mod."):
        with pytest.raises(InvalidArgument, match="names a wrapper of torch"):
            torch_cgx.exclude_layer(pattern)
