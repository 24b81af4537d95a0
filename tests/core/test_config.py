"""Config: every field is validated, and its table is the core's."""

import ctypes
import dataclasses
import importlib
import pickle
from typing import Any, get_args

import numpy as np
import pytest

from cgx_ops import CgxError, Config, InvalidArgument, quantize
from cgx_ops._core import library, tables
from cgx_ops.config import Algorithm, Compressor, Rounding


def test_defaults() -> None:
    assert dataclasses.asdict(Config()) == {
        "bits": 4,
        "bucket_size": 512,
        "rounding": None,
        "algorithm": "auto",
        "gather_bits": None,
        "intra_bits": None,
        "skip_incomplete_buckets": False,
        "minimal_size": 0,
        "compressor": "uniform",
        "density": None,
        "value_bits": None,
        "rotation": None,
        "rate": None,
        "clip": False,
        "error_feedback": None,
        "residual_decay": 1.0,
    }


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("bits", [*range(1, 9), 32, np.int64(3)]),
        ("bucket_size", [1, 7, 2**40]),
        ("rounding", [None, "stochastic", "nearest", "shift"]),
        ("algorithm", ["auto", "one_shot", "sra", "ring", "hierarchical"]),
        ("gather_bits", [None, 1, 8, 32]),
        ("intra_bits", [None, 1, 8, 32]),
        ("skip_incomplete_buckets", [True, False]),
        ("minimal_size", [0, 1, 2**40]),
        ("rotation", [None, *(2**i for i in range(1, 11))]),
        ("error_feedback", [None, True, False]),
        ("residual_decay", [1, 0.9, 1e-9]),
    ],
)
def test_accepts(field: str, values: list[Any]) -> None:
    for value in values:
        assert getattr(Config(**{field: value}), field) == value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("bits", value) for value in (0, 9, 16, 31, 33, -4, 4.0, "4", None, True)),
        *(("bucket_size", value) for value in (0, -1, 2**63, 512.0, None)),
        *(("rounding", value) for value in ("up", "NEAREST", "None", 0)),
        *(("algorithm", value) for value in ("tree", "SRA", 1)),
        *(("gather_bits", value) for value in (0, 9, 31, "8")),
        *(("intra_bits", value) for value in (0, 9, 31, "8")),
        *(("skip_incomplete_buckets", value) for value in (1, None, "yes")),
        *(("minimal_size", value) for value in (-1, 2**63, 1.5)),
        *(("compressor", value) for value in ("gzip", "TOPK", None, 1)),
        *(
            ("density", value)
            for value in (0, 0.0, -1, 1.5, 1 + 1e-10, np.nan, np.inf, "x", "1", True)
        ),
        *(("rate", value) for value in (0, 0.2, 8.1, -1, np.nan, np.inf, -np.inf, "x", "2", True)),
        *(("value_bits", value) for value in (0, 9, 15, 31, 33, 8.0, "8")),
        *(("rotation", value) for value in (0, 1, 3, 48, 2048, 32.0, True)),
        *(("clip", value) for value in (1, None, "yes")),
        *(("error_feedback", value) for value in (1, 0, "yes")),
        *(("residual_decay", value) for value in (0, 1.5, -1, None, "1")),
    ],
)
def test_rejects_and_names_field_and_value(field: str, value: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Config(**{field: value})  # pyright: ignore[reportArgumentType]
    assert f"Config.{field} is {value!r}; it must be " in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, CgxError)


def test_is_a_value() -> None:
    config = Config(bits=2, clip=False)
    assert config == dataclasses.replace(Config(), bits=2, clip=False)
    assert hash(config) == hash(Config(bits=2, clip=False))
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.bits = 3  # pyright: ignore[reportAttributeAccessIssue]
    assert type(Config(bits=np.int64(3)).bits) is int  # pyright: ignore[reportArgumentType]
    decay = Config(residual_decay=np.float32(0.5)).residual_decay  # pyright: ignore[reportArgumentType]
    assert type(decay) is float


# ---- the core's table ----------------------------------------------------------------------------


def fields() -> dict[str, dict[str, Any]]:
    return {field["name"]: field for field in tables.CONFIG_FIELDS}


def test_config_has_every_field_of_the_core() -> None:
    own = [field.name for field in dataclasses.fields(Config)]
    assert own == list(fields())


