"""The C functions for one rank's arithmetic, and plans: invalid arguments raise errors.

Each row is a call with one argument that is null, negative, or too large to count its bytes in 63
bits; the error names it. Other tests: invalid lists in numpy/test_segments.py, carried calls in
core/test_carried.py, communicators in numpy/test_communicator.py.
"""

import ctypes
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cgx_ops
from cgx_ops import Communicator, InvalidArgument, SystemFailure
from cgx_ops._core import library, structs, tables

HUGE = 2**62
X = np.ones(1024, np.float32)
DATA = np.zeros(8192, np.uint8)
NUMEL = X.size
FLOAT32 = tables.DTYPES["float32"]


def codec(**fields: int) -> structs.Codec:
    codec = structs.Codec(config=structs.Config(bits=4, bucket_size=512))
    for field, value in fields.items():
        set_field(codec, field, value)
    return codec


def set_field(struct: structs.Codec | structs.Collective, field: str, value: Any) -> None:
    """Set a field of a call, or of its config."""
    setattr(struct.config if hasattr(struct.config, field) else struct, field, value)


def of_codec(function: str, *arguments: Any, **fields: int) -> Callable[[], None]:
    return lambda: library.call(function, byref(codec(**fields)), *arguments)


def encoded_bytes(numel: int, **fields: int) -> Callable[[], None]:
    return of_codec("cgx_encoded_bytes", numel, byref(c_int64()), **fields)


def quantize(values: Any = X, numel: int = NUMEL, data: Any = DATA, **fields: int) -> Any:
    return of_codec("cgx_quantize", at(values), numel, at(data), byref(c_int64()), **fields)


def dequantize(
    data: Any = DATA, num_bytes: int = 528, numel: int = NUMEL, values: Any = X, **fields: int
) -> Any:
    return of_codec("cgx_dequantize", at(data), num_bytes, numel, at(values), **fields)


def sum_encoded(
    messages: Any = DATA, count: int = 2, stride: int = 528, numel: int = NUMEL, result: Any = DATA
) -> Callable[[], None]:
    return of_codec("cgx_sum_encoded", at(messages), count, stride, numel, at(result))


def exact_sum(values: Any, count: int = 1, numel: int = NUMEL, total: Any = X) -> Any:
    return lambda: library.call("cgx_sum", FLOAT32, values, count, numel, at(total))


def convert(source: Any = X, result: Any = X, numel: int = NUMEL) -> Any:
    dtype = FLOAT32
    return lambda: library.call("cgx_convert", dtype, at(source), dtype, at(result), c_int64(numel))


def convert_residual(source: Any = X, result: Any = X, numel: int = NUMEL) -> Any:
    call = at(source), FLOAT32, at(result), c_int64(numel)
    return lambda: library.call("cgx_convert_residual", *call)


def at(array: Any) -> int | None:
    return None if array is None else array.ctypes.data


def pointers(*arrays: Any) -> Any:
    return (c_void_p * len(arrays))(*map(at, arrays))


