"""Several hosts with several ranks each: algorithm `hierarchical` and transport `hybrid`.

CGX_HOST_ID simulates several hosts on this machine: ranks with different ids share no memory.

    1. results, residuals and bytes, bit for bit as the oracle and cgx_plan
    2. the oracle itself: its bound, and conservation
    3. any order, groups, and failures: lost ranks, an invalid id
"""

import itertools
import json
from typing import Any, Literal

import numpy as np
import pytest
import reference
from support import collective_cases, launch

from cgx_ops import Communicator, InvalidArgument

# The host of each rank. Unless there are several hosts and one has several ranks, hierarchical is
# sra.
exhaustive = pytest.mark.exhaustive
NESTED = ("a,a,b,b", "a,b,a,b", "a,a,a,b", "a,a,b,c")


def numbers(hosts: str) -> tuple[int, ...]:
    return tuple(ord(host) for host in hosts.split(","))


# ---- 1. results ----------------------------------------------------------------------------------


def values(rank: int) -> np.ndarray:
    """Return the inputs of run_hierarchical.py for residuals."""
    return np.random.default_rng(rank).standard_normal(5000).astype(np.float32)


def residual(rank: int) -> np.ndarray:
    """Return a rank's residual before the call."""
    return values(100 + rank) / 8


def expected_residuals(hosts: tuple[int, ...], op: Any, intra_bits: int) -> list[list[str]]:
    xs = [values(rank) for rank in range(len(hosts))]
    lost = [residual(rank) for rank in range(len(hosts))]
    result = reference.allreduce(
        xs, [reference.Segment(0, 5000)], op=op, algorithm="hierarchical", gather_bits=8,
        intra_bits=intra_bits, residuals=lost, hosts=hosts,
    )  # fmt: skip
    return [[collective_cases.digest(result), collective_cases.digest(each)] for each in lost]


LAYOUTS = [
    *((hosts, "AUTO", "hybrid", "hierarchical") for hosts in NESTED),
    ("a,a,b,b", "MPI", "mpi", "hierarchical"),
    ("a,a,b", "AUTO", "hybrid", "hierarchical"),
    ("a,b", "AUTO", "mpi", "sra"),
    ("a,a", "AUTO", "shm", "sra"),
]
# Daily runs use a sample on three layouts. All cases on even hosts and on the most uneven ones, and
# the sample on the other layouts, are slow.
DAILY = (NESTED[1], NESTED[3], "a,b")
RUNS = [
    pytest.param(*layout, cases, marks=marks)
    for layout in LAYOUTS
    for cases, marks in (
        ("sample", [] if layout[0] in DAILY else [pytest.mark.slow]),
        ("all", [pytest.mark.slow if layout[0] in (NESTED[0], NESTED[3]) else exhaustive]),
    )
]


@pytest.mark.parametrize(("hosts", "asked", "transport", "picked", "cases"), RUNS)
def test_against_the_oracle(
    hosts: str, asked: str, transport: str, picked: str, cases: str
) -> None:
    of_ranks = numbers(hosts)
    threads = "1" if hosts == NESTED[0] else "3"  # threads of the codec
    env = {"COMMUNICATOR_TYPE": asked, "CGX_THREADS": threads}
    outputs = launch.mpirun(
        len(of_ranks), "run_hierarchical.py", picked, cases, env=env, hosts=hosts
    )
    ranks = [json.loads(output.splitlines()[-1]) for output in outputs]
    assert [rank["transport"] for rank in ranks] == [transport] * len(ranks)
    known = list(dict.fromkeys(of_ranks))
    assert [r["host"] for r in ranks] == [[known.index(host), len(known)] for host in of_ranks]
    wrong = [
        f"{case}: {[rank['results'][i] for rank in ranks]}"
        for i, case in enumerate(collective_cases.HIERARCHICAL[cases])
        if [rank["results"][i] for rank in ranks]
        != collective_cases.expected(case, len(ranks), of_ranks)
    ]
    assert not wrong, f"{len(wrong)} cases differ:\n" + "\n".join(wrong[:20])
    for i, (op, intra_bits) in enumerate(itertools.product(("sum", "avg"), (4, 32))):
        expected = expected_residuals(of_ranks, op, intra_bits)
        assert [rank["residuals"][i] for rank in ranks] == expected


