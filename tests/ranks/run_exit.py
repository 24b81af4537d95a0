"""Ranks that exit with collectives in flight, for which rank 0 waits later.

run_exit.py numpy|backend|operators
"""

import os
import sys
import time

import numpy as np

HOW = sys.argv[1]
COUNT, NUMEL = 10, 1_000_000


def wait_on_rank_0(rank: int, waits: list) -> None:  # type: ignore[type-arg]
    if rank == 0:
        time.sleep(0.3)  # the other ranks are about to exit
        for wait in waits:
            wait()
        print("right")


def numpy_calls() -> None:
    import cgx_ops

    world = cgx_ops.init()
    ones, config = np.ones(NUMEL, np.float32), cgx_ops.Config(bits=4)
    requests = [
        world.allreduce_async(ones, "avg", config, name=str(number)) for number in range(COUNT)
    ]
    wait_on_rank_0(world.rank, [request.wait for request in requests])


def torch_calls() -> None:
    import torch
    import torch.distributed as dist

    import cgx_ops.torch

    dist.init_process_group("cgx")
    tensors = [torch.ones(NUMEL) for _ in range(COUNT)]
    if HOW == "backend":
        with cgx_ops.torch.compressed(cgx_ops.Config(bits=4)):
            works = [dist.all_reduce(x, async_op=True) for x in tensors]
        wait_on_rank_0(dist.get_rank(), [work.wait for work in works if work])
        return
    call = "op=sum depth=0 bits=4 rounding='nearest' name="
    start, wait = torch.ops.cgx.quantized_all_reduce_start, torch.ops._c10d_functional.wait_tensor
    results = [start(x, None, call, "") for x in tensors]
    waits = [lambda result=result: wait(result) for result in results]
    wait_on_rank_0(dist.get_rank(), waits)


os.environ.setdefault("CGX_TIMEOUT", "60")
numpy_calls() if HOW == "numpy" else torch_calls()
