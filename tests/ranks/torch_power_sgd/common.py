"""What the checks of PowerSGD's hooks share: models, training, what a hook was given."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from cgx_ops.torch import ddp

# mpirun's, which are known before torch's are.
RANK, SIZE = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
Hooked = tuple[DistributedDataParallel, ddp.PowerSGDState]


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return three matrices, two of one shape, and three vectors."""
    torch.manual_seed(0)
    layers = [nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 8)]
    return nn.Sequential(*layers).to(dtype)


def batch(rank: int, step: int, shift: float = 0.0, decay: float = 1.0) -> torch.Tensor:
    """Return 32 examples; their mean is `shift` times the rank; a feature decays to the next."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return (torch.randn(32, 24, generator=generator) + shift * rank) * decay ** torch.arange(24.0)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.to(next(model.parameters()).dtype)
    return (model(x) - x[:, :8]).square().sum(1).mean()


def hooked(
    module: nn.Module | None = None,
    hook: Any = ddp.power_sgd_hook,
    wrapper: dict[str, Any] | None = None,
    **options: Any,
) -> Hooked:
    model = DistributedDataParallel(module or network(), **(wrapper or {}))
    options = {"start_powerSGD_iter": 2, "matrix_approximation_rank": 2, **options}
    state = ddp.PowerSGDState(**options)
    model.register_comm_hook(state, hook)
    return model, state


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
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]).clone())
    return weights


def gathered(mine: torch.Tensor) -> list[torch.Tensor]:
    everyones = [torch.empty_like(mine) for _ in range(SIZE)]
    dist.all_gather(everyones, mine)
    return everyones


class Watched:
    """A hook that notes what went in and came out: of all ranks, by layer."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook
        self.given: dict[str, list[torch.Tensor]] = {}
        self.old: dict[str, list[torch.Tensor]] = {}
        self.averages: dict[str, torch.Tensor] = {}
        self.names: dict[int, str] = {}

    def run(self, state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
        for parameter, gradient in pairs:
            name = self.names[id(parameter)]
            self.given[name] = gathered(gradient.float())
            known = state.residuals.tensors.get(name, torch.zeros(gradient.numel()))
            self.old[name] = gathered(known.float().view(gradient.shape))

        def note(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            buffer = future.value()
            for parameter, gradient in pairs:
                self.averages[self.names[id(parameter)]] = gradient.float().clone()
            return buffer

        return self.hook(state, bucket).then(note)


def watched(
    hook: Any = ddp.power_sgd_hook, **options: Any
) -> tuple[Any, ddp.PowerSGDState, Watched]:
    """Return a model with one bucket, its state, and what its hook saw in the last step."""
    watch = Watched(hook)
    model, state = hooked(hook=watch.run, **options)
    watch.names = {id(p): name for name, p in model.module.named_parameters()}
    return model, state, watch


def backward(model: nn.Module, step: int, scale: float = 1.0, shift: float = 0.0) -> None:
    model.zero_grad()
    (loss_of(model, batch(RANK, step, shift)) * scale).backward()


def identical_on_all_ranks(x: torch.Tensor) -> None:
    assert all(torch.equal(x, other) for other in gathered(x))
