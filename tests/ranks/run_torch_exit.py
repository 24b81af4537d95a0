"""Check that a program may exit while a Python callback of a future runs."""

import time

import torch
import torch.distributed as dist

import cgx_ops.torch  # noqa: F401  (registers the backend)


def slow_callback(future: torch.futures.Future[list[torch.Tensor]]) -> None:
    time.sleep(0.5)  # the interpreter starts to exit during this
    print("slow_callback", flush=True)


dist.init_process_group("cgx")
work = dist.all_reduce(torch.ones(100_000), async_op=True)
assert work is not None
work.get_future().then(slow_callback)
