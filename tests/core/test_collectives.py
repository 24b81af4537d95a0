"""Every collective against the oracle, bit for bit, for all ranks, transports and CPU targets.

Ranks are threads of one process, or processes of mpirun over shared memory or over MPI.
"""

import functools
import itertools
import json
import multiprocessing
import operator
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from ctypes import byref
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import reference
from support import collective_cases, launch

from cgx_ops import Communicator, Config
from cgx_ops._core import library, structs, tables
from cgx_ops._core.call import Call, Op
from cgx_ops.config import Rounding

PROGRAM = Path(__file__).parents[1] / "ranks" / "run_collectives.py"
TARGETS = library.describe()["cpu_targets"]
SOME = "compressors, some"
BLOCKS, LARGE_BLOCKS = "all_to_all", "all_to_all, large"


Oracle = Callable[[str, int], list[list[str]]]


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    """Yield the oracle's digests by set and ranks, computed on all cores to save time."""
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:

        @functools.cache
        def expected(cases: str, n: int) -> list[list[str]]:
            every = collective_cases.SETS[cases]
            return list(
                pool.map(collective_cases.expected, every, itertools.repeat(n), chunksize=4)
            )

        yield expected


def compare(names: str, ranks: list[list[str]], oracle: Oracle) -> None:
    """Compare each rank's digests with the oracle's."""
    cases = collective_cases.SETS[names]
    for rank, digests in enumerate(ranks):
        assert len(digests) == len(cases), f"rank {rank} ran {len(digests)} of {len(cases)} cases"
    wrong = [
        f"{case}: ranks {[r for r in range(len(ranks)) if ranks[r][i] != want[r]]}"
        for i, (case, want) in enumerate(zip(cases, oracle(names, len(ranks)), strict=True))
        if [digests[i] for digests in ranks] != want
    ]
    assert not wrong, f"{len(wrong)} of {len(cases)} cases differ:\n" + "\n".join(wrong[:20])


