"""Rank program of the soak test: run one load and print measurements as JSON, window by window.

    run_soak.py LOAD COUNT THREADS

THREADS: number of ranks in this process, or 0 if this process is a rank started by mpirun.
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
    """Measurements of a process after a part of the calls.

    Attributes:
        resident: resident memory in KiB.
        descriptors, threads: their numbers.
        seconds: duration of a call in the window's fastest batch.
    """

    resident: int
    descriptors: int
    threads: int
    seconds: float


REST = 40.0  # seconds

# measuring opens files, which another rank of this process would count
_measuring = threading.Lock()


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
    """Run the load on one rank; pause: barrier at which ranks that are threads wait."""
    # Starts the engine's thread now; otherwise the first call delayed by a busy machine starts it.
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
    """Return the measurements after idle helper threads have ended.

    They end after half a minute without work (completion_pool.h); a load may be shorter.
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
