"""The numpy API of communicators: arguments, results, lifetimes. Values: test_collectives."""

import gc
import re
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from support.launch import threads

import cgx_ops
from cgx_ops import (
    Closed,
    Communicator,
    Config,
    DeadlineExceeded,
    InvalidArgument,
    MismatchError,
    NotFound,
    Rules,
    Segment,
    Unsupported,
)
from cgx_ops._core.call import call_seed
from cgx_ops._core.exchange import exchange

EXACT = Config(bits=32)


def _world(array: Any, **keywords: Any) -> Any:
    return cgx_ops.init().allreduce(array, config=EXACT, **keywords)


def test_one_rank_is_the_identity() -> None:
    values = np.linspace(-1, 1, 1000, dtype=np.float32)
    assert (cgx_ops.rank(), cgx_ops.size()) == (0, 1)
    np.testing.assert_array_equal(cgx_ops.allreduce(values, config=Config(bits=1)), values)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 0, 2), (3, 5)])
def test_result_has_the_shape_and_dtype_of_the_input(dtype: str, shape: tuple[int, ...]) -> None:
    pytest.importorskip("ml_dtypes")
    values = np.ones(shape, dtype)

    def reduce(_rank: int, comm: Communicator) -> np.ndarray:
        return comm.allreduce(values, config=EXACT)

    for result in threads(2, reduce):
        assert (result.shape, result.dtype) == (values.shape, values.dtype)
        assert (result.astype(np.float32) == 2).all()


def test_views_are_reduced_by_their_elements() -> None:
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    for view in (base.T, base[::2], base[:, ::-1], np.broadcast_to(base[0], (3, 6))):
        np.testing.assert_array_equal(_world(view), view)


def test_out_receives_the_result() -> None:
    def reduce(rank: int, comm: Communicator) -> None:
        values = np.full(100, rank + 1, np.float32)
        out = np.empty_like(values)
        assert comm.allreduce(values, config=EXACT, out=out) is out
        assert (out == 3).all()
        assert (values == rank + 1).all()
        assert comm.allreduce(values, config=EXACT, out=values) is values
        assert (values == 3).all()

    threads(2, reduce)


@pytest.mark.parametrize(
    "values",
    [
        np.arange(4),
        np.ones(4),
        np.ones(4, np.complex64),
        np.ones(4, bool),
        np.ones(4, ">f4"),
        ["a"],
        [1.0, 2.0],
    ],
    ids=lambda values: str(np.asarray(values).dtype),
)
def test_other_dtypes_raise_with_the_remedy(values: Any) -> None:
    with pytest.raises(Unsupported, match=r"only float32.*astype"):
        _world(values)
    with pytest.raises(TypeError):
        cgx_ops.quantize(values)


