"""Who is who: what is known of the models under DistributedDataParallel.

1. which there are: once a backend "cgx" exists, each is remembered when it takes its module. Other
   models are found at their hook's first bucket
2. copies, which torch makes without communication hooks
3. whether a model is the one that was registered
4. whether its dtypes changed, which DistributedDataParallel would not notice
"""

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cgx_ops import Rules
from cgx_ops._core.user_warnings import warn_once
from cgx_ops.torch._compat import parallel
from cgx_ops.torch.averaging import layers
from cgx_ops.torch.averaging.layers import Layer, named_layers
from cgx_ops.torch.ddp.state import HookState


@dataclass
class _Known:
    """What is known of a DistributedDataParallel.

    Attributes:
        names: of its parameters, by id. It keeps them alive, so no id passes to another tensor.
        dtypes: of its parameters when it was made, which its buckets have.
        watched: whether a change of dtypes is noticed.
    """

    names: dict[int, str]
    dtypes: dict[int, torch.dtype]
    watched: bool = False


_known: weakref.WeakKeyDictionary[DistributedDataParallel, _Known] = weakref.WeakKeyDictionary()


# ---- 1. which there are --------------------------------------------------------------------------


def remember(wrapper: DistributedDataParallel, module: nn.Module) -> None:
    """Note the names and dtypes of the module that a DistributedDataParallel was made of."""
    named = named_layers(module)
    names = {id(p): name for name, p in named}
    _known[wrapper] = _Known(names, {id(p): p.dtype for _, p in named})


def names_of(wrapper: DistributedDataParallel) -> dict[int, str]:
    """Return the names of its parameters, by id."""
    return _known[wrapper].names


def wrappers_of(parameters: Sequence[torch.Tensor]) -> list[DistributedDataParallel]:
    """Return those who may have made a bucket, the youngest first: one, but for modules in two.

    Warns once if there is none.
    """
    if not parameters:
        return []
    if not (found := _known_of(parameters)):
        for wrapper in _unknown_of(parameters):
            remember(wrapper, wrapper.module)
        found = _known_of(parameters)
    if not found:
        warn_once(
            "a communication hook finds no DistributedDataParallel with the parameters of its "
            "bucket, so rules for layers have no effect. Keep the model until backward() ends, and "
            "call gc.freeze() after the first backward()"
        )
    return found


def _known_of(parameters: Sequence[torch.Tensor]) -> list[DistributedDataParallel]:
    known = reversed(list(_known.items()))
    return [w for w, its in known if all(id(p) in its.names for p in parameters)]


def _unknown_of(parameters: Sequence[torch.Tensor]) -> list[DistributedDataParallel]:
    """Return models over other backends; torch passes a hook the bucket, but not the model.

    Unused copies must stay unknown: see adopt_copy().
    """
    objects = gc.get_objects()
    wrappers = [o for o in objects if issubclass(type(o), DistributedDataParallel)]
    wanted = {id(p) for p in parameters}
    return [w for w in wrappers if wanted <= {id(p) for p in w.parameters()}]


# ---- 2. copies -----------------------------------------------------------------------------------


def adopt_copy(wrapper: DistributedDataParallel) -> None:
    """Remember one that was not seen taking its module: a copy of another, or one from a file.

    It lists the hooks of that one, with states of its own, and its reducer, which is new, has none:
    it gets ours.
    """
    if wrapper in _known:
        return
    remember(wrapper, wrapper.module)
    if parallel.renew_comm_hooks(wrapper, HookState):
        watch_dtypes(wrapper)


def layers_under(state: HookState) -> set[str]:
    """Return the names of the layers of all models whose hook has a state."""
    found: set[str] = set()
    for wrapper, known in list(_known.items()):
        if any(each is state for each in parallel.comm_hook_states(wrapper)):
            found.update(known.names.values())
    return found


# ---- 3. whether it is the one that was registered ------------------------------------------------


def check_layers(wrapper: DistributedDataParallel, rules: Rules) -> None:
    """Compare its layers with what was registered, and with rules, as layers.check_model does."""
    found = [Layer(name, p.dim(), p.numel()) for name, p in named_layers(wrapper.module)]
    layers.check_model(found, rules)


def trained_layers(wrapper: DistributedDataParallel) -> list[Layer]:
    """Return the layers whose gradients it averages."""
    averaged = {id(p) for p in parallel.parameters_of(wrapper) if p.requires_grad}
    named = named_layers(wrapper.module)
    return [Layer(name, p.dim(), p.numel()) for name, p in named if id(p) in averaged]


# ---- 4. whether its dtypes changed ---------------------------------------------------------------


def watch_dtypes(wrapper: DistributedDataParallel) -> None:
    """Have forward raise once parameters have other dtypes than DistributedDataParallel's buckets.

    It would not notice, and would stop averaging: torch gives such parameters new accumulators of
    gradients, without its hooks.

    Raises:
        TypeError: they have other dtypes already.
    """
    _refuse_new_dtypes(wrapper)
    if not _known[wrapper].watched:
        _known[wrapper].watched = True
        wrapper.register_forward_pre_hook(_before_forward)


def _before_forward(wrapper: DistributedDataParallel, _inputs: Any) -> None:
    if not torch.compiler.is_compiling():
        adopt_copy(wrapper)  # copies have this hook, too
        _refuse_new_dtypes(wrapper)


def _refuse_new_dtypes(wrapper: DistributedDataParallel) -> None:
    known = _known[wrapper]
    for parameter in parallel.parameters_of(wrapper):
        was = known.dtypes.get(id(parameter), parameter.dtype)
        if parameter.dtype != was and parameter.requires_grad:
            raise TypeError(
                f"'{known.names[id(parameter)]}' is {parameter.dtype} and was {was} when "
                "DistributedDataParallel(model) was made, which does not average such gradients: "
                "change the dtype first, then make it"
            )
