"""Connect ranks that a launcher started without MPI: rank 0 listens, the others connect to it.

    with rendezvous.allgather(host, port, rank, size, seconds) as gather:
        blobs = gather(mine)  # any number of times

The connections last only until the ranks have a communicator. Each one starts with the number of
its rank; rank 0 closes any other connection. Rank 0 reports its errors to all connected ranks.
"""

import contextlib
import json
import socket
import struct
import time
from collections.abc import Iterator, Sequence

from cgx_ops._core import library
from cgx_ops._core.consistency import Gather
from cgx_ops.errors import CgxError, DeadlineExceeded, MismatchError, PeerFailed, SystemFailure

_MAGIC = b"cgx_ops rendezvous 1\n"
_HELLO_S = 2.0  # a rank sends its number immediately after it connects
_LONGEST_FRAME = 1 << 24
_HEADER = struct.Struct("!cI")  # the kind (values or the text of an error) and the length
_VALUES, _ERROR = b"+", b"-"
# The address to listen at, by the host that ranks connect to. Other hosts: all addresses.
_LOOPBACK = {"127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1", "::1": "::1"}


@contextlib.contextmanager
def allgather(host: str, port: int, rank: int, size: int, seconds: float) -> Iterator[Gather]:
    """Connect to the other ranks; yield a function that exchanges bytes, in rank order.

    Args:
        host: Name or address of rank 0's host.
        port: A free port there.
        rank: Rank of this process, from 0.
        size: Number of ranks.
        seconds: Time limit for all ranks to connect, and for each exchange.

    Raises:
        SystemFailure: Rank 0 cannot listen at this port.
        DeadlineExceeded: A rank did not connect in time.
        MismatchError: The ranks differ in their number or in the version of cgx_ops, or two
            processes have the same rank.
        PeerFailed: A rank closed its connection.
    """
    where = f"{host}:{port}"
    with contextlib.ExitStack() as stack:
        if rank > 0:
            connection = stack.enter_context(_connect(host, port, rank, size, seconds))
            yield lambda mine: _exchange_as_guest(connection, rank, size, where, mine, seconds)
            return
        guests = _Guests(where, size)
        stack.callback(guests.close)
        with guests.reporting():
            guests.welcome(_listen(host, port), seconds)
        yield lambda mine: _exchange_as_host(guests, mine, seconds)


# ---- rank 0 --------------------------------------------------------------------------------------


