"""Values: types, widening, rounding, sums, min and max. All arithmetic is fp32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

Values: TypeAlias = npt.NDArray[Any]  # float32, float16 or ml_dtypes.bfloat16, one dimension
Float32s: TypeAlias = npt.NDArray[np.float32]
Floats: TypeAlias = npt.NDArray[np.floating[Any]]  # fp32 too, where numpy's types are not precise
Op = Literal["sum", "avg", "min", "max", "product"]
Algorithm = Literal["one_shot", "sra", "ring", "hierarchical"]
AnyAlgorithm = Literal["auto", "one_shot", "sra", "ring", "hierarchical", "by_hosts"]
RoundingMode = Literal["nearest", "stochastic", "shift"]

EXACT_BITS = 32
SMALLEST_QUANTIZED = 16  # a segment of fewer elements is always exact
FLOAT32 = np.dtype(np.float32)
FLOAT16 = np.dtype(np.float16)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def widen(x: Values) -> Float32s:
    """Return the same values in fp32: exact."""
    return x.astype(np.float32)


def round_to(x: Float32s, dtype: np.dtype[Any]) -> Values:
    """Round to nearest even. fp16 and bf16 get one NaN, 0x7e00 or 0x7fc0; fp32 is unchanged."""
    if dtype == FLOAT32:
        return x.copy()
    with np.errstate(all="ignore"):
        rounded = x.astype(dtype)
    nan = np.uint16(0x7E00 if dtype == FLOAT16 else 0x7FC0)
    return np.where(np.isnan(x), nan, rounded.view(np.uint16)).view(dtype)


def round_to_finite(x: Float32s, dtype: np.dtype[Any]) -> Values:
    """Round a residual; values too large for the dtype become its largest number."""
    most = np.float32(ml_dtypes.finfo(dtype).max)
    return round_to(np.clip(x, -most, most), dtype)


def with_one_nan(x: Float32s) -> Float32s:
    """Make every NaN 0x7fc00000: processors differ in the payload and sign of a NaN result."""
    return np.where(np.isnan(x), np.uint32(0x7FC00000), x.view(np.uint32)).view(np.float32)


def order_key(x: Float32s) -> npt.NDArray[np.int32]:
    """Map values to integers of the same order: -0 < +0, NaNs outside the infinities."""
    bits = x.view(np.int32)
    return np.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits)


def from_order_key(key: npt.NDArray[np.int32]) -> Float32s:
    """Invert order_key()."""
    return np.where(key < 0, key ^ np.int32(0x7FFFFFFF), key).astype(np.int32).view(np.float32)


def combine(op: Op, a: Float32s, b: Float32s) -> Float32s:
    """Do one step of a reduction in fp32; avg adds here and divides later. NaN propagates."""
    with np.errstate(all="ignore"):
        if op in ("sum", "avg"):
            return with_one_nan(a + b)
        if op == "product":
            return with_one_nan(a * b)
        pick_key = np.minimum if op == "min" else np.maximum
        extreme = from_order_key(pick_key(order_key(a), order_key(b)))
    nan = np.isnan(a) | np.isnan(b)
    return with_one_nan(np.where(nan, np.float32(np.nan), extreme))


def reduce_in_order(op: Op, terms: Sequence[Float32s]) -> Float32s:
    """Start with the first term and combine the others in the given order. avg is not divided."""
    total = terms[0].copy()
    for term in terms[1:]:
        total = combine(op, total, term)
    return total


def finish(op: Op, total: Float32s, divisor: int) -> Float32s:
    """Divide the fp32 sum if op is avg."""
    if op != "avg":
        return total
    with np.errstate(all="ignore"):
        return with_one_nan(total / np.float32(divisor))
