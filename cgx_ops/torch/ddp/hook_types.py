"""CommHookType: all hooks by name, for programs that choose one with a flag."""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from cgx_ops.torch.ddp.deep_gradient.hook import DeepGradientState, deep_gradient_hook
from cgx_ops.torch.ddp.hook import Hook, QuantizedAllreduceState, quantized_allreduce_hook
from cgx_ops.torch.ddp.power_sgd.hook import PowerSGDState, batched_power_sgd_hook, power_sgd_hook
from cgx_ops.torch.ddp.state import HookState


class _Hook(NamedTuple):
    """A row of the table: a hook, its state's constructor, and arguments for the constructor."""

    hook: Hook
    make_state: Callable[..., HookState | None]
    options: Mapping[str, Any]


def _no_state(process_group: dist.ProcessGroup) -> None:
    del process_group


class CommHookType(Enum):
    """All communication hooks of cgx_ops by name, in the style of torch's DDPCommHookType.

    Attributes:
        QUANTIZED_ALLREDUCE: `quantized_allreduce_hook` with `QuantizedAllreduceState`.
        POWER_SGD: `power_sgd_hook` with `PowerSGDState` of rank 1.
        POWER_SGD_RANK2: `power_sgd_hook` with `PowerSGDState` of rank 2.
        BATCHED_POWER_SGD: `batched_power_sgd_hook` with `PowerSGDState` of rank 1.
        BATCHED_POWER_SGD_RANK2: `batched_power_sgd_hook` with `PowerSGDState` of rank 2.
        DEEP_GRADIENT: `deep_gradient_hook` with `DeepGradientState`.
        NOOP: torch's noop_hook, which sends nothing and leaves every rank its own gradients. Its
            step time is a lower bound for every compression.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> from cgx_ops.torch import ddp
        >>> dist.init_process_group("cgx", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DistributedDataParallel(torch.nn.Linear(64, 64))
        >>> state = ddp.CommHookType["QUANTIZED_ALLREDUCE"].register(model, bits=4)
        >>> model(torch.ones(8, 64)).sum().backward()
        >>> type(state).__name__
        'QuantizedAllreduceState'
        >>> dist.destroy_process_group()
    """

    QUANTIZED_ALLREDUCE = _Hook(quantized_allreduce_hook, QuantizedAllreduceState, {})
    POWER_SGD = _Hook(power_sgd_hook, PowerSGDState, {"matrix_approximation_rank": 1})
    POWER_SGD_RANK2 = _Hook(power_sgd_hook, PowerSGDState, {"matrix_approximation_rank": 2})
    BATCHED_POWER_SGD = _Hook(
        batched_power_sgd_hook, PowerSGDState, {"matrix_approximation_rank": 1}
    )
    BATCHED_POWER_SGD_RANK2 = _Hook(
        batched_power_sgd_hook, PowerSGDState, {"matrix_approximation_rank": 2}
    )
    DEEP_GRADIENT = _Hook(deep_gradient_hook, DeepGradientState, {})
    NOOP = _Hook(noop_hook, _no_state, {})

    def register(self, model: DistributedDataParallel, **options: Any) -> HookState | None:
        """Register this hook with a model, over the model's process group.

        Args:
            model: a DistributedDataParallel that has no communication hook yet.
            **options: arguments of the hook's state.

        Returns:
            The hook's state, to be saved in checkpoints. None for NOOP.

        Raises:
            TypeError: `model` is not a DistributedDataParallel, or the state has no such option.
            InvalidArgument: an option is out of range.
        """
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(
                f"{self.name}.register: model is {type(model).__name__}; it must be a "
                "DistributedDataParallel"
            )
        row = self.value
        state = row.make_state(**{"process_group": model.process_group, **row.options, **options})
        model.register_comm_hook(state, row.hook)  # type: ignore[arg-type]
        return state