class _Guests:
    """The connections of the other ranks to rank 0."""

    def __init__(self, where: str, size: int) -> None:
        self.where, self.size = where, size
        self.by_rank: dict[int, socket.socket] = {}

    def welcome(self, listener: socket.socket, seconds: float) -> None:
        """Accept connections until all ranks have connected."""
        deadline = time.monotonic() + seconds
        with listener:
            while len(self.by_rank) < self.size - 1:
                listener.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    connection = listener.accept()[0]
                except TimeoutError:
                    missing = sorted(set(range(1, self.size)) - set(self.by_rank))
                    raise DeadlineExceeded(
                        f"rank 0 waited {seconds:g} s at {self.where} for ranks {missing} of "
                        f"{self.size}. All ranks must make the call, and must reach this address"
                    ) from None
                self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        connection.settimeout(_HELLO_S)
        try:
            if _receive(connection, len(_MAGIC)) != _MAGIC:
                raise ValueError
            hello = json.loads(_receive_frame(connection))
            rank, size, version = hello["rank"], hello["size"], hello["version"]
        except (OSError, ValueError, KeyError, TypeError, CgxError):  # not one of the ranks
            connection.close()
            return
        twin = rank in self.by_rank or rank == 0
        self.by_rank[-1 - len(self.by_rank) if twin else rank] = connection
        if twin:
            raise MismatchError(
                f"two processes are rank {rank} at {self.where}: give each process its own RANK, "
                "and each job its own MASTER_PORT"
            )
        if (size, version) != (self.size, library.version()):
            raise MismatchError(
                f"rank 0 has {self.size} ranks and cgx_ops {library.version()}, rank {rank} has "
                f"{size} ranks and cgx_ops {version}: both must be equal on all ranks"
            )

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Send an error that is raised inside to all connected ranks."""
        try:
            yield
        except CgxError as error:
            for connection in self.by_rank.values():
                with contextlib.suppress(OSError):
                    connection.settimeout(_HELLO_S)
                    _send_frame(connection, str(error).encode(), _ERROR)
            raise

    def close(self) -> None:
        for connection in self.by_rank.values():
            connection.close()


def _listen(host: str, port: int) -> socket.socket:
    address = _LOOPBACK.get(host, "")
    dual = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or ":" in address else socket.AF_INET
    try:
        return socket.create_server(
            (address, port), family=family, dualstack_ipv6=dual, backlog=1024
        )
    except (OSError, OverflowError) as error:
        raise SystemFailure(
            f"rank 0 cannot listen at port {port} (MASTER_PORT + 2) for the other ranks: {error}. "
            "Give the job another MASTER_PORT; the two ports after it must be free, too"
        ) from error


def _exchange_as_host(guests: _Guests, mine: bytes, seconds: float) -> Sequence[bytes]:
    blobs = [mine]
    with guests.reporting():
        for rank in range(1, guests.size):
            guests.by_rank[rank].settimeout(seconds)
            with _named(f"rank {rank}", guests.where, seconds):
                blobs.append(_receive_frame(guests.by_rank[rank]))
    for rank, connection in guests.by_rank.items():
        with _named(f"rank {rank}", guests.where, seconds):
            _send_frame(connection, b"".join(blobs))
    return blobs


# ---- the other ranks -----------------------------------------------------------------------------


def _connect(host: str, port: int, rank: int, size: int, seconds: float) -> socket.socket:
    deadline = time.monotonic() + seconds
    while True:
        try:
            connection = socket.create_connection((host, port), max(0.1, _left(deadline)))
            # TCP may connect a port to itself.
            if connection.getsockname() != connection.getpeername():
                break
            connection.close()
            failure: OSError = ConnectionRefusedError("no process listens there")
        except OSError as error:  # rank 0 may not listen yet, or its name may not resolve yet
            failure = error
        if _left(deadline) <= 0:
            raise DeadlineExceeded(
                f"rank {rank} of {size} tried for {seconds:g} s to reach rank 0 at {host}:{port} "
                f"(MASTER_ADDR, MASTER_PORT + 2): {failure}. All ranks must make the call, and "
                "must reach this address"
            )
        time.sleep(0.05)
    hello = {"rank": rank, "size": size, "version": library.version()}
    connection.settimeout(seconds)
    with _named("rank 0", f"{host}:{port}", seconds):
        connection.sendall(_MAGIC)
        _send_frame(connection, json.dumps(hello).encode())
    return connection


def _exchange_as_guest(
    connection: socket.socket, rank: int, size: int, where: str, mine: bytes, seconds: float
) -> Sequence[bytes]:
    # Rank 0 needs up to `seconds` to report a late rank, so wait twice as long.
    connection.settimeout(2 * seconds)
    with _named("rank 0", where, 2 * seconds):
        _send_frame(connection, mine)
        blobs = _receive_frame(connection)
    if len(blobs) != size * len(mine):
        raise MismatchError(
            f"rank {rank} sent {len(mine)} bytes to {where}, and received {len(blobs)} bytes from "
            f"{size} ranks. Another job may use this port: give each job its own MASTER_PORT"
        )
    return [blobs[peer * len(mine) : (peer + 1) * len(mine)] for peer in range(size)]


# ---- frames --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _named(peer: str, where: str, seconds: float) -> Iterator[None]:
    """Replace the errors of a socket by errors that name the peer."""
    try:
        yield
    except TimeoutError:
        raise DeadlineExceeded(
            f"{peer} sent nothing for {seconds:g} s while the ranks connected at {where}: check "
            "whether it runs, or raise CGX_TIMEOUT"
        ) from None
    except OSError as error:
        raise PeerFailed(
            f"{peer} left while the ranks connected at {where} ({error}); its own error has the "
            "cause"
        ) from None


def _send_frame(connection: socket.socket, data: bytes, kind: bytes = _VALUES) -> None:
    connection.sendall(_HEADER.pack(kind, len(data)) + data)


def _receive_frame(connection: socket.socket) -> bytes:
    kind, length = _HEADER.unpack(_receive(connection, _HEADER.size))
    if length > _LONGEST_FRAME or kind not in (_VALUES, _ERROR):
        raise ConnectionError("it sent an invalid message")
    data = _receive(connection, length)
    if kind == _ERROR:
        raise PeerFailed(f"rank 0: {data.decode(errors='replace')}")
    return data


def _receive(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise ConnectionResetError("it closed the connection")
        data += part
    return bytes(data)


def _left(deadline: float) -> float:
    return deadline - time.monotonic()
