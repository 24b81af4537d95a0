"""The quantizer alone, on one rank: values to bytes and back, as in docs/reference/wire_format.md.

And what it must lose of values, measured as it measures buckets: statistic().
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
_OF_KNOWN_LENGTH = {row["name"] for row in tables.COMPRESSORS.values() if row["sliced"]}


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
    """Return what these values are on the wire, in the settings given.

    A collective sends fewer than max(16, minimal_size) elements exact, whatever the bits; this
    encodes them in `bits`, and ignores config's minimal_size.

    Args:
        values: an array of dtype float32, float16 or bfloat16, any shape, read in C order.
        config: None: Config(), 4 bits stochastic in buckets of 512.
        rank: of the noise: the encoding rank.
        phase: of the noise: 0 on the way to the owner of a shard, 1 on the way back.
        first_index: index of values[0] in its segment, a multiple of bucket_size.
        seed: of the noise, used unchanged: a signed integer of 64 bits.
        **keywords: bits, bucket_size, compressor and rounding, which replace those of config.

    Raises:
        InvalidArgument: a value out of its range.
        Unsupported: another dtype.
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
    """Return the `numel` values that quantize() encoded with the same settings.

    Args:
        data: what quantize() returned.
        numel: number of values.
        dtype: of the result: float32, float16 or bfloat16. Exact values must be of this dtype.
        config: as for quantize().
        first_index: as for quantize().
        seed: as for quantize(); only "randk" needs it.
        **keywords: as for quantize().

    Raises:
        InvalidArgument: a value out of its range, or data that the settings do not give.
        Unsupported: another dtype.
    """
    settings = config_of(config, **keywords)
    result_type = dtype_named(dtype)
    codec = _codec(settings, result_type, seed)
    codec.first_index = require_integer("first_index", first_index, 0, _MOST_INT64)
    encoded, most = np.frombuffer(data, np.uint8), _encoded_bytes(codec, numel)
    known = settings.bits == EXACT_BITS or settings.compressor in _OF_KNOWN_LENGTH
    if encoded.size > most or (known and encoded.size < most):
        raise InvalidArgument(
            f"{numel} values are {most} bytes{'' if known else ' at most'}; the data has "
            f"{encoded.size}: use the settings of quantize()"
        )
    values = np.empty(numel, result_type)
    library.call(
        "cgx_dequantize", byref(codec), encoded.ctypes.data, encoded.size, numel, values.ctypes.data
    )
    return values


def statistic(values: npt.ArrayLike, config: Config | None = None) -> float:
    """Return the number from which a tensor's quantization error follows, for all bits.

    It is a mean's to take over ranks and steps: predicted errors add up like squares.

    Args:
        values: float32, float16 or bfloat16, any shape, read in C order.
        config: its compressor and bucket_size count; None: Config().

    Returns:
        "uniform": the sum of B R^2 / 12 over buckets of B values with range R (a last bucket may
        have fewer); "levels": the sum of squares. NaN where a value is not finite. The same to the
        bit on all CPUs.

    Raises:
        Unsupported: another compressor, or a rotation, which changes ranges; another dtype.
    """
    array = as_input(values)
    return statistic_at(array.ctypes.data, array.size, dtype_code(array.dtype), config or Config())


def statistic_at(values: int, numel: int, dtype: int, config: Config) -> float:
    """Return the statistic of so many values at an address, of a cgx_dtype_t."""
    codec, found = structs.Codec(config=config.native, dtype=dtype), c_double()
    library.call("cgx_statistic", byref(codec), values, numel, byref(found))
    return found.value


def encoded_bytes(numel: int, config: Config, dtype: npt.DTypeLike = "float32") -> int:
    """Return how many bytes quantize() makes of `numel` values, of "threshold" at most."""
    return _encoded_bytes(_codec(config, dtype_named(dtype)), numel)


def _codec(config: Config, dtype: np.dtype[Any], seed: int = 0) -> structs.Codec:
    return structs.Codec(config=config.native, seed=checked_seed(seed), dtype=dtype_code(dtype))


def _encoded_bytes(codec: structs.Codec, numel: int) -> int:
    count, numel = c_int64(), require_integer("numel", numel, 0, _MOST_INT64)
    library.call("cgx_encoded_bytes", byref(codec), numel, byref(count))
    return count.value
