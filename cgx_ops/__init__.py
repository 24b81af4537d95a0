"""Quantized collectives: one core under PyTorch, JAX and numpy.

This module is the numpy face and imports no framework; `cgx_ops.torch` and `cgx_ops.jax` are the
others. Importing it starts nothing: init() or the first collective does.
"""

from typing import Unpack

import numpy.typing as npt

from cgx_ops._core import at_exit, library  # noqa: F401  (at_exit: what it does when a program ends)
from cgx_ops._core.arrays import Array
from cgx_ops._core.call import Op, Segment
from cgx_ops._core.codec import dequantize, quantize
from cgx_ops._core.request import Request
from cgx_ops._core.world import init
from cgx_ops.autotune import bits_for
from cgx_ops.communicator import Communicator
from cgx_ops.config import Config, Keywords
from cgx_ops.errors import (
    CgxError,
    Closed,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    MismatchError,
    NotFound,
    PeerFailed,
    SystemFailure,
    Unsupported,
)
from cgx_ops.rules import Rules
from cgx_ops.stats import Stats, stats

__version__ = library.version()

__all__ = [
    "CgxError",
    "Closed",
    "Communicator",
    "Config",
    "DeadlineExceeded",
    "InternalError",
    "InvalidArgument",
    "MismatchError",
    "NotFound",
    "PeerFailed",
    "Request",
    "Rules",
    "Segment",
    "Stats",
    "SystemFailure",
    "Unsupported",
    "__version__",
    "allreduce",
    "bits_for",
    "dequantize",
    "init",
    "quantize",
    "rank",
    "size",
    "stats",
]


def rank() -> int:
    """Return this process's rank among those of init(), from 0."""
    return init().rank


def size() -> int:
    """Return the number of ranks of init()."""
    return init().size


def allreduce(
    array: npt.ArrayLike,
    op: Op = "sum",
    config: Config | None = None,
    *,
    out: Array | None = None,
    name: str = "",
    residual: Array | None = None,
    **keywords: Unpack[Keywords],
) -> Array:
    """Reduce the arrays of all ranks, those of init(); every rank gets the same bits.

    Args:
        array: float32, float16 or bfloat16 (of ml_dtypes), any shape, equal on all ranks.
        op: "sum" or "avg"; with 32 bits also "min", "max" and "product".
        config: how values travel; None: Config(). Give bits=32 for an exact result.
        out: receives the result: C-contiguous, of the input's shape and dtype; may be the input.
        name: matches this call with those of other ranks, whatever runs in between; needed if
            several threads call.
        residual: error feedback: added to the array, and set to what compression loses of that on
            this rank, for the next call; see Communicator.allreduce.
        **keywords: bits, bucket_size, compressor and rounding, which replace those of config.

    Returns:
        `out`, or a new array of the input's shape and dtype.

    Raises:
        CgxError: see Communicator and init().
    """
    return init().allreduce(array, op, config, out=out, name=name, residual=residual, **keywords)
