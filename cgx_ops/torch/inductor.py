"""Tells inductor that cgx's `quantized_all_reduce_start` operators are asynchronous collectives.

With the lowering, inductor keeps all collectives of a graph in one order, can overlap them with
computation, and leaves a collective's input alone until the wait, so that no copy of it is needed.
Without it (a release of torch that moved the private interface) the operator is an ordinary extern
kernel: right, but from a copy and without overlap.

Inductor takes seconds to import and eager programs never need it, so the lowering is registered at
the first trace that finds inductor loaded: its own tracing always does.
"""

import logging
import sys

import torch

from cgx_ops import _torch_ops
from cgx_ops.torch import _compat

_log = logging.getLogger(__name__)


def register() -> None:
    """Have the lowering registered when it is needed. Once per process."""
    _torch_ops.on_trace(_register_lowering)


def _register_lowering() -> bool:
    """Register the lowering if inductor is loaded; tell whether that was the last try."""
    if "torch._inductor.lowering" not in sys.modules:
        return False
    start = torch.ops.cgx.quantized_all_reduce_start
    lists = torch.ops.cgx.quantized_all_reduce_coalesced_start.default
    try:
        _compat.lower_as_collective(start.default, start.borrow)
        _compat.lower_as_collective(lists, lists)
    except (ImportError, AttributeError) as error:
        _log.warning(
            "torch %s has no collective lowering that cgx_ops knows (%s): compiled models stay "
            "right, but copy the input of each allreduce and overlap less",
            _compat.TORCH_VERSION,
            error,
        )
    return True
