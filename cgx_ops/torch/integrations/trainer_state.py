"""What callbacks of trainers share: the state of a model's hook in one checkpoint for all ranks.

Without DistributedDataParallel, as trainers go on one device, there is none, and no need of one.
"""

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from cgx_ops.torch._compat import parallel
from cgx_ops.torch.ddp.automatic import hook_state
from cgx_ops.torch.ddp.state import HookState


def save_for_all_ranks(model: object) -> dict[str, Any] | None:
    """Return what a checkpoint of any rank is to hold. Collective.

    Residuals, if there are any, become their mean over the ranks, here too.
    """
    state = _state_of(model)
    if state is None:
        return None
    if state.keeps_residuals():
        state.consolidate()
    return state.state_dict()


def restore(model: object, saved: dict[str, Any]) -> None:
    """Continue with what save_for_all_ranks() returned, on any number of ranks."""
    if (state := _state_of(model)) is not None:
        state.load_state_dict(saved)


def _state_of(model: object) -> HookState | None:
    model = parallel.uncompiled(model)
    return hook_state(model) if isinstance(model, DistributedDataParallel) else None
