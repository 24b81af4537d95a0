"""Every compressor on one rank: bytes, compared with the oracle, and invalid input.

1. against the oracle, on all CPU targets
2. bytes by formula
3. bad input
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from support.compressor_cases import (
    CASES,
    COMPRESSORS,
    DTYPES,
    KINDS,
    ROWS,
    SHAPES,
    digest,
    grain_of,
    library_digests,
    reference_knobs,
    settings_of,
    values,
    with_one_nan,
)

from cgx_ops import Config, InvalidArgument, dequantize, quantize
from cgx_ops._core import codec, library, tables

PROGRAM = Path(__file__).parents[1] / "ranks" / "run_compressors.py"
TARGETS = library.describe()["cpu_targets"]
LARGE = 2**20 + 7

# ---- 1. against the oracle -----------------------------------------------------------------------


def oracle_digests(
    row: str, kind: str, dtype: str, numel: int, bucket_size: int, skip: bool
) -> list[str]:
    x, first = values(kind, numel, dtype), 3 * grain_of(ROWS[row], bucket_size)
    knobs = {**reference_knobs(ROWS[row]), "skip_incomplete_buckets": skip, "seed": -5}
    bits = ROWS[row].get("bits", 4)
    data = reference.quantize(x, bits, bucket_size, rank=2, phase=1, first_index=first, **knobs)
    back = reference.dequantize(
        data, numel, bits, bucket_size, first_index=first, dtype=dtype_of(dtype), **knobs
    )
    return [digest(data), digest(with_one_nan(reference.round_to(back, dtype_of(dtype))))]


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(DTYPES[name])


@functools.cache
def expected() -> list[list[str]]:
    return [oracle_digests(*case) for case in CASES]


@pytest.mark.parametrize("target", TARGETS)
def test_against_the_oracle(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGX_CPU_TARGET", target)
    monkeypatch.setenv("PYTHONPATH", str(PROGRAM.parents[1]), prepend=":")
    done = subprocess.run(
        [sys.executable, PROGRAM], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    wrong = [
        f"{case}: {'bytes' if got[0] != want[0] else 'values'}"
        for case, got, want in zip(CASES, found, expected(), strict=True)
        if got != want
    ]
    assert not wrong, f"{len(wrong)} of {len(CASES)} cases differ:\n" + "\n".join(wrong[:20])


def test_the_cases_have_every_pair_of_values() -> None:
    """Exclude incomplete buckets of votes, which raise errors."""
    for one, other in itertools.combinations((ROWS, KINDS, DTYPES, SHAPES), 2):
        pairs = {
            (a, b)
            for row, kind, dtype, numel, bucket_size, _ in CASES
            for a in (row, kind, dtype, (numel, bucket_size))
            for b in (row, kind, dtype, (numel, bucket_size))
        }
        assert set(itertools.product(one, other)) <= pairs


def _ends() -> set[str]:
    """Return the first and the last row of each compressor."""
    rows = sorted(ROWS, key=lambda row: ROWS[row].get("compressor", ""))  # stable
    groups = itertools.groupby(rows, lambda row: ROWS[row].get("compressor", ""))
    return {row for _, group in groups for own in [list(group)] for row in (own[0], own[-1])}


LARGE_ROWS = [
    pytest.param(row, marks=() if row in _ends() else pytest.mark.exhaustive) for row in ROWS
]


@pytest.mark.slow
@pytest.mark.parametrize("row", LARGE_ROWS)
def test_large_inputs(row: str) -> None:
    """Use more than a million values, also as one bucket."""
    bucket_sizes = [512, 2**21] if ROWS[row].get("rotation") is None else [4096]
    for bucket_size, dtype in zip(bucket_sizes, DTYPES, strict=False):
        case = (row, "heavy", dtype, LARGE, bucket_size, False)
        assert library_digests(*case) == oracle_digests(*case), case


@settings(max_examples=300)
@given(
    row=st.sampled_from(sorted(ROWS)),
    x=npst.arrays(
        np.float32,
        st.integers(0, 300),
        elements=st.floats(width=32, allow_nan=True, allow_infinity=True),
    ),
    bucket_size=st.integers(1, 400),
    seed=st.integers(-(2**63), 2**63 - 1),
    rank=st.integers(0, 2**31 - 1),
    buckets=st.integers(0, 2**40),
)
def test_any_values(row: str, x: Any, bucket_size: int, seed: int, rank: int, buckets: int) -> None:
    x = np.where(np.isnan(x), np.float32(np.nan), x)
    first = buckets * grain_of(ROWS[row], bucket_size)
    config = settings_of(ROWS[row], bucket_size)
    bits, knobs = ROWS[row].get("bits", 4), reference_knobs(ROWS[row])
    data = quantize(x, config, rank=rank, first_index=first, seed=seed)
    assert data == reference.quantize(
        x, bits, bucket_size, seed=seed, rank=rank, first_index=first, **knobs
    )
    back = reference.dequantize(
        data, x.size, bits, bucket_size, seed=seed, first_index=first, **knobs
    )
    found = dequantize(data, x.size, "float32", config, first_index=first, seed=seed)
    assert found.tobytes() == back.tobytes()


# ---- 2. bytes ------------------------------------------------------------------------------------


def elias_fano(numel: int, count: int) -> int:
    low = int(math.log2(numel // count))
    return math.ceil(count * low / 8) + math.ceil(((numel - 1) // 2**low + count) / 8)


def test_bytes_match_the_formulas() -> None:
    """Compare each compressor in fp32 with numerics.md, "Other compressors"."""
    n, whole, rest = 5000, 9, 392  # buckets of 512
    per_bucket = {
        **{f"levels {b}": lambda k, b=b: 2 + math.ceil(k * b / 8) for b in range(1, 5)},
        **{f"qsgd {b}": lambda k, b=b: 2 + math.ceil(k * b / 8) for b in range(2, 9)},
        **{f"uniform {b}": lambda k, b=b: 8 + math.ceil(k * b / 8) for b in range(1, 9)},
        "sign": lambda k: 2 + math.ceil(k / 8),
        "onebit": lambda k: 4 + math.ceil(k / 8),
        "ternary": lambda k: 2 + math.ceil(k / 5),
        "half": lambda k: 2 * k,
        "mxfp8": lambda k: k + math.ceil(k / 32),
        "mxfp8_e5m2": lambda k: k + math.ceil(k / 32),
        "mxfp4": lambda k: math.ceil(k / 2) + math.ceil(k / 32),
        "nvfp4": lambda k: 4 + math.ceil(k / 2) + math.ceil(k / 16),
    }
    for name, size in per_bucket.items():
        compressor, _, bits = name.partition(" ")
        knobs: dict[str, Any] = {"bits": int(bits)} if bits else {}
        config = Config(**{"compressor": compressor, **knobs})
        assert len(quantize(np.ones(n, np.float32), config)) == whole * size(512) + size(rest), name
    values_of = {32: lambda k: 4 * k, 16: lambda k: 2 * k, 1: lambda k: 2 + math.ceil(k / 8)}
    values_of |= {b: lambda k, b=b: 4 + math.ceil(k * b / 8) for b in range(2, 9)}
    for density, (value_bits, size) in itertools.product(
        (0.001, 0.01, 0.3, 1.0), values_of.items()
    ):
        config = Config(compressor="topk", density=density, value_bits=value_bits)
        ks = [(k, max(1, math.ceil(density * k))) for k in [512] * whole + [rest]]
        want = sum(elias_fano(numel, k) + size(k) for numel, k in ks)
        assert len(quantize(values("normal", n, "float32"), config)) == want, config
        randk = Config(compressor="randk", density=density)
        assert len(quantize(np.ones(n, np.float32), randk)) == sum(4 * k for _, k in ks)
    # The information of 64 indices among 4096 is 7.3 bits each; the code uses 8.0, plain ones 12.
    assert elias_fano(4096, 64) == 64


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_all_nan_are_equal(dtype: str) -> None:
    """Check that the first NaNs are sent, whatever their payload."""
    x = values("normal", 3000, dtype)
    bits = x.view(np.uint32 if dtype == "float32" else np.uint16)
    first = {"float32": 0x7F800001, "float16": 0x7C01, "bfloat16": 0x7F81}[dtype]
    for i, at in enumerate((7, 50, 650, 1150, 1250, 2950)):
        bits[at] = first + i | (i % 2) << (8 * x.itemsize - 1)
    for density in (0.001, 0.01):
        knobs: dict[str, Any] = {"compressor": "topk", "density": density}
        data = codec.quantize(x, Config(bucket_size=1000, **knobs))
        assert data == reference.quantize(x, 4, 1000, **knobs), density


# ---- 3. bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        *(
            ({"compressor": "topk", "density": bad}, "Config.density is .*; it must be None")
            for bad in (0, 0.0, -1, 1.5, math.nan, math.inf, "x")
        ),
        *(
            ({"rate": bad}, "Config.rate is .*; it must be None")
            for bad in (0, 0.249, 8.001, -1, math.nan, math.inf, "x")
        ),
        ({"compressor": "zip"}, "Config.compressor is 'zip'; it must be one of 'uniform', "),
        *(
            ({"compressor": name, "rounding": rounding}, f"rounding is '{rounding}'.*'{name}' s")
            for name, rounding in (
                ("levels", "stochastic"), ("sign", "stochastic"), ("onebit", "shift"),
                ("ternary", "nearest"), ("qsgd", "nearest"), ("half", "shift"),
                ("topk", "stochastic"), ("randk", "stochastic"), ("mxfp8", "shift"),
            )
        ),
        ({"density": 0.5}, "density is 0.5.*'uniform' does not support.*topk, randk"),
        ({"compressor": "randk", "value_bits": 8}, "value_bits is 8.*'randk' does not support"),
        ({"compressor": "topk", "rotation": 32}, "rotation is 32.*'topk' does not support"),
        ({"rotation": 3}, "Config.rotation is 3; it must be None, or a power of two"),
        *(
            ({"compressor": name, "bits": 2}, f"bits is 2; compressor='{name}' has a fixed")
            for name in (
                "sign", "onebit", "ternary", "half", "topk", "randk", "entropy", "lossless",
                "mxfp8", "nvfp4",
            )
        ),
        ({"compressor": "levels", "bits": 8}, "bits is 8; with compressor='levels'.* 1 to 4"),
        ({"compressor": "qsgd", "bits": 1}, "bits is 1; with compressor='qsgd'.* 2 to 8"),
        ({"compressor": "ternary", "gather_bits": 8}, "gather_bits is 8.*a fixed width"),
        ({"compressor": "levels", "gather_bits": 8}, "gather_bits is 8"),
        ({"compressor": "topk", "intra_bits": 4}, "intra_bits is 4.*a fixed width"),
        ({"compressor": "mxfp4", "gather_bits": 8}, "gather_bits is 8.*a fixed width"),
        ({"compressor": "nvfp4", "clip": True}, "clip is True.*belongs to ternary"),
        ({"compressor": "sign", "skip_incomplete_buckets": True}, "incomplete_buckets.*'sign'"),
        ({"compressor": "sign", "gather_bits": 32}, "gather_bits.*'sign'"),
        ({"compressor": "levels", "clip": True}, "clip is True.*belongs to ternary"),
        ({"compressor": "topk", "value_bits": 9}, "Config.value_bits is 9"),
        ({"compressor": "sign", "error_feedback": True}, "feedback.*'sign': a vote"),
        ({"compressor": "ternary", "error_feedback": True}, "feedback.*'ternary': without clip"),
        ({"compressor": "qsgd", "error_feedback": True}, "feedback.*'qsgd': the squared error"),
        ({"compressor": "entropy", "rate": 0.2}, "rate is 0.2; it must be None.* from 0.25 to 8"),
        ({"compressor": "entropy", "rate": 8.01}, "rate is 8.01; it must be"),
        ({"compressor": "entropy", "rounding": "stochastic"}, "'stochastic'.*'nearest', 'shift'"),
        ({"rate": 2.0}, "rate is 2.*'uniform' does not support.*entropy"),
        (
            {"compressor": "entropy", "rounding": "shift", "error_feedback": True},
            "feedback.*'entropy': with rounding='shift'.*use rounding='nearest'",
        ),
        ({"compressor": "lossless", "error_feedback": True}, "feedback.*'lossless'.*no quantiz"),
        ({"compressor": "lossless", "rounding": "stochastic"}, "'stochastic'.*supports 'nearest'"),
        ({"compressor": "lossless", "rotation": 32}, "rotation is 32.*'lossless' does not support"),
    ],
)  # fmt: skip
def test_rejects_invalid_arguments(knobs: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        Config(**knobs)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_rejects_data_of_wrong_length(name: Any) -> None:
    config = Config(compressor=name)
    data = quantize(np.ones(1000, np.float32), config)
    for wrong in (b"", data[:-1], data + b"\0"):
        with pytest.raises(InvalidArgument):
            dequantize(wrong, 1000, "float32", config)
    if tables.COMPRESSORS[name]["fixed_length"]:
        with pytest.raises(
            InvalidArgument, match=r"the data has 0 bytes; \d+ values in these settings have \d+"
        ):
            dequantize(b"", 10**15, "float32", config)  # for which memory would not suffice
    assert np.isfinite(dequantize(data, 1000, "float32", config)).all()


def test_rejects_invalid_config() -> None:
    with pytest.raises(InvalidArgument, match=r"config is 5; it must be a cgx_ops\.Config"):
        quantize(np.ones(100, np.float32), 5)  # pyright: ignore[reportArgumentType]


def test_limit_of_2_to_the_32_indices() -> None:
    """Check the limit of 2^32 indices, per bucket for topk and randk."""
    for name in ("topk", "randk"):
        with pytest.raises(InvalidArgument, match=f"{name} supports fewer than 2\\^32"):
            quantize(np.ones(4, np.float32), compressor=name, bucket_size=2**32)
