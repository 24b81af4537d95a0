"""Results of an allreduce: one contender at one size, what follows from it, and the table.

Terms, as nccl-tests have them: algbw = bytes of a rank's tensor / time; busbw = algbw * 2(n-1)/n
for n ranks, which is what each rank must send, uncompressed, by the best algorithm.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from cgx_ops._core.table import Table
from cgx_ops._core.units import size_text, time_text


@dataclass(frozen=True)
class Result:
    """One contender at one size.

    Attributes:
        contender: its name in PEERS, or as cgx_name() gives it.
        ranks: how many.
        bytes: of a rank's fp32 tensor.
        seconds: of a call on the slowest rank; the median over rounds.
        lower: first quartile of the same.
        upper: third quartile.
        rounds: how many.
        error: L2 norm of the result's error over that of the exact sum.
        limit_seconds: no contender that sends so many bytes can be faster here.
        exact_seconds: of the fastest exact peer; None if none ran.
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
        """Bytes of the tensor a second."""
        return self.bytes / self.seconds

    @property
    def busbw(self) -> float:
        """Bytes a second that a rank would send uncompressed."""
        return self.algbw * 2 * (self.ranks - 1) / self.ranks

    @property
    def speedup(self) -> float | None:
        """How many times faster than the fastest exact peer."""
        return None if self.exact_seconds is None else self.exact_seconds / self.seconds

    @property
    def of_limit(self) -> float:
        """Share of the limit that is reached: 1 is the limit."""
        return self.limit_seconds / self.seconds

    def record(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        derived = ("algbw", "busbw", "speedup", "of_limit")
        return asdict(self) | {name: getattr(self, name) for name in derived}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        """Return what record() was made of."""
        return cls(**{field.name: record[field.name] for field in fields(cls)})


def limit_seconds(copy: float, wire_bytes: int, hosts: int, link_rate: float | None) -> float:
    """Return the time that no allreduce can go below.

    Args:
        copy: seconds of a memcpy of the tensor: a rank reads its values and writes the result.
        wire_bytes: of a rank's tensor as it travels.
        hosts: over which the ranks are spread; a host sends wire_bytes * 2(hosts-1)/hosts.
        link_rate: bytes a second that a host can send; None: not known.
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
    "Time: median over rounds of the slowest rank. algbw, busbw: GB/s of fp32 values, as in "
    "nccl-tests. Speed-up: over the fastest exact peer. Of limit: the least time in which the "
    "bytes can move, over the time. Error: L2, relative to the exact sum.",
]


def table_of(title: str, results: list[Result], notes: list[str]) -> Table:
    """Return a row for each result, a section for each size, and the notes below."""
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
