"""The variables of Config.from_env(): names, values, errors."""

import pytest

from cgx_ops import Config, InvalidArgument
from cgx_ops._core import environment


def test_environment_defaults_to_off() -> None:
    assert Config.from_env({}) == Config(bits=32)
    assert Config.from_env({"CGX_COMPRESSION_BUCKET_SIZE": ""}) == Config(bits=32)


def test_environment_gives_every_name_of_cgx() -> None:
    environment = {
        "CGX_COMPRESSION_QUANTIZATION_BITS": "4",
        "CGX_COMPRESSION_BUCKET_SIZE": " 1024 ",
        "CGX_COMPRESSION_SKIP_INCOMPLETE_BUCKETS": "1",
        "CGX_COMPRESSION_MINIMAL_SIZE": "100",
    }
    assert Config.from_env(environment) == Config(
        bits=4,
        bucket_size=1024,
        skip_incomplete_buckets=True,
        minimal_size=100,
    )


@pytest.mark.parametrize(
    ("bits", "switch", "intra_bits"),
    [("4", "1", 4), ("4", "0", None), ("4", "", None), ("", "1", 32), ("2", "on", 2)],
)
def test_environment_compresses_within_hosts(bits: str, switch: str, intra_bits: int) -> None:
    environment = {"CGX_COMPRESSION_QUANTIZATION_BITS": bits, "CGX_INTRA_COMPRESS": switch}
    assert Config.from_env(environment).intra_bits == intra_bits


def test_environment_compresses_within_hosts_by_a_compressor() -> None:
    """Use the default's bits if none are given, unless the compressor has a fixed width."""
    environment = {"CGX_COMPRESSOR": "levels", "CGX_INTRA_COMPRESS": "1"}
    assert Config.from_env(environment) == Config(compressor="levels", intra_bits=4)
    exact = {"CGX_COMPRESSOR": "topk", "CGX_COMPRESSION_QUANTIZATION_BITS": "32"}
    assert Config.from_env({**environment, **exact}).intra_bits == 32
    remedy = "leave CGX_INTRA_COMPRESS unset"
    with pytest.raises(InvalidArgument, match=f"'topk', which has no bits to choose: {remedy}"):
        Config.from_env({**environment, "CGX_COMPRESSOR": "topk"})


@pytest.mark.parametrize(
    ("variable", "honoured", "refused"),
    [
        ("CGX_INTRA_BROADCAST", "0", ("1", "2")),
        ("CGX_INNER_COMMUNICATOR_TYPE", "shm", ("MPI", "NCCL", "x")),
        ("CGX_CROSS_COMMUNICATOR_TYPE", "MPI", ("NCCL", "SHM")),
        ("CGX_INNER_REDUCTION_TYPE", "SRA", ("Ring", "TREE")),
        ("CGX_CROSS_REDUCTION_TYPE", "sra", ("RING",)),
    ],
)
def test_switches_of_hosts(variable: str, honoured: str, refused: tuple[str, ...]) -> None:
    environment.check({variable: honoured})
    environment.check({variable: ""})
    for text in refused:
        with pytest.raises(InvalidArgument) as caught:
            environment.check({variable: text})
        says = f"{variable} is {text!r}; it must be {honoured.upper()}, or not set"
        assert says in str(caught.value)


@pytest.mark.parametrize("level", ["INNER", "CROSS"])
@pytest.mark.parametrize("kind", ["NCCL", "MPI"])
def test_switches_of_transports(level: str, kind: str) -> None:
    switch = f"CGX_{level}_COMMUNICATOR_TYPE"
    environment.check({"COMMUNICATOR_TYPE": kind, switch: kind.lower()})
    for other in ("AUTO", "SHM"):
        with pytest.raises(InvalidArgument, match="set COMMUNICATOR_TYPE=NCCL"):
            environment.check({"COMMUNICATOR_TYPE": other, switch: "NCCL"})


def test_default_is_the_environment_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGX_COMPRESSION_QUANTIZATION_BITS", "3")
    assert Config.from_env().bits == 3
    monkeypatch.setenv("CGX_COMPRESSION_QUANTIZATION_BITS", "5")  # read again
    assert Config.from_env().bits == 5


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("CGX_COMPRESSION_QUANTIZATION_BITS", "four"),
        ("CGX_COMPRESSION_QUANTIZATION_BITS", "16"),
        ("CGX_COMPRESSION_QUANTIZATION_BITS", "4.0"),
        ("CGX_COMPRESSION_QUANTIZATION_BITS", "--4"),
        ("CGX_COMPRESSION_QUANTIZATION_BITS", "\N{SUPERSCRIPT FOUR}"),
        ("CGX_COMPRESSION_BUCKET_SIZE", "0"),
        ("CGX_COMPRESSION_SKIP_INCOMPLETE_BUCKETS", "2"),
        ("CGX_COMPRESSION_MINIMAL_SIZE", "-1"),
        ("CGX_COMPRESSOR", "zip"),
        ("CGX_COMPRESSION_DENSITY", "0"),
        ("CGX_COMPRESSION_DENSITY", "1.5"),
        ("CGX_COMPRESSION_DENSITY", "nan"),
        ("CGX_COMPRESSION_VALUE_BITS", "12"),
        ("CGX_COMPRESSION_ROTATION", "48"),
        ("CGX_COMPRESSION_RATE", "0.2"),
        ("CGX_COMPRESSION_RATE", "9"),
        ("CGX_COMPRESSION_RATE", "nan"),
        ("CGX_COMPRESSION_CLIP", "2"),
        ("COMMUNICATOR_TYPE", "UCC"),
        ("CGX_INTRA_COMPRESS", "yes"),
        ("CGX_AUTO_BITS", "auto"),
    ],
)
def test_rejects_and_names_variable_and_text(variable: str, text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        environment.check({variable: text})
    assert f"{variable} is {text!r}; it must be " in str(caught.value)
    assert "None" not in str(caught.value)  # a value that no variable can have


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ("COMPRESSOR=levels COMPRESSION_ROUNDING=stochastic", "rounding is 'stochastic'.*'levels'"),
        ("COMPRESSOR=topk COMPRESSION_QUANTIZATION_BITS=2", "bits is 2; compressor='topk' has a"),
        ("COMPRESSOR=topk COMPRESSION_ROTATION=32", "rotation is 32, which compressor='topk'"),
        ("COMPRESSOR=onebit COMPRESSION_CLIP=1", "clip is True, which compressor='onebit'"),
        ("COMPRESSION_QUANTIZATION_BITS=4 COMPRESSION_DENSITY=0.1", "density is 0.1, which"),
    ],
)
def test_incompatible_variables(knobs: str, says: str) -> None:
    environment = dict(f"CGX_{knob}".split("=") for knob in knobs.split())
    with pytest.raises(InvalidArgument, match=says) as caught:
        Config.from_env(environment)
    assert all(variable in str(caught.value) for variable in environment)
