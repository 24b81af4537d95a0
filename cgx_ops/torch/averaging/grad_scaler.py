"""Steps under torch.amp.GradScaler, which skips steps whose gradients overflow on this rank.

1. scaling_of(): for optimizers that average, which skip a step on all ranks or on none
2. after_every_step(): counts the steps of any optimizer
3. refuse_grad_scaler(): for averages that would be skipped on one rank only
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from cgx_ops.errors import InvalidArgument
from cgx_ops.torch.averaging.arithmetic import full_precision

_Kind = TypeVar("_Kind", bound=Optimizer)

# GradScaler calls the step() of an optimizer with this attribute in every iteration, and sets the
# attributes found_inf and grad_scale during the call.
_HANDLES_OVERFLOW = "_step_supports_amp_scaling"
_OF_SCALER = ("grad_scale", "found_inf")

# ---- 1. optimizers that average ------------------------------------------------------------------


class Scaling(NamedTuple):
    """The values that a GradScaler passes to an optimizer for a step.

    Attributes:
        inverse: the factor that unscales gradients.
        overflows: whether a gradient of this rank is not finite.
    """

    inverse: float
    overflows: bool


def handles_overflow(kind: type[_Kind]) -> type[_Kind]:
    """Make a GradScaler call step() of these optimizers in every iteration; a class decorator."""
    setattr(kind, _HANDLES_OVERFLOW, True)
    return kind


def scaling_of(optimizer: Optimizer) -> Scaling | None:
    """Return the scaling of the GradScaler that calls the optimizer's step(); None without one."""
    found: Any = getattr(optimizer, "found_inf", None)
    if found is None:
        return None
    scale: torch.Tensor | None = getattr(optimizer, "grad_scale", None)
    inverse = 1.0 if scale is None else float(scale.double().reciprocal().float())
    return Scaling(inverse, bool(found))


@contextlib.contextmanager
def without_scaling_if_failed(optimizer: Optimizer) -> Iterator[None]:
    """Remove the attributes that a GradScaler set on an optimizer if the block raises.

    A GradScaler removes them after successful steps only. Its next step would multiply by the old
    scale.
    """
    try:
        yield
    except BaseException:
        for name in _OF_SCALER:
            optimizer.__dict__.pop(name, None)
        raise


# ---- 2. counts of steps --------------------------------------------------------------------------


@contextlib.contextmanager
def after_every_step(optimizer: Optimizer, then: Callable[[], object]) -> Iterator[None]:
    """Call then() after each step of an optimizer within the block, including skipped steps.

    A step that a GradScaler would skip runs without gradients and leaves the parameters unchanged.
    """
    skipped: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    @full_precision()
    def before(stepped: Any, *_: Any) -> None:
        scaling = scaling_of(optimizer)
        if scaling is None:
            return
        stepped.grad_scale = stepped.found_inf = None  # torch's optimizers require it
        every = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter in every:
            if scaling.overflows:
                skipped.append((parameter, parameter.grad))
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.mul_(scaling.inverse)

    def after(*_: Any) -> None:
        while skipped:
            parameter, parameter.grad = skipped.pop()
        with without_scaling_if_failed(optimizer):
            then()

    with contextlib.ExitStack() as stack:
        if not getattr(optimizer, _HANDLES_OVERFLOW, False):
            setattr(optimizer, _HANDLES_OVERFLOW, True)
            stack.callback(delattr, optimizer, _HANDLES_OVERFLOW)
            stack.callback(optimizer.register_step_pre_hook(before).remove)
        stack.callback(optimizer.register_step_post_hook(after).remove)
        yield


# ---- 3. averages ---------------------------------------------------------------------------------


def refuse_grad_scaler(caller: str, remedy: str) -> None:
    """Raise if the caller is a GradScaler that decides for this rank only.

    Raises:
        InvalidArgument: it is. Every rank raises this in its first step that is not skipped.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is GradScaler.step.__code__:
            scaler = frame.f_locals["self"]
            if scaler.is_enabled() and not _is_shared(scaler):
                raise InvalidArgument(
                    f"{caller} was called by torch.amp.GradScaler.step(), which skips the steps in "
                    "which this rank's gradients overflow; the other ranks would wait for this "
                    f"one: {remedy}"
                )
        frame = frame.f_back


def _is_shared(scaler: GradScaler) -> bool:
    """Return whether all ranks skip the same steps."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler  # slow to import

    return isinstance(scaler, ShardedGradScaler)
