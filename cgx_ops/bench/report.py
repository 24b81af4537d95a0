"""A benchmark's report: settings, results for programs, and tables for people.

A Report is one JSON file. It contains its tables, so that other programs can show them without
knowledge of the benchmark.
"""

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

from cgx_ops._core import library
from cgx_ops._core.text_table import Table
from cgx_ops._core.versions import versions


@dataclass(frozen=True)
class Report:
    """The results of a benchmark.

    Attributes:
        part: Name of the benchmark.
        settings: Settings of this run: ranks, hosts, link, transport, verdict.
        results: One record of plain values per measurement; names include the units.
        tables: The results as tables.
        machine: Machine, time and versions; filled in by default.
        command: The command line; filled in by default.
    """

    part: str
    settings: dict[str, Any]
    results: list[dict[str, Any]]
    tables: list[Table]
    machine: dict[str, Any] = field(default_factory=lambda: describe_machine())
    command: str = field(default_factory=lambda: command_line())

    def write(self, path: str | Path) -> None:
        """Write the report as JSON. Missing folders are created."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a report that write() wrote."""
        fields = json.loads(Path(path).read_text())
        fields["tables"] = [Table(**table) for table in fields["tables"]]
        return cls(**fields)


def describe_machine() -> dict[str, Any]:
    """Return the machine, its software and the time (UTC) as plain values."""
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
    """Return the command that started this process, as a user would type it."""
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
    return found[1] if found else platform.machine()  # ARM's /proc/cpuinfo has no such line
