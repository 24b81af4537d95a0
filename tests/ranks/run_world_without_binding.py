"""Rank program: numpy calls use torch's default group even if cgx_ops.torch is not imported."""

import sys

import numpy as np
import torch.distributed as dist

import cgx_ops

dist.init_process_group("gloo")
assert "cgx_ops.torch" not in sys.modules
total = cgx_ops.allreduce(np.full(8, dist.get_rank() + 1, np.float32), bits=32)
assert total.tolist() == [3.0] * 8, total
assert cgx_ops.init().name.startswith("gloo/"), cgx_ops.init().name
dist.destroy_process_group()
print("right")
