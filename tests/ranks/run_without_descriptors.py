"""Print the transport of a group created while rank 1 has few file descriptors left.

Argument: the number of descriptors left.
"""

import os
import resource
import sys

import numpy as np

import cgx_ops

left = int(sys.argv[1])
world = cgx_ops.init()
world.allreduce(np.ones(100_000, np.float32))  # MPI now has all the connections that it needs
before = resource.getrlimit(resource.RLIMIT_NOFILE)
if world.rank == 1:
    top = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (top + 1, before[1]))
    fillers: list[int] = []
    try:
        while True:
            fillers.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    for filler in fillers[-left:] if left else []:
        os.close(filler)
group = world.group(list(range(world.size)), name="with what there is")
resource.setrlimit(resource.RLIMIT_NOFILE, before)
assert (group.allreduce(np.ones(100_000, np.float32)) == world.size).all()
assert (world.allreduce(np.ones(100_000, np.float32)) == world.size).all()
print("made by", group.transport)
