"""Fragments of an outer loop that are a model's modules."""

from collections.abc import Sequence

from torch import nn

from cgx_ops.errors import InvalidArgument


def of_modules(
    caller: str, modules: Sequence[nn.Module], named: Sequence[tuple[str, nn.Parameter]]
) -> list[list[int]]:
    """Return the places of each module's parameters; each is in one.

    Args:
        caller: for errors.
        modules: one for each fragment.
        named: the parameters of the model that are trained.

    Raises:
        InvalidArgument: modules share a parameter, or none has it.
    """
    owner: dict[nn.Parameter, int] = {}
    for fragment, module in enumerate(modules):
        for parameter in module.parameters():
            if owner.setdefault(parameter, fragment) != fragment:
                raise InvalidArgument(
                    f"{caller}: a parameter of shape {tuple(parameter.shape)} is in fragments "
                    f"{owner[parameter]} and {fragment}; give modules that share none"
                )
    missing = [name for name, parameter in named if parameter not in owner]
    if missing:
        raise InvalidArgument(f"{caller}: no fragment has {missing[0]!r}; give all of the model")
    return [[i for i, (_, p) in enumerate(named) if owner[p] == f] for f in range(len(modules))]
