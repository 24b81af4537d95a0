"""Print the error that the other ranks get, and its delay, if a rank dies or never calls.

Arguments: how the last rank fails ("kill" or "absent"); the deadline in seconds.
"""

import os
import signal
import sys
import threading
import time

import numpy as np

import cgx_ops
from cgx_ops import Closed, Config, DeadlineExceeded, PeerFailed

how, timeout = sys.argv[1], float(sys.argv[2])
world = cgx_ops.init()
x = np.ones(4_000_000, np.float32)
config = Config(bits=4)
world.allreduce(x, config=config, name="warm-up")
last = world.rank == world.size - 1
if last and how == "kill":
    # Fail in the middle: the peers have received the header and some of the values.
    threading.Timer(0.02, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    while True:
        world.allreduce(x, config=config, name="fatal")
if last:
    time.sleep(timeout + 3)
    print("absent", flush=True)
    os._exit(0)
begin = time.monotonic()
try:
    while True:
        world.allreduce(x, config=config, name="fatal", timeout=timeout)
except (DeadlineExceeded, PeerFailed) as error:
    print(type(error).__name__, f"{time.monotonic() - begin:.1f}", error, sep="|", flush=True)
try:
    world.allreduce(x, config=config)
except Closed as error:
    print("Closed", error, sep="|", flush=True)
