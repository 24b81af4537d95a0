"""Error feedback on numpy arrays: the quantization error is added to the next call's values.

1. comparison with the oracle, bit for bit
2. conservation over many steps, for all compressors and algorithms
3. invalid residuals, and compressors that do not support any
"""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from support import conservation, launch

import cgx_ops
from cgx_ops import Communicator, Config, InvalidArgument, Segment

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
SIZES = (0, 1, 17, 511, 512, 513, 2**20 + 7)


def values(rank: int, step: int, numel: int, dtype: str = "float32") -> npt.NDArray[Any]:
    random = np.random.default_rng([rank, step, numel])
    return random.standard_normal(numel).astype(DTYPES[dtype])


# ---- 1. against the oracle -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_two_calls_equal_the_oracle(size: int, dtype: str) -> None:
    """Use the first call's residual in the second; in place, and not."""
    config = Config(2, 128, "nearest")
    numels = [numel for numel in SIZES if size <= 4 or numel < 2**20]

    def rank_of(rank: int, comm: Communicator) -> list[tuple[bytes, bytes]]:
        found = []
        for numel in numels:
            residual = np.zeros(numel, DTYPES[dtype])
            for step in range(2):
                x = values(rank, step, numel, dtype)
                out = x if step else None
                y = comm.allreduce(x, "avg", config, out=out, residual=residual)
                found.append((y.tobytes(), residual.tobytes()))
        return found

    results = launch.threads(size, rank_of)
    call = 0
    for numel in numels:
        residuals = [np.zeros(numel, DTYPES[dtype]) for _ in range(size)]
        for step in range(2):
            xs = [values(rank, step, numel, dtype) for rank in range(size)]
            want = reference.allreduce(
                xs, [reference.Segment(0, numel, 2, 128)], op="avg", residuals=residuals
            )
            for rank in range(size):
                y, residual = results[rank][call]
                assert y == want.tobytes(), (numel, step, rank)
                assert residual == residuals[rank].tobytes(), (numel, step, rank)
            call += 1


def test_segments_have_separate_residuals() -> None:
    """Check that elements outside segments are unchanged, also for a started call."""
    config = Config(rounding="nearest")
    segments = [
        Segment(10, 600, config.with_own(bits=3)),
        Segment(700, 100, config.with_own(bucket_size=32)),
    ]

    def rank_of(rank: int, comm: Communicator) -> tuple[bytes, bytes]:
        residual = values(rank, 1, 1000)
        x = values(rank, 0, 1000)
        y = comm.allreduce_async(x, config=config, segments=segments, residual=residual).wait()
        return y.tobytes(), residual.tobytes()

    residuals = [values(rank, 1, 1000) for rank in range(2)]
    want = reference.allreduce(
        [values(rank, 0, 1000) for rank in range(2)],
        [reference.Segment(10, 600, 3, 512), reference.Segment(700, 100, 4, 32)],
        residuals=residuals,
    )
    for rank, found in enumerate(launch.threads(2, rank_of)):
        assert found == (want.tobytes(), residuals[rank].tobytes())


