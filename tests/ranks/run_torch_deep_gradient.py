"""Rank program: DistributedDataParallel with Deep Gradient Compression, over the backend "cgx".

    mpirun -np 2 python run_torch_deep_gradient.py [--slow] [CHECK ...]

The checks are in torch_deep_gradient/.
"""

import sys

import torch.distributed as dist
from torch_deep_gradient import state, values


def main() -> None:
    dist.init_process_group("cgx")
    chosen = sys.argv[1:]
    checks = values.CHECKS + state.CHECKS
    if "--slow" in chosen:
        chosen.remove("--slow")
        checks += values.SLOW + state.SLOW
    for check in checks:
        if not chosen or check.__name__ in chosen:
            check()
            print(f"ok {check.__name__}", flush=True)
    dist.destroy_process_group()
    print("ok all")


if __name__ == "__main__":
    main()
