"""Several hosts without MPI: network namespaces, without mpirun.

sums       bitwise equal to the oracle's, over tcp, and over shm with tcp between hosts
torchrun   DDP, FSDP2, subgroups, on two and three hosts
spawned    a DeviceMesh of hosts and ranks, with HSDP
JAX        psum_q with torchrun's variables
failures   a killed rank, a broken link, an unauthenticated peer
"""

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import collective_cases, launch
from support.hosts import hosts_py, run_hosts

ROOT = Path(__file__).resolve().parents[2]
RANKS = ROOT / "tests" / "ranks"
TIMEOUT = 4.0  # as in run_tcp_hosts.py
# Without mpirun on PATH, and without variables of a job.
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": launch.python_path()}
ENVIRONMENT["OMP_NUM_THREADS"] = "1"

why_not = hosts_py.refusal()
pytestmark = pytest.mark.skipif(bool(why_not), reason=why_not)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Any]:
    with hosts_py.Hosts(3) as three:
        yield three


def said(ran: Any) -> list[dict[str, Any]]:
    """Return the JSON lines of the ranks, sorted by rank if they contain it."""
    found = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda each: each.get("rank", 0))


def ranks(case: str, size: int, folder: Path) -> list[list[str | Path]]:
    program = [sys.executable, RANKS / "run_tcp_hosts.py", case]
    return [[*program, str(rank), str(size), folder] for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3])
def test_sums_equal_the_oracle(hosts: Any, tmp_path: Path, size: int) -> None:
    found = [said(each)[0] for each in together(hosts, ranks("sums", size, tmp_path))]
    expected = [collective_cases.expected(case, size) for case in run_hosts.CASES]
    assert [each["host"] for each in found] == [f"h{rank}" for rank in range(size)]
    for rank, each in enumerate(found):
        assert (each["transport"], each["rejected_connections"]) == ("tcp", 0)
        assert each["digests"] == [case[rank] for case in expected]


def together(hosts: Any, commands: list[list[str | Path]]) -> Any:
    return hosts.together(commands, env=ENVIRONMENT, timeout=120)


# ---- launchers -----------------------------------------------------------------------------------


def torchrun(hosts: Any, nodes: int, *options: str, arguments: list[str]) -> list[dict[str, Any]]:
    """Run run_torchrun_hosts.py with an agent on each host; return the ranks' JSON lines."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes), *options]
    program = [RANKS / "run_torchrun_hosts.py", *arguments]
    commands = [[*command, "--node-rank", str(node), *program] for node in range(nodes)]
    lines = [line for each in together(hosts, commands) for line in said(each)]
    return sorted(lines, key=lambda line: line["rank"])


@pytest.mark.slow  # daily: two hosts in JAX's test below, torchrun in tests/process/test_world.py
@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (3, 1)])
def test_torchrun(hosts: Any, nodes: int, per_node: int) -> None:
    options = ["--nproc-per-node", str(per_node), "--master-addr", "h0", "--master-port", "29512"]
    found = torchrun(hosts, nodes, *options, arguments=[])
    assert len(found) == nodes * per_node
    assert [each["host"] for each in found] == [
        f"h{rank // per_node}" for rank in range(len(found))
    ]
    for each in found:
        assert each["transport"] == ("tcp" if per_node == 1 else "hybrid_tcp")
        assert each["first"] == each["again"] == found[0]["first"]
        # Small tensors are exact, and so are sums over the ranks of a host.
        assert each["ratio"] > (4 if per_node == 1 else 2)
        assert each["ranks"] == len(found)


@pytest.mark.slow
def test_torchrun_restart(hosts: Any, tmp_path: Path) -> None:
    """Check that the second generation ignores the first one's store, which still exists."""
    options = ["--nproc-per-node", "1", "--max-restarts", "1", "--rdzv-backend", "c10d"]
    options += ["--rdzv-endpoint", "h0:29513", "--rdzv-id", "restart"]
    found = torchrun(hosts, 2, *options, arguments=[str(tmp_path / "note")])
    assert (tmp_path / "note").exists()
    assert [each["rank"] for each in found] == [0, 1]
    assert found[0]["first"] == found[1]["first"] == found[0]["again"]


