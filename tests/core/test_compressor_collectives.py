"""Collectives with compressors, beyond the comparison with the oracle (test_collectives.py).

1. NaN and infinities reach every rank, with every algorithm
2. votes; random indices
3. layers with different compressors
4. mismatched ranks, and ops that compressors do not support
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import reference
from support import launch
from support.compressor_cases import BLOCK_FORMATS, COMPRESSORS, DISAGREE, DTYPES

from cgx_ops import (
    Communicator,
    Config,
    InvalidArgument,
    MismatchError,
    Segment,
    Unsupported,
)

ROUTES: tuple[Any, ...] = ("one_shot", "sra", "ring")


def normal(rank: int, numel: int) -> np.ndarray:
    return np.random.default_rng([rank, numel]).standard_normal(numel).astype(np.float32)


# ---- 1. NaN and infinities -----------------------------------------------------------------------


@pytest.mark.parametrize("compressor", COMPRESSORS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_reach_every_rank(compressor: Any, bad: float) -> None:
    """Check that a value on one rank affects its bucket on all ranks, and nothing else.

    With the mx formats, which have no header of the bucket, it affects its block.
    """
    at, bucket_size, numel = 700, 256, 2000
    affected = 32 if compressor in BLOCK_FORMATS and compressor != "nvfp4" else bucket_size
    affected = numel if compressor == "entropy" else affected  # all values are in one block
    in_bucket = np.arange(numel) // affected == at // affected

    def run(rank: int, comm: Communicator) -> list[Any]:
        results = []
        for route, dtype in itertools.product(ROUTES, DTYPES.values()):
            x = normal(rank, numel).astype(dtype)
            if rank == 1:
                x[at] = bad
            config = Config(bucket_size=bucket_size, compressor=compressor, algorithm=route)
            results.append(comm.allreduce(x, "avg", config, seed=7).astype(np.float32))
        return results

    for results in launch.threads(3, run):
        for result in results:
            assert not np.isfinite(result[in_bucket]).all()
            assert np.isfinite(result[~in_bucket]).all()
            if compressor != "randk":
                assert not np.isfinite(result[at])


# ---- 2. votes and random indices -----------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_votes_are_the_same_for_every_algorithm(size: int, op: Any) -> None:
    """Check the majority's sign, 1 for ties and zeros, for any number of values."""
    numels = (1, 5, 1000, 40_000)

    def run(rank: int, comm: Communicator) -> list[list[bytes]]:
        return [
            [
                comm.allreduce(
                    np.round(normal(rank, numel)), op, Config(compressor="sign", algorithm=route)
                ).tobytes()
                for route in (*ROUTES, "auto")
            ]
            for numel in numels
        ]

    found = launch.threads(size, run)
    for number, numel in enumerate(numels):
        votes = [np.where(np.round(normal(rank, numel)) < 0, -1, 1) for rank in range(size)]
        want = np.where(np.sum(votes, axis=0) < 0, -1, 1).astype(np.float32)
        for of_rank in found:
            assert of_rank[number] == [want.tobytes()] * 4, (numel, size)


def test_randk_sums_the_values_at_its_indices() -> None:
    """Check that the result is the values' sum, encoded once, and 0 elsewhere."""
    numel, config = 3000, Config(compressor="randk", density=0.1)
    exact = np.sum([normal(rank, numel) for rank in range(3)], axis=0)

    def run(rank: int, comm: Communicator) -> list[Any]:
        return [
            comm.allreduce(
                normal(rank, numel), config=Config(**{**config.fields, "algorithm": route}), seed=5
            )
            for route in ROUTES
        ]

    for results in launch.threads(3, run):
        places = results[0] != 0
        assert places.sum() == sum(-(-n // 10) for n in [512] * 5 + [440])
        for result in results:
            assert np.array_equal(result != 0, places)
            np.testing.assert_allclose(result[places], exact[places], rtol=0, atol=1e-6)


def test_randk_draws_different_indices_in_every_call() -> None:
    """Check that indices depend on the shared call counter, without a seed from the caller."""
    config = Config(compressor="randk")

    def run(rank: int, comm: Communicator) -> list[bytes]:
        x = normal(rank, 1000)
        return [(comm.allreduce(x, config=config) != 0).tobytes() for _ in range(5)]

    for places in launch.threads(2, run):
        assert len(set(places)) == 5


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"residual": np.zeros(99, np.float32)}, "residual is float32"),
        ({"segments": [Segment(0, 50), Segment(49, 50)]}, "overlap"),
    ],
)
def test_rejected_call_draws_no_indices(wrong: dict[str, Any], says: str) -> None:
    config = Config(compressor="randk", density=0.5)

    def run(rank: int, comm: Communicator) -> list[bytes]:
        x = normal(rank, 100)
        if rank == 0:
            with pytest.raises(InvalidArgument, match=says):
                comm.allreduce(x, config=config, **wrong)
        return [comm.allreduce(x, config=config).tobytes() for _ in range(2)]

    first, second = launch.threads(2, run)
    assert first == second


