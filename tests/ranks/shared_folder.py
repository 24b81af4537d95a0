"""A folder shared by all ranks of a rank program, for checkpoints."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist


@contextlib.contextmanager
def folder_of_all() -> Iterator[str]:
    """Create a folder on rank 0; delete it when all ranks of the default group have left."""
    names: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    yield names[0]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(names[0])
