"""The outer parameters of an outer loop, and their optimizer."""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from cgx_ops.errors import InvalidArgument
from cgx_ops.torch.diloco.ranks import CALLER


def outer_parameter(parameter: torch.Tensor, device: torch.device, pinned: bool) -> nn.Parameter:
    """Return a float32 copy of a parameter, on a device, pinned or not."""
    values = parameter.detach().to(device=device, dtype=torch.float32, copy=True)
    return nn.Parameter(values.pin_memory() if pinned else values)


def optimizer_of(
    given: Optimizer | Callable[[list[nn.Parameter]], Optimizer] | None,
    parameters: Sequence[nn.Parameter],
    outer: list[nn.Parameter],
) -> Optimizer:
    """Return the outer optimizer, over the outer parameters."""
    if given is None:
        return SGD(outer, lr=0.7, momentum=0.9, nesterov=True)
    if not isinstance(given, Optimizer):
        return given(outer)
    outer_of = dict(zip(parameters, outer, strict=True))
    known = {p for group in given.param_groups for p in group["params"] if p.requires_grad}
    if known != set(parameters) or given.state:
        raise InvalidArgument(
            f"{CALLER}: outer_optimizer must be new and have all parameters of the model: "
            "torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True); or pass a "
            "function: lambda params: torch.optim.SGD(params, lr=0.7)"
        )
    for group in given.param_groups:
        group["params"] = [outer_of[p] for p in group["params"] if p.requires_grad]
    return given
