"""The quantizer alone, on one rank: values to bytes and back, as in docs/wire_format.md."""

from ctypes import byref, c_int64
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cgx_ops import _native
from cgx_ops._arrays import Array, as_input, dtype_code, dtype_named
from cgx_ops.config import Config, Rounding
from cgx_ops.errors import InvalidArgument


def quantize(
    values: npt.ArrayLike,
    config: Config | None = None,
    *,
    bits: int | None = None,
    bucket_size: int | None = None,
    rounding: Rounding | None = None,
    skip_incomplete_buckets: bool | None = None,
    seed: int | None = None,
    rank: int = 0,
    phase: int = 0,
    first_index: int = 0,
) -> bytes:
    """Return what these values are on the wire, in the settings given.

    A collective sends fewer than max(16, minimal_size) elements exact, whatever the bits; this
    encodes them in `bits`, and ignores config's minimal_size.

    Args:
        values: an array of dtype float32, float16 or bfloat16, any shape, read in C order.
        config: None: Config(), 4 bits stochastic in buckets of 512.
        bits: this and the next four replace fields of config. 32: the values as they are.
        bucket_size: elements that share one minimum and step.
        rounding: "stochastic", "nearest" or "shift", as in Config.
        skip_incomplete_buckets: keep a last bucket that is not full exact.
        seed: of the noise, used as it is.
        rank: of the noise: the encoding rank.
        phase: of the noise: 0 on the way to the owner of a shard, 1 on the way back.
        first_index: index of values[0] in its segment, a multiple of bucket_size.

    Raises:
        InvalidArgument: a value out of its range.
        Unsupported: another dtype.
    """
    array = as_input(values)
    settings = _settings(config, bits, bucket_size, rounding, skip_incomplete_buckets, seed)
    codec = _codec(settings, array.dtype)
    for field, value, bits in (
        ("rank", rank, 31),
        ("phase", phase, 31),
        ("first_index", first_index, 63),
    ):
        if not 0 <= value < 2**bits:
            raise InvalidArgument(
                f"{field} is {value}; it must be an integer from 0 to 2^{bits} - 1"
            )
    codec.rank, codec.phase, codec.first_index = rank, phase, first_index
    encoded = np.empty(_encoded_bytes(codec, array.size), np.uint8)
    _native.call("cgx_quantize", byref(codec), array.ctypes.data, array.size, encoded.ctypes.data)
    return encoded.tobytes()


def dequantize(
    data: bytes,
    numel: int,
    dtype: npt.DTypeLike = "float32",
    config: Config | None = None,
    *,
    bits: int | None = None,
    bucket_size: int | None = None,
    skip_incomplete_buckets: bool | None = None,
) -> Array:
    """Return the `numel` values that quantize() encoded with the same settings.

    Args:
        data: what quantize() returned.
        numel: number of values.
        dtype: of the result: float32, float16 or bfloat16. Exact values must be of this dtype.
        config: as for quantize(); so are the rest.
        bits: replaces that of config.
        bucket_size: replaces that of config.
        skip_incomplete_buckets: replaces that of config.

    Raises:
        InvalidArgument: a value out of its range, or data of another length than the settings give.
        Unsupported: another dtype.
    """
    settings = _settings(config, bits, bucket_size, None, skip_incomplete_buckets, None)
    result_type = dtype_named(dtype)
    codec = _codec(settings, result_type)
    encoded = np.frombuffer(data, np.uint8)
    expected = _encoded_bytes(codec, numel)
    if encoded.size != expected:
        raise InvalidArgument(
            f"{numel} values of {settings.bits} bits in buckets of {settings.bucket_size} are "
            f"{expected} bytes; the data has {encoded.size}: use the settings of quantize()"
        )
    values = np.empty(numel, result_type)
    _native.call("cgx_dequantize", byref(codec), encoded.ctypes.data, numel, values.ctypes.data)
    return values


def encoded_bytes(numel: int, config: Config, dtype: npt.DTypeLike = "float32") -> int:
    """Return how many bytes quantize() makes of `numel` values."""
    return _encoded_bytes(_codec(config, dtype_named(dtype)), numel)


def _settings(
    config: Config | None,
    bits: int | None,
    bucket_size: int | None,
    rounding: Rounding | None,
    skip_incomplete_buckets: bool | None,
    seed: int | None,
) -> Config:
    given: dict[str, Any] = {
        "bits": bits,
        "bucket_size": bucket_size,
        "rounding": rounding,
        "skip_incomplete_buckets": skip_incomplete_buckets,
        "seed": seed,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    return replace(Config() if config is None else config, **changes)


def _codec(settings: Config, dtype: np.dtype[Any]) -> _native.Codec:
    return _native.Codec(config=settings.native, seed=settings.seed, dtype=dtype_code(dtype))


def _encoded_bytes(codec: _native.Codec, numel: int) -> int:
    if not 0 <= numel < 2**63:
        raise InvalidArgument(f"numel is {numel}; it must be an integer from 0 to 2^59")
    count = c_int64()
    _native.call("cgx_encoded_bytes", byref(codec), numel, byref(count))
    return count.value
