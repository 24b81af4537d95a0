"""Tells inductor that `cgx::quantized_all_reduce_start` is an asynchronous collective.

With the lowering, inductor keeps all collectives of a graph in one order, can overlap them with
computation, and leaves a collective's input alone until the wait. Where a release of torch has moved
the private interface, the operator becomes an ordinary extern kernel whose input inductor may
overwrite early; the binding then reduces from a copy.
"""

import logging

import torch

from cgx_ops import _torch_ops
from cgx_ops.torch import _compat

_log = logging.getLogger(__name__)


def register() -> bool:
    """Register the lowering; tell whether this torch has what it takes."""
    try:
        _compat.lower_as_collective(torch.ops.cgx.quantized_all_reduce_start.default)
    except (ImportError, AttributeError) as error:
        _torch_ops.set_copy_input(True)
        _log.warning(
            "torch %s has no collective lowering that cgx_ops knows (%s): compiled models stay "
            "right, but copy the input of each allreduce and overlap less",
            _compat.TORCH_VERSION,
            error,
        )
        return False
    return True
