"""An allreduce whose messages the caller transports: cgx_carried_* of cgx.h, section 5.

All ranks are simulated in this thread, and numpy copies the bytes. Every buffer has guards.
Buffers that a step must not use are null.

    1. the simulated ranks
    2. results: bitwise equal to the oracle's and communicators'; bytes equal to cgx_plan's
    3. bad calls
"""

import ctypes
import itertools
from collections.abc import Callable
from ctypes import POINTER, byref, c_int32, c_int64
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import reference
from reference.packing import VARIABLE
from support import collective_cases, launch
from support.collective_cases import COMPRESSORS, DTYPES, FEATURES, Case

from cgx_ops import (
    CgxError,
    Communicator,
    InvalidArgument,
    MismatchError,
    SystemFailure,
    Unsupported,
)
from cgx_ops._core import library, structs, tables
from cgx_ops.config import Algorithm, Rounding

GUARD = 64
ROUNDINGS: tuple[Rounding, ...] = ("nearest", "stochastic", "shift")
ALGORITHMS: tuple[Algorithm, ...] = ("auto", "sra", "one_shot")

# ---- 1. the simulated ranks ----------------------------------------------------------------------


class Guarded:
    """Bytes between guards that must not change. The address is odd, as inside a larger message."""

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.all = np.full(GUARD + numel + GUARD, 0xA5, np.uint8)
        self.bytes = self.all[GUARD - 1 : GUARD - 1 + numel]

    @property
    def address(self) -> int | None:
        """The address; null if the buffer is empty."""
        return self.bytes.ctypes.data if self.numel else None

    def check(self) -> None:
        """Fail if bytes outside of the buffer changed."""
        outside = np.concatenate([self.all[: GUARD - 1], self.all[GUARD - 1 + self.numel :]])
        assert (outside == 0xA5).all(), "written outside of the buffer"


def native_call(case: Case, rank: int) -> structs.Collective:
    """Return a rank's call of the case, without buffers."""
    segments = case.segments or ((0, case.size, case.bits, case.bucket_size),)
    native = [structs.Segment(o, n, bucket_size, bits) for o, n, bits, bucket_size in segments]
    return structs.Collective(
        comm=-1,
        verb=tables.VERBS["allreduce"]["id"],
        dtype=tables.DTYPES[case.dtype],
        op=tables.OPS[case.op],
        config=collective_cases.config_of(case).native,
        seed=case.seed(rank),
        block_numel=case.size,
        segments=(structs.Segment * len(native))(*native),
        num_segments=len(native),
    )