_BASE = np.zeros(8, np.float32)
_READ_ONLY = np.zeros(4, np.float32)
_READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: _world(_BASE, out=np.zeros(7, np.float32)), r"out is float32\[7\]; it must be"),
        (lambda: _world(_BASE, out=np.zeros(8, np.float16)), r"out is float16\[8\]"),
        (lambda: _world(_BASE[:4], out=_BASE[::2]), "must be C-contiguous"),
        (lambda: _world(_BASE[:4], out=_READ_ONLY), "writeable"),
        (lambda: _world(_BASE[:4], out=[0.0] * 4), "out is a list"),
        (lambda: _world(_BASE[:4], out=_BASE[2:6]), "out overlaps"),
        (lambda: _world(_BASE, op="xor"), "op is 'xor'; it must be one of sum, avg"),
        (lambda: _world(_BASE, timeout=0), "timeout is 0"),
        (lambda: _world(_BASE, name="a\0b"), "NUL"),
        (lambda: _world(_BASE, seed=2**63), "seed is 9223372036854775808"),
        (lambda: _world(_BASE, segments=[Segment(0, 9)]), "segment 0"),
        (lambda: _world(_BASE[:0], segments=[Segment(0, 0), Segment(0, 1)]), "segment 1.* of 0"),
        (lambda: _world(_BASE, segments=[Segment(0, 5), Segment(4, 2)]), "overlap"),
        (lambda: Segment(0, 5, cast(Any, 4)), "config is 4; it must be a"),
        (lambda: _world(_BASE, bits=9), "bits is 9"),
        (lambda: Segment(-1, 2), "offset is -1"),
        (lambda: cgx_ops.init().reduce_scatter(np.float32(1), config=EXACT), "first axis"),
        (lambda: _world(_BASE, name=5), "name is 5; it must be a string"),
        (lambda: cgx_ops.allreduce(_BASE, "sum", cast(Any, 4)), "config is 4; it must be a"),
        (lambda: cgx_ops.allreduce(_BASE, config=cast(Any, Rules())), r"is Rules.*take rules="),
        (lambda: _world(_BASE, bits="4"), "bits is '4'; it must be an integer"),
        (lambda: _world(_BASE, rounding="up"), "rounding is 'up'; it must be one of"),
        (lambda: Communicator.local(0), "size is 0"),
        (lambda: Communicator.local(2, timeout=-1), "timeout is -1"),
        (lambda: Communicator.create(0, 1, lambda mine: [mine], "x", timeout=0), "timeout is 0"),
        (lambda: Communicator.create(-1, 2, lambda mine: [mine], "x"), "rank is -1"),
        (lambda: Communicator.create(2, 2, lambda mine: [mine], "x"), "rank is 2"),
        (lambda: Communicator.create(0, 0, lambda mine: [mine], "x"), "size is 0"),
        (lambda: Communicator.create(2**32, 1, lambda mine: [mine], "x"), "rank is 4294967296"),
        (lambda: Communicator.create(0, 2**32 + 1, lambda mine: [mine], "x"), "size is 4294967297"),
        (lambda: Communicator.create(0, 1, lambda mine: [mine], "x", noise_rank=-1), "noise_rank"),
        (lambda: cgx_ops.init().split(2**31, name="x"), "color is 2147483648; it must be an int"),
        (lambda: cgx_ops.init().split(cast(Any, 0.5), name="x"), "color is 0.5; it must be an int"),
        (lambda: cgx_ops.init().split(0, -(2**31) - 1, name="x"), "key is -2147483649"),
        (lambda: cgx_ops.init().group([0, 2**32], name="x"), r"ranks\[1\] is 4294967296"),
        (
            lambda: cgx_ops.dequantize(b"123", 5),
            "the data has 3 bytes; 5 values in these settings have 11: pass",
        ),
        (lambda: cgx_ops.quantize(_BASE, bits=0), "bits is 0"),
        (lambda: cgx_ops.quantize(_BASE, rank=-1), "rank is -1"),
        (lambda: cgx_ops.dequantize(b"", -1), "numel is -1"),
    ],
)
def test_wrong_arguments_raise(call: Callable[[], object], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        call()
    np.testing.assert_array_equal(_world(_BASE), _BASE)  # the communicator still works


def test_reduce_scatter_and_all_gather_work_on_the_first_axis() -> None:
    def run(rank: int, comm: Communicator) -> None:
        values = np.arange(24, dtype=np.float32).reshape(6, 4)
        mine = comm.reduce_scatter(values, config=EXACT)
        np.testing.assert_array_equal(mine, 3 * values[2 * rank : 2 * rank + 2])
        np.testing.assert_array_equal(comm.all_gather(mine, EXACT), 3 * values)
        scalar = comm.all_gather(np.array(rank, np.float32), EXACT)
        np.testing.assert_array_equal(scalar, [0, 1, 2])

    threads(3, run)


def test_empty_segments() -> None:
    """An empty array has an address, and memory of other arrays follows it."""
    everything = np.arange(12, dtype=np.float32)

    def run(_rank: int, comm: Communicator) -> None:
        nothing = everything[:0]
        assert comm.allreduce(nothing, segments=[Segment(0, 0)], out=nothing) is nothing
        for call in (comm.allreduce, comm.reduce_scatter, comm.all_gather):
            with pytest.raises(InvalidArgument, match="segment 0 ends at element 8"):
                call(nothing, segments=[Segment(0, 8)])

    threads(2, run)
    np.testing.assert_array_equal(everything, np.arange(12))


def test_segments_have_separate_bits() -> None:
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    segments = [
        Segment(0, 100, Config(bits=32)),
        Segment(500, 300, Config(bits=8, bucket_size=10)),
    ]

    def run(_rank: int, comm: Communicator) -> None:
        fresh = comm.allreduce(values, config=Config(), segments=segments)
        kept = comm.allreduce(values, config=Config(), segments=segments, out=values.copy())
        for result in (fresh, kept):
            np.testing.assert_array_equal(result[:100], 2 * values[:100])
            error = np.abs(result - 2 * values)[500:800]
            assert 0 < error.max() < 0.1
        assert (fresh[100:500] == 0).all()
        assert (fresh[800:] == 0).all()
        np.testing.assert_array_equal(kept[100:500], values[100:500])

    threads(2, run)


def test_noise_differs_between_calls_and_repeats_in_runs() -> None:
    values = np.random.default_rng(1).standard_normal(4096).astype(np.float32)

    def run(_rank: int, comm: Communicator) -> list[np.ndarray]:
        results = [comm.allreduce(values, config=Config()) for _ in range(3)]
        seed = call_seed(0, "", 0, comm.name)
        return [*results, comm.allreduce(values, config=Config(), seed=seed)]

    first, again = threads(2, run, name="noise")[0], threads(2, run, name="noise")[0]
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)
    assert (first[0] != first[1]).any()
    assert (first[1] != first[2]).any()
    np.testing.assert_array_equal(first[0], first[3])


