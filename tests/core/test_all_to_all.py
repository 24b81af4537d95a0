"""all_to_all: blocks of rows, invalid and contradictory sizes, deadlines, the C API, statistics.

core/test_collectives.py compares results with the oracle, on all transports.
"""

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_int32, c_int64, c_void_p
from typing import Any

import numpy as np
import pytest
import reference
from support import launch
from support.collective_cases import DTYPES

from cgx_ops import (
    Communicator,
    Config,
    DeadlineExceeded,
    InvalidArgument,
    MismatchError,
    PeerFailed,
    Unsupported,
)
from cgx_ops._core import library, structs, tables
from cgx_ops._core.call import Call, build

EXACT = Config(bits=32)
ROWS = np.arange(12, dtype=np.float32).reshape(6, 2)


def sends(rank: int, peer: int) -> int:
    """Return the rows of a rank's block for a peer, of three ranks."""
    return (2 * rank + peer) % 4


def sizes(rank: int) -> dict[str, Any]:
    """Return a rank's arguments for these blocks."""
    return {
        "input_split_sizes": [sends(rank, peer) for peer in range(3)],
        "output_split_sizes": [sends(peer, rank) for peer in range(3)],
    }


# ---- 1. rows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0,)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_rows(shape: tuple[int, ...], dtype: str) -> None:
    def rows(rank: int) -> np.ndarray:
        whole = (sum(sizes(rank)["input_split_sizes"]), *shape)
        values = np.arange(np.prod(whole)) % 50 + 100 * rank
        return values.reshape(whole).astype(DTYPES[dtype])

    def run(rank: int, comm: Communicator) -> None:
        expected = []
        for peer in range(3):
            begin = sum(sends(peer, other) for other in range(rank))
            expected.append(rows(peer)[begin : begin + sends(peer, rank)])
        result = comm.all_to_all(rows(rank), EXACT, **sizes(rank))
        assert result.tobytes() == np.concatenate(expected).tobytes()
        assert result.shape == np.concatenate(expected).shape
        out = np.empty_like(result)
        assert comm.all_to_all(rows(rank), EXACT, out=out, **sizes(rank)) is out
        assert out.tobytes() == result.tobytes()

    launch.threads(3, run)


def test_equal_blocks() -> None:
    """Check that sizes that are not given are equal, also on one side only."""

    def run(rank: int, comm: Communicator) -> None:
        x = ROWS + 100 * rank
        expected = np.concatenate([(ROWS + 100 * r)[2 * rank : 2 * rank + 2] for r in range(3)])
        explicit = [2, 2, 2]
        out = np.empty_like(x)
        forms: list[dict[str, Any]] = [
            {},
            {"input_split_sizes": explicit},
            {"output_split_sizes": np.array(explicit)},
            {"out": out},
        ]
        for given in forms:
            assert (comm.all_to_all(x, EXACT, **given) == expected).all()
        # Rows of `out` are divided, whatever the input has.
        only: dict[str, Any] = {"input_split_sizes": [3, 3, 3] if rank == 0 else [0, 0, 0]}
        x = np.arange(9 if rank == 0 else 0, dtype=np.float32)
        with pytest.raises(MismatchError):
            comm.all_to_all(x, EXACT, out=np.empty(3, np.float32), **only)

    launch.threads(3, run)


def test_input_that_is_not_contiguous() -> None:
    def run(rank: int, comm: Communicator) -> None:
        x = np.arange(12, dtype=np.float32).reshape(2, 6).T
        assert (comm.all_to_all(x, EXACT) == np.tile(x[3 * rank : 3 * rank + 3], (2, 1))).all()

    launch.threads(2, run)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("config", [Config(bits=1), Config(compressor="sign"), Config(bits=32)])
def test_own_block_keeps_its_bits(ranks: int, config: Config) -> None:
    """Check values that no compressor keeps: NaN with payloads, -0, denormals."""
    bits = np.resize(np.array([0x7FC12345, 0xFFC00001, 0x80000000, 1, 0x3F800001], np.uint32), 999)

    def run(rank: int, comm: Communicator) -> None:
        x = np.tile(bits, ranks).view(np.float32)
        own = comm.all_to_all(x, config).view(np.uint32)[999 * rank : 999 * (rank + 1)]
        assert (own == bits).all()

    launch.threads(ranks, run)