class Rank:
    """One rank's part of a carried allreduce."""

    def __init__(self, case: Case, rank: int, size: int) -> None:
        self.x = collective_cases.inputs(case, rank, size)
        self.result = np.zeros(case.size, self.x.dtype)
        self.call = native_call(case, rank)
        self.carried = structs.Carried(rank=rank, size=size, call=ctypes.pointer(self.call))
        self.rank, self.size = rank, size
        algorithm = c_int32(-1)
        sizes = (c_int64 * size)(*[-1] * size), (c_int64 * size)(*[-1] * size)
        library.call("cgx_carried_plan", byref(self.carried), byref(algorithm), *sizes)
        self.one_shot = algorithm.value == tables.ALGORITHMS["one_shot"]
        self.scatter_bytes, self.gather_bytes = (list(given) for given in sizes)

    def use(self, values: npt.NDArray[Any] | None, result: npt.NDArray[Any] | None) -> None:
        """Use these buffers in the next step."""
        self.call.input = None if values is None else values.ctypes.data
        self.call.output = None if result is None else result.ctypes.data

    def encode(self) -> list[npt.NDArray[np.uint8]]:
        """Return the messages: one per owner, empty for itself; or the single one of one_shot."""
        self.use(self.x if self.size > 1 else None, None)
        sizes = [b * (p != self.rank) for p, b in enumerate(self.scatter_bytes)]
        if self.one_shot:
            sizes = [self.gather_bytes[self.rank]]
        messages = Guarded(sum(sizes))
        library.call("cgx_carried_encode", byref(self.carried), messages.address, sum(sizes))
        messages.check()
        return np.split(messages.bytes, np.cumsum(sizes)[:-1])

    def reduce(self, arrived: list[npt.NDArray[np.uint8]]) -> npt.NDArray[np.uint8]:
        """Return the message for all ranks; arrived: from each rank, empty from itself."""
        self.use(self.x if self.size > 1 else None, None)
        joined = np.concatenate(arrived)
        assert len(joined) == (self.size - 1) * self.scatter_bytes[self.rank]
        message = Guarded(self.gather_bytes[self.rank])
        source = (joined.ctypes.data if joined.size else None), joined.size
        sizes = message.address, self.gather_bytes[self.rank]
        library.call("cgx_carried_reduce", byref(self.carried), *source, *sizes)
        message.check()
        return message.bytes

    def decode(self, messages: list[npt.NDArray[np.uint8]]) -> str:
        """Return the digest of the result; messages: of each rank."""
        assert [len(message) for message in messages] == self.gather_bytes
        stride = max(self.gather_bytes) + 3  # bytes between two messages are not read
        gathered = np.full(stride * self.size, 0xA5, np.uint8)
        for rank, message in enumerate(messages):
            gathered[rank * stride : rank * stride + len(message)] = message
        self.use(self.x if self.size == 1 else None, self.result)
        library.call("cgx_carried_decode", byref(self.carried), gathered.ctypes.data, gathered.size)
        return collective_cases.digest(self.result)


def allreduce(case: Case, size: int) -> list[str]:
    """Return the digest of each rank's result."""
    ranks = [Rank(case, rank, size) for rank in range(size)]
    kept = [rank.x.tobytes() for rank in ranks]
    for sizes in ("one_shot", "scatter_bytes", "gather_bytes"):
        assert all(getattr(rank, sizes) == getattr(ranks[0], sizes) for rank in ranks), sizes
    sent = [rank.encode() for rank in ranks]
    if ranks[0].one_shot:
        assert not any(ranks[0].scatter_bytes)
        messages = [mine for (mine,) in sent]
    else:
        messages = [rank.reduce([row[rank.rank] for row in sent]) for rank in ranks]
    digests = [rank.decode(messages) for rank in ranks]
    assert [rank.x.tobytes() for rank in ranks] == kept, f"the input changed: {case}"
    return digests


def payload_bytes(case: Case, comm: Communicator) -> int:
    """Return the payload bytes of the rank, from cgx_plan."""
    call = native_call(case, comm.rank)
    some = np.empty(1)
    call.comm, call.input, call.output = comm.id, some.ctypes.data, some.ctypes.data
    plan = structs.Plan()
    library.call("cgx_plan", byref(call), byref(plan))
    return plan.payload_bytes


# ---- 2. results ----------------------------------------------------------------------------------

CODEC = [
    Case(5003, bits, 100, dtype, rounding, op=op, algorithm=algorithm)
    for bits, dtype, rounding, op, algorithm in itertools.product(
        (*range(1, 9), 32), DTYPES, ROUNDINGS, ("sum", "avg"), ALGORITHMS[1:]
    )
]
SIZES = [
    Case(size, bits, 64, rounding=rounding, algorithm=algorithm)
    for size, bits, rounding, algorithm in itertools.product(
        (0, 1, 15, 16, 17, 511, 512, 513), (4, 32), ROUNDINGS, ALGORITHMS
    )
]
LAYERS = ((0, 700, 4, 512), (700, 9, 4, 512), (709, 1000, 8, 64), (2000, 5000, 32, 1))
SEGMENTS = [
    Case(8000, rounding=rounding, segments=LAYERS, algorithm=algorithm, op="avg", gather_bits=g)
    for rounding, algorithm, g in itertools.product(ROUNDINGS, ALGORITHMS, (0, 8, 32))
]
OTHERS = [c for c in FEATURES if c.verb == "allreduce" and c.algorithm != "ring"]
EVERY_ROW = [c for c in COMPRESSORS if c.verb == "allreduce" and c.algorithm != "ring"][::11]
SETS = {
    "codec": CODEC,
    "sizes": SIZES,
    "segments": SEGMENTS,
    "features": OTHERS,
    "compressors": EVERY_ROW,
}