def on_threads(
    cases: str, n: int, target: str, monkeypatch: pytest.MonkeyPatch, oracle: Oracle
) -> None:
    """Run a set on threads of a new process, because a process selects its CPU target once."""
    monkeypatch.setenv("CGX_CPU_TARGET", target)
    done = subprocess.run(
        [sys.executable, PROGRAM, cases, "--threads", str(n)],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    compare(cases, [json.loads(line) for line in done.stdout.splitlines()], oracle)


def under_mpirun(names: Sequence[str], n: int, transport: str, oracle: Oracle) -> None:
    """Run sets on n processes over one transport, with different threads and buffers for each."""
    threads, buffer = {"SHM": ("1", "64"), "MPI": ("3", "1"), "TCP": ("2", "4")}[transport]
    env = {
        "COMMUNICATOR_TYPE": transport,
        "CGX_THREADS": threads,
        "CGX_FUSION_BUFFER_SIZE_MB": buffer,
        "CGX_SOCKET_IFNAME": "lo",
    }
    outputs = launch.mpirun(n, PROGRAM, *names, env=env, timeout=900)
    lines = [output.splitlines()[-len(names) :] for output in outputs]
    for place, cases in enumerate(names):
        ranks = [json.loads(of_rank[place]) for of_rank in lines]
        assert [rank[0] for rank in ranks] == [transport.lower() if n > 1 else "self"] * n
        compare(cases, [rank[1:] for rank in ranks], oracle)


def daily(cases: str, target: str, n: int) -> bool:
    """Return whether a set runs daily.

    Daily runs use the sample of the matrix, which has every pair of values. The CPU target affects
    only the codec, which does not depend on the rank and is covered by the C++ tests. The features
    of the other targets therefore run on three ranks only, where shards are uneven.
    """
    if n == 3 and cases in ("features", SOME):
        return True
    return target == TARGETS[0] and (cases == "sample" or (cases == BLOCKS and n == 3))


def mark(cases: str, target: str, n: int) -> list[pytest.MarkDecorator]:
    """Return the marks of a set: eight ranks take as long as all others."""
    if daily(cases, target, n):
        return []
    slow = target == TARGETS[0] and n < 8 and cases in ("features", SOME, BLOCKS, LARGE_BLOCKS)
    return [pytest.mark.slow if slow else pytest.mark.exhaustive]


ON_THREADS = [
    pytest.param(cases, target, n, marks=mark(cases, target, n))
    for cases in collective_cases.SETS
    for target in TARGETS
    for n in (1, 2, 3, 4, 8)
    if target == TARGETS[0] or cases not in ("sample", SOME) or daily(cases, target, n)
]
# Transports do not depend on the dtype. The sets of a day share a launch.
DAILY = ("features", SOME, BLOCKS)
UNDER_MPIRUN = [(DAILY, "MPI", 3), (DAILY, "SHM", 3), ((BLOCKS,), "TCP", 3)]
UNDER_MPIRUN += [pytest.param(("sample", *DAILY, LARGE_BLOCKS), "SHM", 4, marks=pytest.mark.slow)]
UNDER_MPIRUN += [
    pytest.param((cases,), transport, n, marks=pytest.mark.exhaustive)
    for cases in ("matrix", "features", "compressors")
    for transport in ("SHM", "MPI", "TCP")
    for n in (2, 3, 4)
]
# One rank has no transport. The oracle of eight ranks takes minutes.
UNDER_MPIRUN += [
    pytest.param(
        (BLOCKS, LARGE_BLOCKS),
        transport,
        n,
        marks=[pytest.mark.exhaustive, pytest.mark.timeout(900)],
    )
    for transport, n in [("SHM", 1), *itertools.product(("SHM", "MPI", "TCP"), (2, 4, 8))]
]


@pytest.mark.parametrize(("cases", "target", "n"), ON_THREADS)
def test_threads(
    cases: str, target: str, n: int, monkeypatch: pytest.MonkeyPatch, oracle: Oracle
) -> None:
    on_threads(cases, n, target, monkeypatch, oracle)


@pytest.mark.parametrize(("names", "transport", "n"), UNDER_MPIRUN)
def test_mpirun(names: Sequence[str], transport: str, n: int, oracle: Oracle) -> None:
    under_mpirun(names, n, transport, oracle)


def test_sample_has_every_pair_of_values() -> None:
    names = ("size", "bits", "bucket_size", "dtype", "rounding", "algorithm")
    pairs = list(itertools.combinations(map(operator.attrgetter, names), 2))
    matrix, sample = (
        [{(one(case), other(case)) for case in cases} for one, other in pairs]
        for cases in (collective_cases.MATRIX, collective_cases.SAMPLE)
    )
    assert sample == matrix


@pytest.mark.parametrize("rounding", ["nearest", "shift"])
def test_error_stays_within_the_bound(rounding: Literal["nearest", "shift"]) -> None:
    """Check the oracle's bound for the library's results, and that it is not far above them."""
    closest = 0.0
    for numel, bits, bucket_size in [(1000, 4, 64), (5000, 8, 512), (5000, 1, 100), (40, 2, 7)]:
        xs = [np.random.default_rng(r).standard_normal(numel).astype(np.float32) for r in range(3)]
        for algorithm in ("one_shot", "sra"):
            config = Config(
                bits=bits, bucket_size=bucket_size, rounding=rounding, algorithm=algorithm
            )

            def run(rank: int, comm: Communicator, config: Config = config) -> np.ndarray:
                return comm.allreduce(xs[rank], config=config)  # noqa: B023

            result = launch.threads(3, run)[0]
            bound = reference.error_bound(
                xs,
                reference.Segment(0, numel, bits, bucket_size),
                algorithm=algorithm,
                rounding=rounding,
            )
            error = np.abs(result - np.sum(xs, axis=0, dtype=np.float64))
            assert (error <= bound).all()
            closest = max(closest, (error / bound).max())
    assert closest > 0.7


@pytest.mark.parametrize(("rounding", "together"), [("stochastic", 1), ("shift", 64)])
def test_noise_is_unbiased(rounding: Rounding, together: int) -> None:
    """Check that the mean over many seeds is within 5 standard errors of the exact sum.

    together: number of elements that share noise, so that their errors may add up.
    """
    repeats, numel = 400, 2000
    xs = [np.random.default_rng(r).standard_normal(numel).astype(np.float32) for r in range(3)]

    def run(rank: int, comm: Communicator) -> np.ndarray:
        config = Config(bits=2, bucket_size=64, rounding=rounding, algorithm="sra")
        results = [comm.allreduce(xs[rank], config=config, seed=s) for s in range(repeats)]
        return np.array(results, np.float64)

    results = launch.threads(3, run)[0]
    exact = np.sum(xs, axis=0, dtype=np.float64)
    # One element's mean is off by 5 standard errors about once in 1.7 million; the mean over all
    # elements even less often.
    errors = (results - exact).mean(axis=0)
    deviation = results.std(axis=0) / np.sqrt(repeats)
    assert (np.abs(errors) <= 5 * deviation + 1e-6).mean() > 0.999
    assert abs(errors.mean()) <= 5 * np.sqrt(together * (deviation**2).sum()) / numel


def test_runs_repeat_and_calls_differ() -> None:
    """Check that the noise of a run repeats, and differs between calls and communicators."""
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)

    def run(rank: int, comm: Communicator) -> list[bytes]:
        config = Config(bits=1)
        return [comm.allreduce(x * (rank + 1), config=config).tobytes() for _ in range(2)]

    first, second, other = (launch.threads(2, run, name=name)[0] for name in ("a", "a", "b"))
    assert first == second
    assert len({*first, *other}) == 4


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_more_than_two_to_the_31_bytes() -> None:
    """Reduce 537 million fp32 values in place on two ranks; compare slices at the edges."""
    numel, bucket = 2**29 + 1000, 512
    pattern = np.random.default_rng(0).standard_normal(2**20 + 7).astype(np.float32)
    middle = -(-numel // bucket) // 2 * bucket  # start of the second rank's shard

    def values(rank: int) -> np.ndarray:
        return np.resize(pattern * (rank + 1), numel)

    def run(rank: int, comm: Communicator) -> np.ndarray:
        x = values(rank)
        config = Config(bits=4, rounding="nearest", algorithm="sra")
        return comm.allreduce(x, config=config, out=x)

    left, right = launch.threads(2, run, timeout=600)
    assert np.array_equal(left, right)
    inputs = [values(0), values(1)]
    for start in (0, middle - 8 * bucket, middle, (numel - 1000) // bucket * bucket):
        at = slice(start, min(start + 8 * bucket, numel))
        owner = int(start >= middle)
        seen = [
            x[at]
            if rank == owner
            else reference.dequantize(
                reference.quantize(x[at], 4, bucket), len(x[at]), 4, bucket, dtype=np.float32
            )
            for rank, x in enumerate(inputs)
        ]
        total = seen[0] + seen[1]
        want = reference.dequantize(
            reference.quantize(total, 4, bucket), len(total), 4, bucket, dtype=np.float32
        )
        assert np.array_equal(left[at], want), start


@pytest.mark.parametrize(("op", "width"), [("sum", 4), ("avg", 4), ("product", 4), ("max", 2)])
def test_bytes_of_16_bit_partial_sums(op: Op, width: int) -> None:
    """Check cgx_plan and the bytes sent by a ring.

    Partial sums travel in fp32 towards the owner, maxima in their dtype; results travel in fp16.
    """
    size, numel, header = 4, 40_000, 208  # of docs/reference/control_messages.md

    def run(rank: int, comm: Communicator) -> tuple[int, int]:
        x = np.ones(numel, np.float16)
        config = Config(bits=32, algorithm="ring")
        comm.allreduce(x, op, config)
        call = Call("allreduce", op, config, "", None, 0, None).collective(
            comm.id, tables.DTYPES["float16"], x.ctypes.data, x.ctypes.data, x.size
        )
        plan = structs.Plan()
        library.call("cgx_plan", byref(call), byref(plan))
        return plan.payload_bytes, comm.bytes_sent - header * (size - 1)

    sent = (size - 1) * numel // size * (width + 2)
    assert launch.threads(size, run) == [(sent, sent)] * size