CODEC_CALLS: dict[str, tuple[Callable[[], None], str]] = {
    "no codec": (
        lambda: library.call("cgx_encoded_bytes", None, 1, byref(c_int64())),
        "cgx_codec_t is a null",
    ),
    "no bytes": (of_codec("cgx_encoded_bytes", 1, None), "bytes is a null pointer"),
    "negative numel": (encoded_bytes(-1), "numel is -1"),
    "4 bits": (encoded_bytes(HUGE), f"numel is {HUGE}"),
    "8 bits, buckets of one": (encoded_bytes(2**60, bits=8, bucket_size=1), "numel is"),
    "8 bits, buckets of two": (encoded_bytes(2**61, bits=8, bucket_size=2), "numel is"),
    "32 bits": (encoded_bytes(2**61, bits=32), "numel is"),
    "32 bits, the most": (encoded_bytes(2**63 - 1, bits=32), "numel is"),
    "first_index": (quantize(first_index=-512), "first_index is -512"),
    "end of index": (quantize(first_index=2**63 - 512), "first_index is"),
    "rank": (quantize(rank=-1), "rank is -1"),
    "phase": (quantize(phase=-1), "phase is -1"),
    "rounding": (quantize(rounding=4), "rounding is 4"),
    "device": (quantize(device=2), "device is 2"),
    "dtype": (quantize(dtype=3), "dtype is 3"),
    "no values": (quantize(values=None), "values is a null pointer; it holds 1024"),
    "no message": (quantize(data=None), "bytes is a null pointer; it holds 528"),
    "no encoded": (dequantize(data=None), "bytes is a null pointer; it holds 528"),
    "negative length": (dequantize(num_bytes=-1), "num_bytes is -1"),
    "short": (dequantize(num_bytes=527), "527 bytes"),
    "long": (dequantize(num_bytes=529), "529 bytes"),
    "no decoded": (dequantize(values=None), "values is a null pointer"),
    "huge decoded": (dequantize(numel=HUGE), f"numel is {HUGE}"),
    "no messages": (sum_encoded(messages=None), "messages is a null pointer"),
    "no result": (sum_encoded(result=None), "message is a null pointer"),
    "no count": (sum_encoded(count=0), "num_messages is 0"),
    "stride": (sum_encoded(stride=527), "stride is 527, but the longest of 2 messages has 528"),
    "negative stride": (sum_encoded(stride=-1), "stride is -1"),
    "most negative stride": (sum_encoded(stride=-HUGE), f"stride is -{HUGE}"),
    "endless stride": (sum_encoded(stride=HUGE, count=3), f"stride is {HUGE}"),
    "no list": (exact_sum(None), "values is a null pointer"),
    "a hole in the list": (exact_sum(pointers(X, None), 2), "one of values is a null pointer"),
    "no total": (exact_sum(pointers(X), total=None), "sum is a null pointer"),
    "empty list": (exact_sum(pointers(X), count=0), "num_values is 0"),
    "negative sum": (exact_sum(pointers(X), numel=-1), "numel is -1"),
    "huge sum": (exact_sum(pointers(X), numel=HUGE), f"numel is {HUGE}"),
    "no source": (convert(source=None), "from is a null pointer"),
    "no target": (convert(result=None), "to is a null pointer"),
    "negative convert": (convert(numel=-1), "numel is -1"),
    "huge convert": (convert(numel=HUGE), f"numel is {HUGE}"),
    "no residual": (convert_residual(source=None), "from is a null pointer"),
    "no target of a residual": (convert_residual(result=None), "to is a null pointer"),
    "huge residual": (convert_residual(numel=HUGE), f"numel is {HUGE}"),
}


@pytest.mark.parametrize("name", CODEC_CALLS)
def test_codec_rejects_invalid_arguments(name: str) -> None:
    call, text = CODEC_CALLS[name]
    with pytest.raises(InvalidArgument) as caught:
        call()
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"), [("bits", 9), ("bucket_size", 0), ("rounding", 4), ("compressor", 15)]
)
def test_errors_name_the_invalid_field(field: str, value: int) -> None:
    with pytest.raises(InvalidArgument) as caught:
        encoded_bytes(1024, **{field: value})()
    assert caught.value.field == field


def test_names_of_compressors() -> None:
    core = ctypes.CDLL(str(Path(cgx_ops.__file__).with_name("libcgx.so")))
    core.cgx_compressor_name.restype = ctypes.c_char_p
    names = [row["name"].encode() for row in tables.COMPRESSORS.values()]
    assert [core.cgx_compressor_name(c_int64(i)) for i in range(len(names))] == names
    for number in (-1, len(names), 2**62):
        assert core.cgx_compressor_name(c_int64(number)) == b"unknown"


def test_zero_elements_need_no_memory() -> None:
    for call in (
        quantize(values=None, numel=0, data=None),
        dequantize(data=None, num_bytes=0, numel=0, values=None),
        sum_encoded(None, 1, 0, 0, None),
        sum_encoded(DATA, 1, -1),  # one message has no stride
        exact_sum(pointers(None), numel=0, total=None),
        convert(None, None, 0),
        convert_residual(None, None, 0),
        encoded_bytes(2**59, bits=8, bucket_size=1),
    ):
        call()


def test_python_rejects_invalid_arguments() -> None:
    for numel in (2**60, 2**62, 2**63, 2**64, -1):
        with pytest.raises(InvalidArgument, match="numel is"):
            cgx_ops.dequantize(b"", numel, bits=32)
    with pytest.raises(InvalidArgument, match="first_index is"):
        cgx_ops.quantize(X, first_index=2**64)


