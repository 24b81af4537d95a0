"""bits_for(): given timings lead to the same bits on all ranks."""

import logging

import pytest
from support.launch import threads

import cgx_ops
from cgx_ops import Communicator, Config, InvalidArgument
from cgx_ops._core.verdicts import Timings, Verdict, best_bits, in_words
from cgx_ops.autotune import SIZES, _slot, choices_of, measured
from cgx_ops.planner import Costs

NEAREST = Config(rounding="nearest", error_feedback=False)


def of(costs: Costs, *, exact_per_value: float = 0.0, bits: tuple[int, ...] = (8, 4)) -> Timings:
    """Return the times of allreduces in the planner's model, exact and compressed."""
    link = [costs.latency + costs.link_fixed + 4 * n * costs.link_per_byte for n in SIZES]
    seconds = {
        32: tuple(
            each + exact_per_value * n for each, n in zip(link, SIZES, strict=True)
        )
    }  # fmt: skip
    for b in bits:
        seconds[b] = tuple(
            costs.latency + costs.encode_fixed + costs.link_fixed + costs.decode_fixed
            + n * (costs.encode_per_value + costs.decode_per_value + b / 8 * costs.link_per_byte)
            for n in SIZES
        )  # fmt: skip
    return Timings(SIZES, seconds)


CODEC = {"encode_fixed": 2e-5, "decode_fixed": 2e-5, "encode_per_value": 5e-10}
GIGABIT = of(Costs(**CODEC, link_per_byte=8e-9, latency=1e-4))
MEMORY = of(Costs(**CODEC, link_per_byte=5e-11, latency=1e-5))


# ---- decisions from timings ----------------------------------------------------------------------


def test_break_even_size() -> None:
    verdict = Verdict.of(GIGABIT)
    eight = (1.4e-4 - 0.9e-4) / (0.9 * 32e-9 - 4.5e-9)  # 0.9 (1e-4 + 32e-9 n) = 1.4e-4 + 4.5e-9 n
    four = 0.14e-4 / (8.5e-9 - 1.1 * 4.5e-9)  # 1.4e-4 + 8.5e-9 n = 1.1 (1.4e-4 + 4.5e-9 n)
    assert [bits for _, bits in verdict.larger[4]] == [8, 4]
    for (at, bits), exactly in zip(verdict.larger[4], (eight, four), strict=True):
        assert exactly <= at <= exactly * 2 ** (1 / 8)
        assert verdict.bits(at - 1) != verdict.bits(at) == bits
    assert verdict.bits(10**9) == 4


def test_half_precision_has_a_larger_break_even() -> None:
    verdict = Verdict.of(GIGABIT)
    assert verdict.larger[2][0][0] > verdict.larger[4][0][0]
    assert verdict.bits(10**6, element_bytes=2) == 4


def test_memory_needs_no_compression() -> None:
    assert Verdict.of(MEMORY).larger == {4: (), 2: ()}


def test_most_bits_of_equally_fast_choices() -> None:
    slow_sums = of(Costs(encode_per_value=1e-7, link_per_byte=1e-9), exact_per_value=2e-7)
    assert best_bits(slow_sums, 10**6) == 8  # 204 ms exact, 101 in 8 bits, 100.5 in 4
    bits = (8, 4, 2)
    assert best_bits(of(Costs(**CODEC, link_per_byte=1e-8), bits=bits), 10**6) == 2


def test_timing_noise_does_not_select_fewer_bits() -> None:
    timings = Timings((1024, 65536), {32: (1.0, 1.0), 8: (0.95, 0.95), 4: (0.92, 0.92)})
    assert Verdict.of(timings).larger[4] == ()


def test_single_size_and_decreasing_times() -> None:
    alone = Timings((1024,), {32: (1.0,), 4: (0.5,)})
    assert alone.at(32, 512) == 1 and alone.at(32, 4096) == 4
    assert Timings((1024, 4096), {32: (2.0, 1.0)}).at(32, 10**6) == 2


def test_two_bits_require_error_feedback() -> None:
    assert choices_of(NEAREST) == (8, 4)
    assert choices_of(Config(error_feedback=True)) == (8, 4, 2)
    assert choices_of(Config(compressor="levels")) == (4, 2)
    assert choices_of(Config(compressor="levels", error_feedback=False)) == (4,)
    diverges = Config(compressor="qsgd", error_feedback=True, bucket_size=32)
    assert choices_of(diverges) == (8, 4)  # error feedback diverges in 2 bits


def test_bits_that_diverge_are_not_required() -> None:
    eight = Config(8, compressor="qsgd", error_feedback=True)
    with pytest.raises(InvalidArgument, match="squared error of 4 bits"):
        eight.with_own(bits=4)

    def run(_rank: int, comm: Communicator) -> int:
        return cgx_ops.bits_for(comm, 10**6, eight)

    found = threads(2, run)
    assert found[0] == found[1] and found[0] in (32, 8)


# ---- calls ---------------------------------------------------------------------------------------


def set_verdict(comm: Communicator, config: Config, verdict: Verdict) -> None:
    """Set a communicator's verdict, equal on all ranks, so that it measures nothing."""
    _slot(comm, config)[0].verdict = verdict


def test_bits_follow_from_the_decision() -> None:
    verdict = Verdict.of(GIGABIT)

    def run(_rank: int, comm: Communicator) -> list[int]:
        set_verdict(comm, NEAREST, verdict)
        found = [cgx_ops.bits_for(comm, numel, NEAREST) for numel in (100, 3000, 50_000)]
        found.append(cgx_ops.bits_for(comm, 3000, NEAREST, element_bytes=2))
        assert "8 bits from 8.72 KiB on, 4 bits from" in comm.stats().auto
        assert "auto: 8 bits" in str(comm.stats())
        return found

    assert threads(3, run) == [[32, 8, 4, verdict.bits(3000, 2)]] * 3


def test_measurements_are_the_same_on_all_ranks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "cgx_ops.autotune")

    def run(_rank: int, comm: Communicator) -> tuple[Timings, int, str]:
        first = cgx_ops.bits_for(comm, 100_000)
        known = comm.collectives
        assert cgx_ops.bits_for(comm, 100_000, Config(bits=8)) == first
        assert comm.collectives == known, "it was measured again"
        return measured(comm, Config()), first, comm.stats().auto

    first, *others = threads(3, run)
    assert others == [first, first]
    assert set(first[0].seconds) == {32, 8, 4}
    assert "bits by size: " in caplog.text


def test_decision_of_a_closed_communicator_is_dropped() -> None:
    [comm] = Communicator.local(1)
    set_verdict(comm, NEAREST, Verdict.of(GIGABIT))
    assert in_words(comm.id)
    comm.close()
    assert not in_words(comm.id)


def test_single_rank_does_not_measure() -> None:
    [comm] = Communicator.local(1)
    assert cgx_ops.bits_for(comm, 10**9) == 32
    assert comm.collectives == 0
    comm.close()


def test_invalid_settings_raise() -> None:
    [comm] = Communicator.local(1)
    with pytest.raises(InvalidArgument, match="has no bits to choose"):  # as on several ranks
        cgx_ops.bits_for(comm, 100, Config(compressor="half"))
    with pytest.raises(InvalidArgument, match=r"'entropy' has no bits .* set Config\(rate="):
        cgx_ops.bits_for(comm, 100, Config(compressor="entropy"))
    with pytest.raises(InvalidArgument, match="element_bytes is 8"):
        cgx_ops.bits_for(comm, 100, element_bytes=8)
    comm.close()
