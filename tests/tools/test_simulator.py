"""benchmarks/simulator.py and its parts: the model counts the bytes that the core sends.

counts   bytes sent by a rank, equal to cgx_plan's
prices   limits with known times, and monotonicity
fit      finds the constants from some of the times that they produced
growth   participants, on threads
"""

import argparse
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace

import cost_model
import growth
import messages
import numpy as np
import predictions
import pytest
import simulator
from cost_model import ALGORITHMS, HEADER_BYTES, PEERS, Constants, Path, Ranks, seconds
from ranks.run_plan import algorithm_of, plan
from support import launch

from cgx_ops import Communicator, Config
from cgx_ops._core.codec import encoded_bytes

EVERY = {**ALGORITHMS, **PEERS}
BITS = (2, 4, 8, 32)
# Values: one shard and several chunks, uneven shards, fewer buckets than ranks.
VALUES = (512, 5 * 512, 512 * 240, 512 * 4801)
SLOW = Constants(
    link_rate=125e6,
    far=Path(1e-4, 5e-6, 1e-9, 2e-4),
    near=Path(1e-6, 1e-6, 1e-10, 1e-5),
    call=5e-6,
    cores=2,
    rates=dict.fromkeys(itertools.product(("encode", "add", "decode"), BITS), 1e-9),
)


# ---- counts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", range(1, 9))
def test_wire_bytes(bits: int) -> None:
    for values in (16, 511, 512, 513, 100_003):
        expected = encoded_bytes(values, Config(bits=bits))
        assert cost_model.wire_bytes(values, bits) == expected, values


@pytest.mark.parametrize("size", [2, 3, 4, 7, 16])
@pytest.mark.parametrize("algorithm", ["one_shot", "sra", "ring"])
def test_bytes_equal_the_plan(algorithm: str, size: int) -> None:
    """Compare the rank that sends most; for a ring with uneven shards, the sum over ranks."""
    cases = list(itertools.product(VALUES, BITS))
    planned = launch.threads(
        size, lambda _, comm: [plan(comm, algorithm, *case).payload_bytes for case in cases]
    )
    for index, (values, bits) in enumerate(cases):
        of_ranks = [ranks[index] for ranks in planned]
        work = ALGORITHMS[algorithm](values, bits, Ranks(1, size))
        sent = work.sent - HEADER_BYTES * (size - 1)
        expected = sum(of_ranks) / size if algorithm == "ring" else max(of_ranks)
        assert sent == pytest.approx(expected, rel=1e-12), (values, bits)  # of fp64 sums


@pytest.mark.parametrize("values", [512 * 8, 512 * 4801])
@pytest.mark.parametrize("algorithm", ["one_shot", "sra"])
def test_bytes_equal_those_sent(algorithm: str, values: int) -> None:
    """Include headers; the smaller one_shot message fits into them."""
    config = Config(algorithm=algorithm)  # pyright: ignore[reportArgumentType]

    def sent(_rank: int, comm: Communicator) -> int:
        before = comm.bytes_sent
        comm.allreduce(np.zeros(values, np.float32), config=config)
        return comm.bytes_sent - before

    assert ALGORITHMS[algorithm](values, 4, Ranks(1, 3)).sent == max(launch.threads(3, sent))


def test_bytes_of_hierarchical_equal_the_plan() -> None:
    """Use equal shards, because otherwise different ranks send the most near and far bytes."""
    cases = [["hierarchical", values, bits] for values in (512 * 4, 512 * 4800) for bits in BITS]
    outputs = launch.mpirun(4, "run_plan.py", *map(json.dumps, cases), hosts="a,a,b,b")
    planned = [json.loads(output.splitlines()[-1]) for output in outputs]
    for index, (_, values, bits) in enumerate(cases):
        work = cost_model.hierarchical(values, bits, Ranks(2, 2))
        assert work.sent - HEADER_BYTES * 3 == max(ranks[index][1] for ranks in planned)


