"""Resources of a process, which must not grow.

- `Resources`: the number of descriptors and threads, with the names of new descriptors.
- `used` and `grown`: memory and mappings, too, by more than ALLOWED after many rounds.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from pathlib import Path

# How much more a program may use after many rounds. The allocator keeps or returns some MiB of
# pages at any time. gloo's threads end a moment after a group that was replaced.
ALLOWED = {
    "descriptors": 2,
    "threads": 2,
    "mappings": 20,
    "shared mappings": 2,
    "resident KiB": 8_000,
}


def used() -> dict[str, int]:
    """Return what this process uses of the system; the keys are those of ALLOWED."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "mappings": len(maps),
        "shared mappings": sum("memfd" in line or "/dev/shm" in line for line in maps),
        "resident KiB": int(status["VmRSS"].split()[0]),
    }


def grown(before: dict[str, int], after: dict[str, int]) -> str:
    """Describe what has grown by more than ALLOWED; "" if nothing."""
    return "; ".join(
        f"{name}: {before[name]} to {after[name]}"
        for name, allowed in ALLOWED.items()
        if after[name] > before[name] + allowed
    )


class Resources:
    """Descriptors and threads of this process."""

    def __init__(self) -> None:
        gc.collect()
        self.descriptors = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
                self.descriptors.append(os.readlink(f"/proc/self/fd/{name}"))
        self.threads = len(os.listdir("/proc/self/task"))

    def more_than(self, before: Resources) -> str:
        """Describe what has increased; "" if nothing."""
        # gloo keeps some descriptors of an interrupted group; those of this library have these
        # names.
        frameworks = {"torch", "jax"} & set(sys.modules)
        if frameworks:
            of_core = [each for each in self.descriptors if "cgx" in each or "pidfd" in each]
            had = [each for each in before.descriptors if "cgx" in each or "pidfd" in each]
        else:
            of_core, had = self.descriptors, before.descriptors
        if len(of_core) > len(had):
            new = list(of_core)
            for each in had:
                with contextlib.suppress(ValueError):
                    new.remove(each)
            return f"{len(of_core)} descriptors, {len(had)} before: {new}"
        if frameworks:  # whose pools of threads grow
            return ""
        made = max(before.threads, int(os.environ["CGX_THREADS"]))  # the core's pool is made once
        return f"{self.threads} threads, {before.threads} before" if self.threads > made else ""


class ForeignFiles:
    """Files that reuse the numbers of descriptors that the library has closed."""

    def __init__(self, size: int) -> None:
        self._files = [os.memfd_create(f"foreign {number}") for number in range(32)]
        for file in self._files:
            os.ftruncate(file, size)

    def close(self) -> None:
        for file in self._files:
            os.close(file)
