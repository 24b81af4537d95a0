"""Compressors with their settings, and values of all kinds for them.

ROWS     knobs of cgx_ops.Config, by a name
    bits_of, settings_of, reference_knobs    a row's arguments for the library and the oracle
    values   values of a kind
    DISAGREE  different settings of two ranks, and the part of the error that names them
"""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cgx_ops import Config, dequantize, quantize
from cgx_ops._core import codec

DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
COMPRESSORS = (
    "uniform", "levels", "sign", "onebit", "ternary", "qsgd", "half", "topk", "randk",
    "entropy", "lossless", "mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4",
)  # fmt: skip
BLOCK_FORMATS = COMPRESSORS[-4:]


def _rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"bits": bits} for bits in (1, 3, 8)]
    rows += [{"rounding": "nearest"}, {"rounding": "shift", "bits": 2}]
    rows += [{"compressor": "levels", "bits": bits} for bits in range(1, 5)]
    rows += [{"compressor": "qsgd", "bits": bits} for bits in range(2, 9)]
    rows += [{"compressor": name} for name in ("sign", "onebit", "ternary", "half", "lossless")]
    for name, rounding in itertools.product(BLOCK_FORMATS, ("nearest", "stochastic")):
        rows.append({"compressor": name, "rounding": rounding})
    rows += [{"compressor": "ternary", "clip": True}]
    rows += [{"compressor": "half", "rounding": "stochastic"}]
    rows += [{"compressor": "entropy", "rate": rate} for rate in (0.25, 1.0, 3.4, 8.0)]
    rows += [{"compressor": "entropy", "rate": 2.0, "rounding": "shift"}]
    for value_bits in (1, 2, 3, 4, 5, 6, 7, 8, 16):
        rows.append({"compressor": "topk", "density": 0.07, "value_bits": value_bits})
    for name, density in itertools.product(("topk", "randk"), (1e-9, 0.01, 0.3, 1.0)):
        rows.append({"compressor": name, "density": density})
    rotated = (
        ("uniform", 3), ("levels", 2), ("onebit", 4), ("qsgd", 5), ("mxfp4", 4), ("nvfp4", 4),
    )  # fmt: skip
    for (name, bits), rotation in itertools.product(rotated, (2, 32, 1024)):
        rows.append({"compressor": name, "bits": bits, "rotation": rotation})
    return [*rows, {"compressor": "ternary", "clip": True, "rotation": 16}]


ROWS = {" ".join(f"{name}={value}" for name, value in row.items()): row for row in _rows()}
# Settings of some ranks and of another, and the part of the error that names both.
DISAGREE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "compressor": ({}, {"compressor": "levels"}, "compressor uniform against levels"),
    "density": (
        {"compressor": "topk"},
        {"compressor": "topk", "density": 0.5},
        "density None against 0.5",
    ),
    "value_bits": (
        {"compressor": "topk", "value_bits": 16},
        {"compressor": "topk", "value_bits": 8},
        "value_bits 16 against 8",
    ),
    "rate": (
        {"compressor": "entropy"},
        {"compressor": "entropy", "rate": 3.4},
        "rate None against 3.4",
    ),
    "rotation": ({"rotation": 32}, {"rotation": 64}, "rotation 32 against 64"),
    "clip": (
        {"compressor": "ternary"},
        {"compressor": "ternary", "clip": True},
        "clip False against True",
    ),
    "rounding": (
        {"compressor": "half"},
        {"compressor": "half", "rounding": "stochastic"},
        "rounding nearest against stochastic",
    ),
}
KINDS = ("normal", "heavy", "sizes", "ties", "zeros", "denormal", "huge", "nan", "inf")
# Elements, bucket_size.
SHAPES = (
    (0, 512), (1, 512), (17, 16), (511, 512), (512, 512), (513, 512), (3000, 77), (5000, 1000),
    (1700, 2048),
)  # fmt: skip


