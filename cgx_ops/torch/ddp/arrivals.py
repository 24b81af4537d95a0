"""Arrivals: records when gradients become ready during training, as input for cgx_ops.planner."""

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from cgx_ops.communicator import Communicator
from cgx_ops.errors import InvalidArgument, Unsupported
from cgx_ops.planner import ready_times
from cgx_ops.torch._compat.graphs import tree_leaves
from cgx_ops.torch.averaging.layers import named_layers

_MOST_STEPS = 64  # that are kept


class Arrivals:
    """Record when each parameter's gradient becomes ready, measured from the start of backward.

    Recording starts at construction and ends with `close` or at the end of a `with` block. A hook
    per parameter reads the clock, which costs about a microsecond. A backward pass starts with the
    first gradient of the model's output. Every backward pass counts as a step, also inside
    no_sync(). The last 64 are kept.

    Args:
        module: a model on the CPU. For a DistributedDataParallel, its inner module is used, whose
            parameter names do not start with "module.".

    Attributes:
        numels: number of elements of each parameter that requires a gradient, by name.

    Raises:
        Unsupported: a parameter is on another device, where hooks run before gradients are ready.
        InvalidArgument: no parameter requires a gradient.

    Example:
        >>> import cgx_ops
        >>> import torch
        >>> from cgx_ops.torch import ddp
        >>> model = torch.nn.Linear(64, 64)
        >>> with ddp.Arrivals(model) as arrivals:
        ...     for _ in range(8):
        ...         model(torch.ones(8, 64)).sum().backward()
        >>> arrivals.numels
        {'weight': 4096, 'bias': 64}
        >>> seconds = arrivals.ready(cgx_ops.init())  # for Plan.of(arrivals.numels, seconds, ...)
        >>> len(seconds)
        2
    """

    def __init__(self, module: nn.Module) -> None:
        module = module.module if isinstance(module, DistributedDataParallel) else module
        parameters = {name: p for name, p in named_layers(module) if p.requires_grad}
        if not parameters:
            raise InvalidArgument("Arrivals: no parameter of the module needs a gradient")
        for name, parameter in parameters.items():
            if parameter.device.type != "cpu":
                raise Unsupported(
                    f"Arrivals: {name!r} is on {parameter.device}, where hooks run before "
                    "gradients are ready: time the gradients with events and pass the seconds to "
                    "planner.ready_times()"
                )
        self.numels = {name: parameter.numel() for name, parameter in parameters.items()}
        self._steps: deque[_Step] = deque(maxlen=_MOST_STEPS)
        self._handles: list[RemovableHandle] = [module.register_forward_hook(self._on_forward)]
        for index, parameter in enumerate(parameters.values()):
            hook = self._hook_of(index)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def _on_forward(self, _module: nn.Module, _inputs: Any, outputs: Any) -> None:
        tensors = [x for x in tree_leaves(outputs) if isinstance(x, torch.Tensor)]
        differentiated = [x for x in tensors if x.requires_grad]
        if differentiated:  # freed together with its graph
            register_multi_grad_hook(differentiated, self._on_backward, mode="any")

    def _on_backward(self, _gradient: torch.Tensor) -> None:
        self._steps.append(_Step(time.perf_counter(), len(self.numels)))

    def _hook_of(self, index: int) -> Callable[[torch.Tensor], None]:
        def arrived(_parameter: torch.Tensor) -> None:
            if self._steps:  # else this backward pass began before the hooks existed
                self._steps[-1].arrivals[index] = time.perf_counter()

        return arrived

    def ready(self, communicator: Communicator, *, warmup: int = 3) -> list[float]:
        """Return when each gradient is ready, the same on all ranks. Collective.

        Args:
            communicator: the ranks that will share a plan.
            warmup: number of recorded steps to skip. In the first ones memory is allocated and
                DistributedDataParallel rebuilds its buckets.

        Returns:
            For each parameter of `numels`, seconds since the start of backward, as the median over
            steps and the maximum over ranks. The input of `Plan.of`.

        Raises:
            InvalidArgument: this rank recorded no step after the warm-up, or a parameter got no
                gradient in a step.
        """
        steps = list(self._steps)[warmup:]
        if not steps:
            raise InvalidArgument(
                f"Arrivals.ready: {len(self._steps)} backward passes were recorded, and the first "
                f"{warmup} are skipped: train more steps, or set warmup=0"
            )
        for step in steps:
            for name, arrival in zip(self.numels, step.arrivals, strict=True):
                if math.isnan(arrival):
                    raise InvalidArgument(
                        f"Arrivals.ready: {name!r} got no gradient in one of the backward passes: "
                        "freeze it with requires_grad_(False), or record passes that use it"
                    )
        arrivals = [step.arrivals for step in steps]
        return ready_times(communicator, arrivals, begins=[step.begin for step in steps])

    def close(self) -> None:
        """Stop recording. Recorded steps remain."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Step:
    """A backward pass: its start, and each gradient's arrival or NaN, in seconds of one clock."""

    def __init__(self, begin: float, parameters: int) -> None:
        self.begin, self.arrivals = begin, [math.nan] * parameters
