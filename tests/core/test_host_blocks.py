"""Hierarchical reduce_scatter and all_gather, and all_to_all, on simulated hosts (CGX_HOST_ID).

Results and residuals, bit for bit as the oracle; bytes and algorithm, as cgx_plan; bytes between
hosts.
"""

import json
from typing import Any

import pytest
from support import collective_cases, host_block_cases, launch

LAYOUTS = (
    "a", "a,a", "a,a,a,a", "a,b", "a,a,b,b", "a,a,b,b,c,c,d,d", "a,b,b,b", "a,a,a,b,c,c",
    "a,a,b,b,c,c,c,c", "a,b,a,b", "a,b,b,a,c",
)  # fmt: skip
DAILY = ("a", "a,a,b,b", "a,b,b,a,c")
# Daily runs use a sample on few layouts. The sample on the others, and all cases on one uneven
# layout, are slow.
RUNS = [
    *(
        pytest.param(hosts, "AUTO", "sample", marks=[] if hosts in DAILY else [pytest.mark.slow])
        for hosts in LAYOUTS
    ),
    ("a,a,b", "MPI", "sample"),
    pytest.param("a,a,b", "AUTO", "all", marks=pytest.mark.slow),
    *(pytest.param(hosts, "AUTO", "all", marks=pytest.mark.exhaustive) for hosts in LAYOUTS),
]


def transport_of(hosts: str, asked: str) -> str:
    """Return the transport that is selected."""
    names = hosts.split(",")
    if len(names) == 1:
        return "self"
    if asked == "MPI" or len(set(names)) == len(names):
        return "mpi"
    return "shm" if len(set(names)) == 1 else "hybrid"


@pytest.mark.parametrize(("hosts", "asked", "cases"), RUNS)
def test_against_the_oracle(hosts: str, asked: str, cases: str) -> None:
    of_ranks = tuple(map(ord, hosts.split(",")))
    threads = "1" if len(of_ranks) % 3 else "3"  # threads of the codec
    env = {"COMMUNICATOR_TYPE": asked, "CGX_THREADS": threads}
    outputs = launch.mpirun(
        len(of_ranks), "run_host_blocks.py", cases, env=env, hosts=hosts, timeout=300
    )
    ranks = [json.loads(output.splitlines()[-1]) for output in outputs]
    for rank in ranks:
        assert rank["transport"] == transport_of(hosts, asked)
    check(cases, [rank["results"] for rank in ranks], of_ranks)
    check("sample", [rank["tcp"] for rank in ranks], of_ranks)
    for found in ("all_to_all", "tcp all_to_all"):
        check("all_to_all", [rank[found] for rank in ranks], of_ranks)


@pytest.mark.parametrize("hosts", ["a,a,b,b", pytest.param("a,b,a", marks=pytest.mark.slow)])
def test_bytes_between_hosts(hosts: str) -> None:
    """Compare the bytes that each host receives with the number of encoded blocks, plus headers.

    Hierarchical, a block crosses once from each other host, which has summed its values, or once
    to this host. Otherwise every rank sends to every rank.
    """
    of_ranks = hosts.split(",")
    outputs = launch.torchrun(len(of_ranks), "run_host_bytes.py", env={"CGX_TEST_HOSTS": hosts})
    ranks = [json.loads(output.splitlines()[-1]) for output in outputs]
    assert {rank["transport"] for rank in ranks} == {"hybrid_tcp"}
    for host in set(of_ranks):
        near = of_ranks.count(host)
        far, others = len(of_ranks) - near, len(set(of_ranks)) - 1
        for call, blocks in (
            ("reduce_scatter hierarchical", near * others),
            ("all_gather hierarchical", far),
            ("reduce_scatter sra", near * far),
            ("all_gather sra", near * far),
        ):
            own = [rank for rank, of_rank in zip(ranks, of_ranks, strict=True) if of_rank == host]
            received, payload = sum(r["received"][call] for r in own), blocks * own[0]["block"]
            assert payload <= received <= payload + 2**14, (host, call, received, payload)


def check(cases: str, ranks: list[list[str]], hosts: tuple[int, ...]) -> None:
    """Compare digests with the oracle's."""
    wrong: list[Any] = [
        f"{case}: {[rank[i] for rank in ranks]}"
        for i, case in enumerate(host_block_cases.CASES[cases])
        if [rank[i] for rank in ranks] != collective_cases.expected(case, len(ranks), hosts)
    ]
    assert not wrong, f"{len(wrong)} cases differ:\n" + "\n".join(wrong[:20])
