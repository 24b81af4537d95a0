"""Rank program: 50 steps of PowerSGD's hook, for JAX to do again.

    mpirun -np 2 python run_torch_power_sgd_losses.py FILE

FILE gets the first weights by name, "batches" (steps, ranks, examples, features) and "losses"
(steps, ranks).
"""

import sys

import numpy as np
import torch
import torch.distributed as dist
from torch_power_sgd.common import RANK, SIZE, batch, gathered, hooked, loss_of

STEPS, SHIFT, DECAY = 50, 0.1, 0.1


def main() -> None:
    dist.init_process_group("cgx")
    model, _ = hooked()
    weights = {name: x.numpy().copy() for name, x in model.module.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, batch(RANK, step, SHIFT, DECAY))
        loss.backward()
        optimizer.step()
        losses.append(torch.stack(gathered(loss.detach())))
    if RANK == 0:
        batches = [[batch(r, s, SHIFT, DECAY).numpy() for r in range(SIZE)] for s in range(STEPS)]
        np.savez(sys.argv[1], losses=torch.stack(losses).numpy(), batches=batches, **weights)
    dist.destroy_process_group()
    print("ok all")


if __name__ == "__main__":
    main()
