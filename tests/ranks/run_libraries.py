"""Print the transport of an allreduce, and the MPI libraries that the process has loaded after it.

The argument is torch's backend, or "none" for the launcher's ranks.
"""

import re
import sys
from pathlib import Path

import numpy as np

import cgx_ops

x = np.full(600, 1.0, np.float32)
if sys.argv[1] != "none":
    import torch
    import torch.distributed as dist

    import cgx_ops.torch

    dist.init_process_group(sys.argv[1])
    dist.all_reduce(torch.from_numpy(x.copy()))
world = cgx_ops.init()
assert (world.allreduce(x) == world.size).all()
libraries = set(re.findall(r"/(libmpi|libcgx_mpi)\.so", Path("/proc/self/maps").read_text()))
print(world.transport, *sorted(libraries))
