"""What torch.compile needs to know of the operators: both are set up when one is first traced.

1. the keys of its caches on disk
2. a lowering: `quantized_all_reduce_start` and its kin are asynchronous collectives

With the lowering, inductor keeps all collectives of a graph in one order, can overlap them with
computation, and leaves a collective's input alone until the wait, so that no copy of it is needed.
Without it (a release of torch that moved the private interface) the operator is an ordinary extern
kernel: right, but from a copy and without overlap.

Inductor takes seconds to import and eager programs never need it, so the lowering is registered at
the first trace that finds inductor loaded: its own tracing always does. Dynamo traces the operators
of a graph before anything looks the graph up in a cache.
"""

import logging
import sys
from pathlib import Path

import torch

from cgx_ops import _torch_ops
from cgx_ops.torch._compat import graphs

_log = logging.getLogger(__name__)


def register() -> None:
    """Have cache keys and lowering set up when they are needed. Call once per process."""
    _torch_ops.on_trace(_on_trace)


def key_caches() -> None:
    """Make the caches' keys depend on this build of cgx_ops, and on this rank."""
    graphs.key_compile_caches(map(Path, (_torch_ops.__file__, graphs.__file__, __file__)))


def _on_trace() -> bool:
    key_caches()
    return _register_lowering()


def _register_lowering() -> bool:
    """Register the lowering if inductor is loaded; tell whether that was the last try."""
    if "torch._inductor.lowering" not in sys.modules:
        return False
    cgx = torch.ops.cgx
    lists = cgx.quantized_all_reduce_coalesced_start.default
    try:
        for start in (
            cgx.quantized_all_reduce_start,
            cgx.quantized_reduce_scatter_tensor_start,
            cgx.quantized_all_gather_into_tensor_start,
        ):
            graphs.lower_as_collective(start.default, start.borrow)
        graphs.lower_as_collective(lists, lists)
    except (ImportError, AttributeError) as error:
        _log.warning(
            "torch %s has no collective lowering that cgx_ops knows (%s): compiled models stay "
            "right, but copy the input of each allreduce and overlap less",
            graphs.TORCH_VERSION,
            error,
        )
    return True
