"""What a benchmark found: where and when, its numbers for machines, its tables for people.

A Report is one JSON file. It carries its tables with it, so that whoever collects reports can show
them without knowing what was measured.
"""

import io
import json
import os
import platform
import re
import shlex
import sys
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from cgx_ops._core import library
from cgx_ops._core.versions import versions

_WIDTH = 120


@dataclass(frozen=True)
class Table:
    """Cells, as text.

    Attributes:
        title: one line.
        columns: headings.
        rows: as many cells each as there are columns.
        text_columns: how many of the first columns are words; the others are numbers.
        sections: numbers of the rows that begin a group, which a line divides from the last.
        notes: sentences below it.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]
    text_columns: int = 1
    sections: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def print(self) -> None:
        """Print it, at least _WIDTH columns wide: what mpirun starts thinks that it has 80."""
        console = Console(width=max(Console().width, _WIDTH), highlight=False, markup=False)
        console.print(self._rich(box.SIMPLE_HEAD, self.title))
        for note in self.notes:
            console.print(note)

    def markdown(self) -> str:
        """Return it in Markdown, under a heading of the third level."""
        text = io.StringIO()
        Console(file=text, width=1000, markup=False).print(self._rich(box.MARKDOWN, None))
        rows = (line.strip() for line in text.getvalue().splitlines())
        return "\n\n".join([f"### {self.title}", "\n".join(filter(None, rows)), *self.notes])

    def _rich(self, style: box.Box, title: str | None) -> RichTable:
        lines = style is not box.MARKDOWN
        table = RichTable(title=title, title_justify="left", box=style, show_edge=not lines)
        for index, column in enumerate(self.columns):
            justify = "left" if index < self.text_columns else "right"
            table.add_column(column, justify=justify, no_wrap=True)
        for index, row in enumerate(self.rows):
            if lines and index in self.sections:
                table.add_section()
            table.add_row(*row)
        return table


@dataclass(frozen=True)
class Report:
    """A benchmark's findings.

    Attributes:
        part: which benchmark.
        settings: of this run: ranks, hosts, link, transport and the like.
        results: one record of plain values per measurement; units are in the names.
        tables: the same for people.
        machine: where, when and with which versions; filled in if it is not given.
        command: that made it; filled in too.
    """

    part: str
    settings: dict[str, Any]
    results: list[dict[str, Any]]
    tables: list[Table]
    machine: dict[str, Any] = field(default_factory=lambda: describe_machine())
    command: str = field(default_factory=lambda: command_line())

    def write(self, path: str | Path) -> None:
        """Write it as JSON; the folder is made if it is missing."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read what write() wrote."""
        fields = json.loads(Path(path).read_text())
        fields["tables"] = [Table(**table) for table in fields["tables"]]
        return cls(**fields)


def size_text(size: int) -> str:
    """Return bytes in powers of 1024: "64 KiB"."""
    power = next(power for power in (3, 2, 1, 0) if size % 1024**power == 0)
    return f"{size // 1024**power} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"


def time_text(seconds: float) -> str:
    """Return a time in three digits: "7.12 us", "36.5 ms", "1.20 s"."""
    unit, factor = next(
        (unit, factor)
        for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6))
        if seconds * factor >= 1 or unit == "us"
    )
    value = seconds * factor
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {unit}"


def rate_text(rate: float) -> str:
    """Return bytes a second in bits: "100 Mbit/s", "2.5 Gbit/s"."""
    return f"{rate * 8 / 1e9:g} Gbit/s" if rate >= 125e6 else f"{rate * 8 / 1e6:g} Mbit/s"


def describe_machine() -> dict[str, Any]:
    """Return the machine, its software and the time (UTC), as plain values."""
    build = library.describe()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu_target": build["cpu_target"],
        "mpi": library.describe_mpi()["library"],
        "versions": {name: version for name, version in versions().items() if version},
    }


def command_line() -> str:
    """Return the command that started this process, as one would type it."""
    ranks = os.environ.get("OMPI_COMM_WORLD_SIZE")
    launcher = ["mpirun", "-n", ranks] if ranks else []
    program = Path(sys.argv[0])
    module = ["-m", program.parent.name] if program.name == "__main__.py" else None
    words = [
        *launcher,
        "python",
        *(module or [os.path.relpath(program)]),
        *sys.argv[1:],
    ]
    return shlex.join(words)


def _cpu_model() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()  # ARM's list has no such line
