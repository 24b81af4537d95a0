"""Faults of this process's TCP connections: their packets are lost for a while, or they close."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
from collections.abc import Iterator

# Linux's names, which Python lacks. The filter is one instruction of classic BPF: return 0, drop.
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_DROP = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0), 8)
_DROP_ALL = struct.pack("HP", 1, ctypes.addressof(_DROP))


@contextlib.contextmanager
def _connections(but_to: int | None) -> Iterator[list[socket.socket]]:
    """Yield duplicates of this process's TCP connections, except those to a port."""
    with contextlib.ExitStack() as stack:
        found = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # it was closed, or is not connected
                if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                    continue
                each = stack.enter_context(socket.socket(fileno=os.dup(int(name))))
                is_ip = each.family in (socket.AF_INET, socket.AF_INET6)
                if is_ip and each.getpeername()[1] != but_to:
                    found.append(each)
        yield found


@contextlib.contextmanager
def away(but_to: int | None) -> Iterator[None]:
    """Lose everything that arrives at this process's TCP connections, inside `with`.

    Both ends send again, like after a link that was away.

    Args:
        but_to: the port of a server whose connections stay.
    """
    with _connections(but_to) as found:
        for each in found:
            each.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _DROP_ALL)
        try:
            yield
        finally:
            for each in found:
                each.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def cut(but_to: int | None) -> None:
    """Close this process's TCP connections under the library, like a middlebox that forgets them.

    Args:
        but_to: the port of a server whose connections stay.
    """
    with _connections(but_to) as found:
        for each in found:
            with contextlib.suppress(OSError):  # the peer has closed it
                each.shutdown(socket.SHUT_RDWR)