@pytest.mark.slow
def test_device_mesh_of_spawned_ranks(hosts: Any) -> None:
    program = [sys.executable, RANKS / "run_spawned_hosts.py"]
    ran = together(hosts, [[*program, str(host)] for host in range(2)])
    found = [line for each in ran for line in said(each)]
    assert [(each["rank"], each["host"]) for each in found] == [
        (0, "h0"), (1, "h0"), (2, "h1"), (3, "h1")
    ]  # fmt: skip
    for each in found:
        assert (each["hosts"], each["ranks"]) == ("tcp", "shm")
        assert each["weights"] == found[0]["weights"]


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_jax_with_the_variables_of_torchrun(hosts: Any, devices: int) -> None:
    program = [sys.executable, RANKS / "run_jax_initialize.py", "by_torchrun"]
    variables = ["MASTER_ADDR=h0", "MASTER_PORT=29612", "WORLD_SIZE=2"]
    variables += [f"XLA_FLAGS=--xla_force_host_platform_device_count={devices}", "PROCESSES=2"]
    commands = [["env", *variables, f"RANK={rank}", *program] for rank in range(2)]
    for ran in together(hosts, commands):
        assert ran.stdout.splitlines()[-1] == "ok all"


# ---- failures ------------------------------------------------------------------------------------


def test_killed_rank_is_an_immediate_error(hosts: Any, tmp_path: Path) -> None:
    *survivors, victim = ranks("kill", 3, tmp_path)
    with pytest.raises(hosts_py.CommandFailed, match=r"ended with status -?[0-9]+") as failed:
        together(hosts, [*survivors, victim])
    assert "run_tcp_hosts.py kill 2" in str(failed.value)  # only the victim failed


@contextlib.contextmanager
def link_down(hosts: Any, folder: Path, seconds: float) -> Iterator[None]:
    """Take down host 1's link when two ranks are reducing, for some seconds."""

    def cut() -> None:
        deadline = time.monotonic() + 60
        while not all((folder / f"reducing {rank}").exists() for rank in range(2)):
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)
        time.sleep(0.2)
        hosts.run(1, ["ip", "link", "set", "eth0", "down"])
        over.wait(seconds)
        hosts.run(1, ["ip", "link", "set", "eth0", "up"])
        (folder / "back").touch()

    over = threading.Event()
    cutter = threading.Thread(target=cut)
    cutter.start()
    try:
        yield
    finally:
        over.set()
        cutter.join()


@pytest.mark.slow
def test_a_link_that_comes_back_in_time_loses_nothing(hosts: Any, tmp_path: Path) -> None:
    away = 3.0
    with link_down(hosts, tmp_path, away):
        found = [said(each)[0] for each in together(hosts, ranks("blink", 2, tmp_path))]
    assert max(each["seconds"] for each in found) > away / 2, "the link was not away"


def test_broken_link(hosts: Any, tmp_path: Path) -> None:
    """Break the link silently: every rank raises within its deadline and half a second."""
    with link_down(hosts, tmp_path, 60):
        found = [said(each)[0] for each in together(hosts, ranks("link", 2, tmp_path))]
    for rank, each in enumerate(found):
        assert each["error"] in ("DeadlineExceeded", "PeerFailed")
        assert f"rank {1 - rank}" in each["text"]
        assert each["seconds"] < TIMEOUT + 2  # the deadline, an inquiry, and the last message


KNOCK = """
import socket, sys
from pathlib import Path
found = []
for port in range(32768, 61000):
    with socket.socket() as knocking:
        knocking.settimeout(5)
        if knocking.connect_ex((sys.argv[1], port)) == 0:
            knocking.sendall(b"GET / HTTP/1.1" + bytes(100))
            found.append(port)
assert found, "no port is open"
"""


def test_unauthenticated_peer_is_ignored(hosts: Any, tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def knock() -> None:
        try:
            deadline = time.monotonic() + 60
            while not (tmp_path / "listening").exists():
                assert time.monotonic() < deadline, "rank 1 never came"
                time.sleep(0.05)
            hosts.run(2, [sys.executable, "-c", KNOCK, "h0"], timeout=60)
        except BaseException as error:
            failures.append(error)
        finally:
            (tmp_path / "knocked").touch()

    knocking = threading.Thread(target=knock)
    knocking.start()
    found = [said(each)[0] for each in together(hosts, ranks("stranger", 2, tmp_path))]
    knocking.join()
    assert not failures
    assert found[0]["rejected_connections"] >= 1
    assert found[1]["rejected_connections"] == 0
    expected = [collective_cases.expected(case, 2) for case in run_hosts.CASES]
    for rank, each in enumerate(found):
        assert each["digests"] == [case[rank] for case in expected]
