"""Create a communicator from a key-value store only, without mpirun and MPI.

Arguments: a folder that serves as the store (one file per value); the expected transport.
"""

import os
import sys
from pathlib import Path

import mpi4py
import numpy as np
from support.file_store import allgather_by_files

from cgx_ops import Communicator, Config

mpi4py.rc.initialize = False
from mpi4py import MPI  # noqa: E402

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
allgather = allgather_by_files(Path(sys.argv[1]), rank, size)
with Communicator.create(rank, size, allgather, "by files", timeout=30) as comm:
    result = comm.allreduce(np.full(100_000, rank, np.float32), config=Config(bits=8))
    assert (result == sum(range(size))).all()
    assert comm.transport == sys.argv[2]
assert not MPI.Is_initialized()
print("no MPI needed")
