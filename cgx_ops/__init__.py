"""Quantized collectives for numpy arrays, and the types that PyTorch and JAX share.

`cgx_ops.torch` and `cgx_ops.jax` have the functions for PyTorch and JAX. Importing this module
imports no framework and starts no communication: init() or the first collective does.
"""

from typing import Unpack

import numpy.typing as npt

from cgx_ops._core import at_exit, library  # noqa: F401  (at_exit registers handlers)
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
    """Return the rank of this process, from 0. Like init(), the first call connects the ranks.

    Raises:
        CgxError: The ranks cannot be connected; see init().

    Example:
        >>> import cgx_ops
        >>> cgx_ops.rank()
        0
    """
    return init().rank


def size() -> int:
    """Return the number of ranks. Like init(), the first call connects the ranks.

    Raises:
        CgxError: The ranks cannot be connected; see init().

    Example:
        >>> import cgx_ops
        >>> cgx_ops.size()
        1
    """
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
    """Sum or average the arrays of all ranks, compressed; all ranks get the same bits.

    All ranks of init() must call it with equal arguments (except `array`, `out` and `residual`).

    Args:
        array: float32, float16 or bfloat16 (of ml_dtypes), of any shape. Shape and dtype must be
            equal on all ranks.
        op: "sum" or "avg"; with 32 bits also "min", "max" and "product".
        config: The compression. None is `Config()`: 4 bits, stochastic rounding. `bits=32` is
            exact.
        out: Array for the result: C-contiguous, of the input's shape and dtype. It may be the
            input.
        name: Matches this call with the same call of other ranks. Needed if several threads call
            collectives; without names, calls match in program order.
        residual: Array for error feedback, zeros before the first call. The call adds it to `array`
            and sets it to the quantization error of this rank, for the next call. See
            Communicator.allreduce().
        **keywords: `bits`, `bucket_size`, `compressor` and `rounding`, which replace those fields
            of `config`.

    Returns:
        `out`, or a new array of the input's shape and dtype.

    Raises:
        InvalidArgument: A value is out of range.
        Unsupported: The dtype or the operation is not supported.
        MismatchError: The arguments of the ranks differ.
        CgxError: A rank is late or has failed, or the ranks cannot be connected; see Communicator
            and init().

    Example:
        >>> import numpy as np
        >>> import cgx_ops
        >>> gradient = np.ones(1000, np.float32)
        >>> average = cgx_ops.allreduce(gradient, "avg", bits=4)
        >>> average.shape, average.dtype
        ((1000,), dtype('float32'))
    """
    return init().allreduce(array, op, config, out=out, name=name, residual=residual, **keywords)
