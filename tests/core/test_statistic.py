"""The statistic of a tensor: the core's equals the oracle's bit for bit on all CPU targets."""

import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import reference
from support.launch import python_path

from cgx_ops import Config, InvalidArgument, Unsupported
from cgx_ops._core import library
from cgx_ops.planner import statistic

_SIZES = (1, 5, 511, 1000, 3000)
_BUCKETS = (20, 64, 512, 2**40)


def _tensors() -> list[np.ndarray]:
    """Return values of all dtypes: usual, tiny, huge, constant, zero."""
    random = np.random.default_rng(0)
    found = []
    for numel in _SIZES:
        usual = random.standard_t(3, numel)
        for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
            found += [usual.astype(dtype), np.full(numel, 0.75, dtype), np.zeros(numel, dtype)]
        found += [(usual * scale).astype(np.float32) for scale in (1e-38, 1e-42, 1e35)]
    return found


def _of_core() -> list[float]:
    configs = [
        Config(bits=4, bucket_size=size, compressor=compressor)
        for size in _BUCKETS
        for compressor in ("uniform", "levels")
    ]
    return [statistic(values, config) for values in _tensors() for config in configs]


def test_equals_the_oracle() -> None:
    expected = [
        reference.statistic(values, size, ranges=ranges)
        for values in _tensors()
        for size in _BUCKETS
        for ranges in (True, False)
    ]
    assert all(map(np.isfinite, expected))
    assert _of_core() == expected


def test_sum_of_squares_of_entropy_equals_the_oracle() -> None:
    for values in _tensors():
        config = Config(compressor="entropy", bucket_size=64, skip_incomplete_buckets=True)
        assert statistic(values, config) == reference.statistic(values, 64, ranges=False)


@pytest.mark.slow
def test_equal_on_every_cpu_target() -> None:
    program = (
        "import hashlib, struct, test_statistic as t; found = t._of_core();"
        "print(hashlib.sha256(struct.pack(f'{len(found)}d', *found)).hexdigest())"
    )
    targets = library.describe()["cpu_targets"]
    assert len(targets) > 1
    told = {
        target: subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "CGX_CPU_TARGET": target, "PYTHONPATH": python_path()},
            cwd=os.path.dirname(__file__),
            check=True,
            capture_output=True,
            timeout=120,
        ).stdout
        for target in targets
    }
    assert len(set(told.values())) == 1, told


@pytest.mark.parametrize("compressor", ["uniform", "levels", "entropy"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_propagate(compressor: str, bad: float) -> None:
    values = np.ones(1000, np.float32)
    values[700] = bad
    config = Config(compressor=compressor)  # pyright: ignore[reportArgumentType]
    assert np.isnan(statistic(values, config))


def test_overflowing_range_propagates() -> None:
    assert np.isnan(statistic(np.array([3e38, -3e38], np.float32)))


def test_exact_bucket_has_no_error() -> None:
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    some = Config(skip_incomplete_buckets=True)
    assert statistic(values, some) == statistic(values[:512])
    assert statistic(values[:500], some) == 0
    # One bucket that is larger than the tensor.
    assert statistic(values, Config(bucket_size=4096, skip_incomplete_buckets=True)) == 0


@pytest.mark.parametrize("config", [Config(compressor="topk"), Config(rotation=32)])
def test_unpredictable_compressors_raise(config: Config) -> None:
    with pytest.raises(Unsupported, match="predicted"):
        statistic(np.ones(4, np.float32), config)


def test_other_dtypes_raise() -> None:
    with pytest.raises((Unsupported, InvalidArgument), match="float64"):
        statistic(np.ones(4))
