"""benchmarks/hosts.py: link rates, isolation of hosts, and clean-up.

links     rate in each direction and into a host; delay and loss if the kernel has netem
hosts     names, /dev/shm, and cgx between hosts, bit for bit
failures  exceptions in the block; missing tools
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import collective_cases
from support.hosts import PROGRAM, hosts_py, run_hosts

Hosts = hosts_py.Hosts
why_not = hosts_py.refusal()
needs_hosts = pytest.mark.skipif(bool(why_not), reason=why_not)


@pytest.fixture(scope="module")
def three() -> Iterator[Hosts]:
    """Yield three hosts; tests shape the links."""
    with Hosts(3) as hosts:
        yield hosts


# ---- links ---------------------------------------------------------------------------------------

# A receiver sends "1" at the end of each connection; the senders' clock runs until then.
RECEIVE = """
import socket, sys
with socket.create_server(("", 5001)) as server:
    print("listening", flush=True)
    taken = [server.accept()[0] for _ in range(int(sys.argv[1]))]
    for connection in taken:
        while connection.recv(1 << 20): pass
        connection.sendall(b"1")
"""
SEND = """
import socket, sys, time
host, count = sys.argv[1], int(sys.argv[2])
deadline = time.monotonic() + 20
while True:
    try:
        connection = socket.create_connection((host, 5001), timeout=20)
        break
    except ConnectionRefusedError:
        assert time.monotonic() < deadline, "the receiver never listened"
        time.sleep(0.01)
begin = time.monotonic()
connection.sendall(bytes(count))
connection.shutdown(socket.SHUT_WR)
assert connection.recv(1) == b"1"
print(begin, time.monotonic())
"""


def seconds_to_send(hosts: Hosts, senders: list[int], receiver: int, count: int) -> float:
    """Return the time from the first byte sent to the last confirmation, on one clock."""
    with ThreadPoolExecutor() as pool:
        listening = pool.submit(
            hosts.run, receiver, [sys.executable, "-c", RECEIVE, str(len(senders))], timeout=60
        )
        command = [sys.executable, "-c", SEND, hosts.names[receiver], str(count)]
        sent = [pool.submit(hosts.run, host, command, timeout=60) for host in senders]
        spans = [list(map(float, each.result().stdout.split())) for each in sent]
        listening.result()
    return max(end for _, end in spans) - min(begin for begin, _ in spans)


@needs_hosts
@pytest.mark.parametrize("senders", [[0], [1], [0, 1]], ids=str)
def test_link_has_the_requested_rate(three: Hosts, senders: list[int]) -> None:
    # A token bucket lets n bytes pass in at least (n - burst) / rate, in each direction; all
    # senders share the one into host 2. The payload is 1448 of the 1514 bytes of a frame.
    three.shape("100mbit")
    rate, count = 100e6 / 8, 1 << 22
    burst = rate * hosts_py._BUCKET_SECONDS
    n = len(senders) * count * 1514 / 1448
    seconds = min(seconds_to_send(three, senders, 2, count) for _ in range(3))
    assert seconds >= (n - burst) / rate
    # The best of three on a busy machine: at least half of the requested rate.
    assert seconds <= 2 * n / rate


def shape_or_skip(hosts: Hosts, *args: str | None, **kwargs: str | None) -> None:
    """Shape links; skip the test if the kernel has no netem, which delays and drops packets."""
    try:
        hosts.shape(*args, **kwargs)
    except hosts_py.Unavailable as error:
        if "netem" not in str(error):
            raise
        pytest.skip(str(error))


ECHO = """
import socket
with socket.create_server(("", 5002)) as server:
    connection, _ = server.accept()
    while byte := connection.recv(1): connection.sendall(byte)
"""
PING = """
import socket, sys, time
deadline = time.monotonic() + 20
while True:
    try:
        connection = socket.create_connection((sys.argv[1], 5002), timeout=20)
        break
    except ConnectionRefusedError:
        assert time.monotonic() < deadline, "the echo never listened"
        time.sleep(0.01)
begin = time.monotonic()
connection.sendall(b"1")
connection.recv(1)
print(time.monotonic() - begin)
"""


@needs_hosts
@pytest.mark.parametrize("rate", [None, "100mbit"])
def test_delay_is_that_of_one_way(three: Hosts, rate: str | None) -> None:
    shape_or_skip(three, rate, delay="20ms")
    with ThreadPoolExecutor() as pool:
        echo = pool.submit(three.run, 1, [sys.executable, "-c", ECHO], timeout=60)
        there_and_back = float(three.run(0, [sys.executable, "-c", PING, "h1"]).stdout)
        echo.result()
    assert there_and_back >= 2 * 0.02


COUNT = """
import socket
with socket.socket(type=socket.SOCK_DGRAM) as datagrams:
    datagrams.bind(("", 5003))
    datagrams.settimeout(5)
    taken = 0
    try:
        while datagrams.recv(16): taken += 1
    except TimeoutError:
        print(taken)
