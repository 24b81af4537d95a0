"""Rank program: what the backend "cgx" does, case by case, in one launch of any launcher.

    run_torch_backend.py [case...]      all cases if none is named

Each case ends with a barrier and leaves no group behind but the default one.
They are in torch_backend/.
"""

import datetime
import sys
import time
from typing import Any

import torch.distributed
from torch_backend import compression, exchanges, groups, reductions

from cgx_ops import Communicator

dist: Any = torch.distributed  # its annotations are those of its own internals
MODULES = (reductions, exchanges, compression, groups)
CASES = {case.__name__: case for module in MODULES for case in module.CASES}


def main() -> None:
    dist.init_process_group("cgx", timeout=datetime.timedelta(seconds=60))
    for name in sys.argv[1:] or CASES:
        begun = time.monotonic()
        CASES[name](dist.get_rank(), dist.get_world_size())
        dist.barrier()
        print(f"{name}: {time.monotonic() - begun:.2f} s", flush=True)
    rank, transport = dist.get_rank(), Communicator.find("0").transport
    dist.destroy_process_group()
    print(f"rank {rank}: all cases over {transport}", flush=True)


if __name__ == "__main__":
    main()
