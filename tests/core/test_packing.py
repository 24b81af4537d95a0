"""Small segments of compressors without fixed length share messages (wire_format.md, section 6).

core/test_collectives.py and core/test_host_blocks.py compare more cases, on all transports.

    1. results and residuals, bit for bit as the oracle
    2. conservation over many steps
    3. bytes
    4. ranks that differ
"""

from ctypes import byref, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import reference
from support import launch
from support.collective_cases import DTYPES

from cgx_ops import Communicator, Config, MismatchError, Segment
from cgx_ops._core import library
from cgx_ops._core.call import build

# They have one compressor, except for OTHER; exact below 16; up to the limit of `lossless` and
# beyond it. The small ones of `lossless` are longer than a block together.
NUMELS = (17, 513, 5000, 1, 4095, 100, 0, 4096, 18_000, 4000, 4001, 3999, 63)
OTHER = 2  # its segment has another compressor
KNOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "lossless": ("bfloat16", {"compressor": "lossless"}),
    "entropy": ("float32", {"compressor": "entropy", "rate": 1.5}),
    "entropy, half": ("float16", {"compressor": "entropy", "rate": 0.5}),
    "entropy, shift": ("float32", {"compressor": "entropy", "rate": 3.0, "rounding": "shift"}),
    "entropy, a NaN": ("float32", {"compressor": "entropy", "rate": 2.0}),
    "lossless, a NaN": ("float32", {"compressor": "lossless"}),
}
VERBS = (
    *(("allreduce", algorithm) for algorithm in ("one_shot", "sra", "ring", "auto")),
    ("reduce_scatter", "auto"),
    ("all_gather", "auto"),
)
Values = npt.NDArray[Any]


def segments_of(knobs: dict[str, Any]) -> list[reference.Segment]:
    """Return the segments of a block, with gaps between them."""
    made, offset = [], 3
    for i, numel in enumerate(NUMELS):
        own: dict[str, Any] = {"bits": 4, "rounding": "nearest"} if i == OTHER else knobs
        made.append(reference.Segment(offset, numel, **own))
        offset += numel + 2
    return made


def only(segments: list[reference.Segment], buffer: Values, blocks: int) -> bytes:
    """Return the bytes of the segments' values, without the gaps."""
    of_blocks = buffer.reshape(blocks, -1)
    return b"".join(of_blocks[:, s.offset : s.offset + s.numel].tobytes() for s in segments)


# ---- 1. results and residuals --------------------------------------------------------------------


@pytest.mark.parametrize(("verb", "algorithm"), VERBS)
@pytest.mark.parametrize(
    "size",
    [
        *(1, 3, pytest.param(2, marks=pytest.mark.slow)),
        *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (4, 8)),
    ],
)
@pytest.mark.parametrize("name", KNOBS)
def test_results_and_residuals_equal_the_oracle(
    name: str, size: int, verb: str, algorithm: Any
) -> None:
    dtype, knobs = KNOBS[name]
    keeps = name.startswith("entropy") and name != "entropy, shift" and verb != "all_gather"
    segments = segments_of(knobs)
    end = segments[-1].offset + segments[-1].numel
    blocks_in = size if verb == "reduce_scatter" else 1
    blocks_out = size if verb == "all_gather" else 1
    op: dict[str, Any] = {} if verb == "all_gather" else {"op": "avg"}

    def inputs(rank: int) -> Values:
        values = np.random.default_rng(rank).standard_normal(blocks_in * end)
        if name.endswith("NaN") and rank == size - 1:
            values[segments[1].offset] = np.nan
        return values.astype(DTYPES[dtype])

    def old_residual() -> Values:
        return np.full(blocks_in * end, 0.125, DTYPES[dtype])

    def run(rank: int, comm: Communicator) -> tuple[bytes, bytes]:
        own = Config(algorithm=algorithm, **knobs)
        other = Config(4, rounding="nearest", algorithm=algorithm)
        lists = [
            Segment(each.offset, each.numel, other if i == OTHER else own)
            for i, each in enumerate(segments)
        ]
        residual = old_residual()
        fed: dict[str, Any] = {"residual": residual} if keeps else {}
        call = getattr(comm, verb)
        result = call(inputs(rank), config=own, segments=lists, seed=rank, **op, **fed)
        return only(segments, result, blocks_out), only(segments, residual, blocks_in)

    options: dict[str, Any] = {"seeds": list(range(size)), **op}
    residuals = [old_residual() for _ in range(size)]
    if keeps:
        options["residuals"] = residuals
    if verb != "all_gather":
        options["algorithm"] = algorithm
    given = [inputs(rank) for rank in range(size)]
    results: Any = getattr(reference, verb)(given, segments, **options)
    if verb != "reduce_scatter":
        results = [results] * size
    expected = [
        (only(segments, result, blocks_out), only(segments, residual, blocks_in))
        for result, residual in zip(results, residuals, strict=True)
    ]
    assert launch.threads(size, run) == expected


