"""All hooks by name, for programs that choose one by a flag."""

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
    """One row of the table: a hook, what makes its state, and arguments of that."""

    hook: Hook
    make_state: Callable[..., HookState | None]
    options: Mapping[str, Any]


def _no_state(process_group: dist.ProcessGroup) -> None:
    del process_group


class CommHookType(Enum):
    """All hooks of cgx_ops, in the style of torch's DDPCommHookType.

        state = CommHookType["POWER_SGD_RANK2"].register(model, start_powerSGD_iter=100)

    NOOP is torch's noop_hook, which leaves every rank its own gradients. No compression makes a
    step faster than that.
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
        """Give a model this hook, over the model's process group.

        Args:
            model: without a communication hook so far.
            **options: of the hook's state.

        Returns:
            The hook's state, to be saved beside the model; None of NOOP.

        Raises:
            TypeError: model is no DistributedDataParallel; an option that the state does not have.
            InvalidArgument: an option is out of its range.
        """
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(
                f"{self.name}.register: model is {type(model).__name__}; give a "
                "DistributedDataParallel"
            )
        row = self.value
        state = row.make_state(**{"process_group": model.process_group, **row.options, **options})
        model.register_comm_hook(state, row.hook)  # type: ignore[arg-type]
        return state
