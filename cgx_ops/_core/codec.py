"""Quantize values to bytes and back, without communication (docs/reference/wire_format.md).

statistic() measures the quantization error of values.
"""

from ctypes import byref, c_double, c_int64
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from cgx_ops._core import library, structs, tables
from cgx_ops._core.arrays import Array, as_input, dtype_code, dtype_named
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.config import Config, Keywords, config_of
from cgx_ops.errors import InvalidArgument, checked_seed, require_integer

_MOST_INT32, _MOST_INT64 = 2**31 - 1, 2**63 - 1
_OF_KNOWN_LENGTH = {row["name"] for row in tables.COMPRESSORS.values() if row["fixed_length"]}


def quantize(
    values: npt.ArrayLike,
    config: Config | None = None,
    *,
    rank: int = 0,
    phase: int = 0,
    first_index: int = 0,
    seed: int = 0,
    **keywords: Unpack[Keywords],
) -> bytes:
    """Return values as the bytes that a collective would send.

    Collectives send arrays with fewer than max(16, minimal_size) elements exact. This function does
    not: it encodes any number of values in `bits`.

    Args:
        values: A float32, float16 or bfloat16 array of any shape, read in C order.
        config: The compression. None is `Config()`: 4 bits, stochastic rounding, buckets of 512.
        rank: The encoding rank; the rounding noise depends on it.
        phase: 0 for values on the way to the owner of a shard, 1 for sums on the way back; the
            noise depends on it.
        first_index: Index of values[0] in its segment, a multiple of bucket_size; of 4,096 for
            "entropy", 16,384 for "lossless", 512 for the MX formats.
        seed: Seed of the noise: a signed 64-bit integer, used unchanged.
        **keywords: `bits`, `bucket_size`, `compressor` and `rounding`, which replace those fields
            of `config`.

    Raises:
        InvalidArgument: A value is out of its range.
        Unsupported: The dtype is not supported.

    Example:
        >>> import numpy as np
        >>> import cgx_ops
        >>> values = np.linspace(-1, 1, 1024, dtype=np.float32)
        >>> len(values.tobytes()), len(cgx_ops.quantize(values, bits=4))
        (4096, 528)
    """
    array = as_input(values)
    settings = config_of(config, **keywords)
    codec = _codec(settings, array.dtype, seed)
    codec.rank = require_integer("rank", rank, 0, _MOST_INT32)
    codec.phase = require_integer("phase", phase, 0, _MOST_INT32)
    codec.first_index = require_integer("first_index", first_index, 0, _MOST_INT64)
    encoded, written = np.empty(_encoded_bytes(codec, array.size), np.uint8), c_int64()
    library.call(
        "cgx_quantize", byref(codec), array.ctypes.data, array.size, encoded.ctypes.data,
        byref(written),
    )  # fmt: skip
    return encoded[: written.value].tobytes()


def dequantize(
    data: bytes,
    numel: int,
    dtype: npt.DTypeLike = "float32",
    config: Config | None = None,
    *,
    first_index: int = 0,
    seed: int = 0,
    **keywords: Unpack[Keywords],
) -> Array:
    """Return the values that quantize() encoded with the same settings.

    Args:
        data: The bytes that quantize() returned.
        numel: Number of values.
        dtype: dtype of the result: float32, float16 or bfloat16. If values were sent exact, it must
            be their dtype.
        config: As for quantize().
        first_index: As for quantize().
        seed: As for quantize(); only "randk" needs it.
        **keywords: As for quantize().

    Raises:
        InvalidArgument: A value is out of its range, or `data` does not match the settings.
        Unsupported: The dtype is not supported.

    Example:
        >>> import numpy as np
        >>> import cgx_ops
        >>> values = np.linspace(-1, 1, 1024, dtype=np.float32)
        >>> data = cgx_ops.quantize(values, bits=8, rounding="nearest")
        >>> decoded = cgx_ops.dequantize(data, 1024, bits=8, rounding="nearest")
        >>> bool(np.abs(decoded - values).max() < 0.01)
        True
    """
    settings = config_of(config, **keywords)
    result_type = dtype_named(dtype)
    codec = _codec(settings, result_type, seed)
    codec.first_index = require_integer("first_index", first_index, 0, _MOST_INT64)
    encoded, most = np.frombuffer(data, np.uint8), _encoded_bytes(codec, numel)
    known = settings.bits == EXACT_BITS or settings.compressor in _OF_KNOWN_LENGTH
    if encoded.size > most or (known and encoded.size < most):
        raise InvalidArgument(
            f"the data has {encoded.size} bytes; {numel} values in these settings have "
            f"{'' if known else 'at most '}{most}: pass the same settings as to quantize()"
        )
    values = np.empty(numel, result_type)
    library.call(
        "cgx_dequantize", byref(codec), encoded.ctypes.data, encoded.size, numel, values.ctypes.data
    )
    return values


def statistic(values: npt.ArrayLike, config: Config | None = None) -> float:
    """Return the statistic of a tensor from which its quantization error follows, for any bits.

    predicted_error(), allocate_bits() and allocate_rates() take it. Average it over ranks and
    steps: the squared errors add up.

    Args:
        values: A float32, float16 or bfloat16 array of any shape, read in C order.
        config: Its compressor and bucket_size are used; None: `Config()`.

    Returns:
        For "uniform", the sum of B R^2 / 12 over the buckets, where B is the number of values and R
        their range. For "levels" and "entropy", the sum of squares. NaN if a value is not finite.
        All CPUs return the same bits.

    Raises:
        Unsupported: The config has another compressor or a rotation, or the dtype is not supported.

    Example:
        >>> import numpy as np
        >>> from cgx_ops import Config
        >>> from cgx_ops.planner import predicted_error, statistic
        >>> config = Config(bits=4)
        >>> found = statistic(np.arange(1024, dtype=np.float32), config)
        >>> predicted_error(found, 4, config) > predicted_error(found, 8, config)
        True
    """
    array = as_input(values)
    return statistic_at(array.ctypes.data, array.size, dtype_code(array.dtype), config or Config())


def statistic_at(values: int, numel: int, dtype: int, config: Config) -> float:
    """Return the statistic of `numel` values at an address; `dtype` is a cgx_dtype_t."""
    codec, found = structs.Codec(config=config.native, dtype=dtype), c_double()
    library.call("cgx_statistic", byref(codec), values, numel, byref(found))
    return found.value


def encoded_bytes(numel: int, config: Config, dtype: npt.DTypeLike = "float32") -> int:
    """Return the size of the output of quantize(); the largest one if it depends on the values."""
    return _encoded_bytes(_codec(config, dtype_named(dtype)), numel)


def _codec(config: Config, dtype: np.dtype[Any], seed: int = 0) -> structs.Codec:
    return structs.Codec(config=config.native, seed=checked_seed(seed), dtype=dtype_code(dtype))


def _encoded_bytes(codec: structs.Codec, numel: int) -> int:
    count, numel = c_int64(), require_integer("numel", numel, 0, _MOST_INT64)
    library.call("cgx_encoded_bytes", byref(codec), numel, byref(count))
    return count.value
