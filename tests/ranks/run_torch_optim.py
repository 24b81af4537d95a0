"""Rank program: OneBitAdam and Signum, over the backend "cgx".

    mpirun -np 2 python run_torch_optim.py [CHECK ...]
    mpirun -np 2 python run_torch_optim.py losses FOLDER

The checks are in torch_optim.py; "losses" writes 50 steps of both for JAX to do again.
"""

import sys

import torch.distributed as dist
import torch_optim


def main() -> None:
    dist.init_process_group("cgx")
    if sys.argv[1:2] == ["losses"]:
        torch_optim.write_losses(sys.argv[2])
    else:
        for check in torch_optim.CHECKS:
            if not sys.argv[1:] or check.__name__ in sys.argv[1:]:
                check()
                print(f"ok {check.__name__}", flush=True)
    dist.destroy_process_group()
    print("ok all")


if __name__ == "__main__":
    main()