@pytest.mark.parametrize(
    "config",
    [
        Config(),
        Config(bits=2, compressor="levels", error_feedback=False),
        Config(compressor="topk", density=0.01, value_bits=16, residual_decay=0.9),
        Config(rounding="shift", gather_bits=8, intra_bits=2, algorithm="hierarchical"),
    ],
)
def test_texts_round_trip(config: Config) -> None:
    assert Config.parse(str(config)) == config
    assert Config.parse("") == Config()


@pytest.mark.parametrize("text", ["bits=9", "bits", "nothing=1", "bits=4 bits=4", "bits=4,clip=1"])
def test_invalid_texts(text: str) -> None:
    with pytest.raises(InvalidArgument):
        Config.parse(text)


@pytest.mark.parametrize(
    ("config", "keeps"),
    [
        (Config(), False),
        (Config(rounding="nearest"), True),
        (Config(rounding="shift"), False),
        (Config(rounding="stochastic", error_feedback=True), True),
        (Config(rounding="nearest", error_feedback=False), False),
        (Config(bits=32, rounding="nearest"), False),
        (Config(compressor="half"), False),
        *((Config(compressor=each), True) for each in ("levels", "topk", "randk")),
        *((Config(compressor=each), True) for each in ("mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4")),
        (Config(compressor="mxfp8", rounding="stochastic"), False),
        *((Config(compressor=each), False) for each in ("sign", "ternary", "qsgd")),
    ],
)
def test_feedback_is_for_biased_encodings(config: Config, keeps: bool) -> None:
    assert config.keeps_residuals == keeps


@pytest.mark.parametrize(
    ("name", "words"),
    [("rounding", Rounding), ("algorithm", Algorithm), ("compressor", Compressor)],
)
def test_names_equal_those_of_the_core(name: str, words: Any) -> None:
    field = fields()[name]
    own = {"None"} if name == "rounding" else set()
    assert {*get_args(words)} | own == field["words"].keys()
    assert all(word in field["accepted"] for word in field["words"])


def test_text() -> None:
    config = Config(3, 64, "shift", "sra", 8, None, True, 100, error_feedback=True)
    assert str(config) == (
        "bits=3 bucket_size=64 rounding='shift' algorithm='sra' gather_bits=8 intra_bits=None "
        "skip_incomplete_buckets=True minimal_size=100 compressor='uniform' density=None "
        "value_bits=None rotation=None rate=None clip=False error_feedback=True residual_decay=1.0"
    )
    native = config.native
    values = {name: getattr(native, name) for name in fields()}
    assert values == {
        "bits": 3,
        "bucket_size": 64,
        "rounding": 2,
        "algorithm": 2,
        "gather_bits": 8,
        "intra_bits": 0,
        "skip_incomplete_buckets": 1,
        "minimal_size": 100,
        "compressor": 0,
        "density": 0,
        "value_bits": 0,
        "rotation": 0,
        "rate": 0,
        "clip": 0,
        "error_feedback": 2,
        "residual_decay": 0,
    }


def test_texts_may_omit_and_reorder_fields() -> None:
    parse = library.parse_config
    assert bytes(parse("")) == bytes(Config().native)
    short = parse("rounding='nearest' bits=8")
    assert bytes(short) == bytes(Config(8, rounding="nearest").native)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("bits=9", "bits is 9; it must be an integer from 1 to 8, or 32"),
        ("bits=", "bits is ; it must be"),
        ("bits", "bits is ; it must be"),
        ("bits= 4", "bits is ; it must be"),
        ("bits=4x", "bits is 4x;"),
        ("bits=99999999999999999999", "bits is 99999999999999999999;"),
        ("rounding=nearest", "rounding is nearest; it must be one of 'nearest', 'stochastic'"),
        ("gather_bits=0", "gather_bits is 0; it must be None"),
        ("skip_incomplete_buckets=1", "it must be True or False"),
        ("minimal_size=-1", "minimal_size is -1;"),
        ("bits=4 bits=4", "bits is given twice"),
        ("bits=4 speed=2", "a config has no field 'speed'; the fields are bits, bucket_size"),
        ("bits=4  algorithm='sra'", "a config has no field ' algorithm'"),
        (" bits=4", "a config has no field ' bits'"),
        ("=", "a config has no field ''"),
    ],
)
def test_bad_texts(text: str, says: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        library.parse_config(text)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("bits=9", "bits"),
        ("clip=1", "clip"),
        ("bits=4 density=2", "density"),
        ("compressor='none' bits=9", "compressor"),  # the first one
        ("bits=8 compressor='levels'", None),  # the two fields are incompatible
        ("density=0.5", None),
        ("speed=2", None),
        ("bits=4 bits=9", None),
    ],
)
def test_invalid_field(text: str, field: str | None) -> None:
    with pytest.raises(InvalidArgument) as caught:
        library.parse_config(text)
    assert caught.value.field == field
    with pytest.raises(InvalidArgument) as caught:
        library.call("cgx_config_check_feedback", ctypes.byref(library.parse_config("bits=32")))
    assert caught.value.field is None  # that of the last failure only