def test_calls_in_any_order_and_repeated() -> None:
    """Check named calls that ranks start in different orders, on several threads."""

    def run(rank: int, comm: Communicator) -> list[bytes]:
        def call(name: str) -> bytes:
            x = np.full((9, 1000), rank + ord(name), np.float32)
            return comm.all_to_all(x, bits=4, name=name).tobytes()

        names = list("abcdefgh")
        with ThreadPoolExecutor(len(names)) as pool:
            results = list(pool.map(call, names[::-1] if rank == 1 else names))
        return sorted(results)

    expected = sorted(
        np.repeat(np.array([ord(name) + rank for rank in range(3)], np.float32), 3000).tobytes()
        for name in "abcdefgh"
    )
    assert launch.threads(3, run) == [expected] * 3


# ---- 2. invalid sizes ----------------------------------------------------------------------------

INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "negative": ({"input_split_sizes": [7, -1, 0]}, r"input_split_sizes\[1\] is -1"),
    "too few": ({"input_split_sizes": [3, 3]}, "has 2 sizes; it must have one for each of 3"),
    "too many": ({"output_split_sizes": [2, 2, 2, 0]}, "output_split_sizes has 4 sizes"),
    "sum": ({"input_split_sizes": [2, 2, 1]}, "add up to 5, but the array has 6 rows"),
    "float": ({"output_split_sizes": [2.0, 2, 2]}, r"output_split_sizes\[0\] is 2.0"),
    "bool": ({"output_split_sizes": [True, 2, 2]}, r"output_split_sizes\[0\] is True"),
    "number": ({"output_split_sizes": 2}, "output_split_sizes is 2; it must be a list"),
    "huge": ({"output_split_sizes": [2**62, 2, 2]}, r"output_split_sizes\[0\] is 46116860"),
    "rows": ({"array": ROWS[:5]}, "3 ranks do not divide 5 rows: pass input_split_sizes"),
    "scalar": ({"array": np.float32(1)}, "all_to_all of a scalar"),
    "shape of out": ({"out": np.empty(6, np.float32)}, "out is float32"),
}


