"""Ranks that agree on something before their framework can: over cgx's own communicator."""

import socket

import numpy as np

from cgx_ops.communicator import Communicator
from cgx_ops.config import Config

_BLOB = 512  # bytes that a rank may say at a time


def exchange(text: str, name: str, world: Communicator) -> list[str]:
    """Give every rank's text, of at most 512 bytes, to every rank, in rank order.

    Args:
        text: what this rank says; what is longer is cut.
        name: of the collective, equal on all ranks.
        world: the ranks.
    """
    data = text.encode()[:_BLOB].decode(errors="ignore").encode()  # whole characters
    blob = np.zeros(_BLOB, np.float32)
    blob[: len(data)] = np.frombuffer(data, np.uint8)
    blobs = world.all_gather(blob, Config(bits=32), name=name)
    rows = np.asarray(blobs).reshape(world.size, _BLOB).astype(np.uint8)
    return [row.tobytes().rstrip(b"\0").decode() for row in rows]


def free_address(hosts: list[str]) -> tuple[str, int]:
    """Return an address of this host that processes on all the hosts can reach, and a free port.

    Args:
        hosts: host names of all ranks; hosts[0] is this one.
    """
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    others = [host for host in hosts if host != hosts[0]]
    return (_address_towards(others[0]) if others else "127.0.0.1"), port


def _address_towards(host: str) -> str:
    """Return the address that this host sends from to another; nothing is sent to find out."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError:  # the name cannot be resolved from here
        return socket.getfqdn()
