"""Check numpy arrays before libcgx reads or writes them."""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from cgx_ops._core.tables import DTYPES
from cgx_ops.errors import InvalidArgument, Unsupported

Array = npt.NDArray[Any]

_from_buffer: Callable[[Any], ctypes.c_char] = ctypes.c_char.from_buffer

_REMEDY = "convert it first, for instance with array.astype(numpy.float32)"


@functools.cache  # dtype.name is slow, and every call needs it
def dtype_code(dtype: np.dtype[Any]) -> int:
    """Return the cgx_dtype_t of a numpy dtype. bfloat16 is that of ml_dtypes, found by its name.

    Raises:
        Unsupported: The dtype is not float32, float16 or bfloat16 in native byte order.
    """
    if dtype.name not in DTYPES or not dtype.isnative:
        raise Unsupported(
            f"Arrays of dtype {dtype} cannot be quantized or reduced, only "
            f"{', '.join(DTYPES)} in native byte order: {_REMEDY}"
        )
    return DTYPES[dtype.name]


def dtype_named(name: npt.DTypeLike) -> np.dtype[Any]:
    """Return the numpy dtype. The name "bfloat16" needs ml_dtypes, which registers it."""
    if name == "bfloat16":
        try:
            import ml_dtypes  # noqa: F401  (the import registers the name)
        except ImportError as error:
            raise Unsupported(
                "numpy has no bfloat16 without ml_dtypes: pip install ml_dtypes"
            ) from error
    return np.dtype(name)


def as_input(values: npt.ArrayLike) -> Array:
    """Return values as a C-contiguous array of a supported dtype; copy only if needed."""
    array = np.asarray(values)
    dtype_code(array.dtype)
    return array if array.flags.c_contiguous else array.copy(order="C")


def address(array: Array) -> int:
    """Return the address of a C-contiguous array's values."""
    try:
        return ctypes.addressof(_from_buffer(array))  # array.ctypes takes longer
    except (TypeError, ValueError):  # read-only, empty, or bfloat16 of ml_dtypes
        return array.ctypes.data


def as_output(
    out: Array | None, shape: tuple[int, ...], dtype: np.dtype[Any], name: str = "out"
) -> Array:
    """Return `out` if it is writable and fits, or a new array if it is None."""
    if out is None:
        return np.empty(shape, dtype)
    if not isinstance(out, np.ndarray):
        raise InvalidArgument(f"{name} is a {type(out).__name__}; it must be a numpy array or None")
    if out.shape != shape or out.dtype != dtype:
        raise InvalidArgument(
            f"{name} is {out.dtype}{list(out.shape)}; it must be {dtype}{list(shape)}"
        )
    if not out.flags.c_contiguous or not out.flags.writeable:
        raise InvalidArgument(
            f"{name} must be C-contiguous and writeable: pass a new array, and copy from it"
        )
    return out
