"""Report that this rank will not start a collective, so that the other ranks do not wait for it."""

import contextlib
from collections.abc import Iterator
from ctypes import byref
from typing import Protocol

from cgx_ops._core import library, structs
from cgx_ops.errors import KINDS, Closed, PeerFailed


class Ranks(Protocol):
    """A communicator."""

    id: int


def refuse(comm: Ranks, name: str, occurrence: int, reason: str) -> None:
    """Report to the other ranks that this one will not start a call; theirs raises the reason."""
    call = structs.Collective(comm=comm.id, name=library.encode(name), occurrence=occurrence)
    with contextlib.suppress(Closed):  # the other ranks have the reason already
        library.call("cgx_refuse", byref(call), KINDS.index(PeerFailed), library.encode(reason))


@contextlib.contextmanager
def or_refuse(comm: Ranks, name: str, occurrence: int = -1) -> Iterator[None]:
    """Refuse a call if the block before it fails, so that the other ranks do not wait.

    Args:
        comm: the ranks.
        name: name of the call.
        occurrence: index of the call among those of its name, counted from 0; -1: this rank's next
            one.
    """
    try:
        yield
    except Exception as error:
        refuse(comm, name, occurrence, reason_of(error))
        raise


def reason_of(error: BaseException) -> str:
    """Return the text by which other ranks report an error of this rank."""
    return f"{type(error).__name__}: {error}"