@pytest.mark.parametrize("algorithm", [name for name in EVERY if name != "hierarchical"])
def test_near_and_far_bytes(algorithm: str) -> None:
    """Check that bytes are far with one rank per host, near on one host, and constant in sum."""
    apart, between, together = (
        EVERY[algorithm](1 << 20, 32, Ranks(hosts, 16 // hosts)) for hosts in (16, 4, 1)
    )
    assert apart.near.bytes == together.far.bytes == together.link_bytes == 0
    for work in (between, together):
        assert work.sent == pytest.approx(apart.sent, rel=1e-12)


# ---- prices --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [Ranks(2, 1), Ranks(8, 1), Ranks(64, 1)])
@pytest.mark.parametrize("algorithm", ["sra", "ring", "hierarchical", *PEERS])
def test_time_on_an_ideal_link_is_bytes_over_rate(algorithm: str, ranks: Ranks) -> None:
    values = 512 * ranks.size * 100
    work = EVERY[algorithm](values, 32, ranks)
    least = 2 * (ranks.size - 1) / ranks.size * 4 * values
    if algorithm == "MPI recursive doubling":
        least = math.log2(ranks.size) * 4 * values
    headers = 0 if algorithm in PEERS else HEADER_BYTES * (ranks.size - 1)
    assert seconds(work, ranks, Constants(link_rate=125e6)) == pytest.approx(
        (least + headers) / 125e6, rel=1e-12
    )


def test_hosts_of_many_ranks_send_the_minimum() -> None:
    """Check 2(h-1)/h of the encoded bytes, shared by lanes; a flat sra sends a multiple of it."""
    ranks, values = Ranks(4, 8), 512 * 3200
    must = 2 * 3 / 4 * cost_model.wire_bytes(values, 4)
    headers = 8 * 24 * HEADER_BYTES
    assert cost_model.hierarchical(values, 4, ranks).link_bytes == must + headers
    flat = 8 * 24 / 32 * 2 * cost_model.wire_bytes(values, 4)
    assert cost_model.sra(values, 4, ranks).link_bytes == pytest.approx(flat + headers)


@pytest.mark.parametrize("ranks", [Ranks(2, 1), Ranks(16, 1), Ranks(16, 8)])
@pytest.mark.parametrize("algorithm", EVERY)
def test_more_bytes_take_longer(algorithm: str, ranks: Ranks) -> None:
    times = [seconds(EVERY[algorithm](512 << power, 32, ranks), ranks, SLOW) for power in range(20)]
    assert times == sorted(times)
    assert times[-1] > 100 * times[0] > 0


@pytest.mark.parametrize("algorithm", EVERY)
@pytest.mark.parametrize("ranks", [Ranks(2, 1), Ranks(8, 4)])
def test_every_constant_counts(algorithm: str, ranks: Ranks) -> None:
    work = EVERY[algorithm](1 << 20, 32, ranks)
    free = Constants(link_rate=math.inf)
    assert seconds(work, ranks, free) == 0
    alone = {
        "link": Constants(link_rate=125e6),
        "call": Constants(math.inf, call=1.0),
        "alpha": Constants(math.inf, far=Path(alpha=1.0)),
        "message": Constants(math.inf, far=Path(message=1.0)),
        "byte": Constants(math.inf, far=Path(byte=1.0)),
        "add": Constants(math.inf, rates={("add", 32): 1.0}),
    }
    for name, constants in alone.items():
        assert seconds(work, ranks, constants) > 0, name


def test_link_and_processor_overlap() -> None:
    """Check that many chunks take the longer of the two times, and one chunk takes both."""
    ranks, processor = Ranks(2, 1), {("encode", 4): 1e-9}
    for values, share in ((512 * 40_000, 1 / 162), (512 * 16, 1.0)):
        work = cost_model.sra(values, 4, ranks)
        link = work.link_bytes / 125e6
        both = seconds(work, ranks, Constants(125e6, rates=processor))
        arithmetic = values * 1e-9
        expected = max(link, arithmetic) + share * min(link, arithmetic)
        assert both == pytest.approx(expected, rel=1e-12)


def test_ranks_share_cores() -> None:
    ranks, work = Ranks(1, 8), cost_model.sra(1 << 20, 32, Ranks(1, 8))
    own, shared = (
        seconds(work, ranks, Constants(math.inf, cores=cores, rates={("add", 32): 1e-9}))
        for cores in (8, 2)
    )
    assert shared == pytest.approx(4 * own)
    waiting = Constants(math.inf, near=Path(alpha=1.0, turn=10.0), cores=2)
    assert seconds(work, ranks, waiting) == 3 * (1 + 3 * 10)  # header, scatter, gather


# ---- the fit -------------------------------------------------------------------------------------

TRUE = cost_model.Machine(SLOW.rates, 2e-5, 1e-9, 3e-4, 5e-4, 2e-6, 3e-5, 7e-6, 0.93)


def samples(worlds: Sequence[simulator.World]) -> list[simulator.Sample]:
    """Return the times that TRUE predicts, for two algorithms and widths."""
    made = []
    for world in worlds:
        for size, algorithm, bits in itertools.product(world.sizes, ("one_shot", "sra"), (32, 4)):
            cost = growth.Cost("", world.hosts, world.ranks.size, algorithm, bits, size, 1, 1, 1, 1)
            sample = simulator.Sample(world, cost)
            cost = replace(cost, seconds=simulator.predict(sample, TRUE))
            made.append(simulator.Sample(world, cost))
    return made


def test_fit_finds_the_constants() -> None:
    """Fit some times only; the predictions of all others must be right."""
    every = samples(simulator.WORLDS)
    known = cost_model.Machine(TRUE.rates, TRUE.far_message, TRUE.far_byte)
    found = simulator.fit([sample for sample in every if sample.fitted], known)
    for sample in every:
        # least_squares stops at changes below 1e-8 of its sum of squares, far below 1e-4 here.
        assert simulator.predict(sample, found) == pytest.approx(sample.cost.seconds, rel=1e-4)


def test_hosts_made_here_share_its_cores() -> None:
    """Check that with twice the hosts, and processor time only, each has half of a core."""
    of_two, of_four = (
        simulator.Sample(
            simulator.World(hosts, 1, "", (1 << 24,)),
            growth.Cost("mpi", hosts, hosts, "MPI_Allreduce", 32, 1 << 24, 1, 1, 1, 1),
        )
        for hosts in (2 * simulator.CORES, 4 * simulator.CORES)
    )
    machine = cost_model.Machine(TRUE.rates, *[0.0] * 7, efficiency=1)
    # MPI's best adds (n-1)/n of the values; the cores are shared by 2, then by 4 ranks.
    n = 2 * simulator.CORES
    expected = 2 * ((2 * n - 1) / (2 * n)) / ((n - 1) / n)
    assert simulator.predict(of_four, machine) / simulator.predict(of_two, machine) == (
        pytest.approx(expected, rel=1e-12)
    )


def test_auto_equals_the_core() -> None:
    """Compare predictions.auto() with the core's selection on threads, without several hosts."""

    def picked(_rank: int, comm: Communicator) -> list[str]:
        return [algorithm_of(plan(comm, "auto", size // 4, 4)) for size in predictions.GRID]

    expected = [predictions.auto(size, Ranks(1, 2)) for size in predictions.GRID]
    assert launch.threads(2, picked) == [expected, expected]


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 4), (4, 2)])
def test_auto_equals_the_core_on_hosts_of_several_ranks(hosts: int, per_host: int) -> None:
    """Test around the limits: 2 KiB of encoded values on 2 hosts of 4 ranks, 2.7 KiB on 4 of 2."""
    sizes = [64, 512, *range(12 << 10, 24 << 10, 1 << 10), 64 << 10]
    cases = [json.dumps(["auto", size // 4, 4]) for size in sizes]
    names = ",".join(name for name in "abcd"[:hosts] for _ in range(per_host))
    outputs = launch.mpirun(8, "run_plan.py", *cases, hosts=names)
    expected = [predictions.auto(size, Ranks(hosts, per_host)) for size in sizes]
    assert {"one_shot", "hierarchical"} <= set(expected)
    for output in outputs:
        assert [name for name, _ in json.loads(output.splitlines()[-1])] == expected


# ---- growth --------------------------------------------------------------------------------------


def test_growth_of_threads() -> None:
    options = argparse.Namespace(sizes=[4096, 2 << 20], bits=[32, 4], budget=0)
    costs = growth.threads(3, options)
    found = {(cost.algorithm, cost.bits, cost.bytes) for cost in costs}
    assert found == {
        *itertools.product(("one_shot", "sra"), (32, 4), (4096,)),
        *itertools.product(("sra",), (32, 4), (2 << 20,)),
        *itertools.product(("ring",), (32,), (4096, 2 << 20)),
    }
    assert all(cost.transport == "thread" and cost.ranks == 3 for cost in costs)
    table = growth.table_of(costs)
    assert [row[:4] for row in table.rows[:2]] == [
        ["thread", "4 KiB", "one_shot", "32"],
        ["thread", "4 KiB", "sra", "32"],
    ]


def test_messages_parts() -> None:
    found = [messages.Message(n, 2e-5 + n * 1e-9, 0, 0) for n in messages.LENGTHS]
    assert messages.parts(found) == pytest.approx((2e-5, 1e-9), rel=1e-9)
