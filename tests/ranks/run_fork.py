"""A forked child that exits, and one that calls cgx, disturb nobody."""

import os

import numpy as np

import cgx_ops
from cgx_ops import Closed

world = cgx_ops.init()
x = np.ones(100_000, np.float32)
world.allreduce(x)
children = []
for call in (False, True):
    child = os.fork()
    if child == 0:
        if not call:
            raise SystemExit(0)  # runs atexit handlers, as a data loader's worker may
        try:
            world.allreduce(x)
        except Closed:
            os._exit(7)
        os._exit(1)
    children.append(child)
for _ in range(20):
    world.allreduce(x)
statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
assert statuses == [0, 7], statuses
assert (world.allreduce(x) == world.size).all()
print("undisturbed")
