"""Exchange bytes among the ranks of a communicator, and find an address to reach a rank.

Frameworks use these functions before their own collectives work.
"""

import socket

import numpy as np

from cgx_ops.communicator import Communicator
from cgx_ops.config import Config

_BLOCK = 512  # bytes of the first message: a length of four bytes, then data


def exchange(mine: bytes, name: str, communicator: Communicator) -> list[bytes]:
    """Return the bytes of all ranks, in rank order. The lengths may differ.

    Args:
        mine: This rank's bytes. Up to 508 need one collective, more need two.
        name: Name of the collectives, equal on all ranks.
        communicator: The ranks.
    """
    data = len(mine).to_bytes(4, "little") + mine
    rows = _gather(data[:_BLOCK].ljust(_BLOCK, b"\0"), name, communicator)
    lengths = [4 + int.from_bytes(row[:4], "little") for row in rows]
    if (longest := max(lengths)) > _BLOCK:
        rest = _gather(data[_BLOCK:].ljust(longest - _BLOCK, b"\0"), name, communicator)
        rows = [row + more for row, more in zip(rows, rest, strict=True)]
    return [row[4:length] for row, length in zip(rows, lengths, strict=True)]


def _gather(data: bytes, name: str, communicator: Communicator) -> list[bytes]:
    """Exchange bytes of equal length on all ranks, as float32 numbers, which are exact."""
    numbers = np.frombuffer(data, np.uint8).astype(np.float32)
    rows = communicator.all_gather(numbers[None], Config(bits=32), name=name)
    return [row.astype(np.uint8).tobytes() for row in rows]


def free_address(hosts: list[str]) -> tuple[str, int]:
    """Return an address of this host that processes on all hosts can reach, and a free port.

    Args:
        hosts: Host names of all ranks; hosts[0] is this one.
    """
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    others = [host for host in hosts if host != hosts[0]]
    return (_address_towards(others[0]) if others else "127.0.0.1"), port


def _address_towards(host: str) -> str:
    """Return the address from which this host sends to another. It sends nothing."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError:  # the name cannot be resolved from here
        return socket.getfqdn()
