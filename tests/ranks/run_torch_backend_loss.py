"""Rank program: the backend "cgx" without MPI when ranks are late, on other hosts or lost.

Started without mpirun. Rank 1 exits in the middle; the others must detect it and exit cleanly.
"""

import datetime
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed

from cgx_ops.torch import BackendOptions

dist: Any = torch.distributed  # its annotations refer to torch internals


def main() -> None:
    dist.init_process_group("cgx", timeout=datetime.timedelta(seconds=60))
    rank = dist.get_rank()
    assert "MASTER_ADDR" in os.environ, "the launcher's, untouched"

    # The ranks cannot connect, because MPI was not started.
    far = BackendOptions(transport="MPI")
    with pytest.raises(
        dist.DistBackendError, match=r"reach each other(.|\n)*gloo(.|\n)*carrier='c10d'"
    ):
        dist.new_group(pg_options=far)
    x = torch.ones(100_000)
    dist.all_reduce(x)
    assert x[0] == dist.get_world_size()

    works = [dist.all_reduce(x.clone(), async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
    dist.barrier()
    if rank == 1:
        os._exit(0)
    begun = time.monotonic()
    with pytest.raises(dist.DistBackendError, match="rank 1"):
        dist.all_reduce(x)
    assert time.monotonic() - begun < 20
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(x)  # the group is lost
    if rank == 0:  # a group that rank 1 never joins
        with pytest.raises(dist.DistBackendError, match=r"rank 0 waited 1 s for ranks \[1\] of 2"):
            dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1))
    dist.destroy_process_group()
    print(f"rank {rank}: noticed", flush=True)


if __name__ == "__main__":
    main()
