"""What a benchmark found: where and when, its numbers for machines, its tables for people.

A Report is one JSON file. It carries its tables with it, so that whoever collects reports can show
them without knowing what was measured.
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
from cgx_ops._core.table import Table
from cgx_ops._core.versions import versions


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
