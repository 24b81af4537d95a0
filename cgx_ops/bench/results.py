"""Results of an allreduce: one contender at one size, derived quantities, and the table.

Terms are those of nccl-tests: algbw = bytes of a rank's tensor / time; busbw = algbw * 2(n-1)/n for
n ranks, the bytes per second that each rank sends at least without compression.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from cgx_ops._core.text_table import Table
from cgx_ops._core.units import size_text, time_text


@dataclass(frozen=True)
class Result:
    """One contender at one size.

    Attributes:
        contender: Its name in PEERS, or from cgx_name().
        ranks: Number of ranks.
        bytes: Bytes of a rank's float32 tensor.
        seconds: Time of a call on the slowest rank; the median over rounds.
        lower: First quartile of the same.
        upper: Third quartile of the same.
        rounds: Number of rounds.
        error: L2 norm of the result's error, divided by that of the exact sum.
        limit_seconds: Lower bound of the time of any contender that sends as many bytes.
        exact_seconds: Time of the fastest exact peer; None if none was measured.
    """

    contender: str
    ranks: int
    bytes: int
    seconds: float
    lower: float
    upper: float
    rounds: int
    error: float
    limit_seconds: float
    exact_seconds: float | None

    @property
    def algbw(self) -> float:
        """Bytes of the tensor per second."""
        return self.bytes / self.seconds

    @property
    def busbw(self) -> float:
        """Bytes per second that a rank would send uncompressed."""
        return self.algbw * 2 * (self.ranks - 1) / self.ranks

    @property
    def speedup(self) -> float | None:
        """The time of the fastest exact peer, divided by this one's."""
        return None if self.exact_seconds is None else self.exact_seconds / self.seconds

    @property
    def of_limit(self) -> float:
        """The time limit divided by the time; 1 is the limit."""
        return self.limit_seconds / self.seconds

    def record(self) -> dict[str, Any]:
        """Return everything as plain values."""
        derived = ("algbw", "busbw", "speedup", "of_limit")
        return asdict(self) | {name: getattr(self, name) for name in derived}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        """Return the Result of a record()."""
        return cls(**{field.name: record[field.name] for field in fields(cls)})


def limit_seconds(copy: float, wire_bytes: int, hosts: int, link_rate: float | None) -> float:
    """Return a lower bound of the time of any allreduce.

    Args:
        copy: Seconds of a memcpy of the tensor: each rank reads its values and writes the result.
        wire_bytes: Encoded bytes of a rank's tensor.
        hosts: Number of hosts; each one sends wire_bytes * 2(hosts-1)/hosts.
        link_rate: Bytes per second that a host can send; None if unknown.
    """
    if link_rate is None:
        return copy
    return max(copy, wire_bytes * 2 * (hosts - 1) / hosts / link_rate)


_COLUMNS = [
    "size",
    "contender",
    "time",
    "quartiles",
    "algbw",
    "busbw",
    "speed-up",
    "of limit",
]
_NOTES = [
    "Time: of the slowest rank, median over rounds. algbw, busbw: GB/s of float32 values, as in "
    "nccl-tests. Speed-up: relative to the fastest exact peer. Of limit: the shortest possible "
    "time to move the bytes, divided by the time. Error: L2, relative to the exact sum.",
]


def table_of(title: str, results: list[Result], notes: list[str]) -> Table:
    """Return a table with one row per result, one section per size, and the notes below."""
    sizes = [result.bytes for result in results]
    sections = [index for index in range(1, len(sizes)) if sizes[index] != sizes[index - 1]]
    rows = [
        [
            size_text(result.bytes),
            result.contender,
            time_text(result.seconds),
            f"{time_text(result.lower)} - {time_text(result.upper)}",
            f"{result.algbw / 1e9:.3g}",
            f"{result.busbw / 1e9:.3g}",
            "" if result.speedup is None else f"{result.speedup:.2f}",
            f"{result.of_limit:.0%}",
            f"{result.error:.1e}",
        ]
        for result in results
    ]
    return Table(title, [*_COLUMNS, "error"], rows, 2, sections, [*_NOTES, *notes])