@pytest.mark.parametrize("name", ["", "layer"])
@pytest.mark.parametrize("config", [Config(bits=2), Config(bits=2, rounding="nearest")])
def test_repeated_calls_give_the_same_results(config: Config, name: str) -> None:
    values = [np.random.default_rng(rank).standard_normal(1000, np.float32) for rank in range(2)]

    def repeated(rank: int, comm: Communicator) -> list[bytes]:
        out = np.empty(1000, np.float32)
        calls = (comm.allreduce(values[rank], config=config, out=out, name=name) for _ in range(4))
        return [call.tobytes() for call in calls]

    def first(rank: int, comm: Communicator) -> list[bytes]:
        calls = (comm.allreduce(values[rank], config=config, name=name) for _ in range(4))
        return [call.tobytes() for call in calls]

    found, expected = (threads(2, function, name="repeats") for function in (repeated, first))
    assert found == expected
    assert len(set(found[0])) == (4 if config.is_random else 1)


def test_repeated_calls_raise_the_same_errors() -> None:
    base, config = np.arange(8, dtype=np.float32), Config(bits=4)
    comm = cgx_ops.init()
    out = np.empty(4, np.float32)
    read_only = base[:4].copy()
    read_only.flags.writeable = False
    for _ in range(3):
        np.testing.assert_array_equal(comm.allreduce(base[:4], config=config, out=out), base[:4])
    with pytest.raises(InvalidArgument, match="out overlaps"):
        comm.allreduce(base[:4], config=config, out=base[2:6])
    with pytest.raises(InvalidArgument, match="out must be C-contiguous"):
        comm.allreduce(base[:4], config=config, out=base[::2])
    with pytest.raises(InvalidArgument, match="out must be C-contiguous and writeable"):
        comm.allreduce(base[:4], config=config, out=read_only)
    np.testing.assert_array_equal(comm.allreduce(read_only, config=config, out=out), read_only)
    np.testing.assert_array_equal(comm.allreduce(base[::2], config=config, out=out), base[::2])
    closed = Communicator.local(1)[0]
    closed.allreduce(base, config=config, out=base)
    closed.close()
    with pytest.raises(Closed):
        closed.allreduce(base, config=config, out=base)


