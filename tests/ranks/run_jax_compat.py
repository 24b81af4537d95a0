"""Rank program: the multi-process functions of compat.py.

    run_jax_compat.py ADDRESS

Runs as three processes; RANK 0 runs the coordinator of initialize().
"""

import os
import sys

import jax

from cgx_ops.jax._src.runtime import compat
from cgx_ops.jax._src.runtime.initialize import initialize

jax.config.update("jax_platforms", "cpu")
rank = int(os.environ["RANK"])
assert not compat.backends_started()
initialize(sys.argv[1], 3, rank)  # connects
assert jax.distributed.is_initialized()
assert not compat.backends_started()
for turn in range(2):
    said = compat.gather_from_processes(f"test/{turn}", bytes([rank, turn]), 30)
    assert said == [bytes([other, turn]) for other in range(3)]
if rank != 1:
    assert compat.gather_from_processes("some", bytes([rank]), 30, [0, 2]) == [b"\0", b"\2"]
assert compat.gather_from_processes("empty", b"", 30) == [b""] * 3
compat.leave_distributed()
assert not jax.distributed.is_initialized()
assert jax.process_count() == 1
print("ok")
