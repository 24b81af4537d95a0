"""The hook of hook.py, registered automatically with models over the backend "cgx".

A DistributedDataParallel is noticed when it takes its module. It gets the hook before its first
forward: by then a user who wants another one has registered it. hook_state() gives it immediately.
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
from cgx_ops.torch.averaging.reports import report_layers
from cgx_ops.torch.averaging.residuals import Residuals
from cgx_ops.torch.backend import process_group
from cgx_ops.torch.ddp import models
from cgx_ops.torch.ddp.hook import QuantizedAllreduceState, quantized_allreduce_hook
from cgx_ops.torch.ddp.power_sgd.state import Factors
from cgx_ops.torch.ddp.state import HookState

_CHOOSE_BITS = ("CGX_COMPRESSION_QUANTIZATION_BITS", "CGX_COMPRESSOR")

_log = logging.getLogger(__name__)


def notice_models() -> None:
    """Notice every DistributedDataParallel from now on. Call once per process."""
    register_module_module_registration_hook(_on_registration)


def register() -> None:
    """Have torch.load() accept what states consist of. Call once per process."""
    planned = [AdaptiveBits, Sample, Plan]
    saved = [Residuals, Factors, Average, Rules, Rule, Config, *planned]
    torch.serialization.add_safe_globals([*saved, *(getattr(ddp, name) for name in ddp.__all__)])


def hook_state(model: DistributedDataParallel) -> HookState | None:
    """Return the state of the hook of cgx_ops that a model has, to be saved and restored.

    For those who did not make it: trainers, over the backend "cgx". There a model that has no hook
    gets its own at its first forward, or here. Restore it in place, by load_state_dict().

    Args:
        model: as training calls it, also what torch.compile(model) returned.

    Returns:
        The state, as ddp.QuantizedAllreduceState; None if no hook of cgx_ops is there: gradients
        are exact, or a hook of the user's has them.

    Raises:
        TypeError: this is no DistributedDataParallel.
    """
    model = parallel.uncompiled(model)
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"hook_state: {type(model).__name__} is no DistributedDataParallel; give the wrapper, "
            "not the module in it"
        )
    models.adopt_copy(model)
    if _before_first_forward in parallel.forward_pre_hooks(model).values():
        _before_first_forward(model, None)
    states = [state for state in parallel.comm_hook_states(model) if isinstance(state, HookState)]
    return states[0] if states else None


def _on_registration(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """See DistributedDataParallel take its module: torch calls this for every submodule."""
    if torch.compiler.is_compiling():  # modules that dynamo looks into are made already
        return
    if name != "module" or not isinstance(parent, DistributedDataParallel) or child is None:
        return
    models.remember(parent, child)
    if process_group.options_of(group_or_default(parent.process_group)) is not None:
        hook: Any = _before_first_forward  # of this module, by its own name: models pickle
        parent.register_forward_pre_hook(hook)


@graphs.not_compiled
def _before_first_forward(wrapper: DistributedDataParallel, _inputs: Any) -> None:
    models.adopt_copy(wrapper)  # copies have this hook, too
    _attach(wrapper)
    hooks = parallel.forward_pre_hooks(wrapper)  # without handles: copies have none
    for number in [n for n, hook in hooks.items() if hook is _before_first_forward]:
        del hooks[number]


def _report_exact(wrapper: DistributedDataParallel, options: process_group.BackendOptions) -> None:
    """Log that gradients travel exact, and warn once if that is because no bits are set."""
    found = models.trained_layers(wrapper)
    names = [layer.name for layer in found]
    segments = [Segment(0, layer.numel) for layer in found]
    group = wrapper.process_group
    report_layers((id(wrapper), "DDP"), "DDP", group, options.config, names, segments)
    _warn_of_exact(options)


@functools.cache
def _warn_of_exact(options: process_group.BackendOptions) -> None:
    chosen = any(os.environ.get(name) for name in _CHOOSE_BITS)
    if chosen or dist.get_rank() > 0 or options != process_group.BackendOptions():
        return
    _log.warning(
        "DistributedDataParallel's gradients travel exact, because no bits are set. To compress "
        "them set %s=4, or give init_process_group pg_options=BackendOptions(Config(bits=4)); "
        "exact on purpose: %s=32",
        _CHOOSE_BITS[0],
        _CHOOSE_BITS[0],
    )


def _attach(wrapper: DistributedDataParallel) -> None:
    """Give a DistributedDataParallel over the backend "cgx" the hook, if it has none."""
    group = group_or_default(wrapper.process_group)
    options = process_group.options_of(group)
    # Its Python reducer has no buckets; compress_collectives() is for that.
    if options is None or parallel.has_python_reducer(wrapper):
        return
    if hooks := parallel.comm_hooks(wrapper):
        # That of mixed precision is torch's own, and has the process group sum each bucket.
        if quantized_allreduce_hook not in hooks and not parallel.has_mixed_precision(wrapper):
            process_group.leave_gradients_to_hooks(group)
        return
    if parallel.steps_in_backward(wrapper):  # by a communication hook that torch is about to set
        return
    models.check_layers(wrapper, layers.process_rules())
    exact = options.config.bits == EXACT_BITS and not options.auto_bits
    if exact and not layers.process_rules():
        _report_exact(wrapper, options)
        return
    models.watch_dtypes(wrapper)
    state = QuantizedAllreduceState(
        group,
        options.config,
        seed=options.seed,
        unsupported="exact",
        auto_bits=bool(options.auto_bits),
    )
    wrapper.register_comm_hook(state, quantized_allreduce_hook)
    _log.debug(
        "group '%s': DistributedDataParallel's gradients are compressed layer by layer",
        group.group_name,
    )