# ---- 2. the oracle itself ------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ["nearest", "shift"])
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("hosts", NESTED)
def test_error_stays_within_the_bound(
    hosts: str, op: Literal["sum", "avg"], rounding: Literal["nearest", "shift"]
) -> None:
    """Check that the bound "Hierarchical" of numerics.md holds and is not loose."""
    closest = 0.0
    for bits, bucket_size, intra_bits in [(4, 64, 0), (8, 512, 4), (1, 100, 1), (2, 7, 8)]:
        segment = reference.Segment(0, 3000, bits, bucket_size)
        xs = [values(rank)[:3000] for rank in range(len(numbers(hosts)))]
        options: dict[str, Any] = {
            "op": op, "algorithm": "hierarchical", "rounding": rounding,
            "intra_bits": intra_bits, "hosts": numbers(hosts),
        }  # fmt: skip
        result = reference.allreduce(xs, [segment], **options)
        exact = np.sum(xs, axis=0, dtype=np.float64) / (len(xs) if op == "avg" else 1)
        share = np.abs(result - exact) / reference.error_bound(xs, segment, **options)
        assert (share <= 1).all()
        closest = max(closest, share.max())
    assert closest > 0.6


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("intra_bits", [0, 4])
@pytest.mark.parametrize("hosts", NESTED)
def test_conservation(hosts: str, intra_bits: int, op: Literal["sum", "avg"]) -> None:
    """Check that inputs plus old residuals equal the result (as a sum) plus the new residuals."""
    xs = [values(rank) for rank in range(len(numbers(hosts)))]
    lost = [residual(rank) for rank in range(len(xs))]
    given = [*xs, *(each.copy() for each in lost)]
    result = reference.allreduce(
        xs, [reference.Segment(0, 5000)], op=op, algorithm="hierarchical", intra_bits=intra_bits,
        residuals=lost, hosts=numbers(hosts),
    )  # fmt: skip
    total = np.sum(given, axis=0, dtype=np.float64)
    back = result * np.float64(len(xs) if op == "avg" else 1) + np.sum(lost, axis=0, dtype=float)
    # Each of the 2 W - 1 additions, the division, the W encodings' differences and the product with
    # the divisor rounds once, for numbers below the sum of all magnitudes.
    sizes = np.sum(np.abs(given), axis=0) + np.sum(np.abs(lost), axis=0) + np.abs(total - back)
    assert (np.abs(total - back) <= (3 * len(xs) + 2) * 2.0**-24 * 2 * sizes).all()
    assert np.abs(total - result).max() > 0.01


# ---- 3. order, groups and failures ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "program"),
    [
        ("a,b,a,b", ("run_order.py", 2000)),
        ("a,a,b,c", ("run_groups.py",)),
        pytest.param("a,b,a,b", ("run_groups.py",), marks=pytest.mark.exhaustive),
        pytest.param("a,a,b,c", ("run_order.py", 2000), marks=pytest.mark.exhaustive),
    ],
)
def test_order_and_groups(hosts: str, program: tuple[Any, ...]) -> None:
    """Use thousands of calls in flight, and groups on one host, several hosts, and all ranks."""
    outputs = launch.mpirun(4, *program, hosts=hosts)
    assert all("right" in output and "hybrid" in output for output in outputs), outputs


@pytest.mark.parametrize("how", ["kill", pytest.param("absent", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "hosts", ["a,a,b,b", pytest.param("a,a,a,b", marks=pytest.mark.exhaustive)]
)
def test_lost_rank(how: str, hosts: str) -> None:
    """Lose the last rank, near some ranks and far from others: all others raise in time."""
    outputs = launch.mpirun(
        4, "run_failure.py", how, 4, hosts=hosts,
        mpirun_args=("--with-ft", "ulfm"), timeout=90, check=False,
    )  # fmt: skip
    launch.check_survivors(outputs[:3], how)


def test_host_id_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGX_HOST_ID", "x" * 65)
    with pytest.raises(InvalidArgument, match=r"CGX_HOST_ID=\"x+\": give at most 64 bytes"):
        Communicator.create(0, 2, lambda blob: [blob, blob], "too long")
