"""A failed step can be repeated if the group is still usable: its gradient counts once.

The failure is a mismatch of the ranks, or a rank that cannot start its part: all ranks fail.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from failing import fails
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_training import RANK, SIZE, backward, network, refused_start, weights_of

from cgx_ops import Config
from cgx_ops.torch import ddp
from cgx_ops.torch.averaging import state as averaging_state
from cgx_ops.torch.averaging.state import Sent
from cgx_ops.torch.optim import CompressedAdamW, Signum

DISAGREE = "ranks 0 and 1 disagree"
HALF = Config(bits=2, bucket_size=64, error_feedback=True, residual_decay=0.5, rounding="nearest")


def optimizers_step_again() -> None:
    if SIZE == 1:
        return
    makers: list[Callable[[Any], Any]] = [lambda p: CompressedAdamW(p, warmup_steps=2), Signum]
    for make in makers:
        weights = []
        for failing in ((), (0, 3)):  # during the warm-up, and after it
            model = network()
            optimizer = make(model.parameters())
            for step in range(6):
                backward(model, step)
                if step in failing:
                    last = list(model.parameters())[-1].requires_grad_(RANK != 1)
                    fails(RuntimeError, DISAGREE, optimizer.step)
                    last.requires_grad_(True)
                optimizer.step()
            weights.append(weights_of(model))
        assert torch.equal(*weights), optimizer


def tensors_of_state(state: Any) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in state.residuals.tensors.items()}


def _disagree(state: Any) -> Callable[[], None]:
    """Make the ranks disagree on the hook's first message; return a function that undoes this."""
    config, bits = state.config, getattr(state, "factor_bits", None)
    if RANK == 1:
        state.config = Config(bits=3, error_feedback=True, residual_decay=0.5)
        state.factor_bits = 16

    def end() -> None:
        state.config, state.factor_bits = config, bits

    return end


def _lose_the_second(_state: Any) -> Callable[[], None]:
    """Make the message after the first one fail."""
    patch = mock.patch.object(Sent, "follow", side_effect=RuntimeError(DISAGREE))
    patch.start()
    return patch.stop


def _cannot_start(_state: Any) -> Callable[[], None]:
    """Make rank 1 fail to get a thread for the hook's first message."""
    patch = mock.patch.object(
        averaging_state, "start", refused_start if RANK == 1 else averaging_state.start
    )
    patch.start()
    return patch.stop


def hooks_average_again() -> None:
    """Check that the state is unchanged after the failure.

    Matrices are compared up to rounding, sparse layers after the repeated step.
    """
    if SIZE == 1:
        return
    quantized = ddp.QuantizedAllreduceState, {"config": HALF}, ddp.quantized_allreduce_hook
    low_rank = ddp.PowerSGDState, {"config": HALF, "start_powerSGD_iter": 2}, ddp.power_sgd_hook
    torchs = ddp.PowerSGDState, {"feedback": "torch", "start_powerSGD_iter": 2}, ddp.power_sgd_hook
    sparse = ddp.DeepGradientState, {"density": 0.05}, ddp.deep_gradient_hook
    cases: list[tuple[Any, Callable[[Any], Callable[[], None]], str]] = [
        (quantized, _disagree, DISAGREE),
        (low_rank, _disagree, DISAGREE),
        (low_rank, _lose_the_second, DISAGREE),
        (torchs, _lose_the_second, DISAGREE),
        (quantized, _cannot_start, "no thread"),
        (low_rank, _cannot_start, "no thread"),
        (sparse, _cannot_start, "no thread"),
    ]
    for (make, options, hook), begin, words in cases:
        model: nn.Module = DistributedDataParallel(network())
        state = make(**options)
        model.register_comm_hook(state, hook)  # type: ignore[operator]
        for step in range(4):
            backward(model, step)
        before = tensors_of_state(state)
        matrices = {name for name in before if name.endswith("weight")}
        assert matrices and all(before[name].any() for name in matrices), make
        end = begin(state)
        fails(RuntimeError, words, lambda model=model: backward(model, 4))
        end()
        for name, x in tensors_of_state(state).items():
            if make is ddp.QuantizedAllreduceState:
                assert torch.equal(x, before[name]), name
            elif make is ddp.PowerSGDState and name in matrices:
                torch.testing.assert_close(x, before[name], rtol=1e-4, atol=1e-5)
        backward(model, 4)


CHECKS = [optimizers_step_again, hooks_average_again]
