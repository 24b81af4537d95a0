"""Rank program: DistributedDataParallel with quantized_allreduce_hook, over the backend "cgx".

Every check compares with the oracle or with another run, bit for bit. The checks are in torch_ddp/.
"""

import checks
import torch.distributed as dist
from torch_ddp import (
    adaptive,
    backend,
    carried_on_cuda,
    feedback,
    planned,
    steps,
    unused,
    waiting,
)


def main() -> None:
    dist.init_process_group("cgx")
    checks.run(
        checks.of_modules(
            steps, backend, waiting, feedback, adaptive, planned, unused, carried_on_cuda
        )
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
