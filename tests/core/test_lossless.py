"""The compressor lossless: exact values, its bytes against the oracle, and malformed blocks.

core/test_compressors.py runs it on all CPU targets, core/test_collectives.py on several ranks.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import reference
from reference import lossless, rans
from support import launch
from support.compressor_cases import DTYPES, KINDS, values

from cgx_ops import Communicator, Config, InvalidArgument, dequantize, quantize

LOSSLESS = Config(compressor="lossless")
SIZES = (0, 1, 17, 511, 512, 513, 5000, 16383, 16384, 16385, 65535, 65536, 65537)


def any_bits(numel: int, dtype: str) -> npt.NDArray[Any]:
    """Return values with random bits: NaN payloads, denormals, both zeros."""
    width = np.dtype(DTYPES[dtype]).itemsize
    return np.frombuffer(np.random.default_rng(numel).bytes(numel * width), DTYPES[dtype])


def mixed(numel: int, dtype: str) -> npt.NDArray[Any]:
    """Return normal values, a few of which have random bits."""
    x = values("normal", numel, dtype)
    x[::97] = any_bits(numel, dtype)[::97]
    return x


def round_trip(x: npt.NDArray[Any], dtype: str) -> bytes:
    """Check that the values are exact and the bytes are the oracle's; return them."""
    data = quantize(x, LOSSLESS)
    assert data == reference.quantize(x, 4, 512, compressor="lossless")
    assert dequantize(data, x.size, dtype, LOSSLESS).tobytes() == x.tobytes()
    assert lossless.decode(data, x.size, x.dtype).tobytes() == x.tobytes()
    return data


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
def test_sizes(numel: int, dtype: str) -> None:
    for x in (mixed(numel, dtype), any_bits(numel, dtype)):
        blocks = -(-numel // 16384)
        assert len(round_trip(x, dtype)) <= numel * x.itemsize + 5 * blocks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind: str, dtype: str) -> None:
    round_trip(values(kind, 20_000, dtype), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_million_values(dtype: str) -> None:
    round_trip(mixed(2**20 + 7, dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_bits_are_sent_plain(dtype: str) -> None:
    x = np.random.default_rng(0).integers(0, 256, 16384 * np.dtype(DTYPES[dtype]).itemsize)
    data = round_trip(x.astype(np.uint8).view(DTYPES[dtype]), dtype)
    assert data[4] == 0
    assert len(data) == 4 + 1 + x.size


@pytest.mark.parametrize(
    ("dtype", "most"), [("float32", 26.8), ("float16", 13.7), ("bfloat16", 10.8)]
)
def test_gaussian_bits(dtype: str, most: float) -> None:
    x = values("normal", 65536, dtype)
    assert 8 * len(round_trip(x, dtype)) / x.size < most


def test_planes_that_gain_are_coded() -> None:
    """Check zeros, and fp32 values that are bf16 numbers, such as gradients of autocast."""
    assert len(round_trip(np.zeros(16384, np.float32), "float32")) < 600
    rounded = values("normal", 65536, "bfloat16").astype(np.float32)
    assert 8 * len(round_trip(rounded, "float32")) / rounded.size < 11.1


def test_one_two_and_all_symbols() -> None:
    for symbols in ([7], [0, 255], range(256)):
        exponents = np.resize(np.array(symbols, np.uint16), 20_000)
        round_trip((exponents << 7).view(DTYPES["bfloat16"]), "bfloat16")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_results_have_the_bits_of_exact_ones(size: int) -> None:
    """Check sums in rank order, of values with random bits among them."""
    cases = list(itertools.product(("one_shot", "sra"), DTYPES, ("sum", "avg", "max")))

    def run(rank: int, comm: Communicator) -> list[tuple[bytes, bytes]]:
        results = []
        for algorithm, dtype, op in cases:
            x = np.roll(mixed(40_000, dtype), rank)
            found, wanted = (
                comm.allreduce(x, op, replace(config, algorithm=algorithm)).tobytes()
                for config in (LOSSLESS, Config(32))
            )
            results.append((found, wanted))
        return results

    for results in launch.threads(size, run):
        for case, (found, wanted) in zip(cases, results, strict=True):
            assert found == wanted, case


# ---- malformed blocks ----------------------------------------------------------------------------


def framed(block: bytes) -> bytes:
    return len(block).to_bytes(4, "little") + block


def rejected(block: bytes, numel: int, dtype: str = "bfloat16") -> None:
    with pytest.raises(InvalidArgument):
        dequantize(framed(block), numel, dtype, LOSSLESS)


def test_rejects_malformed_blocks() -> None:
    numel = 4096
    block = lossless.encode_block(values("normal", numel, "bfloat16"))
    assert block[0] == 1
    length = int.from_bytes(block[1:5], "little")
    dequantize(framed(block), numel, "bfloat16", LOSSLESS)
    for at in range(0, len(block), 7):
        rejected(block[:at], numel)
    rejected(block + b"\0", numel)
    rejected(block, numel - 1)
    rejected(block, numel + 1)
    for flags in (0, 2, 3, 4, 255):
        rejected(bytes([flags]) + block[1:], numel)
    for wrong in (0, 1, length - 1, length + 1, 2**31, 2**32 - 1):
        rejected(block[:1] + wrong.to_bytes(4, "little") + block[5:], numel)
    _, size = rans.read_frequencies(block[5:])
    state = 5 + size
    for value in (0, 2**15 - 1, 2**31, 2**32 - 1):  # out of range
        rejected(block[:state] + value.to_bytes(4, "little") + block[state + 4 :], numel)
    last = 5 + length - 1
    rejected(block[:last] + bytes([block[last] ^ 1]) + block[last + 1 :], numel)
    rejected(block[:5] + b"\0" * size + block[state:], numel)
    plain = b"\0" + b"\0" * (2 * numel)
    dequantize(framed(plain), numel, "bfloat16", LOSSLESS)
    rejected(plain[:-1], numel)
    rejected(plain + b"\0", numel)
