"""Rank program: run the checks of the backend "cgx" in one launch, with any launcher.

    run_torch_backend.py [CHECK...]      all if none is named

EXPECTED_TRANSPORT is the transport of the default group. Each check ends with a barrier and
leaves only the default group behind. The checks are in torch_backend/.
"""

import datetime
import os
from functools import partial
from typing import Any

import checks
import torch.distributed
from torch_backend import compression, exchanges, groups, reductions

from cgx_ops import Communicator

dist: Any = torch.distributed  # its annotations refer to torch internals


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