def settings_of(row: dict[str, Any], bucket_size: int, **more: Any) -> Config:
    """Return a row as a Config of the library."""
    return Config(bucket_size=bucket_size, **row, **more)


def grain_of(row: dict[str, Any], bucket_size: int) -> int:
    """Return a number of elements whose multiples are valid first indices."""
    name = row.get("compressor", "")
    grains = {"lossless": 16384, "entropy": 4096, **dict.fromkeys(BLOCK_FORMATS[:3], 512)}
    return grains.get(name, bucket_size)


def reference_knobs(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as keyword arguments of the oracle's codec, without the bits."""
    own = "stochastic" if row.get("compressor", "uniform") == "uniform" else "nearest"
    return {"rounding": own, **{name: row[name] for name in row if name != "bits"}}


def values(kind: str, numel: int, dtype: str, seed: int = 0) -> npt.NDArray[Any]:
    """Return values of a kind; "sizes" ranges from the smallest to the largest numbers.

    An even number of them is around 2^-32 and 2^32, where sums over a bucket begin to be scaled.
    """
    random = np.random.default_rng([KINDS.index(kind), numel, seed])
    x = random.standard_normal(numel).astype(np.float32)
    at = random.integers(0, max(1, numel), 3)
    with np.errstate(all="ignore"):
        if kind == "heavy":
            x = random.standard_t(2, numel).astype(np.float32)
        elif kind == "sizes":
            at = random.integers(-149, 125, numel)
            if numel % 2 == 0:
                around = random.choice([-32, 32], numel // 256 + 1) + random.integers(-2, 2)
                at = np.repeat(around, 256)[:numel] - random.integers(0, 3, numel)
            x = np.ldexp(x, at).astype(np.float32)
        elif kind == "ties":
            x = np.round(x)
        elif kind == "zeros":
            x = np.where(x < 0, np.float32(-0.0), np.float32(0))
        elif kind == "denormal":
            x *= np.float32(1e-40)
        elif kind == "huge":
            x = np.clip(x, -1, 1) * np.finfo(np.float32).max
        elif kind in ("nan", "inf") and numel:
            x[at] = [np.nan, np.nan, 1] if kind == "nan" else [np.inf, -np.inf, 1]
        return x.astype(DTYPES[dtype])


# ---- digests for each CPU target -----------------------------------------------------------------

Case = tuple[str, str, str, int, int, bool]  # row, kind, dtype, elements, bucket_size, skip


def _cases() -> list[Case]:
    """Yield a seventh of all combinations of row, kind, dtype and shape, and large ones."""
    skips = {name: row.get("compressor") != "sign" for name, row in ROWS.items()}
    product = itertools.product(ROWS, KINDS, DTYPES, SHAPES, (False, True))
    cases: list[Case] = [
        (row, kind, dtype, *shape, skip and skips[row])
        for row, kind, dtype, shape, skip in itertools.islice(product, 0, None, 7)
    ]
    return cases


CASES = _cases()


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def library_digests(
    row: str, kind: str, dtype: str, numel: int, bucket_size: int, skip: bool
) -> list[str]:
    """Return digests of the bytes that the library encodes, and of the decoded values."""
    config = settings_of(ROWS[row], bucket_size, skip_incomplete_buckets=skip)
    first = 3 * grain_of(ROWS[row], bucket_size)
    data = quantize(values(kind, numel, dtype), config, rank=2, phase=1, first_index=first, seed=-5)
    assert len(data) <= codec.encoded_bytes(numel, config, dtype)
    back = dequantize(data, numel, dtype, config, first_index=first, seed=-5)
    return [digest(data), digest(with_one_nan(back))]


def with_one_nan(x: Any) -> bytes:
    """Return bytes of values with one form of NaN, as raw values keep theirs."""
    return np.where(np.isnan(x), x.dtype.type(np.nan), x).tobytes()
