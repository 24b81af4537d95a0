"""Save and restore the state of a model's hook in one checkpoint for all ranks.

Models without DistributedDataParallel, as trainers use on one device, have no state.
"""

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from cgx_ops.torch._compat import parallel
from cgx_ops.torch.ddp.automatic import hook_state
from cgx_ops.torch.ddp.state import HookState


def save_for_all_ranks(model: object) -> dict[str, Any] | None:
    """Return the hook's state for a checkpoint that any rank can load. Collective.

    Residuals, if there are any, become their mean over the ranks, also in the model.

    Args:
        model: a DistributedDataParallel, or another model.

    Returns:
        The state; None if the model has no hook of cgx_ops.
    """
    state = _state_of(model)
    if state is None:
        return None
    if state.keeps_residuals():
        state.consolidate()
    return state.state_dict()


def restore(model: object, saved: dict[str, Any]) -> None:
    """Restore what save_for_all_ranks() returned, on any number of ranks.

    Args:
        model: a DistributedDataParallel, or another model.
        saved: what save_for_all_ranks() returned.
    """
    if (state := _state_of(model)) is not None:
        state.load_state_dict(saved)


def _state_of(model: object) -> HookState | None:
    model = parallel.uncompiled(model)
    return hook_state(model) if isinstance(model, DistributedDataParallel) else None
