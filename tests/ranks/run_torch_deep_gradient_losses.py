"""Rank program: 50 steps of Deep Gradient Compression, for JAX to do again.

    mpirun -np 2 python run_torch_deep_gradient_losses.py FILE NESTEROV

FILE gets the first weights by name, "batches" (steps, ranks, examples, features) and "losses"
(steps, ranks).
"""

import sys

import numpy as np
import torch
import torch.distributed as dist
from torch_deep_gradient.common import hooked
from torch_power_sgd.common import RANK, SIZE, batch, gathered, loss_of

STEPS, SHIFT, DECAY = 50, 0.1, 0.1


def main() -> None:
    dist.init_process_group("cgx")
    nesterov = sys.argv[2] == "1"
    model, _ = hooked(density=0.02, warmup_steps=20, clip=2.0, nesterov=nesterov)
    weights = {name: x.numpy().copy() for name, x in model.module.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
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
