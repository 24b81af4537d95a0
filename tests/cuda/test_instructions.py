"""The speed of kernels without a GPU: instructions for each value, in the code of libcgx.so."""

import re
from pathlib import Path

import pytest
from support import gpu_code, sass

from cgx_ops._core import binary

pytestmark = [
    pytest.mark.slow,  # a listing takes 20 seconds
    pytest.mark.skipif(
        "cuda" not in binary.built_with(),
        reason="cgx_ops was built without CUDA: no nvcc was found",
    ),
]

TILE = Path(__file__).parents[2] / "cgx_ops/csrc/kernel/cuda/aligned/tile.h"
# The values that a lane processes in an iteration.
VALUES = int(re.findall(r"\bkLaneValues = (\d+);", TILE.read_text())[0])
# Bytes that a lane loads for them.
FLOAT32 = 4 * VALUES
CODES = 4 * VALUES // 8
UNIFORM_RECORD, LEVELS_RECORD = 8 + CODES, 2 + CODES  # with a header


def _kernels(coding: str) -> tuple[str, str, str]:
    """Return the kernels that encode, decode and sum fp32 values in buckets of 512 values."""
    return (
        f"encode_aligned<Float32, {coding}, 32, false, false>",
        f"decode_aligned<Float32, {coding}, 32>",
        f"reduce_aligned<Float32, {coding}, 32, false, false, false, true>",
    )


ENCODE, DECODE, SUM = _kernels("Uniform<4>")
# A lane of an H200 executes about 35 instructions in the time in which its memory moves one value.
# These limits are 3 to 7 % above the present numbers. Loops that decode levels include 6
# instructions per value for warps whose lanes have diverged, which do not run.
ENCODE_LEVELS, DECODE_LEVELS, SUM_LEVELS = _kernels("Levels<4>")


def _code(kernel: str, architecture: str) -> dict[int, sass.Instruction]:
    found = gpu_code.code(architecture, f"^{re.escape(kernel)}$")
    assert found, f"libcgx.so has no kernel {kernel}"
    return found[kernel]


@pytest.mark.parametrize(
    ("kernel", "architecture", "loaded", "limit"),
    [
        (ENCODE, "sm_90", FLOAT32, 16),
        (DECODE, "sm_90", UNIFORM_RECORD, 8),
        (SUM, "sm_90", UNIFORM_RECORD, 8),
        (ENCODE_LEVELS, "sm_90", FLOAT32, 30),
        (DECODE_LEVELS, "sm_90", LEVELS_RECORD + 4, 11),  # and one of the levels,
        (SUM_LEVELS, "sm_90", LEVELS_RECORD, 11),
    ],
)
def test_instructions_of_the_hot_loop(
    kernel: str, architecture: str, loaded: int, limit: int
) -> None:
    """Check the loop over tiles, and for sums the nested loop over messages."""
    code = _code(kernel, architecture)
    loop = sass.hot_loop(code)
    loads = [code[address] for address in loop.body if code[address].loads]
    assert sum(load.bytes for load in loads) == loaded, "the loop processes VALUES"
    assert len(loop) / VALUES <= limit


@pytest.mark.parametrize(
    ("kernel", "architecture", "limit"), [(SUM, "sm_90", 16), (SUM_LEVELS, "sm_90", 32)]
)
def test_instructions_for_encoding_a_sum(kernel: str, architecture: str, limit: int) -> None:
    code = _code(kernel, architecture)
    messages = sass.hot_loop(code)
    tiles = sass.loop_around(code, messages)
    assert (len(tiles) - len(messages)) / VALUES <= limit


def test_kernels_without_one_hot_loop_are_refused() -> None:
    code = _code("run_buckets<Float32, UniformFormat, Warp, Encode>", "sm_90")
    with pytest.raises(LookupError, match="innermost loops"):
        sass.hot_loop(code)