# ---- 2. conservation -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_conservation_of_a_reduce_scatter(size: int) -> None:
    """Check over 20 steps that inputs equal the results (as sums) plus the last residuals."""
    config, steps, block = Config(compressor="entropy", rate=1.0), 20, 900
    segments = [Segment(0, 700, config), Segment(700, 5, config), Segment(705, 195, config)]

    def values(rank: int, step: int) -> Values:
        shape = (size, block)
        return np.random.default_rng([rank, step]).standard_normal(shape).astype(np.float32)

    def run(rank: int, comm: Communicator) -> tuple[Values, Values, Values]:
        residual, total = np.zeros((size, block), np.float32), np.zeros(block)
        largest = np.zeros((size, block))
        for step in range(steps):
            x = values(rank, step)
            y = comm.reduce_scatter(x, "sum", config, segments=segments, residual=residual)[0]
            total += y
            largest = np.maximum(largest, np.abs(residual))
            largest[rank] = np.maximum(largest[rank], np.abs(y))
        return total, residual, largest

    results = launch.threads(size, run)
    inputs = [values(rank, step) for rank in range(size) for step in range(steps)]
    missing: Any = np.sum(inputs, axis=0, dtype=np.float64)
    missing -= np.sum([residual for _, residual, _ in results], axis=0, dtype=np.float64)
    missing -= [total for total, *_ in results]
    # In a step each rank's value passes at most size + 3 operations of fp32, each off by 2^-24 of
    # at most the sum of all ranks' inputs, residuals and results.
    bound = np.sum([largest for *_, largest in results], axis=0) + 6 * size
    assert (np.abs(missing) <= steps * (size + 3) * 2.0**-24 * bound).all()
    assert all(residual.any() for _, residual, _ in results)


# ---- 3. bytes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["allreduce", "reduce_scatter", "all_gather"])
def test_small_segments_send_fewer_bytes_together(verb: str) -> None:
    """Check that a hundred segments of 64 values cost less in one call than in separate calls."""
    config = Config(compressor="entropy", rate=1.0, algorithm="one_shot")
    blocks = 2 if verb == "reduce_scatter" else 1

    def run(rank: int, comm: Communicator) -> tuple[int, int]:
        x = np.random.default_rng(rank).standard_normal((blocks, 6400)).astype(np.float32)
        segments = [Segment(64 * i, 64, config) for i in range(100)]
        call = getattr(comm, verb)
        before = comm.bytes_sent
        call(x.reshape(-1), config=config, segments=segments)
        together = comm.bytes_sent - before
        for i in range(100):
            call(x[:, 64 * i : 64 * i + 64].reshape(-1), config=config)
        return together, comm.bytes_sent - before - together

    for together, alone in launch.threads(2, run):
        assert together < 6400 / 8 * 1.02 + 300  # the rate, its tolerance, and the header
        assert alone > 2 * together


# ---- 4. ranks that differ ------------------------------------------------------------------------


def reduce_with(comm: Communicator, x: Values, residuals: list[Values | None]) -> None:
    """Sum three small segments, with residuals of some."""
    config = Config(compressor="entropy", rate=2.0, algorithm="sra")
    numel, y = x.size // 3, np.empty_like(x)
    call = build(
        "allreduce", "sum", config, [(i * numel, numel, config) for i in range(3)],
        comm=comm.id, input=x.ctypes.data, output=y.ctypes.data,
        residuals=(c_void_p * 3)(*(None if e is None else e.ctypes.data for e in residuals)),
    )  # fmt: skip
    library.call("cgx_run", byref(call))


def test_residuals_of_other_segments() -> None:
    """Segments are packed by their residuals, so ranks must not have those of other segments."""

    def run(rank: int, comm: Communicator) -> None:
        x = np.random.default_rng(rank).standard_normal(300).astype(np.float32)
        e = [np.zeros(100, np.float32) for _ in range(3)]
        own = [e[0], e[1], None] if rank else [None, e[1], e[2]]
        with pytest.raises(MismatchError, match="sizes or settings of segments"):
            reduce_with(comm, x, own)
        # All on one rank and none on the other are packed equally.
        reduce_with(comm, x, [*e] if rank else [None] * 3)
        assert any(each.any() for each in e) == bool(rank)

    launch.threads(2, run)