def numbers_of(case: Case, rank: Rank) -> int:
    """Return how many numbers of 8 bytes only the caller's messages have.

    With random indices, each message begins with a seed. Each block of a compressor without fixed
    length begins with its length.
    """
    peers = rank.size - 1
    if case.size < 16 or not peers:
        return 0
    if case.compressor == "randk":
        return peers
    if case.compressor not in VARIABLE:
        return 0
    segment = reference.Segment(0, case.size, compressor=case.compressor)
    grain = {"lossless": 16_384, "entropy": 65_536}[case.compressor]
    if rank.one_shot:
        return peers * -(-case.size // grain)
    owned = [
        -(-(at.stop - at.start) // grain) for at in reference.shards(segment, rank.size, False)
    ]
    return sum(owned) - owned[rank.rank] + peers * owned[rank.rank]


def check(cases: list[Case], size: int) -> None:
    """Compare with the oracle and with communicators, on every rank."""

    def on_communicator(_rank: int, comm: Communicator) -> list[tuple[str, int]]:
        return [(collective_cases.run(c, comm), payload_bytes(c, comm)) for c in cases]

    communicators = launch.threads(size, on_communicator)
    wrong = []
    for index, case in enumerate(cases):
        results = allreduce(case, size)
        if results != collective_cases.expected(case, size):
            wrong.append(f"{case}: not the oracle's")
        if results != [of_rank[index][0] for of_rank in communicators]:
            wrong.append(f"{case}: not the communicators'")
        ranks = [Rank(case, rank, size) for rank in range(size)]
        sent = [
            sum(rank.scatter_bytes)
            - rank.scatter_bytes[rank.rank]
            + (size - 1) * rank.gather_bytes[rank.rank]
            - 8 * numbers_of(case, rank)
            for rank in ranks
        ]
        if sent != [of_rank[index][1] for of_rank in communicators]:
            wrong.append(f"{case}: {sent} bytes, not those of the plan")
    assert not wrong, f"{len(wrong)} of {len(cases)} cases:\n" + "\n".join(wrong[:20])


# On eight ranks the oracle is slow for the codec and all features.
RUNS = [
    pytest.param(cases, size, marks=marks)
    for size, marks in ((1, ()), (3, ()), (2, pytest.mark.slow), (4, pytest.mark.exhaustive))
    for cases in SETS
]
RUNS += [
    pytest.param(cases, 8, marks=() if cases in ("segments", "sizes") else pytest.mark.exhaustive)
    for cases in SETS
]


@pytest.mark.parametrize(("cases", "size"), RUNS)
def test_same_bits_and_bytes(cases: str, size: int) -> None:
    check(SETS[cases], size)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_large(size: int) -> None:
    """Use many chunks per shard; their number differs between the shards."""
    check(
        [
            Case(2**20 + 7, 4, rounding="shift", op="avg"),
            Case(2**20 + 7, 3, 1000, "bfloat16", gather_bits=8),
            Case(2**20 + 7, 8, rounding="nearest", algorithm="one_shot"),
            Case(2**20 + 7, 32, dtype="float16", op="max"),
        ],
        size,
    )


def test_in_place() -> None:
    """Use the input as output: decode writes where encode and reduce have read."""
    case = Case(5000, algorithm="sra")
    ranks = [Rank(case, rank, 2) for rank in range(2)]
    for rank in ranks:
        rank.result = rank.x
    sent = [rank.encode() for rank in ranks]
    messages = [rank.reduce([row[rank.rank] for row in sent]) for rank in ranks]
    digests = [rank.decode(messages) for rank in ranks]
    assert digests == collective_cases.expected(case, 2)


# ---- 3. bad calls --------------------------------------------------------------------------------


def _plan(carried: structs.Carried | None) -> None:
    sizes = (c_int64 * 4)(), (c_int64 * 4)()
    given = None if carried is None else byref(carried)
    library.call("cgx_carried_plan", given, byref(c_int32()), *sizes)


def _encode(carried: structs.Carried) -> None:
    library.call("cgx_carried_encode", byref(carried), np.empty(9000, np.uint8).ctypes.data, 9000)


def _decode(carried: structs.Carried) -> None:
    gathered = np.empty(9000, np.uint8)
    library.call("cgx_carried_decode", byref(carried), gathered.ctypes.data, 9000)


def _nowhere(step: str, *arguments: int | None) -> Callable[[structs.Carried], None]:
    return lambda carried: library.call(f"cgx_carried_{step}", byref(carried), *arguments)


def _reduce_to_null(carried: structs.Carried) -> None:
    arrived = np.zeros(258, np.uint8)
    library.call("cgx_carried_reduce", byref(carried), arrived.ctypes.data, 258, None, 258)


# step, invalid fields of cgx_carried_t and of its call, the kind and the text of the error
BAD_CALLS: dict[str, tuple[Callable[..., None], dict[str, Any], dict[str, Any], type, str]] = {
    "rank": (_plan, {"rank": 2}, {}, InvalidArgument, "rank is 2 and size 2; accepted: 0 <= rank"),
    "no rank": (_encode, {"rank": -1}, {}, InvalidArgument, "rank is -1"),
    "size": (_decode, {"size": 0}, {}, InvalidArgument, "size 0"),
    "struct_size": (_plan, {"struct_size": 8}, {}, InvalidArgument, "cgx_carried_t.struct_size"),
    "no call": (_plan, {"call": None}, {}, InvalidArgument, "cgx_collective_t is a null pointer"),
    "call": (_plan, {}, {"struct_size": 4}, InvalidArgument, "cgx_collective_t.struct_size is 4"),
    "verb": (_plan, {}, {"verb": 1}, InvalidArgument, "give CGX_ALLREDUCE"),
    "ring": (_plan, {}, {"algorithm": 3}, InvalidArgument, "give auto, one_shot or sra"),
    "hierarchical": (_plan, {}, {"algorithm": 4}, InvalidArgument, "algorithm is hierarchical"),
    "dtype": (_encode, {}, {"dtype": 7}, InvalidArgument, "dtype is 7"),
    "rounding": (_plan, {}, {"rounding": 4}, InvalidArgument, "rounding is 4; it must be one of"),
    "op": (_encode, {}, {"op": 3}, Unsupported, "op max is not supported for compressed values"),
    "input": (_encode, {}, {"input": None}, InvalidArgument, "input is a null pointer"),
    "output": (_decode, {}, {"output": None}, InvalidArgument, "output is a null pointer"),
    "alone": (_decode, {"rank": 0, "size": 1}, {"input": None}, InvalidArgument, "input is a null"),
    "messages": (
        _nowhere("encode", None, 9000),
        {},
        {},
        InvalidArgument,
        "messages is a null pointer",
    ),
    "no length": (_nowhere("encode", 1, -1), {}, {}, InvalidArgument, "messages has -1 bytes"),
    "no room": (_nowhere("encode", 1, 257), {}, {}, InvalidArgument, "messages has room for 257"),
    "arrived": (
        _nowhere("reduce", None, 258, 1, 258),
        {},
        {},
        InvalidArgument,
        "arrived is a null",
    ),
    "short": (_nowhere("reduce", 1, 257, 1, 258), {}, {}, InvalidArgument, "reports 258"),
    "long": (_nowhere("reduce", 1, 259, 1, 258), {}, {}, InvalidArgument, "arrived has 259 bytes"),
    "message": (_reduce_to_null, {}, {}, InvalidArgument, "message is a null pointer"),
    "gathered": (_nowhere("decode", None, 4096), {}, {}, InvalidArgument, "gathered is a null"),
    "stride": (_nowhere("decode", 1, 514), {}, {}, InvalidArgument, "at least 258 bytes"),
    "odd": (_nowhere("decode", 1, 517), {}, {}, InvalidArgument, "2 messages of equal size"),
    "sizes": (_nowhere("plan", None, None, None), {}, {}, InvalidArgument, "is a null pointer"),
    "device": (_plan, {}, {"device": 2}, InvalidArgument, "device is 2; accepted: a cgx_device_t"),
    "no GPU codec": (
        _plan,
        {},
        {"device": 1, "compressor": 8, "density": 10**7, "rounding": 3},
        Unsupported,
        "compressor='randk' is not supported on GPUs if the caller sends the messages",
    ),
    "one_shot": (
        _nowhere("reduce", 1, 1, 1, 1),
        {},
        {"algorithm": 1},
        InvalidArgument,
        "cgx_carried_decode sums",
    ),
}


@pytest.mark.skipif(bool(library.describe()["cuda"]["devices"]), reason="there is a GPU")
def test_without_gpu() -> None:
    x = np.zeros(1000, np.float32)
    call = native_call(Case(1000, 4, 500, algorithm="sra"), 1)
    call.input, call.device = x.ctypes.data, tables.CUDA
    built = library.describe()["cuda"]["built"]
    kind, text = (SystemFailure, "looking for GPUs") if built else (Unsupported, "rebuild it")
    with pytest.raises(kind, match=text):
        _encode(structs.Carried(rank=1, size=2, call=ctypes.pointer(call)))


@pytest.mark.parametrize("name", BAD_CALLS)
def test_rejects_invalid_arguments(name: str) -> None:
    step, of_carried, of_call, kind, text = BAD_CALLS[name]
    x = np.zeros(1000, np.float32)
    call = native_call(Case(1000, 4, 500, algorithm="sra"), 1)
    call.input = call.output = x.ctypes.data
    for field, value in of_call.items():
        setattr(call.config if hasattr(call.config, field) else call, field, value)
    carried = structs.Carried(rank=1, size=2, call=ctypes.pointer(call))
    for field, value in of_carried.items():
        setattr(carried, field, POINTER(structs.Collective)() if value is None else value)
    with pytest.raises(kind) as caught:
        step(carried)
    assert isinstance(caught.value, CgxError)
    assert text in str(caught.value)


@pytest.mark.parametrize("algorithm", ["sra", "one_shot"])
def test_mismatched_seeds_of_indices(algorithm: Algorithm) -> None:
    """Check that every rank reports both seeds, in the step that reads the others' messages."""
    case = Case(1000, algorithm=algorithm, compressor="randk")
    ranks = [Rank(case, rank, 3) for rank in range(3)]
    ranks[2].call.seed += 1
    sent = [rank.encode() for rank in ranks]
    for rank in ranks:
        other = 0 if rank.rank == 2 else 2
        read, place = (rank.reduce, rank.rank) if algorithm == "sra" else (rank.decode, 0)
        arrived = [row[place] for row in sent]
        with pytest.raises(MismatchError) as caught:
            read(arrived)
        said = str(caught.value)
        assert f"ranks {rank.rank} and {other} disagree: the seed of the random indices" in said
        assert "against" in said


def test_rejects_null_struct() -> None:
    with pytest.raises(InvalidArgument, match="cgx_carried_t is a null pointer"):
        _plan(None)
