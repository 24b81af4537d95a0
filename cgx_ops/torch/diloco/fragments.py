"""Fragments of an outer loop that consist of a model's modules."""

from collections.abc import Sequence

from torch import nn

from cgx_ops.errors import InvalidArgument


def of_modules(
    caller: str, modules: Sequence[nn.Module], named: Sequence[tuple[str, nn.Parameter]]
) -> list[list[int]]:
    """Return the indices of each module's parameters; each parameter is in one module.

    Args:
        caller: for errors.
        modules: one for each fragment.
        named: the parameters of the model that require gradients.

    Raises:
        InvalidArgument: modules share a parameter, or a parameter is in no module.
    """
    owner: dict[nn.Parameter, int] = {}
    for fragment, module in enumerate(modules):
        for parameter in module.parameters():
            if owner.setdefault(parameter, fragment) != fragment:
                raise InvalidArgument(
                    f"{caller}: a parameter of shape {tuple(parameter.shape)} is in fragments "
                    f"{owner[parameter]} and {fragment}; the modules must not share parameters"
                )
    missing = [name for name, parameter in named if parameter not in owner]
    if missing:
        raise InvalidArgument(
            f"{caller}: no fragment has parameter {missing[0]!r}; together the fragments must "
            "have all parameters of the model"
        )
    return [[i for i, (_, p) in enumerate(named) if owner[p] == f] for f in range(len(modules))]