"""
SCATTER = """
import socket, sys, time
time.sleep(1)
with socket.socket(type=socket.SOCK_DGRAM) as datagrams:
    for _ in range(1000):
        datagrams.sendto(b"1", (sys.argv[1], 5003))
"""


@needs_hosts
def test_loss_is_the_requested_part(three: Hosts) -> None:
    shape_or_skip(three, loss="50%")
    with ThreadPoolExecutor() as pool:
        counted = pool.submit(three.run, 1, [sys.executable, "-c", COUNT], timeout=60)
        three.run(0, [sys.executable, "-c", SCATTER, "h1"])
        taken = int(counted.result().stdout)
    # Binomial: 500 expected, standard deviation sqrt(1000 / 4) = 15.8; six of them, 2e-9.
    assert abs(taken - 500) <= 95


@pytest.mark.parametrize("rate", ["1", "0mbit", "fast", "-1gbit", "1 gbit", "1gbps"])
def test_invalid_rate_raises(rate: str) -> None:
    with pytest.raises(ValueError, match="such as 100mbit"):
        Hosts(2, rate=rate)


# ---- hosts ---------------------------------------------------------------------------------------


def said(ran: subprocess.CompletedProcess[str]) -> list[dict[str, object]]:
    """Return the output of each rank of run_hosts.py."""
    return [json.loads(line) for line in ran.stdout.splitlines()]


@needs_hosts
def test_allreduce_between_hosts_equals_the_oracle() -> None:
    with Hosts(2, rate="1gbit") as hosts:
        ranks = said(hosts.mpirun(1, [sys.executable, PROGRAM], timeout=120))
    expected = [collective_cases.expected(case, 2) for case in run_hosts.CASES]
    assert [rank["host"] for rank in ranks] == ["h0", "h1"]
    assert [rank["transport"] for rank in ranks] == ["mpi", "mpi"]
    assert [rank["files"] for rank in ranks] == [["rank-0"], ["rank-1"]]
    for index, rank in enumerate(ranks):
        assert rank["digests"] == [each[index] for each in expected]


@needs_hosts
def test_ranks_of_one_host_share_its_memory() -> None:
    with Hosts(1) as hosts:
        ranks = said(hosts.mpirun(2, [sys.executable, PROGRAM], timeout=120))
    assert [rank["host"] for rank in ranks] == ["h0", "h0"]
    assert [rank["transport"] for rank in ranks] == ["shm", "shm"]
    assert [rank["files"] for rank in ranks] == [["rank-0", "rank-1"]] * 2


# ---- failures ------------------------------------------------------------------------------------


def network_of(hosts: Hosts) -> str:
    """Return the identity of host 0's network namespace: "net:[4026532000]"."""
    return hosts.run(0, ["readlink", "/proc/self/ns/net"]).stdout.strip()


def is_gone(network: str) -> bool:
    """Return whether no process uses a network namespace, and no file keeps it."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "ns" / "net").readlink().name == network:
                return False
            if network in (process / "mountinfo").read_text():
                return False
        except OSError:  # the process has ended
            continue
    return True


def wait_until_gone(network: str) -> None:
    """Wait until the kernel has ended the killed processes; fail after 30 s."""
    deadline = time.monotonic() + 30
    while not is_gone(network):
        assert time.monotonic() < deadline, f"{network} is still in use"
        time.sleep(0.05)


@needs_hosts
def test_clean_up_after_the_block_and_after_an_exception() -> None:
    networks = []
    with Hosts(2) as hosts:
        networks.append(network_of(hosts))
        assert not is_gone(networks[0])

    def fail() -> None:
        with Hosts(2, rate="1gbit") as hosts:
            networks.append(network_of(hosts))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    for network in networks:
        wait_until_gone(network)
    with pytest.raises(RuntimeError, match="with Hosts"):
        hosts.run(0, ["true"])


def test_error_names_the_missing_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hosts_py.refusal() == "ip and tc not found: install iproute2"
    with pytest.raises(hosts_py.Unavailable, match="install iproute2"), Hosts(1):
        pass
