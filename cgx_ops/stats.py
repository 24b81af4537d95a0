"""What the communicators of this process have done: counts, bytes before and after, time per phase.

libcgx counts as collectives end; here its numbers are read and given names and units. Any thread
may ask at any time, also while collectives are in flight. Differences of two readings describe what
ran in between.
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
    """What one rank of a communicator has done since its creation.

    `collectives`, the bytes (but for `bytes_sent`) and the times are of collectives that ended
    without error; making other communicators from this one is none. Times are sums over
    collectives, which overlap, so they may exceed the time that passed; of collectives that run one
    after another, agree_seconds + move_seconds is the time they took.

    Attributes:
        name: of the communicator.
        rank: this one's, from 0.
        size: number of ranks.
        transport: how bytes move: "self", "thread", "shm", "hybrid" (shm and mpi), "mpi",
            "hybrid_tcp" (shm and tcp) or "tcp"; "framework" where torch's or XLA's collectives do.
        collectives: how many.
        bytes_in: of their input values on this rank, as they were given. What lies in no segment
            does not count.
        bytes_plain: what they would have sent uncompressed, by the algorithms that send least:
            for n ranks bytes_in times 2(n-1)/n (allreduce), (n-1)/n (reduce_scatter) or n-1
            (all_gather).
        bytes_sent: what this rank handed to its peers, over all peers: encoded values and headers,
            those of collectives in flight or failed included.
        agree_seconds: from a call until every rank had made the same call: mostly the time that
            slower ranks were waited for.
        move_seconds: from then until the result was there: exchange and arithmetic. All of one
            rank's, which copies.
        compute_seconds: of both, inside the algorithm on this rank: encode, sum, decode, hand over.
            The rest is waiting, and the transport's own work.
        strangers: connections that were refused while the ranks met by TCP: whoever made them did
            not know the communicator's key, or stood for a rank that was there already.
        auto: what bits_for() and auto_bits choose here from which size on, and by what times; "" if
            nobody asked for it.
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
    strangers: int
    auto: str = ""

    @property
    def ratio(self) -> float:
        """bytes_plain / bytes_sent, headers included: 4 bits approach 7.76. NaN if none was sent.

        Small tensors stay below what their bits promise, even below 1: headers weigh there, and
        they go straight from every rank to every other, which costs fewer steps and more bytes.
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
    """Return the Stats of the communicator of this id.

    Raises:
        Closed, NotFound: there is none any more, or never was.
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
        strangers=info.strangers,
        auto=verdicts.in_words(comm),
    )


class StatsByName(dict[str, Stats]):
    """Stats by name; print() shows them as a table."""

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
    """Return what this process has sent since it started, by closed communicators too."""
    found = structs.Traffic()
    library.call(function, byref(found))
    return found


def _carried() -> Stats | None:
    """Return what carriers of frameworks have sent, over all groups; None: nothing."""
    found = traffic("cgx_carried_traffic")
    if not found.collectives:
        return None
    values: dict[str, Any] = dict.fromkeys(("rank", "size", "strangers"), 0)
    values |= dict.fromkeys(("agree_seconds", "move_seconds", "compute_seconds"), math.nan)
    counts = ("collectives", "bytes_in", "bytes_plain", "bytes_sent")
    values |= {name: getattr(found, name) for name in counts}
    return Stats(name="carrier", transport="framework", **values)


def stats() -> StatsByName:
    """Return the Stats of every communicator of this process that is not closed, by name.

    Oldest first; those that PyTorch and JAX made are among them. What carrier="c10d" and "xla" have
    sent is the last, "carrier", without a rank or times. print() shows a table. Starts nothing: the
    world is there once init() or a collective has run.
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
    """Return a number of bytes in decimal units: "999 bytes", "1.5 kB", "64.0 MB"."""
    if count < 1000:
        return f"{count} bytes"
    power = next(power for power in (1, 2, 3, 4) if count < 1000 ** (power + 1) or power == 4)
    return f"{count / 1000**power:.1f} {'kMGT'[power - 1]}B"
