"""Settings of single segments: address, seed, residual; and calls that a rank rejects.

1. calls of the C interface, by threads as ranks
2. results and residuals, against the oracle to the bit
3. bad lists
4. rejected calls
"""

import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref, c_int64, c_void_p
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import reference
from support import launch

from cgx_ops import CgxError, Communicator, Config, InvalidArgument, MismatchError, Segment
from cgx_ops._core import library, structs, tables

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
NUMELS = (5000, 17, 0, 512, 3)
BITS = (4, 2, 8, 32, 4)

# ---- 1. calls ------------------------------------------------------------------------------------


SRA = Config(algorithm="sra", rounding="nearest").native


def pointers(arrays: Sequence[npt.NDArray[Any]]) -> Any:
    """Return the arrays' addresses; null for those without elements."""
    return (c_void_p * len(arrays))(*(a.ctypes.data if a.size else None for a in arrays))


def call_of(comm: Communicator, dtype: str, **fields: Any) -> structs.Collective:
    """Return an allreduce of NUMELS elements with these `fields`."""
    segments = (structs.Segment * len(NUMELS))(
        *(structs.Segment(0, n, 512, bits) for n, bits in zip(NUMELS, BITS, strict=True))
    )
    return structs.Collective(
        comm=comm.id, dtype=tables.DTYPES[dtype], segments=segments, num_segments=len(NUMELS),
        occurrence=-1, **fields,
    )  # fmt: skip


def inputs(rank: int, dtype: str, scale: float = 1) -> list[npt.NDArray[Any]]:
    """Return one array per segment, at unrelated addresses."""
    random = np.random.default_rng(rank)
    return [(random.standard_normal(n) * scale).astype(DTYPES[dtype]) for n in NUMELS]


def run(
    call: structs.Collective, xs: Any, ys: Any, seeds: Any = None, residuals: Any = None
) -> None:
    call.inputs, call.outputs = pointers(xs), pointers(ys)
    if seeds is not None:
        call.seeds = (c_int64 * len(seeds))(*seeds)
    if residuals is not None:
        call.residuals = pointers(residuals)
    library.call("cgx_run", byref(call))


# ---- 2. results and residuals --------------------------------------------------------------------