# ---- plans ---------------------------------------------------------------------------------------


def segment(offset: int = 0, numel: int = NUMEL, bits: int = 4) -> structs.Segment:
    return structs.Segment(offset, numel, 512, bits)


# The segments (None: no pointer), their number if different, other fields, the error's text.
PLANS: dict[str, tuple[list[structs.Segment] | None, int | None, dict[str, Any], str]] = {
    "no segments": (None, 1, {}, "segments is a null pointer; it holds 1 segments"),
    "negative count": (None, -1, {}, "num_segments is -1"),
    "endless count": (None, HUGE, {}, "num_segments is"),
    "offset": ([segment(offset=-1)], None, {}, "both must be at least 0"),
    "numel": ([segment(numel=-1)], None, {}, "both must be at least 0"),
    "far away": ([segment(offset=HUGE)], None, {}, "at most 2^59"),
    "huge": ([segment(numel=2**59)], None, {}, "at most 2^59"),
    "huge together": ([segment(numel=2**57) for _ in range(5)], None, {"lists": True}, "most 2^59"),
    "block": ([segment()], None, {"block_numel": -1, "verb": 1}, "block_numel is -1"),
    "blocks": ([segment()], None, {"block_numel": 2**59, "verb": 1}, "block_numel is"),
    "minimal_size": ([segment()], None, {"minimal_size": -1}, "minimal_size is -1"),
    "divisor": ([segment()], None, {"divisor": -1}, "divisor is -1"),
}


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_plan_rejects_invalid_arguments(name: str, carried: bool) -> None:
    segments, count, fields, text = PLANS[name]
    fields = dict(fields)
    call = structs.Collective(comm=Communicator.local(2)[0].id)
    call.input = call.output = X.ctypes.data
    if segments is not None:
        call.segments = (structs.Segment * len(segments))(*segments)
        call.num_segments = len(segments)
        if fields.pop("lists", False):
            call.inputs = call.outputs = (c_void_p * len(segments))(*[X.ctypes.data] * 5)
    if count is not None:
        call.num_segments = count
    for field, value in fields.items():
        set_field(call, field, value)
    native = structs.Carried(rank=0, size=2, call=ctypes.pointer(call))
    sizes = (c_int64 * 2)(), (c_int64 * 2)()
    function = "cgx_carried_plan" if carried else "cgx_plan"
    arguments: tuple[Any, ...] = byref(call), byref(structs.Plan())
    if carried:
        arguments = byref(native), byref(c_int32()), *sizes
    with pytest.raises(InvalidArgument) as caught:
        library.call(function, *arguments)
    assert text in str(caught.value)


@pytest.mark.parametrize("step", [0, 1, 2])
def test_allgather_without_effect_raises(step: int) -> None:
    """Let the bootstrap return zeros in this step, on this rank."""
    blobs: dict[tuple[int, int], bytes] = {}
    written = threading.Condition()
    skipped = threading.Event()

    def create(rank: int) -> str:
        rounds = itertools.count()

        @ctypes.CFUNCTYPE(ctypes.c_int, c_void_p, c_void_p, ctypes.c_size_t, c_void_p)
        def allgather(_context: object, mine: int, count: int, everything: int) -> int:
            now = next(rounds)
            if rank == 0 and now == step:
                skipped.set()
                return 0
            with written:
                blobs[now, rank] = ctypes.string_at(mine, count)
                written.notify_all()
                while (now, 1 - rank) not in blobs:
                    if skipped.is_set():
                        return 1
                    written.wait(0.01)
            ctypes.memmove(everything, blobs[now, 0] + blobs[now, 1], 2 * count)
            return 0

        bootstrap = structs.Bootstrap(
            rank=rank,
            size=2,
            allgather=ctypes.cast(allgather, c_void_p),
            name=f"nothing {rank}".encode(),
            transport=b"SHM",
        )
        with pytest.raises(SystemFailure) as raised:
            library.call_for_id("cgx_comm_create", byref(bootstrap))
        return str(raised.value)

    with ThreadPoolExecutor(2) as ranks:
        first, second = ranks.map(create, range(2), timeout=30)
    assert "did not return this rank's own bytes" in first
    assert "allgather failed" in second
