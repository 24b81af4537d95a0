"""Rank program: 50 steps of OneBitAdam and of Signum, for JAX to do again.

    mpirun -np 2 python run_torch_optim_losses.py FOLDER

FOLDER gets a file of each: the first weights by name, "batches" (steps, ranks, examples, features)
and "losses" (steps, ranks).
"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch_hooks.optim import MAKERS, SHIFT, run
from torch_power_sgd.common import RANK, SIZE, batch, gathered, network

STEPS = range(50)


def main() -> None:
    dist.init_process_group("cgx")
    for name, make in MAKERS.items():
        model = network()
        weights = {of: x.numpy().copy() for of, x in model.state_dict().items()}
        losses = torch.tensor(run(model, make(model.parameters()), STEPS))
        everyones = torch.stack(gathered(losses)).T.numpy()
        if RANK == 0:
            batches = [[batch(r, s, SHIFT).numpy() for r in range(SIZE)] for s in STEPS]
            np.savez(Path(sys.argv[1], f"{name}.npz"), losses=everyones, batches=batches, **weights)
    dist.destroy_process_group()
    print("ok all")


if __name__ == "__main__":
    main()
