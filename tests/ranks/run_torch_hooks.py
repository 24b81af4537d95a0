"""Rank program: what PyTorch builds around hooks, post-local SGD, optimizers that average.

    mpirun -np 2 python run_torch_hooks.py [--slow] [MODULE or CHECK ...]

The checks are in torch_hooks/.
"""

import sys

import torch.distributed as dist
from torch_hooks import averager, composed, optim


def main() -> None:
    dist.init_process_group("cgx")
    chosen = [name for name in sys.argv[1:] if name != "--slow"]
    for module in (composed, averager, optim):
        name = module.__name__.split(".")[-1]
        for check in module.CHECKS:
            if not chosen or {name, check.__name__} & set(chosen):
                check()
                print(f"ok {name} {check.__name__}", flush=True)
    dist.destroy_process_group()
    print("ok all")


if __name__ == "__main__":
    main()
