"""Error feedback of a reduce_scatter: each rank gets the quantization error of its inputs.

1. a rank's residual is the error of encoding other ranks' blocks, and zero in its own block
2. conservation over many steps, for all compressors
3. bad residuals
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support import launch
from support.torch_codecs import FEEDBACK

import cgx_ops
from cgx_ops import Communicator, Config, InvalidArgument, Segment

BLOCK = 700


def values(rank: int, step: int, size: int, dtype: Any = np.float32) -> npt.NDArray[Any]:
    return np.random.default_rng([rank, step]).standard_normal((size, BLOCK)).astype(dtype)


def name_of(config: Config) -> str:
    return "-".join(str(v) for k, v in config.fields.items() if v != getattr(Config(), k))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_residual_is_the_quantization_error(size: int) -> None:
    """Compare with quantize() and dequantize() of each segment of each block."""
    config = Config(bits=1, compressor="levels", bucket_size=64)
    segments = [
        Segment(at, numel, config.with_own(bits=bits))
        for at, numel, bits in ((0, 500, 1), (500, 150, 32), (660, 40, 2))
    ]

    def rank_of(rank: int, comm: Communicator) -> tuple[Any, Any, Any, Any]:
        x, old = values(rank, 0, size), values(rank, 1, size) / 8
        residual = old.copy()
        y = comm.reduce_scatter(x, "sum", config, segments=segments, residual=residual)
        return x, old, y, residual

    results = launch.threads(size, rank_of)
    for rank, (x, old, _, residual) in enumerate(results):
        for block in range(size):
            for at, numel, bits in ((0, 500, 1), (500, 150, 32), (660, 40, 2)):
                place = (block, slice(at, at + numel))
                want = np.zeros(numel, np.float32)
                if block != rank and bits != 32:
                    whole = x[place] + old[place]
                    encoded = cgx_ops.quantize(whole, config, bits=bits)
                    want = whole - cgx_ops.dequantize(encoded, numel, config=config, bits=bits)
                assert residual[place].tobytes() == want.tobytes(), (rank, block, at)
            # Elements outside segments are unchanged.
            assert np.array_equal(residual[block, 650:660], old[block, 650:660])


@pytest.mark.parametrize("config", FEEDBACK, ids=name_of)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_conservation(op: Any, size: int, config: Config) -> None:
    """Check over 50 steps that inputs equal the results (as sums) plus the last residuals."""
    steps = 50

    def rank_of(rank: int, comm: Communicator) -> tuple[Any, Any, Any]:
        residual, total = np.zeros((size, BLOCK), np.float32), np.zeros(BLOCK)
        largest = np.zeros((size, BLOCK))
        for step in range(steps):
            x = values(rank, step, size)
            y = comm.reduce_scatter(x, op, config, residual=residual)[0]
            total += y.astype(np.float64) * (size if op == "avg" else 1)
            largest = np.maximum(largest, np.abs(residual))
            largest[rank] = np.maximum(largest[rank], np.abs(y) * np.float64(size))
        return total, residual, largest

    results = launch.threads(size, rank_of)
    given_up: Any = np.sum(
        [values(rank, step, size) for rank in range(size) for step in range(steps)],
        axis=0, dtype=np.float64,
    )  # fmt: skip
    given_up -= np.sum([residual for _, residual, _ in results], axis=0, dtype=np.float64)
    for rank, (total, *_) in enumerate(results):
        given_up[rank] -= total
    # In a step each rank's value passes at most size + 3 operations of fp32, each off by 2^-24 of
    # at most the sum of all ranks' inputs, residuals and results.
    bound = np.sum([largest for *_, largest in results], axis=0) + 6 * size
    assert (np.abs(given_up) <= steps * (size + 3) * 2.0**-24 * bound).all()
    assert any(residual.any() for _, residual, _ in results) == (size > 1)


def test_bad_residuals() -> None:
    def rank_of(rank: int, comm: Communicator) -> None:
        x, config = values(rank, 0, 2), Config(bits=2, rounding="nearest")
        for residual in (np.zeros((2, BLOCK), np.float64), np.zeros(BLOCK, np.float32)):
            with pytest.raises(InvalidArgument, match="residual"):
                comm.reduce_scatter(x, "sum", config, residual=residual)
        with pytest.raises(InvalidArgument, match="a vote has no magnitude"):
            comm.reduce_scatter(x, "sum", Config(compressor="sign"), residual=x * 0)
        with pytest.raises(InvalidArgument, match="only sum and avg support them"):
            comm.reduce_scatter(x, "max", Config(bits=32), residual=x * 0)

    launch.threads(2, rank_of)
