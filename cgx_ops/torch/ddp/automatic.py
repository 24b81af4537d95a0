"""Register the quantized DDP hook automatically with models over the backend "cgx".

A DistributedDataParallel is found when it takes its module. It gets the hook before its first
forward, so that a user can register another hook first, or when hook_state() is called.
"""

import functools
import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from cgx_ops import Config, Rules, Segment
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.planner import AdaptiveBits, Plan
from cgx_ops.planner.adaptive import Sample
from cgx_ops.rules import Rule
from cgx_ops.torch import ddp
from cgx_ops.torch._compat import graphs, parallel
from cgx_ops.torch._compat.parallel import group_or_default
from cgx_ops.torch.averaging import layers
from cgx_ops.torch.averaging.averager import Average
from cgx_ops.torch.averaging.power_sgd.state import Factors
from cgx_ops.torch.averaging.reports import report_layers
from cgx_ops.torch.averaging.residuals import Residuals
from cgx_ops.torch.backend import process_group
from cgx_ops.torch.ddp import models
from cgx_ops.torch.ddp.hook import QuantizedAllreduceState, quantized_allreduce_hook
from cgx_ops.torch.ddp.state import HookState

_CHOOSE_BITS = ("CGX_COMPRESSION_QUANTIZATION_BITS", "CGX_COMPRESSOR")

_log = logging.getLogger(__name__)


def notice_models() -> None:
    """Track every DistributedDataParallel that is made from now on. Call once per process."""
    register_module_module_registration_hook(_on_registration)


def register() -> None:
    """Allow torch.load() to load the classes of hook states. Call once per process."""
    planned = [AdaptiveBits, Sample, Plan]
    saved = [Residuals, Factors, Average, Rules, Rule, Config, *planned]
    torch.serialization.add_safe_globals([*saved, *(getattr(ddp, name) for name in ddp.__all__)])


def hook_state(model: DistributedDataParallel) -> HookState | None:
    """Return the state of a model's cgx_ops communication hook, to save and restore it.

    Use it for models over the backend "cgx", whose hook is registered automatically. If the model
    has no hook yet, this call registers it. Restore the state in place with its `load_state_dict`.

    Args:
        model: a DistributedDataParallel, or what torch.compile returned for one.

    Returns:
        The state, for example a `ddp.QuantizedAllreduceState`. None if the model has no hook of
        cgx_ops: its gradients are sent exact, or another hook is registered.

    Raises:
        TypeError: `model` is not a DistributedDataParallel.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> from cgx_ops import Config
        >>> from cgx_ops.torch import BackendOptions, hook_state
        >>> options = BackendOptions(Config(bits=4))
        >>> dist.init_process_group(
        ...     "cgx", pg_options=options, store=dist.HashStore(), rank=0, world_size=1
        ... )
        >>> model = DistributedDataParallel(torch.nn.Linear(64, 64))
        >>> model(torch.ones(8, 64)).sum().backward()  # gradients are averaged in 4 bits
        >>> checkpoint = {"model": model.state_dict(), "hook": hook_state(model).state_dict()}
        >>> hook_state(model).load_state_dict(checkpoint["hook"])
        >>> dist.destroy_process_group()
    """
    model = parallel.uncompiled(model)
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"hook_state: model is {type(model).__name__}; pass the DistributedDataParallel, not "
            "the module in it"
        )
    models.adopt_copy(model)
    if _before_first_forward in parallel.forward_pre_hooks(model).values():
        _before_first_forward(model, None)
    states = [state for state in parallel.comm_hook_states(model) if isinstance(state, HookState)]
    return states[0] if states else None


def _on_registration(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """Track a DistributedDataParallel that takes its module; called for every submodule."""
    if torch.compiler.is_compiling():  # the modules that dynamo traces exist already
        return
    if name != "module" or not isinstance(parent, DistributedDataParallel) or child is None:
        return
    models.remember(parent, child)
    if process_group.options_of(group_or_default(parent.process_group)) is not None:
        hook: Any = _before_first_forward  # a function of this module, so that models pickle
        parent.register_forward_pre_hook(hook)


@graphs.not_compiled
def _before_first_forward(wrapper: DistributedDataParallel, _inputs: Any) -> None:
    """Attach the hook before the first forward, then remove this pre-hook."""
    models.adopt_copy(wrapper)  # copies have this pre-hook, too
    _attach(wrapper)
    hooks = parallel.forward_pre_hooks(wrapper)  # by function: copies have no handles
    for number in [n for n, hook in hooks.items() if hook is _before_first_forward]:
        del hooks[number]


def _report_exact(
    wrapper: DistributedDataParallel, config: Config, options: process_group.BackendOptions
) -> None:
    """Log that gradients are sent exact, and warn once if no bits were chosen."""
    found = models.trained_layers(wrapper)
    names = [layer.name for layer in found]
    segments = [Segment(0, layer.numel) for layer in found]
    group = wrapper.process_group
    report_layers((id(wrapper), "DDP"), "DDP", group, config, names, segments)
    if not options.auto_bits:
        _warn_of_exact(options)


@functools.cache
def _warn_of_exact(options: process_group.BackendOptions) -> None:
    chosen = any(os.environ.get(name) for name in _CHOOSE_BITS)
    if chosen or dist.get_rank() > 0 or options != process_group.BackendOptions():
        return
    _log.warning(
        "DistributedDataParallel's gradients are sent exact, because no bits are set. To compress "
        "them, set %s=4 or pass pg_options=BackendOptions(Config(bits=4)) to "
        "init_process_group(). To silence this warning, set %s=32",
        _CHOOSE_BITS[0],
        _CHOOSE_BITS[0],
    )


def _is_on_cpu(wrapper: DistributedDataParallel) -> bool:
    return all(p.device.type == "cpu" for p in parallel.parameters_of(wrapper))


def _attach(wrapper: DistributedDataParallel) -> None:
    """Register the hook with a DistributedDataParallel over the backend "cgx" that has none."""
    group = group_or_default(wrapper.process_group)
    options = process_group.options_of(group)
    # The Python reducer has no buckets; use compress_collectives() with it.
    if options is None or parallel.has_python_reducer(wrapper):
        return
    if hooks := parallel.comm_hooks(wrapper):
        # DDP's mixed precision registers a hook of torch's, which calls this group's allreduce.
        if quantized_allreduce_hook not in hooks and not parallel.has_mixed_precision(wrapper):
            process_group.leave_gradients_to_hooks(group)
        return
    if parallel.steps_in_backward(wrapper):  # torch is about to set a hook
        return
    models.check_layers(wrapper, layers.process_rules())
    config, auto_bits = options.config, bool(options.auto_bits)
    if auto_bits and not _is_on_cpu(wrapper):  # as for the group's allreduces, which it warned of
        config, auto_bits = config.with_own(bits=EXACT_BITS), False
    exact = config.bits == EXACT_BITS and not auto_bits
    if exact and not layers.process_rules():
        _report_exact(wrapper, config, options)
        return
    models.watch_dtypes(wrapper)
    state = QuantizedAllreduceState(
        group,
        config,
        seed=options.seed,
        unsupported="exact",
        auto_bits=auto_bits,
    )
    wrapper.register_comm_hook(state, quantized_allreduce_hook)
    _log.debug(
        "group '%s': DistributedDataParallel's gradients are compressed by layer",
        group.group_name,
    )