# ---- 3. layers -----------------------------------------------------------------------------------


def test_segments_with_different_compressors() -> None:
    """Use one compressor per segment in one message, as rules do, and compare with the oracle."""
    layers: list[dict[str, Any]] = [
        {"compressor": "topk", "density": 0.1, "value_bits": 4},
        {"compressor": "levels", "bits": 2, "rotation": 32},
        {"bits": 8},
        {"compressor": "sign"},
        {"bits": 32},
        {"compressor": "ternary", "clip": True},
        {"compressor": "half"},
        {"compressor": "mxfp8"},
        {"compressor": "nvfp4", "rounding": "stochastic"},
    ]
    numel = 700
    want_of = [reference.Segment(i * numel, numel, **layer) for i, layer in enumerate(layers)]
    config = Config(4, rounding="nearest")

    for route in ROUTES:

        def run(rank: int, comm: Communicator, route: Any = route) -> bytes:
            x, call = normal(rank, numel * len(layers)), replace(config, algorithm=route)
            segments = [
                Segment(i * numel, numel, call.with_own(**layer)) for i, layer in enumerate(layers)
            ]
            return comm.allreduce(x, config=call, segments=segments, seed=rank).tobytes()

        xs = [normal(rank, numel * len(layers)) for rank in range(3)]
        want = reference.allreduce(xs, want_of, algorithm=route, seeds=[0, 1, 2])
        assert launch.threads(3, run) == [want.tobytes()] * 3


# ---- 4. errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("what", DISAGREE)
def test_mismatch_is_one_error_on_every_rank(what: str) -> None:
    ours, theirs, text = DISAGREE[what]

    def run(rank: int, comm: Communicator) -> str:
        x = normal(rank, 1000)
        with pytest.raises(MismatchError) as caught:
            comm.allreduce(x, config=Config(**(theirs if rank == 2 else ours)))
        comm.allreduce(x, config=Config(**ours))  # the communicator is still usable
        return str(caught.value)

    errors = launch.threads(3, run)
    assert len(set(errors)) == 1 and text in errors[0] and "rank" in errors[0], errors


def test_only_seeds_of_indices_must_match() -> None:
    def run(rank: int, comm: Communicator) -> str:
        x = normal(rank, 1000)
        with pytest.raises(MismatchError) as caught:
            comm.allreduce(x, config=Config(compressor="randk"), seed=rank)
        comm.allreduce(x, config=Config(compressor="randk"), seed=5)
        comm.allreduce(x, config=Config(compressor="qsgd"), seed=rank)
        return str(caught.value)

    errors = launch.threads(2, run)
    assert len(set(errors)) == 1 and "the seed of the random indices" in errors[0], errors


def test_mismatched_segments() -> None:
    def run(rank: int, comm: Communicator) -> str:
        density = 0.1 if rank else 0.2
        segments = [Segment(0, 500), Segment(500, 500, Config(compressor="topk", density=density))]
        with pytest.raises(MismatchError) as caught:
            comm.allreduce(normal(rank, 1000), segments=segments, config=Config())
        return str(caught.value)

    assert all("sizes or settings of segments" in error for error in launch.threads(2, run))


@pytest.mark.parametrize(
    "compressor", [each for each in COMPRESSORS if each not in ("half", "lossless")]
)
def test_only_sums_are_compressed(compressor: Any) -> None:
    comm = Communicator.local(2)[0]
    with pytest.raises(Unsupported, match="op max is not supported for compressed values"):
        comm.allreduce(np.ones(100, np.float32), "max", Config(compressor=compressor))
