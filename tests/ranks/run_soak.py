"""Rank program of soak: runs one load and prints, window by window, what it measured, as JSON.

    run_soak.py LOAD COUNT THREADS

THREADS ranks in this process (0: this process is a rank that mpirun started).
"""

import contextlib
import gc
import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from soak.loads import BATCHES, LOADS, WINDOWS

import cgx_ops
from cgx_ops import Communicator


@dataclass(frozen=True)
class Window:
    """What a process has after a part of the calls.

    Attributes:
        resident: KiB of memory.
        descriptors, threads: how many.
        seconds: of a call, in the fastest of the window's batches.
    """

    resident: int
    descriptors: int
    threads: int
    seconds: float


REST = 40.0  # seconds

_measuring = threading.Lock()  # it opens files, which another rank of this process would count


def measure(seconds: float) -> Window:
    with _measuring:
        return _measure(seconds)


def _measure(seconds: float) -> Window:
    gc.collect()
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return Window(
        resident=int(fields["VmRSS"].split()[0]),
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=int(fields["Threads"]),
        seconds=seconds,
    )


def run(comm: Communicator, load: str, count: int, pause: threading.Barrier | None) -> list[Window]:
    """Run it on one rank; pause: where ranks that are threads wait for each other."""
    # Starts the engine's thread, which else comes with the first call that a busy machine delays.
    comm.allreduce_async(np.ones(1, np.float32)).wait()
    step, number, windows = LOADS[load].make(comm), 0, []
    value = None
    for _ in range(WINDOWS):
        fastest = float("inf")
        for _ in range(BATCHES):
            begin, calls = time.perf_counter(), max(1, count // (WINDOWS * BATCHES))
            for _ in range(calls):
                got = step(number)
                number += 1
                assert value is None or got == value, f"call {number}: {got}, before {value}"
                value = got
            fastest = min(fastest, (time.perf_counter() - begin) / calls)
        if pause:
            pause.wait(60)
        windows.append(measure(fastest))
        if pause:
            pause.wait(60)
    windows.append(at_rest(windows))
    return windows


def at_rest(windows: list[Window]) -> Window:
    """Return what there is at the end, when threads that helped out had the time to leave.

    They stay for half a minute without work (completion_pool.h), longer than a load may take.
    """
    most = max(window.threads for window in windows[: len(windows) // 2])
    deadline = time.monotonic() + REST
    while True:
        window = measure(windows[-1].seconds)
        if window.threads <= most or time.monotonic() > deadline:
            return window
        time.sleep(1)


def main() -> None:
    load, count, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if threads:
        comms, pause = Communicator.local(threads), threading.Barrier(threads)
        for comm in comms[1:]:
            threading.Thread(target=run, args=(comm, load, count, pause), daemon=True).start()
        windows = run(comms[0], load, count, pause)
    else:
        comms = [cgx_ops.init()]
        windows = run(comms[0], load, count, None)
    print(json.dumps({"transport": comms[0].transport, "windows": [asdict(w) for w in windows]}))
    with contextlib.suppress(cgx_ops.CgxError):
        comms[0].close()


if __name__ == "__main__":
    main()
