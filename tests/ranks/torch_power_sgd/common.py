"""Helpers of the PowerSGD checks: a model with a hook, and a record of the hook's input."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel
from torch_training import gathered, network

from cgx_ops.torch import ddp

Hooked = tuple[DistributedDataParallel, ddp.PowerSGDState]


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


class Watched:
    """Record a hook's inputs and outputs on all ranks, by layer."""

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
    """Return a model with one bucket, its state, and the record of its hook in the last step."""
    watch = Watched(hook)
    model, state = hooked(hook=watch.run, **options)
    watch.names = {id(p): name for name, p in model.module.named_parameters()}
    return model, state, watch
