"""Rank program: record 50 steps of every method that JAX has too, for comparison with JAX.

    mpirun -np 2 python run_torch_losses.py FOLDER

Writes FOLDER/<name>.npz for each method. For hooks: the initial weights by name, "batches" (steps,
ranks, examples, features) and "losses" (steps, ranks). For optimizers and outer loops, by the
parameter's name: "first/", "given/" (steps, ranks, ...: gradients, or moves of inner steps) and the
final "params/".
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


def initial(model: nn.Module) -> dict[str, Any]:
    """Return the parameters, and random values for each step and rank."""
    found: dict[str, Any] = {}
    for n, p in model.named_parameters():
        shape = len(STEPS), SIZE, *p.shape
        found[f"first/{n}"] = p.detach().numpy().copy()
        found[f"given/{n}"] = np.random.default_rng(p.numel()).standard_normal(shape, np.float32)
    return found


def optimizers_that_average() -> None:
    for name, make in torch_hooks.optim.MAKERS.items():
        model = network()
        # JAX rounds to nearest without a key. A rotation would spread a last bit that differs over
        # a whole group of values.
        own = {"warmup_config": torch_hooks.optim.NEAREST, "config": SIGNS}
        own = {} if name == "signum" else own
        optimizer = make(model.parameters(), **own)
        found = initial(model)
        for step in STEPS:
            for n, p in model.named_parameters():
                p.grad = torch.from_numpy(found[f"given/{n}"][step, RANK])
            optimizer.step()
        if RANK == 0:
            found |= {f"params/{n}": p.detach().numpy() for n, p in model.named_parameters()}
            np.savez(FOLDER / f"{name}.npz", **found)


def outer_loops() -> None:
    """Record each loop's final parameters and residuals, too."""
    for name, make in torch_hooks.diloco.IN_BOTH.items():
        model = network()
        loop = make(model)
        found = initial(model)
        for step in STEPS:
            for n, p in model.named_parameters():
                p.data += torch.from_numpy(found[f"given/{n}"][step, RANK] / 8)
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
