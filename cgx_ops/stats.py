"""Statistics of the communicators of this process: counts, bytes, and time per phase.

libcgx counts when a collective ends; this module gives the numbers names and units. Any thread may
read them at any time, also while collectives are in flight. The difference between two readings
describes the collectives in between.
"""

import contextlib
import math
from ctypes import byref
from dataclasses import dataclass
from typing import Any

from cgx_ops._core import library, structs, verdicts
from cgx_ops.errors import Closed


@dataclass(frozen=True)
class Stats:
    """The statistics of one rank of a communicator since its creation.

    `collectives`, the times and the bytes (except `bytes_sent`) count collectives that ended
    without an error. Times are sums over collectives. Collectives overlap, so a sum may exceed the
    elapsed time. If collectives run one after another, they took `agree_seconds + move_seconds`.

    Attributes:
        name: Name of the communicator.
        rank: This rank, from 0.
        size: Number of ranks.
        transport: How bytes move: "self", "thread", "shm", "hybrid" (shm and mpi), "mpi",
            "hybrid_tcp" (shm and tcp) or "tcp"; "framework" if PyTorch's or XLA's collectives move
            them.
        collectives: Number of collectives.
        bytes_in: Bytes of the input on this rank. Elements outside all segments do not count.
        bytes_plain: Bytes that an uncompressed collective would send at least. For n ranks this is
            `bytes_in` times 2(n-1)/n (allreduce), (n-1)/n (reduce_scatter) or n-1 (all_gather). For
            all_to_all it is the size of the blocks for other ranks.
        bytes_sent: Bytes that this rank sent to all peers: encoded values and headers. Collectives
            in flight and failed ones count, too.
        agree_seconds: Time from a call until all ranks had made the same call. Mostly this is
            waiting for slower ranks.
        move_seconds: Time from then until the result was complete: exchange and arithmetic.
        compute_seconds: The part of both that this rank spent in the algorithm: encode, sum,
            decode, post messages. The rest is waiting, and work of the transport.
        rejected_connections: TCP connections that were refused while the ranks connected. The
            peer did not have the communicator's key, or used the rank of a connected process.
        auto: The bits that bits_for() and auto_bits chose by message size, and the measured times;
            "" if neither was used.

    Example:
        >>> import numpy as np
        >>> from cgx_ops import Communicator
        >>> [comm] = Communicator.local(1, "example")
        >>> result = comm.allreduce(np.zeros(1000, np.float32))
        >>> stats = comm.stats()
        >>> stats.collectives, stats.bytes_in, stats.transport
        (1, 4000, 'self')
        >>> comm.close()
    """

    name: str
    rank: int
    size: int
    transport: str
    collectives: int
    bytes_in: int
    bytes_plain: int
    bytes_sent: int
    agree_seconds: float
    move_seconds: float
    compute_seconds: float
    rejected_connections: int
    auto: str = ""

    @property
    def ratio(self) -> float:
        """The compression ratio, bytes_plain / bytes_sent; NaN if nothing was sent.

        Headers count: 4 bits approach 7.76. Small messages have lower ratios, even below 1, because
        headers weigh more, and because each rank sends them to all others in one step.
        """
        return self.bytes_plain / self.bytes_sent if self.bytes_sent else math.nan

    def __str__(self) -> str:
        sent = f"{with_unit(self.bytes_sent)} sent"
        if self.bytes_sent:
            sent += f" instead of {with_unit(self.bytes_plain)} (ratio {self.ratio:.2f})"
        return (
            f"{self.name}, rank {self.rank} of {self.size} ({self.transport}): "
            f"{self.collectives} collectives, {with_unit(self.bytes_in)} in, {sent}; "
            f"agree {self.agree_seconds:.3f} s, move {self.move_seconds:.3f} s, "
            f"compute {self.compute_seconds:.3f} s" + (f"; auto: {self.auto}" if self.auto else "")
        )


def read_stats(comm: int) -> Stats:
    """Return the Stats of a communicator by its id.

    Raises:
        Closed: close() was called.
        NotFound: No communicator had this id.
    """
    info = structs.CommInfo()
    library.call("cgx_comm_info", comm, byref(info))
    return Stats(
        name=library.text(info.name),
        rank=info.rank,
        size=info.size,
        transport=library.text(info.transport),
        collectives=info.collectives,
        bytes_in=info.bytes_in,
        bytes_plain=info.bytes_plain,
        bytes_sent=info.bytes_sent,
        agree_seconds=info.agree_ns / 1e9,
        move_seconds=info.move_ns / 1e9,
        compute_seconds=info.compute_ns / 1e9,
        rejected_connections=info.rejected_connections,
        auto=verdicts.in_words(comm),
    )


class StatsByName(dict[str, Stats]):
    """Stats by communicator name; print() shows them as a table."""

    def __str__(self) -> str:
        if not self:
            return "no communicators"
        titles = ("name", "rank", "transport", "collectives", "sent", "instead of", "ratio")
        rows = [titles, *map(_row, self.values())]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        aligned = (
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        )
        return "\n".join(line.rstrip() for line in aligned)


def _row(entry: Stats) -> tuple[str, ...]:
    return (
        entry.name,
        f"{entry.rank} of {entry.size}" if entry.size else "-",
        entry.transport,
        str(entry.collectives),
        with_unit(entry.bytes_sent),
        with_unit(entry.bytes_plain),
        f"{entry.ratio:.2f}" if entry.bytes_sent else "-",
    )


def traffic(function: str = "cgx_traffic") -> structs.Traffic:
    """Return what this process has sent since it started, including closed communicators."""
    found = structs.Traffic()
    library.call(function, byref(found))
    return found


def _carried() -> Stats | None:
    """Return what frameworks' collectives have sent over all groups; None if nothing."""
    found = traffic("cgx_carried_traffic")
    if not found.collectives:
        return None
    values: dict[str, Any] = dict.fromkeys(("rank", "size", "rejected_connections"), 0)
    values |= dict.fromkeys(("agree_seconds", "move_seconds", "compute_seconds"), math.nan)
    counts = ("collectives", "bytes_in", "bytes_plain", "bytes_sent")
    values |= {name: getattr(found, name) for name in counts}
    return Stats(name="carrier", transport="framework", **values)


def stats() -> StatsByName:
    """Return the Stats of all open communicators of this process, by name, the oldest first.

    The communicators of PyTorch and JAX are among them. The last entry, "carrier", has what the
    frameworks' own collectives sent (`carrier="c10d"` or `"xla"`); it has no rank and no times. The
    call starts nothing: the communicator "world" appears once init() or a collective has run.

    Returns:
        A dict that print() shows as a table.

    Raises:
        CgxError: The statistics of a communicator cannot be read.

    Example:
        >>> import cgx_ops
        >>> communicator = cgx_ops.init()
        >>> print(cgx_ops.stats()["world"].transport)
        self
    """
    found = []
    comm = -1
    while (comm := library.call_for_id("cgx_comm_next", comm)) >= 0:
        with contextlib.suppress(Closed):  # another thread has just closed it
            found.append(read_stats(comm))
    if carried := _carried():
        found.append(carried)
    return StatsByName((entry.name, entry) for entry in found)


def with_unit(count: int) -> str:
    """Return bytes in decimal units: "999 bytes", "1.5 kB", "64.0 MB"."""
    if count < 1000:
        return f"{count} bytes"
    power = next(power for power in (1, 2, 3, 4) if count < 1000 ** (power + 1) or power == 4)
    return f"{count / 1000**power:.1f} {'kMGT'[power - 1]}B"
