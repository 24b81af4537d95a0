"""Rank program: DistributedDataParallel with quantized_allreduce_hook, over the backend "cgx".

Every check compares with the oracle to the bit, or with another run to the bit. They are in
torch_ddp/.
"""

import torch.distributed as dist
from torch_ddp import backend, feedback, planned, steps, waiting


def main() -> None:
    dist.init_process_group("cgx")
    for check in (
        *steps.CHECKS,
        *backend.CHECKS,
        *waiting.CHECKS,
        *feedback.CHECKS,
        *planned.CHECKS,
    ):
        check()
        print(f"ok {check.__name__}", flush=True)
    dist.destroy_process_group()
    print("ok all")


if __name__ == "__main__":
    main()
