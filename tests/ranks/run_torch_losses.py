"""Rank program: record 50 steps of every method that JAX has too, for comparison with JAX.

    mpirun -np 2 python run_torch_losses.py FOLDER

Writes FOLDER/<name>.npz for each method: the initial weights by name, "batches" (steps, ranks,
examples, features) and "losses" (steps, ranks).
"""

import sys
from pathlib import Path
from typing import Any

import checks
import numpy as np
import torch
import torch.distributed as dist
import torch_deep_gradient.common
import torch_hooks.diloco
import torch_hooks.optim
import torch_power_sgd.common
from torch import nn
from torch_training import RANK, SIZE, batch, gathered, loss_of, network

from cgx_ops import Config

FOLDER = Path(sys.argv[1])
STEPS, SHIFT = range(50), 0.1  # between ranks' data
SIGNS = Config(compressor="levels", bits=1)


def record(name: str, model: nn.Module, optimizer: Any, decay: float = 1.0) -> None:
    """Train on features, each of which is `decay` times the one before."""
    module = getattr(model, "module", model)
    weights = {of: x.numpy().copy() for of, x in module.state_dict().items()}
    losses = []
    for step in STEPS:
        optimizer.zero_grad()
        loss = loss_of(model, batch(RANK, step, SHIFT, decay))
        loss.backward()
        optimizer.step()
        losses.append(torch.stack(gathered(loss.detach())))
    if RANK == 0:
        batches = [[batch(r, s, SHIFT, decay).numpy() for r in range(SIZE)] for s in STEPS]
        everyones = torch.stack(losses).numpy()
        np.savez(FOLDER / f"{name}.npz", losses=everyones, batches=batches, **weights)


def power_sgd() -> None:
    model, _ = torch_power_sgd.common.hooked()
    record("power_sgd", model, torch.optim.SGD(model.parameters(), 0.02), 0.1)


def deep_gradient() -> None:
    for nesterov, name in ((False, "deep_gradient"), (True, "deep_gradient, nesterov")):
        model, _ = torch_deep_gradient.common.hooked(
            density=0.02, warmup_steps=20, clip=2.0, nesterov=nesterov
        )
        record(name, model, torch.optim.SGD(model.parameters(), 0.01), 0.1)


def optimizers_that_average() -> None:
    for name, make in torch_hooks.optim.MAKERS.items():
        model = network()
        # JAX rounds to nearest without a key. A rotation would spread a last bit that differs over
        # a whole group of values.
        own = {"warmup_config": torch_hooks.optim.NEAREST, "config": SIGNS}
        own = {} if name == "signum" else own
        record(name, model, make(model.parameters(), **own))


def outer_loops() -> None:
    """Record each loop's initial and final parameters, and the updates of its inner steps."""
    for name, make in torch_hooks.diloco.IN_BOTH.items():
        model = network()
        loop = make(model)
        found: dict[str, Any] = {
            f"first/{n}": p.detach().numpy().copy() for n, p in model.named_parameters()
        }
        for n, p in model.named_parameters():
            shape = len(STEPS), SIZE, *p.shape
            moves = np.random.default_rng(p.numel()).standard_normal(shape, np.float32) / 8
            found[f"moves/{n}"] = moves
        for step in STEPS:
            for n, p in model.named_parameters():
                p.data += torch.from_numpy(found[f"moves/{n}"][step, RANK])
            loop.step()
        for n, outer, p in zip(loop.names, loop.outer_parameters, loop.parameters, strict=True):
            found[f"outer/{n}"] = outer.detach().numpy()
            found[f"params/{n}"] = torch.stack(gathered(p.detach())).numpy()
            lost = loop.exchange.residuals.tensors.get(n)
            if lost is not None:
                found[f"residual/{n}"] = torch.stack(gathered(lost)).numpy()
        if RANK == 0:
            np.savez(FOLDER / f"{name}.npz", **found)


def main() -> None:
    dist.init_process_group("cgx")
    checks.run(checks.named(power_sgd, deep_gradient, optimizers_that_average, outer_loops), [])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
