"""Start named collectives of random sizes from 4 threads, in a different order on each rank.

The argument is the number of collectives. All calls of a window are in flight together. Every
result is checked.
"""

import sys
import threading

import numpy as np

import cgx_ops
from cgx_ops import Config

WINDOW, STARTERS = 1000, 4
count = int(sys.argv[1])
world = cgx_ops.init()
rank, size = world.rank, world.size
sizes = np.random.default_rng(0).integers(0, 5000, count)
failures: list[str] = []


def value(call: int, of: int) -> float:
    return float(call % 1000 + of)


def start_and_check(calls: list[int]) -> None:
    try:
        requests = []
        for call in calls:
            x = np.full(sizes[call], value(call, rank), np.float32)
            # All values of a bucket are equal, so that 4 bits represent them exactly.
            config = Config(bits=(32, 8, 4)[call % 3])
            requests.append(world.allreduce_async(x, "sum", config, name=f"call {call}"))
        for call, request in zip(calls, requests, strict=True):
            result, want = request.wait(), sum(value(call, r) for r in range(size))
            if len(result) != sizes[call] or not (result == want).all():
                failures.append(f"call {call}: {result[:3]}, not {want}")
    except Exception as error:
        failures.append(repr(error))


for first in range(0, count, WINDOW):
    order = first + np.random.default_rng([rank, first]).permutation(min(WINDOW, count - first))
    threads = [
        threading.Thread(target=start_and_check, args=([int(c) for c in order[i::STARTERS]],))
        for i in range(STARTERS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
assert not failures, failures[:5]
assert world.collectives == count, world.collectives
print("all right", world.transport, count)
