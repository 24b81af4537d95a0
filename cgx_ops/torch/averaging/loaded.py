"""Checks of loaded states: the right kind of state, and the right model."""

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from cgx_ops.errors import InvalidArgument

_SHOWN = 4  # number of names that an error lists


def require_keys(caller: str, state_dict: Mapping[str, Any], keys: Collection[str]) -> None:
    """Raise InvalidArgument unless a state_dict has the keys of the caller's own."""
    if set(state_dict) != set(keys):
        raise InvalidArgument(
            f"{caller}.load_state_dict: the keys are {sorted(state_dict)}, not {sorted(keys)}: "
            "pass what state_dict() returned"
        )


def require_layers(
    caller: str,
    kept: Sequence[dict[str, Any]],
    names: Collection[str],
    *,
    strict: bool,
    has_partial: bool = True,
) -> None:
    """Require that all layers of a loaded state exist in the model.

    Args:
        caller: the kind of state, for the error, for example "PowerSGDState".
        kept: its entries, by name of the layer.
        names: names of the model's layers.
        strict: False: remove entries that belong to no layer, with a warning.
        has_partial: whether the caller's load_state_dict() accepts strict=False.

    Raises:
        InvalidArgument: strict, and an entry belongs to no layer of the model.
    """
    loaded = {name for each in kept for name in each}
    foreign = sorted(loaded - set(names))
    if not foreign:
        return
    found = (
        f"{caller}: the loaded state has layers that this model does not have: {_listed(foreign)}"
        f"; the model's other layers: {_listed(sorted(set(names) - loaded))}"
    )
    if strict:
        partial = ", or load it with strict=False to drop these entries" * has_partial
        raise InvalidArgument(f"{found}. Load the state of this model{partial}")
    warnings.warn(f"{found}. These entries were dropped", stacklevel=2)
    for each in kept:
        for name in foreign:
            each.pop(name, None)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", ".join(f"'{name}'" for name in names[:_SHOWN]) or "none") + more