def old_residuals(rank: int, dtype: str) -> list[Any]:
    """Return a rank's residuals before the call, which differ from its inputs."""
    return inputs(100 + rank, dtype, scale=0.1)


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("algorithm", ["sra", "one_shot", "ring"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_segments_anywhere(size: int, dtype: str, algorithm: Any, op: Any) -> None:
    """Use lists of pointers, a seed per segment, a divisor and residuals; compare bit for bit."""
    divisor = 2 * size

    def rank_of(rank: int, comm: Communicator) -> tuple[Any, Any]:
        xs = inputs(rank, dtype)
        ys, residuals = [np.full_like(x, 7) for x in xs], old_residuals(rank, dtype)
        call = call_of(
            comm, dtype, op=tables.OPS[op], config=Config(algorithm=algorithm).native,
            divisor=divisor,
        )  # fmt: skip
        run(call, xs, ys, [100 * rank + i for i in range(len(xs))], residuals)
        return ys, residuals

    results = launch.threads(size, rank_of)
    for i, (numel, bits) in enumerate(zip(NUMELS, BITS, strict=True)):
        xs = [inputs(rank, dtype)[i] for rank in range(size)]
        lost = [old_residuals(rank, dtype)[i] for rank in range(size)]
        want = reference.allreduce(
            xs, [reference.Segment(0, numel, bits, 512)], op=op, algorithm=algorithm,
            rounding="stochastic", seeds=[100 * rank + i for rank in range(size)],
            divisor=divisor, residuals=lost,
        )  # fmt: skip
        for rank, (ys, residuals) in enumerate(results):
            assert ys[i].tobytes() == want.tobytes(), (i, rank)
            assert residuals[i].tobytes() == lost[rank].tobytes(), (i, rank)


@pytest.mark.parametrize("verb", tables.VERBS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_single_rank_divides_averages(dtype: str, verb: str) -> None:
    """The sum over one rank is its own values, but an average still has its divisor."""
    comm = Communicator.local(1)[0]
    x = inputs(0, dtype)[0]
    for divisor in (0, 1, 3):
        y = np.empty_like(x)
        segment = structs.Segment(0, x.size, 512, 4)
        call = structs.Collective(
            comm=comm.id, verb=tables.VERBS[verb]["id"], dtype=tables.DTYPES[dtype],
            op=tables.OPS["avg"], segments=(structs.Segment * 1)(segment), num_segments=1,
            occurrence=-1, divisor=divisor,
        )  # fmt: skip
        call.input, call.output = x.ctypes.data, y.ctypes.data
        library.call("cgx_run", byref(call))
        by = np.float32((tables.VERBS[verb]["reduces"] and divisor) or 1)
        assert y.tobytes() == (x.astype(np.float32) / by).astype(x.dtype).tobytes(), divisor


@pytest.mark.parametrize("algorithm", ["sra", "one_shot", "ring"])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_conservation(op: Any, algorithm: Any) -> None:
    """Check that inputs plus old residuals equal results plus new ones, up to fp32 rounding."""
    size = 3

    def rank_of(rank: int, comm: Communicator) -> tuple[Any, Any]:
        xs = inputs(rank, "float32")
        ys, residuals = [np.empty_like(x) for x in xs], old_residuals(rank, "float32")
        config = Config(algorithm=algorithm, rounding="nearest").native
        call = call_of(comm, "float32", op=tables.OPS[op], config=config)
        run(call, xs, ys, residuals=residuals)
        return ys, residuals

    results = launch.threads(size, rank_of)
    for i in range(len(NUMELS)):
        given = [of(rank, "float32")[i] for of in (inputs, old_residuals) for rank in range(size)]
        exact = np.sum(given, axis=0, dtype=np.float64)
        lost = sum(residuals[i].astype(np.float64) for _, residuals in results)
        total = results[0][0][i].astype(np.float64) * (size if op == "avg" else 1)
        # Each value passes at most 2 (size + 3) fp32 operations (sums, a quotient, differences, a
        # product), each off by 2^-24 of at most `largest`.
        largest = sum(np.abs(values).max(initial=0) for values in given)
        bound = 2 * (size + 3) * 2.0**-24 * 2 * largest
        assert np.abs(exact - total - lost).max(initial=0) <= bound


def test_nan_does_not_enter_residuals() -> None:
    """Check that a NaN makes its bucket's result NaN, but not the residual."""

    def rank_of(rank: int, comm: Communicator) -> tuple[Any, Any]:
        xs = inputs(rank, "float32")
        if rank == 1:
            xs[0][700] = np.nan
        ys, residuals = [np.empty_like(x) for x in xs], [np.zeros_like(x) for x in xs]
        call = call_of(comm, "float32", config=SRA)
        run(call, xs, ys, residuals=residuals)
        return ys, residuals

    for ys, residuals in launch.threads(2, rank_of):
        assert np.isnan(ys[0][512:1024]).all()
        assert np.isfinite(ys[0][:512]).all()
        assert all(np.isfinite(residual).all() for residual in residuals)


def test_lists_match_a_single_buffer() -> None:
    """Use a list on one rank and a single buffer on another: addresses need not match."""

    def rank_of(rank: int, comm: Communicator) -> npt.NDArray[Any]:
        xs = inputs(rank, "float32")
        call = call_of(comm, "float32", config=SRA)
        if rank == 0:
            ys = [np.empty_like(x) for x in xs]
            run(call, xs, ys)
            return np.concatenate(ys)
        flat = np.concatenate(xs)
        at = 0
        for i, numel in enumerate(NUMELS):
            call.segments[i].offset = at
            at += numel
        call.input = call.output = flat.ctypes.data
        library.call("cgx_run", byref(call))
        return flat

    first, second = launch.threads(2, rank_of)
    assert first.tobytes() == second.tobytes()


# ---- 3. bad lists --------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["inputs", "outputs"])
def test_a_missing_buffer(which: str) -> None:
    comm = Communicator.local(2)[0]
    xs = inputs(0, "float32")
    lists = {"xs": xs, "ys": list(xs)}
    key = {"inputs": "xs", "outputs": "ys"}[which]
    lists[key] = [x if i else np.empty(0, np.float32) for i, x in enumerate(lists[key])]
    with pytest.raises(InvalidArgument, match=rf"{which}\[0\] is a null pointer; it holds 5000"):
        run(call_of(comm, "float32"), **lists)


def test_lists_are_for_allreduce_and_residuals_for_sums() -> None:
    comm = Communicator.local(2)[0]
    xs = inputs(0, "float32")
    with pytest.raises(InvalidArgument, match="are in one buffer"):
        run(call_of(comm, "float32", verb=tables.VERBS["all_gather"]["id"]), xs, xs)
    exact = call_of(comm, "float32", op=tables.OPS["max"])
    for segment in exact.segments[: len(NUMELS)]:
        segment.bits = 32
    with pytest.raises(InvalidArgument, match="only sum and avg"):
        run(exact, xs, xs, residuals=xs)


def test_a_divisor_must_be_the_same() -> None:
    def rank_of(rank: int, comm: Communicator) -> None:
        xs = inputs(rank, "float32")
        call = call_of(comm, "float32", op=tables.OPS["avg"], divisor=4 + rank)
        with pytest.raises(MismatchError, match="divisor 4 against 5"):
            run(call, xs, xs)

    launch.threads(2, rank_of)
    comm = Communicator.local(2)[0]
    with pytest.raises(InvalidArgument, match="divisor is -1"):
        run(call_of(comm, "float32", divisor=-1), inputs(0, "float32"), inputs(0, "float32"))


@pytest.mark.parametrize("own", range(3))
@pytest.mark.parametrize(
    "other",
    [
        {"compressor": "qsgd"},
        {"gather_bits": 8},
        {"rounding": "nearest"},
        {"bits": 3},
        {"bucket_size": 64},
    ],
    ids=str,
)
def test_inherited_settings_of_segments_must_match(own: int, other: Any) -> None:
    """Also if some segments have another compressor."""

    def rank_of(rank: int, comm: Communicator) -> None:
        config = Config(**(other if rank else {}))
        segments = [Segment(1000 * i, 1000) for i in range(3)]
        segments[own] = replace(segments[own], config=config.with_own(compressor="onebit"))
        with pytest.raises(MismatchError):
            comm.allreduce(np.ones(3000, np.float32), config=config, segments=segments)

    launch.threads(2, rank_of)


def test_list_on_one_side_requires_a_buffer_on_the_other() -> None:
    comm = Communicator.local(2)[0]
    for side, missing in (("inputs", "output"), ("outputs", "input")):
        call = call_of(comm, "float32")
        setattr(call, side, pointers(inputs(0, "float32")))
        with pytest.raises(InvalidArgument, match=f"{missing} is a null pointer"):
            library.call("cgx_run", byref(call))


# ---- 4. rejected calls ---------------------------------------------------------------------------


def refuse(comm: Communicator, name: str, text: str) -> None:
    call = structs.Collective(comm=comm.id, name=name.encode(), occurrence=-1)
    library.call("cgx_refuse", byref(call), 1, text.encode())


@pytest.mark.parametrize("refusing", [(0,), (2,), (0, 1), (0, 1, 2)])
def test_rejected_call_fails_on_all_ranks(refusing: tuple[int, ...]) -> None:
    """Check that only the call fails: the communicator and the name remain usable."""

    def rank_of(rank: int, comm: Communicator) -> None:
        x = np.ones(1000, np.float32)
        for _ in range(3):
            if rank in refusing:
                refuse(comm, "step", "no devices")
            else:
                with pytest.raises(
                    CgxError, match=rf"rank {refusing[0]} takes no part.*no devices"
                ):
                    comm.allreduce(x, name="step")
            assert (comm.allreduce(x, name="step") == 3).all()
        assert (comm.allreduce(x) == 3).all()

    launch.threads(3, rank_of)


def test_long_errors_are_cut_between_characters() -> None:
    """Python's exceptions cannot contain a part of a character."""

    def rank_of(rank: int, comm: Communicator) -> None:
        for start in ("", "a"):
            if rank == 1:
                refuse(comm, "step", start + 600 * "é")
                continue
            with pytest.raises(CgxError, match=f"rank 1 takes no part.*{start}é+") as caught:
                comm.allreduce(np.ones(1000, np.float32), name="step")
            assert "\ufffd" not in str(caught.value)

    launch.threads(2, rank_of)


def test_rejection_requires_a_reason() -> None:
    comm = Communicator.local(2)[0]
    call = structs.Collective(comm=comm.id, name=b"x", occurrence=-1)
    for status, text, says in (
        (0, b"why", "status is 0"),
        (99, b"why", "status is 99"),
        (1, None, "needs a message"),
    ):
        with pytest.raises(InvalidArgument, match=says):
            library.call("cgx_refuse", byref(call), status, text)


def test_exact_sums() -> None:
    """Check that cgx_sum adds in order, in fp32."""
    values = [inputs(rank, "float16", 1000)[0] for rank in range(3)]
    total = np.empty(len(values[0]), np.float32)
    lists = pointers(values)
    functions: Callable[..., Any] = library.call
    functions("cgx_sum", tables.DTYPES["float16"], lists, 3, total.size, total.ctypes.data)
    want = values[0].astype(np.float32)
    for value in values[1:]:
        want = want + value.astype(np.float32)
    assert total.tobytes() == want.tobytes()
    half = np.empty(total.size, np.float16)
    args = (tables.DTYPES["float32"], total.ctypes.data, tables.DTYPES["float16"])
    functions("cgx_convert", *args, half.ctypes.data, ctypes.c_int64(half.size))
    assert half.tobytes() == want.astype(np.float16).tobytes()
