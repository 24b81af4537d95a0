"""Rank program: what the backend "cgx" does, case by case, in one launch of any launcher.

    run_torch_backend.py [CHECK...]      all if none is named

EXPECTED_TRANSPORT is that of the default group. Each check ends with a barrier and leaves no group
behind but the default one. They are in torch_backend/.
"""

import datetime
import os
from functools import partial
from typing import Any

import checks
import torch.distributed
from torch_backend import compression, exchanges, groups, reductions

from cgx_ops import Communicator

dist: Any = torch.distributed  # its annotations are those of its own internals


def main() -> None:
    dist.init_process_group("cgx", timeout=datetime.timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    modules = checks.of_modules(reductions, exchanges, compression, groups)
    of_rank = {name: partial(check, rank, size) for name, check in modules.items()}
    checks.run(of_rank, after=dist.barrier)
    assert Communicator.find("0").transport == os.environ["EXPECTED_TRANSPORT"]
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
