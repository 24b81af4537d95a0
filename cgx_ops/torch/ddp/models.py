"""Track the models under DistributedDataParallel: their parameters' names and dtypes.

1. find them: once a backend "cgx" exists, each model is recorded when it takes its module; other
   models are found at their hook's first bucket
2. copies, which torch makes without communication hooks
3. compare a model with the registered layers
4. detect changed dtypes, which DistributedDataParallel does not detect
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
    """The record of a DistributedDataParallel.

    Attributes:
        names: names of its parameters by id. The model keeps the parameters alive, so ids are not
            reused.
        dtypes: the parameters' dtypes at construction, which its buckets have.
        watched: whether changes of dtypes are detected.
    """

    names: dict[int, str]
    dtypes: dict[int, torch.dtype]
    watched: bool = False


_known: weakref.WeakKeyDictionary[DistributedDataParallel, _Known] = weakref.WeakKeyDictionary()


# ---- 1. find models ------------------------------------------------------------------------------


def remember(wrapper: DistributedDataParallel, module: nn.Module) -> None:
    """Record the names and dtypes of the module that a DistributedDataParallel was made from."""
    named = named_layers(module)
    names = {id(p): name for name, p in named}
    _known[wrapper] = _Known(names, {id(p): p.dtype for _, p in named})


def names_of(wrapper: DistributedDataParallel) -> dict[int, str]:
    """Return the names of a model's parameters, by id."""
    return _known[wrapper].names


def wrappers_of(parameters: Sequence[torch.Tensor]) -> list[DistributedDataParallel]:
    """Return the models that may own a bucket, the newest first; several if they share a module.

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
            "a communication hook found no DistributedDataParallel with the parameters of its "
            "bucket, so rules for layers have no effect. Keep a reference to the model until "
            "backward() ends, and call gc.freeze() only after the first backward()"
        )
    return found


def _known_of(parameters: Sequence[torch.Tensor]) -> list[DistributedDataParallel]:
    known = reversed(list(_known.items()))
    return [w for w, its in known if all(id(p) in its.names for p in parameters)]


def _unknown_of(parameters: Sequence[torch.Tensor]) -> list[DistributedDataParallel]:
    """Find models over other backends: torch passes the bucket to a hook, but not the model.

    Unused copies must stay unknown; see adopt_copy().
    """
    objects = gc.get_objects()
    wrappers = [o for o in objects if issubclass(type(o), DistributedDataParallel)]
    wanted = {id(p) for p in parameters}
    return [w for w in wrappers if wanted <= {id(p) for p in w.parameters()}]


# ---- 2. copies -----------------------------------------------------------------------------------


def adopt_copy(wrapper: DistributedDataParallel) -> None:
    """Record a model that was not seen taking its module: a copy or an unpickled one.

    A copy lists the hooks of the original with copies of their states, but its new reducer has no
    hook. This function registers the hooks of cgx_ops with it.
    """
    if wrapper in _known:
        return
    remember(wrapper, wrapper.module)
    if parallel.renew_comm_hooks(wrapper, HookState):
        watch_dtypes(wrapper)


def layers_under(state: HookState) -> set[str]:
    """Return the names of the layers of all models whose hook uses a state."""
    found: set[str] = set()
    for wrapper, known in list(_known.items()):
        if any(each is state for each in parallel.comm_hook_states(wrapper)):
            found.update(known.names.values())
    return found


# ---- 3. compare with registered layers -----------------------------------------------------------


def check_layers(wrapper: DistributedDataParallel, rules: Rules) -> None:
    """Compare a model's layers with the registered ones and with rules; see check_model()."""
    found = [Layer(name, p.dim(), p.numel()) for name, p in named_layers(wrapper.module)]
    layers.check_model(found, rules)


def trained_layers(wrapper: DistributedDataParallel) -> list[Layer]:
    """Return the layers whose gradients a model averages."""
    averaged = {id(p) for p in parallel.parameters_of(wrapper) if p.requires_grad}
    named = named_layers(wrapper.module)
    return [Layer(name, p.dim(), p.numel()) for name, p in named if id(p) in averaged]


# ---- 4. detect changed dtypes --------------------------------------------------------------------


def watch_dtypes(wrapper: DistributedDataParallel) -> None:
    """Make forward raise if a parameter's dtype differs from DistributedDataParallel's buckets.

    Without this check, DistributedDataParallel would silently stop averaging: torch creates new
    gradient accumulators for such parameters, without DDP's hooks.

    Raises:
        TypeError: dtypes differ already.
    """
    _refuse_new_dtypes(wrapper)
    if not _known[wrapper].watched:
        _known[wrapper].watched = True
        wrapper.register_forward_pre_hook(_before_forward)


def _before_forward(wrapper: DistributedDataParallel, _inputs: Any) -> None:
    if not torch.compiler.is_compiling():
        adopt_copy(wrapper)  # copies have this pre-hook, too
        _refuse_new_dtypes(wrapper)


def _refuse_new_dtypes(wrapper: DistributedDataParallel) -> None:
    known = _known[wrapper]
    for parameter in parallel.parameters_of(wrapper):
        was = known.dtypes.get(id(parameter), parameter.dtype)
        if parameter.dtype != was and parameter.requires_grad:
            raise TypeError(
                f"'{known.names[id(parameter)]}' is {parameter.dtype}, but was {was} when "
                "DistributedDataParallel(model) was called, which would not average its gradient: "
                "change the dtype before you call DistributedDataParallel(model)"
            )
