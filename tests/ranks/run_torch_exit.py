"""A program that ends while a callback of a future runs, in Python, ends as any other."""

import time

import torch
import torch.distributed as dist

import cgx_ops.torch  # noqa: F401  (registers the backend)


def told(future: torch.futures.Future[list[torch.Tensor]]) -> None:
    time.sleep(0.5)  # the interpreter is about to end meanwhile
    print("told", flush=True)


dist.init_process_group("cgx")
work = dist.all_reduce(torch.ones(100_000), async_op=True)
assert work is not None
work.get_future().then(told)
