"""Integration of the operators with torch.compile: cache keys, and a lowering.

With the lowering, inductor keeps all collectives of a graph in one order and can overlap them with
computation. It does not reuse a collective's input before the wait, so that no copy is needed.
Without it, in a torch release that changed the private interface, the operators are ordinary extern
kernels: correct, but with a copy and without overlap.

Inductor takes seconds to import. So the lowering is registered at the first trace after inductor
was imported; inductor's own tracing always is. Dynamo traces operators before it looks up a graph
in a cache.
"""

import logging
import sys
from pathlib import Path

import torch

from cgx_ops import _torch_ops
from cgx_ops.torch._compat import graphs

_log = logging.getLogger(__name__)


def register() -> None:
    """Set up cache keys and lowering when they are needed. Call once per process."""
    _torch_ops.on_trace(_on_trace)


def key_caches() -> None:
    """Make the caches' keys depend on this build of cgx_ops and on this rank."""
    graphs.key_compile_caches(map(Path, (_torch_ops.__file__, graphs.__file__, __file__)))


def _on_trace() -> bool:
    key_caches()
    return _register_lowering()


def _register_lowering() -> bool:
    """Register the lowering if inductor is loaded; return whether this was the last attempt."""
    if "torch._inductor.lowering" not in sys.modules:
        return False
    cgx = torch.ops.cgx
    lists = cgx.quantized_all_reduce_coalesced_start.default
    try:
        for start in (
            cgx.quantized_all_reduce_start,
            cgx.quantized_reduce_scatter_tensor_start,
            cgx.quantized_all_gather_into_tensor_start,
            cgx.quantized_all_to_all_single_start,
        ):
            graphs.lower_as_collective(start.default, start.borrow)
        graphs.lower_as_collective(lists, lists)
    except (ImportError, AttributeError) as error:
        _log.warning(
            "cgx_ops does not support the collective lowering of torch %s (%s): compiled models "
            "are correct, but copy the input of each allreduce and overlap less",
            graphs.TORCH_VERSION,
            error,
        )
    return True
