"""When gradients are ready, recorded while a model trains: what cgx_ops.planner plans with."""

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

_MOST_STEPS = 64  # that are remembered


class Arrivals:
    """The seconds from the start of each backward pass until each parameter's gradient is there.

        with Arrivals(model) as arrivals:
            for _ in range(8):
                train_step()
        plan = Plan.of(arrivals.numels, arrivals.ready(cgx_ops.init()), costs)

    By the processor's clock, in hooks that cost about a microsecond a parameter. A backward pass
    starts with the first gradient of what the model returned. Every backward pass counts as a step,
    also inside no_sync(); of the last 64 is known.

    Attributes:
        numels: of each parameter that needs a gradient, by name.
    """

    def __init__(self, module: nn.Module) -> None:
        """Begin to record; close() ends it, as leaving a `with` block does.

        Args:
            module: on the CPU. Of a DistributedDataParallel, the module in it, whose names have no
                "module." in front.

        Raises:
            Unsupported: a parameter is on another device, whose gradients are there later than its
                hooks run.
            InvalidArgument: no parameter needs a gradient.
        """
        module = module.module if isinstance(module, DistributedDataParallel) else module
        parameters = {name: p for name, p in named_layers(module) if p.requires_grad}
        if not parameters:
            raise InvalidArgument("Arrivals: no parameter of the module needs a gradient")
        for name, parameter in parameters.items():
            if parameter.device.type != "cpu":
                raise Unsupported(
                    f"Arrivals: {name!r} is on {parameter.device}, where hooks run before "
                    "gradients are there: time them by events, and give planner.ready_times() the "
                    "seconds"
                )
        self.numels = {name: parameter.numel() for name, parameter in parameters.items()}
        self._steps: deque[_Step] = deque(maxlen=_MOST_STEPS)
        self._handles: list[RemovableHandle] = [module.register_forward_hook(self._on_forward)]
        for place, parameter in enumerate(parameters.values()):
            hook = self._hook_of(place)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def _on_forward(self, _module: nn.Module, _inputs: Any, outputs: Any) -> None:
        tensors = [x for x in tree_leaves(outputs) if isinstance(x, torch.Tensor)]
        differentiated = [x for x in tensors if x.requires_grad]
        if differentiated:  # gone with its graph, so nobody need remove it
            register_multi_grad_hook(differentiated, self._on_backward, mode="any")

    def _on_backward(self, _gradient: torch.Tensor) -> None:
        self._steps.append(_Step(time.perf_counter(), len(self.numels)))

    def _hook_of(self, place: int) -> Callable[[torch.Tensor], None]:
        def arrived(_parameter: torch.Tensor) -> None:
            if self._steps:  # else this backward pass began before the hooks were there
                self._steps[-1].arrivals[place] = time.perf_counter()

        return arrived

    def ready(self, communicator: Communicator, *, warmup: int = 3) -> list[float]:
        """Return when each gradient is ready, the same on all ranks, for Plan.of(). Collective.

        Args:
            communicator: of the ranks that will share a plan.
            warmup: of the steps recorded, the first so many do not count, in which memory is taken
                and DistributedDataParallel makes its buckets.

        Returns:
            For each of `numels`, seconds from the start of the backward pass: the median over
            steps, the largest over ranks.

        Raises:
            InvalidArgument: on this rank no step counts, or a parameter got no gradient in one.
        """
        steps = list(self._steps)[warmup:]
        if not steps:
            raise InvalidArgument(
                f"Arrivals.ready: {len(self._steps)} backward passes were recorded, and the first "
                f"{warmup} do not count: train some more steps, or give warmup=0"
            )
        for step in steps:
            for name, arrival in zip(self.numels, step.arrivals, strict=True):
                if math.isnan(arrival):
                    raise InvalidArgument(
                        f"Arrivals.ready: {name!r} got no gradient in one of the backward passes: "
                        "freeze it (requires_grad_(False)) or record passes that use it"
                    )
        arrivals = [step.arrivals for step in steps]
        return ready_times(communicator, arrivals, begins=[step.begin for step in steps])

    def close(self) -> None:
        """Stop recording; what is recorded stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Step:
    """A backward pass, in seconds of one clock: its begin, and each gradient's arrival or NaN."""

    def __init__(self, begin: float, parameters: int) -> None:
        self.begin, self.arrivals = begin, [math.nan] * parameters
