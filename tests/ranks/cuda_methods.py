"""Trainings of run_cuda_torch.py: hooks with a method of their own, optimizers and outer loops."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from support import torch_cases as tc
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cgx_ops import Config
from cgx_ops.torch import ddp, optim
from cgx_ops.torch.averaging import QuantizedModelAverager
from cgx_ops.torch.diloco import DiLoCo

dist: Any = torch.distributed  # its annotations refer to torch internals
LEVELS = Config(bits=2, compressor="levels", error_feedback=True)
RATE = 1.0  # of SGD; the loss is a mean over many values
Step = Callable[[], None]


def hooked(model: nn.Module, state: Any, hook: Any) -> tuple[nn.Module, Step]:
    wrapped = DistributedDataParallel(model, init_sync=False)
    wrapped.register_comm_hook(state, hook)
    return wrapped, torch.optim.SGD(wrapped.parameters(), RATE).step


def power_sgd(model: nn.Module) -> tuple[nn.Module, Step]:
    state = ddp.PowerSGDState(matrix_approximation_rank=2, start_powerSGD_iter=2)
    return hooked(model, state, ddp.power_sgd_hook)


def deep_gradient(model: nn.Module) -> tuple[nn.Module, Step]:
    return hooked(model, ddp.DeepGradientState(density=0.1), ddp.deep_gradient_hook)


def adam(model: nn.Module) -> tuple[nn.Module, Step]:
    config = Config(bits=8)
    optimizer = optim.CompressedAdamW(
        model.parameters(), 0.01, config=LEVELS, warmup_config=config, warmup_steps=4
    )
    return model, optimizer.step


def signum(model: nn.Module) -> tuple[nn.Module, Step]:
    return model, optim.Signum(model.parameters(), 0.002).step


def averager(model: nn.Module) -> tuple[nn.Module, Step]:
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    average = QuantizedModelAverager(period=4, config=LEVELS)

    def step() -> None:
        optimizer.step()
        average.average_parameters(model.parameters())

    return model, step


def diloco(model: nn.Module) -> tuple[nn.Module, Step]:
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    loop = DiLoCo(model, sync_every=7, config=LEVELS)

    def step() -> None:
        optimizer.step()
        loop.step()

    return model, step


def methods(r: int, n: int) -> None:
    """Check that each method trains, and that all ranks have equal weights at the end."""
    for method in (power_sgd, deep_gradient, adam, signum, averager, diloco):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 48)).cuda()
        model, step = method(layers)
        x = tc.values(r, 32 * 48).reshape(32, 48).cuda()
        losses = []
        for _ in range(21):  # averager and diloco average at the end
            model.zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            step()
            losses.append(loss.item())
        assert losses[-1] < losses[0], (method.__name__, losses)
        mine = torch.cat([p.detach().flatten() for p in layers.parameters()]).cpu()
        everyones = [torch.empty_like(mine) for _ in range(n)]
        dist.all_gather(everyones, mine)
        assert all(tc.same_bits(mine, other) for other in everyones), method.__name__
