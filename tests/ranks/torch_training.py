"""Helpers of rank programs about training: a model, its data, steps, and a failing start."""

import os
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from cgx_ops import Communicator
from cgx_ops._core.refusal import refuse

# The ranks of mpirun, which are known before torch's.
RANK, SIZE = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model with three matrices, two of equal shape, and three vectors."""
    torch.manual_seed(0)
    layers = [nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 8)]
    return nn.Sequential(*layers).to(dtype)


def batch(rank: int, step: int, shift: float = 0.0, decay: float = 1.0) -> torch.Tensor:
    """Return 32 examples with mean `shift` times the rank; features decay by `decay`."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return (torch.randn(32, 24, generator=generator) + shift * rank) * decay ** torch.arange(24.0)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.to(next(model.parameters()).dtype)
    return (model(x) - x[:, :8]).square().sum(1).mean()


def backward(model: nn.Module, step: int, scale: float = 1.0, shift: float = 0.0) -> None:
    model.zero_grad()
    (loss_of(model, batch(RANK, step, shift)) * scale).backward()


def train(
    model: nn.Module, steps: range, rate: float = 0.05, shift: float = 0.0, decay: float = 1.0
) -> list[torch.Tensor]:
    """Train by SGD; return all weights after each step."""
    optimizer = torch.optim.SGD(model.parameters(), rate)
    weights = []
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, batch(RANK, step, shift, decay)).backward()
        optimizer.step()
        weights.append(weights_of(model))
    return weights


def gathered(mine: torch.Tensor) -> list[torch.Tensor]:
    everyones = [torch.empty_like(mine) for _ in range(SIZE)]
    dist.all_gather(everyones, mine)
    return everyones


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().float() for p in model.parameters()])


def identical_on_all_ranks(x: torch.Tensor) -> None:
    assert all(torch.equal(x, other) for other in gathered(x))


def refused_start(comm: Communicator, *_: Any, name: str, **__: Any) -> NoReturn:
    """Replace work.start() or start_apart() on a rank without a thread; notify the other ranks."""
    refuse(comm, name, -1, "no thread")
    raise dist.DistBackendError("no thread")
