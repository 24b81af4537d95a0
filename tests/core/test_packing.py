"""Small segments of compressors without fixed length share blocks (wire_format.md, section 6)."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import reference
from support import launch

from cgx_ops import Communicator, Config, Segment

# Of the same compressor, except for one; exact below 16; up to a block of lossless and beyond it.
NUMELS = (17, 513, 5000, 1, 16_383, 100, 0, 16_384, 30_000, 63)
OTHER = 2  # its segment has another compressor
KNOBS: dict[str, dict[str, Any]] = {
    "lossless": {"compressor": "lossless"},
    "entropy": {"compressor": "entropy", "rate": 1.5},
    "entropy, shift": {"compressor": "entropy", "rate": 3.0, "rounding": "shift"},
}
Float32s = npt.NDArray[np.float32]


def segments_of(knobs: dict[str, Any]) -> list[reference.Segment]:
    """Return the segments, with gaps between them."""
    made, offset = [], 3
    for i, numel in enumerate(NUMELS):
        own: dict[str, Any] = {"bits": 4, "rounding": "nearest"} if i == OTHER else knobs
        made.append(reference.Segment(offset, numel, **own))
        offset += numel + 2
    return made


def only(segments: list[reference.Segment], buffer: Float32s) -> bytes:
    """Return the bytes of the segments' values, without the gaps."""
    return b"".join(buffer[s.offset : s.offset + s.numel].tobytes() for s in segments)


@pytest.mark.parametrize("algorithm", ["one_shot", "sra", "ring", "auto"])
@pytest.mark.parametrize(
    "size", [1, 2, 3, *(pytest.param(each, marks=pytest.mark.slow) for each in (4, 8))]
)
@pytest.mark.parametrize("name", KNOBS)
def test_results_and_residuals_equal_the_oracle(name: str, size: int, algorithm: Any) -> None:
    knobs, keeps = KNOBS[name], name == "entropy"
    segments = segments_of(knobs)
    numel = segments[-1].offset + segments[-1].numel

    def inputs(rank: int) -> Float32s:
        return np.random.default_rng(rank).standard_normal(numel).astype(np.float32)

    def old_residual() -> Float32s:
        return np.full(numel, 0.125, np.float32)

    def run(rank: int, comm: Communicator) -> tuple[bytes, bytes]:
        own = Config(algorithm=algorithm, **knobs)
        other = Config(4, rounding="nearest", algorithm=algorithm)
        lists = [
            Segment(each.offset, each.numel, other if i == OTHER else own)
            for i, each in enumerate(segments)
        ]
        residual = old_residual()
        fed: dict[str, Any] = {"residual": residual} if keeps else {}
        result = comm.allreduce(inputs(rank), "avg", own, segments=lists, seed=rank, **fed)
        return only(segments, result), only(segments, residual)

    residuals = [old_residual() for _ in range(size)]
    want = reference.allreduce(
        [inputs(rank) for rank in range(size)], segments, op="avg", algorithm=algorithm,
        seeds=list(range(size)), residuals=residuals if keeps else None,
    )  # fmt: skip
    expected = [(only(segments, want), only(segments, residual)) for residual in residuals]
    assert launch.threads(size, run) == expected


def test_small_segments_send_fewer_bytes_together() -> None:
    """A hundred segments of 64 values cost less in one call than in calls of their own."""
    config = Config(compressor="entropy", rate=1.0, algorithm="one_shot")

    def run(rank: int, comm: Communicator) -> tuple[int, int]:
        x = np.random.default_rng(rank).standard_normal(6400).astype(np.float32)
        segments = [Segment(64 * i, 64, config) for i in range(100)]
        before = comm.bytes_sent
        comm.allreduce(x, config=config, segments=segments)
        together = comm.bytes_sent - before
        for i in range(100):
            comm.allreduce(x[64 * i : 64 * i + 64], config=config)
        return together, comm.bytes_sent - before - together

    for together, alone in launch.threads(2, run):
        assert together < 6400 / 8 * 1.02 + 300  # the rate, its tolerance, and the header
        assert alone > 2 * together