def test_requests_may_be_awaited_twice_or_dropped() -> None:
    def run(_rank: int, comm: Communicator) -> None:
        values = np.ones(100_000, np.float32)
        request = comm.allreduce_async(values, config=EXACT)
        assert request.wait() is request.wait()
        assert request.done()
        for _ in range(5):
            comm.allreduce_async(np.ones(100_000, np.float32), config=EXACT)
            gc.collect()
        assert (comm.allreduce(values, config=EXACT) == 2).all()

    threads(2, run)


def test_missing_rank_raises_at_the_deadline() -> None:
    def run(rank: int, comm: Communicator) -> None:
        if rank == 0:
            values = np.ones(100, np.float32)
            with pytest.raises(DeadlineExceeded, match="rank 1 has not started it") as caught:
                comm.allreduce(values, config=EXACT, name="lonely", timeout=0.5)
            assert isinstance(caught.value, TimeoutError)
            assert comm.closed
            with pytest.raises(Closed):
                comm.allreduce(values, config=EXACT)

    threads(2, run)


def test_registry_and_close() -> None:
    with Communicator.local(1, "mine")[0] as comm:
        assert Communicator.find("mine/0").id == comm.id
        assert not comm.closed
        assert comm.transport in ("self", "thread")
    assert comm.closed
    comm.close()
    with pytest.raises(NotFound, match="mine/0"):
        Communicator.find("mine/0")
    Communicator.local(1, "twice")
    with pytest.raises(InvalidArgument, match="exists"):
        Communicator.local(1, "twice")


@pytest.mark.parametrize("text", ["0", "-64", "1048577", "64MB"])
def test_invalid_fusion_buffer_size(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGX_FUSION_BUFFER_SIZE_MB", text)
    says = f'CGX_FUSION_BUFFER_SIZE_MB="{text}": give an integer from 1 to 1048576'
    with pytest.raises(InvalidArgument, match=says):
        Communicator.local(2)


def test_bootstrap_by_callback_needs_no_mpi() -> None:
    alone = Communicator.create(0, 1, lambda blob: [blob], "alone")
    assert (alone.name, alone.rank, alone.size) == ("alone", 0, 1)
    alone.close()


@pytest.mark.parametrize(
    ("allgather", "error"),
    [
        (lambda blob: {}["no such key"], KeyError),
        (lambda blob: [blob, blob[1:]], InvalidArgument),
        (lambda blob: [blob], InvalidArgument),
    ],
)
def test_failures_of_the_bootstrap_are_raised(
    allgather: Callable[[bytes], list[bytes]], error: type[Exception]
) -> None:
    with pytest.raises(error):
        Communicator.create(0, 2, allgather, "broken", timeout=5)
    with pytest.raises(NotFound):
        Communicator.find("broken")


def test_a_rank_of_another_version_is_named() -> None:
    """The first blob of another version has the same size and begins with its version."""

    def allgather(blob: bytes) -> list[bytes]:
        assert len(blob) == 1024
        return [blob, b"99.1\0".ljust(len(blob), b"?")]

    says = f"this rank runs cgx {cgx_ops.__version__}, rank 1 cgx 99.1: install the same version"
    with pytest.raises(MismatchError, match=re.escape(says)):
        Communicator.create(0, 2, allgather, "versions", timeout=5)


@pytest.mark.parametrize("lengths", [(0, 0), (508, 1), (509, 0), (3, 70_000)])
def test_ranks_exchange_bytes_of_any_lengths(lengths: tuple[int, int]) -> None:
    said = [(bytes(range(256)) * 300)[:length] for length in lengths]
    found = threads(2, lambda rank, ranks: exchange(said[rank], "bytes", ranks), timeout=20)
    assert found == [said, said]
