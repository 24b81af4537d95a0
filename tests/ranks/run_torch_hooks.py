"""Rank program: PyTorch's own wrappers and averagers around the hooks of cgx_ops.

    mpirun -np 2 python run_torch_hooks.py [--slow] [CHECK ...]

The checks are in torch_hooks/.
"""

import sys

import torch.distributed as dist
from torch_hooks import averager, composed


def main() -> None:
    dist.init_process_group("cgx")
    chosen = [name for name in sys.argv[1:] if name != "--slow"]
    for check in composed.CHECKS + averager.CHECKS:
        if not chosen or check.__name__ in chosen:
            check()
            print(f"ok {check.__name__}", flush=True)
    dist.destroy_process_group()
    print("ok all")


if __name__ == "__main__":
    main()