def test_config_names_the_invalid_field() -> None:
    with pytest.raises(InvalidArgument) as caught:
        Config(bits=4, density=2)
    assert caught.value.field == "density"
    with pytest.raises(InvalidArgument) as caught:
        Config(residual_decay=0)
    assert caught.value.field == "residual_decay"
    with pytest.raises(InvalidArgument) as caught:
        Config(density=0.5)
    assert caught.value.field is None


OVERRIDES: list[tuple[Config, dict[str, Any]]] = [
    (Config(), {}),
    (Config(3, 64), {"bits": 2, "rounding": "nearest"}),
    (Config(3, rotation=32, gather_bits=8, intra_bits=8), {"bucket_size": 128}),
    (Config(3, rotation=32, gather_bits=8, intra_bits=8), {"compressor": "uniform"}),
    (Config(3, 64, rotation=32, gather_bits=8, intra_bits=8), {"compressor": "levels"}),
    (Config(8, rounding="shift", minimal_size=99), {"compressor": "levels", "bits": 2}),
    (Config(compressor="topk", density=0.3, value_bits=8), {"compressor": "uniform"}),
    (Config(compressor="topk", density=0.3), {"compressor": "randk"}),
    (Config(compressor="ternary", clip=True, algorithm="sra"), {"compressor": "sign"}),
    (Config(32), {"compressor": "topk"}),
    (Config(), {"compressor": "gzip"}),
    (Config(32), {"compressor": "levels", "bits": 1}),
    (Config(2, compressor="levels", error_feedback=True), {"bits": 32}),
    (Config(2, compressor="levels", error_feedback=True), {"compressor": "lossless"}),
    (Config(2, compressor="levels", error_feedback=True, residual_decay=0.9), {"bits": 1}),
    (Config(compressor="topk"), {"bits": 2}),
    (Config(4), {"compressor": "qsgd", "rounding": "nearest"}),
    (Config(4, error_feedback=True), {"compressor": "sign"}),
    (Config(4), {"bits": 9}),
]


@pytest.mark.parametrize("unknown", ["gzip", "TOPK", ["topk"], 3])
def test_unknown_compressor_in_a_keyword_raises(unknown: Any) -> None:
    with pytest.raises(InvalidArgument, match="compressor"):
        quantize(np.ones(4, np.float32), compressor=unknown)
    with pytest.raises(InvalidArgument, match="compressor"):
        Config().with_own(compressor=unknown)


@pytest.mark.parametrize(("config", "own"), OVERRIDES, ids=str)
def test_core_overrides_like_python(config: Config, own: dict[str, Any]) -> None:
    native = library.parse_config(str(config))
    text = " ".join(f"{name}={value!r}" for name, value in own.items()).encode()
    before = bytes(native)
    try:
        want = config.with_own(**own)
    except InvalidArgument:
        with pytest.raises(InvalidArgument):
            library.call("cgx_config_override", text, ctypes.byref(native))
        assert bytes(native) == before
        return
    library.call("cgx_config_override", text, ctypes.byref(native))
    written = ctypes.c_char_p()
    library.call("cgx_config_text", ctypes.byref(native), ctypes.byref(written))
    assert Config.parse((written.value or b"").decode()) == want


def test_torch_operators_define_no_defaults() -> None:
    pytest.importorskip("torch.nn")
    torch = importlib.import_module("torch")
    importlib.import_module("cgx_ops.torch")
    for form in ("", "_", "_coalesced", "_with_feedback", "_coalesced_with_feedback"):
        schema = str(getattr(torch.ops.cgx, f"quantized_allreduce{form}").default._schema)
        assert (
            ', int? bits=None, int? bucket_size=None, str op="sum", str group_name="", *, '
            'str? compressor=None, str? rounding=None, str config="", str name="", '
            'str carrier="native") ->'
        ) in schema
