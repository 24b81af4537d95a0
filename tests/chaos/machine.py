"""The machine: wake-up delays, leftovers, and where a process is stuck."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from pathlib import Path

_NAP = 0.01  # seconds


class Lateness(threading.Thread):
    """Measures how late this machine wakes sleeping threads; time limits must allow for this.

    Attributes:
        worst: the largest delay so far, in seconds.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.worst = 0.0
        self._samples: deque[tuple[float, float]] = deque(maxlen=20_000)
        self.start()

    def run(self) -> None:
        while True:
            asked = time.monotonic() + _NAP
            time.sleep(_NAP)
            now = time.monotonic()
            self._samples.append((now, now - asked))
            self.worst = max(self.worst, now - asked)

    def slack(self, since: float) -> float:
        """Return the extra seconds to allow for something that began at `since`.

        Several threads must be woken one after another until a rank detects a failure.
        """
        return 0.2 + 10 * self.worst_since(since)

    def worst_since(self, since: float) -> float:
        """Return the largest delay since then, in seconds."""
        return max((late for at, late in list(self._samples) if at >= since), default=0)


# ---- Leftovers -----------------------------------------------------------------------------------


def alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    return state(pid) not in ("", "Z", "X")


def state(pid: int) -> str:
    """Return its state from /proc/PID/stat: "T" is stopped; "" does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def wait_gone(pid: int, seconds: float) -> bool:
    """Wait until a process has ended."""
    until = time.monotonic() + seconds
    while alive(pid):
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def session(leader: int) -> list[int]:
    """Return the running processes of a session."""
    found = []
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == leader and alive(pid):
                found.append(pid)
    return found


def shared_memory_of(pid: int | str) -> frozenset[str]:
    """Return the paths in /dev/shm that a process has mapped or open."""
    paths = [line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            paths.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return frozenset(path for path in paths if path.startswith("/dev/shm/"))


# ---- Stuck processes -----------------------------------------------------------------------------


def describe(pid: int) -> str:
    """Describe where each thread of a process waits; its Python stack goes to its own log."""
    lines = []
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGUSR1)
        for task in sorted(os.listdir(f"/proc/{pid}/task")):
            folder = Path(f"/proc/{pid}/task/{task}")
            status = (folder / "status").read_text().splitlines()
            kept = [line for line in status if line.startswith(("Name", "State"))]
            lines.append(f"  {task} {' '.join(kept)} wchan {(folder / 'wchan').read_text()}")
    if shutil.which("gdb"):
        command = ["gdb", "-p", str(pid), "-batch", "-ex", "thread apply all backtrace 12"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            lines += [
                "  " + line for line in done.stdout.splitlines() if line.startswith(("#", "Thread"))
            ]
    return "\n".join(lines)