@pytest.mark.parametrize("algorithm", ["one_shot", "sra"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "knobs", [{"compressor": "levels", "bits": 1}, {"compressor": "topk"}], ids=str
)
def test_a_residual_stays_finite(knobs: dict[str, Any], dtype: str, algorithm: Any) -> None:
    """Check that residuals near the dtype's largest number are limited to it."""
    size, numel, most = 4, 600, float(ml_dtypes.finfo(DTYPES[dtype]).max)
    # A sum of four such values overflows fp32, so bf16's values are half as large.
    most /= 1 if dtype == "float16" else 16
    config = Config(algorithm=algorithm, **knobs)
    steps = [
        [
            (values(rank, step, numel).clip(-3.9, 3.9) * most / 4).astype(DTYPES[dtype])
            for rank in range(size)
        ]
        for step in range(12)
    ]

    def rank_of(rank: int, comm: Communicator) -> list[tuple[bytes, bytes]]:
        found, residual = [], np.zeros(numel, DTYPES[dtype])
        for xs in steps:
            y = comm.allreduce(xs[rank], "avg", config, residual=residual)
            found.append((y.tobytes(), residual.tobytes()))
        return found

    results = launch.threads(size, rank_of)
    residuals = [np.zeros(numel, DTYPES[dtype]) for _ in range(size)]
    largest = 0.0
    for step, xs in enumerate(steps):
        segment = reference.Segment(0, numel, **{"bits": 4, **knobs})
        want = reference.allreduce(
            xs, [segment], op="avg", algorithm=algorithm, residuals=residuals
        )
        for rank in range(size):
            assert results[rank][step] == (want.tobytes(), residuals[rank].tobytes()), step
            assert np.isfinite(residuals[rank].astype(np.float32)).all()
            largest = max(largest, float(np.abs(residuals[rank].astype(np.float32)).max()))
    if dtype == "float16":
        assert largest == most, "no residual was too large: this shows nothing"


# ---- 2. conservation -----------------------------------------------------------------------------


ROUTES = ("one_shot", "sra", "ring")


def conserved(size: int, numel: int, op: Any, config: Config) -> None:
    """Check that over many calls inputs equal the results, as sums, plus the last residuals."""

    def rank_of(rank: int, comm: Communicator) -> Any:
        return conservation.run(comm, op, config, conservation.of_numpy(comm, op, config), numel)

    conservation.check(launch.threads(size, rank_of))


@settings(max_examples=25)
@given(
    size=st.integers(1, 4),
    numel=st.integers(0, 3000),
    algorithm=st.sampled_from(["auto", "one_shot", "sra", "ring"]),
    op=st.sampled_from(["sum", "avg"]),
    knobs=st.fixed_dictionaries(
        {
            "bits": st.sampled_from([2, 3, 4, 8]),
            "bucket_size": st.sampled_from([1, 7, 64, 512, 5000]),
            "rounding": st.sampled_from(["nearest", "stochastic", "shift"]),
            "gather_bits": st.sampled_from([None, 2, 8]),
            "skip_incomplete_buckets": st.booleans(),
            "minimal_size": st.sampled_from([0, 1000]),
        }
    ),
)
def test_conservation(
    size: int, numel: int, algorithm: Any, op: Any, knobs: dict[str, Any]
) -> None:
    """Check over 50 steps that inputs equal the results (as sums) plus the last residuals."""
    conserved(size, numel, op, Config(algorithm=algorithm, **knobs))


@pytest.mark.parametrize("size", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
@pytest.mark.parametrize("knobs", conservation.FED_BACK, ids=str)
def test_conservation_of_all_compressors(knobs: dict[str, Any], size: int) -> None:
    for algorithm in ROUTES:
        config = Config(algorithm=algorithm, **knobs)
        conserved(size, 1000, "avg" if algorithm == "sra" else "sum", config)


def test_two_bits_with_feedback_reach_the_mean() -> None:
    """Check the mean; without feedback, nearest rounding to 2 bits keeps a constant error."""
    numel, steps = 2048, 64
    config = Config(2, 512, "nearest", algorithm="sra")

    def rank_of(rank: int, comm: Communicator) -> tuple[float, float]:
        x, residual = values(rank, 0, numel), np.zeros(numel, np.float32)
        total = np.zeros(numel)
        for _ in range(steps):
            total += comm.allreduce(x, "sum", config, residual=residual)
        exact = sum(values(each, 0, numel) for each in range(comm.size))
        without = comm.allreduce(x, "sum", config)
        return np.abs(total / steps - exact).max(), np.abs(without - exact).max()

    for mended, off in launch.threads(2, rank_of):
        assert mended < off / 16


# ---- 3. bad residuals ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("residual", "says"),
    [
        (np.zeros(99, np.float32), r"residual is float32\[99\]; it must be float32\[100\]"),
        (np.zeros(100, np.float64), r"residual is float64\[100\]"),
        (np.zeros(200, np.float32)[::2], "residual must be C-contiguous and writeable"),
        ([0.0] * 100, "residual is a list"),
    ],
)
def test_invalid_residuals(residual: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        cgx_ops.allreduce(np.ones(100, np.float32), residual=residual)


def test_residual_must_not_share_memory() -> None:
    x, out = np.ones((2, 100), np.float32)
    with pytest.raises(InvalidArgument, match="residual overlaps"):
        cgx_ops.allreduce(x, residual=x)
    with pytest.raises(InvalidArgument, match="residual overlaps"):
        cgx_ops.allreduce(x, out=out, residual=out)


@pytest.mark.parametrize("exact", [Config(bits=32), Config(compressor="lossless")])
def test_exact_calls_have_no_residual(exact: Config) -> None:
    segments = [Segment(0, 50), Segment(50, 50)]

    def run(_rank: int, comm: Communicator) -> None:
        x, residual = np.ones(100, np.float32), np.ones(100, np.float32)
        for call in (comm.allreduce, comm.allreduce_async, comm.reduce_scatter):
            with pytest.raises(InvalidArgument, match="exact call has no quantization"):
                call(x, config=exact, residual=residual)
        with pytest.raises(InvalidArgument, match="leave the residual out, or compress"):
            comm.allreduce(x, config=exact, segments=segments, residual=residual)
        mixed = [segments[0], replace(segments[1], config=Config(bits=4))]
        comm.allreduce(x, config=exact, segments=mixed, residual=residual)

    launch.threads(2, run)


def test_only_sums_have_residuals() -> None:
    comm = Communicator.local(2)[0]
    x = np.ones(100, np.float32)
    with pytest.raises(InvalidArgument, match="only sum and avg support them"):
        comm.allreduce(x, "max", Config(bits=32), residual=np.zeros_like(x))


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"compressor": "sign"}, "'sign': a vote has no magnitude"),
        ({"compressor": "ternary"}, "'ternary': without clip=True"),
        (
            {"compressor": "qsgd", "bits": 2},
            "'qsgd': the squared error of 2 bits in buckets of 512",
        ),
        ({"compressor": "qsgd", "bits": 4}, "use more bits or smaller buckets"),
        ({"compressor": "qsgd", "bits": 8, "gather_bits": 2}, "the squared error of 2 bits"),
        ({"bits": 1}, "'uniform': at 1 bit"),
        ({"bits": 4, "gather_bits": 1}, "'uniform': at 1 bit"),
        ({"bits": 4, "intra_bits": 1}, "'uniform': at 1 bit"),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_diverging_compressors_reject_residuals(
    knobs: dict[str, Any], says: str, size: int
) -> None:
    def run(rank: int, comm: Communicator) -> None:
        x, config = values(rank, 0, 1000), Config(**knobs)
        with pytest.raises(InvalidArgument, match=says):
            comm.allreduce(x, config=config, residual=np.zeros_like(x))

    launch.threads(size, run)
    with pytest.raises(InvalidArgument, match=says):
        Config(**knobs, error_feedback=True)


@pytest.mark.parametrize(("rotation", "late"), [(None, 0.3), (32, 0.1)])
def test_two_bits_of_levels_with_feedback_reach_the_mean(rotation: int | None, late: float) -> None:
    """Check the pending part after 100 steps: less than `late` of the error without feedback.

    A value of several times its bucket's root mean square waits for several steps; with rotation,
    for fewer.
    """
    numel, steps = 4096, 100
    config = Config(2, compressor="levels", algorithm="sra", rotation=rotation)
    assert config.keeps_residuals

    def rank_of(rank: int, comm: Communicator) -> tuple[float, float]:
        x, residual = values(rank, 0, numel), np.zeros(numel, np.float32)
        total = sum(comm.allreduce(x, "sum", config, residual=residual) for _ in range(steps))
        exact = sum(values(each, 0, numel) for each in range(comm.size))
        without = comm.allreduce(x, "sum", config)
        return float(np.linalg.norm(total / steps - exact)), float(np.linalg.norm(without - exact))

    for mended, lost in launch.threads(2, rank_of):
        assert mended < late * lost, mended / lost