@pytest.mark.parametrize("what", INVALID)
@pytest.mark.parametrize("bad_ranks", [(2,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("compressor", ["uniform", "randk"])
def test_invalid_sizes(what: str, bad_ranks: tuple[int, ...], compressor: Any) -> None:
    """Check that the ranks with valid arguments do not wait, and that later calls work."""
    bad, text = INVALID[what]
    arguments: dict[str, Any] = {"array": ROWS} | bad
    config = Config(compressor=compressor, density=1.0 if compressor == "randk" else None)

    def run(rank: int, comm: Communicator) -> None:
        for name in ("", "moe"):
            if rank in bad_ranks:
                with pytest.raises(InvalidArgument, match=text):
                    comm.all_to_all(**arguments, config=config, name=name)
            else:
                begin = time.monotonic()
                with pytest.raises(PeerFailed, match=f"rank 2 takes no part.*{text}"):
                    comm.all_to_all(ROWS, config, name=name)
                assert time.monotonic() - begin < 10
            assert comm.all_to_all(ROWS, config, name=name).shape == (6, 2)
            # Random indices come from one seed, so all ranks count the failed call.
            x = np.ones(300, np.float32)
            assert (comm.all_to_all(x, config, name=name) == 1).all()

    launch.threads(3, run)


@pytest.mark.parametrize("out", [ROWS, ROWS[:3]])
def test_out_must_not_overlap(out: np.ndarray) -> None:
    comm = Communicator.local(1)[0]
    with pytest.raises(InvalidArgument, match="out overlaps the input of all_to_all"):
        comm.all_to_all(ROWS, out=out, output_split_sizes=[len(out)])
    with pytest.raises(Unsupported, match="int64"):
        comm.all_to_all(np.arange(3))


# ---- 3. ranks that differ ------------------------------------------------------------------------


def failing(change: dict[str, Any]) -> str:
    """Return the text that all ranks raise if the last has other arguments."""

    def run(rank: int, comm: Communicator) -> str:
        arguments: dict[str, Any] = {"array": ROWS} | (change if rank == 2 else {})
        with pytest.raises(MismatchError) as caught:
            comm.all_to_all(**arguments)
        assert comm.all_to_all(ROWS).shape == ROWS.shape
        return str(caught.value)

    errors = launch.threads(3, run)
    assert len(set(errors)) == 1
    return errors[0]


DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "input": (
        {"input_split_sizes": [1, 3, 2]},
        "rank 2 sends 2 elements to rank 0, which expects 4; ",
    ),
    "output": (
        {"output_split_sizes": [2, 0, 2]},
        "rank 1 sends 4 elements to rank 2, which expects 0; ",
    ),
    "own": ({"output_split_sizes": [2, 2, 5]}, "rank 2 sends 4 elements to rank 2, which expects"),
    "columns": ({"array": np.ones((6, 3), np.float32)}, "elements of a block or row 2 against 3"),
    "shape of equal blocks": (
        {"array": np.ones((3, 4), np.float32)},
        "elements of a block or row 2 against 4",
    ),
    "bits": ({"config": Config(bits=8)}, "ranks 0 and 2 disagree.*bits 4 against 8"),
    "dtype": ({"array": ROWS.astype(np.float16)}, "dtype float32 against float16"),
    "compressor": ({"config": Config(compressor="topk")}, "compressor uniform against topk"),
    "bucket_size": ({"config": Config(bucket_size=7)}, "bucket_size 512 against 7"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_mismatch_is_one_error_on_every_rank(what: str) -> None:
    change, text = DIFFERENT[what]
    error = failing(change)
    assert re.search(text, error), error


def test_other_verbs_do_not_match() -> None:
    def run(rank: int, comm: Communicator) -> None:
        call: Callable[..., Any] = comm.all_to_all if rank else comm.reduce_scatter
        with pytest.raises(MismatchError, match="verb reduce_scatter against all_to_all"):
            call(ROWS)

    launch.threads(3, run)


def test_seeds_of_random_indices_must_match() -> None:
    """Check it for blocks that have no random indices on one rank, because they are small."""

    def run(rank: int, comm: Communicator) -> None:
        config = Config(compressor="randk")
        sent = 100 if rank == 0 else 0
        arguments: dict[str, Any] = {
            "input_split_sizes": [0, sent],
            "output_split_sizes": [100 - sent, 0],
        }
        x = np.ones(sent, np.float32)
        for _ in range(2):
            assert len(comm.all_to_all(x, config, **arguments)) == 100 - sent
        with pytest.raises(MismatchError, match="seed of the random indices"):
            comm.all_to_all(x, config, seed=rank, **arguments)

    launch.threads(2, run)


def test_late_rank() -> None:
    def run(rank: int, comm: Communicator) -> None:
        if rank == 2:
            time.sleep(1.5)
            return
        with pytest.raises((DeadlineExceeded, PeerFailed), match="rank 2 has not started"):
            comm.all_to_all(ROWS, timeout=0.5)
        assert comm.closed

    launch.threads(3, run)


# ---- 4. the C API --------------------------------------------------------------------------------


def call_of(
    comm: Communicator, x: np.ndarray, out: np.ndarray, **fields: Any
) -> structs.Collective:
    """Return a call of a single rank, with changed fields."""
    call = build(
        "all_to_all", "sum", EXACT, [(0, 0, EXACT)],
        comm=comm.id, input=x.ctypes.data, output=out.ctypes.data,
        input_splits=(c_int64 * 1)(x.size), output_splits=(c_int64 * 1)(out.size),
    )  # fmt: skip
    for field, value in fields.items():
        setattr(call, field, value)
    return call


BAD_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "no output_splits": ({"output_splits": None}, "input_splits are given alone"),
    "no input_splits": ({"input_splits": None}, "output_splits are given alone"),
    "row": (
        {"block_numel": 5},
        r"input_splits\[0\] is 12, which is not a multiple of a row of 5 elements",
    ),
    "no segment": ({"num_segments": 0}, "with 0 segments"),
    "negative": ({"input_splits": (c_int64 * 1)(-1)}, r"input_splits\[0\] is -1"),
    "huge": ({"output_splits": (c_int64 * 1)(2**60)}, r"output_splits\[0\] is 1152921504606846976"),
    "own": ({"output_splits": (c_int64 * 1)(5)}, r"input_splits\[0\] is 12 and output_splits"),
    "another verb": (
        {"verb": tables.VERBS["reduce_scatter"]["id"]},
        "splits are given for reduce_scatter",
    ),
    "no input": ({"input": None}, "input is a null pointer; it holds 12"),
    "no output": ({"output": None}, "output is a null pointer; it holds 12"),
    "residuals": ({"residuals": (c_void_p * 1)(0)}, "residuals are given for all_to_all"),
    "lists": ({"inputs": (c_void_p * 1)(0)}, "inputs are given for all_to_all"),
    "other splits": (
        {"peer": (c_int32 * 1)(1)},
        r"input_splits\[0\] is 12, but the peer is rank 1",
    ),
    "peer": ({"peer": (c_int32 * 1)(0)}, "peer is 0; accepted: a rank from 0 to 0 other than this"),
    "peer without splits": (
        {"peer": (c_int32 * 1)(0), "input_splits": None, "output_splits": None},
        "a peer is given without input_splits and output_splits",
    ),
}


@pytest.mark.parametrize("what", BAD_CALLS)
def test_core_rejects(what: str) -> None:
    comm = Communicator.local(1)[0]
    x, out = np.ones(12, np.float32), np.zeros(12, np.float32)
    library.call("cgx_run", byref(call_of(comm, x, out)))
    assert (out == x).all()
    fields, text = BAD_CALLS[what]
    with pytest.raises(InvalidArgument, match=text):
        library.call("cgx_run", byref(call_of(comm, x, out, **fields)))


def test_segments_of_equal_blocks() -> None:
    """Check blocks of several segments against the oracle, each segment alone."""
    config = Config(bits=4, bucket_size=64)
    places = [(0, 100, config), (100, 700, config.with_own(bits=8)), (810, 10, config)]
    seeds = [[11, 12, 13], [21, 22, 23]]  # of each rank

    def values(rank: int) -> np.ndarray:
        return np.random.default_rng(rank).standard_normal(2 * 820).astype(np.float32)

    def run(rank: int, comm: Communicator) -> np.ndarray:
        x, out = values(rank), np.zeros(2 * 820, np.float32)
        call = build(
            "all_to_all", "sum", config, places, comm=comm.id, block_numel=820,
            input=x.ctypes.data, output=out.ctypes.data, seeds=(c_int64 * 3)(*seeds[rank]),
        )  # fmt: skip
        library.call("cgx_run", byref(call))
        return out

    expected = [np.zeros(2 * 820, np.float32) for _ in range(2)]
    for number, (offset, numel, own) in enumerate(places):
        blocks = [
            np.concatenate([values(rank)[at : at + numel] for at in (offset, 820 + offset)])
            for rank in range(2)
        ]
        results = reference.all_to_all(
            blocks,
            [[numel, numel]] * 2,
            reference.Segment(0, numel, own.bits, own.bucket_size),
            rounding="stochastic",
            seeds=[of_rank[number] for of_rank in seeds],
        )
        for result, to in zip(results, expected, strict=True):
            to[offset : offset + numel] = result[:numel]
            to[820 + offset : 820 + offset + numel] = result[numel:]
    for found, wanted in zip(launch.threads(2, run), expected, strict=True):
        assert found.tobytes() == wanted.tobytes()


# ---- 5. bytes ------------------------------------------------------------------------------------


def test_bytes_and_statistics() -> None:
    header = 208 + 2 * 3 * 8  # of docs/reference/control_messages.md, with the sizes
    numels = [512 * 40, 512 * 70, 10]

    def encoded(numel: int) -> int:
        return 4 * numel if numel < 16 else numel // 512 * (8 + 256)

    def run(rank: int, comm: Communicator) -> None:
        x = np.ones(sum(numels), np.float32)
        received = np.empty(3 * numels[rank], np.float32)
        before = comm.stats()
        expected = [numels[rank]] * 3
        comm.all_to_all(
            x, bits=4, out=received, input_split_sizes=numels, output_split_sizes=expected
        )
        after = comm.stats()
        others = [numel for peer, numel in enumerate(numels) if peer != rank]
        payload = sum(map(encoded, others))
        assert after.bytes_sent - before.bytes_sent == payload + 2 * header
        assert after.bytes_in - before.bytes_in == x.nbytes
        assert after.bytes_plain - before.bytes_plain == 4 * sum(others)
        call = Call("all_to_all", "sum", Config(bits=4), "", None, 0, None).collective(
            comm.id, tables.DTYPES["float32"], x.ctypes.data, received.ctypes.data, 0
        )
        call.input_splits = (c_int64 * 3)(*numels)
        call.output_splits = (c_int64 * 3)(*expected)
        plan = structs.Plan()
        library.call("cgx_plan", byref(call), byref(plan))
        assert (plan.payload_bytes, plan.exact_bytes) == (payload, 4 * sum(others))

    launch.threads(3, run)


def test_blocks_do_not_share_noise() -> None:
    """Check that blocks for two ranks, of equal values, are rounded differently."""
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)

    def run(rank: int, comm: Communicator) -> bytes:
        config = Config(bits=1, rounding="stochastic")
        return comm.all_to_all(np.tile(x, 3), config)[:1000].tobytes()

    _, second, third = launch.threads(3, run)  # from rank 0
    assert second != third
