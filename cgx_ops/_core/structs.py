"""The structs of cgx.h in ctypes.

`__slots__` makes an unknown field an AttributeError; ctypes alone would accept it.
"""

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_void_p
from typing import Any

from cgx_ops._core.tables import CONFIG_FIELDS

CALLBACK = ctypes.CFUNCTYPE(None, c_void_p, c_int, c_char_p)


class _Sized(ctypes.Structure):
    """A struct whose first field is its own size."""

    __slots__ = ()

    def __init__(self, **fields: Any) -> None:
        super().__init__(struct_size=ctypes.sizeof(type(self)), **fields)


class Bootstrap(_Sized):
    """cgx_bootstrap_t."""

    __slots__ = ()

    _fields_ = (
        ("struct_size", c_size_t),
        ("rank", c_int32),
        ("size", c_int32),
        ("allgather", c_void_p),  # set by _numpy_ops.create()
        ("context", c_void_p),
        ("name", c_char_p),
        ("transport", c_char_p),
        ("timeout_s", c_double),
        ("noise_rank", POINTER(c_int32)),
        ("elastic", c_int32),
        ("connect_timeout_s", c_double),
    )


class CommInfo(_Sized):
    """cgx_comm_info_t."""

    __slots__ = ()

    _fields_ = (
        ("struct_size", c_size_t),
        ("rank", c_int32),
        ("size", c_int32),
        ("closed", c_int32),
        ("name", c_char_p),
        ("transport", c_char_p),
        ("bytes_sent", c_int64),
        ("collectives", c_int64),
        ("bytes_in", c_int64),
        ("agree_ns", c_int64),
        ("move_ns", c_int64),
        ("compute_ns", c_int64),
        ("bytes_plain", c_int64),
        ("wire", c_char_p),
        ("host", c_int32),
        ("hosts", c_int32),
        ("rejected_connections", c_int64),
    )


class Traffic(_Sized):
    """cgx_traffic_t."""

    __slots__ = ()

    _fields_ = (
        ("struct_size", c_size_t),
        ("collectives", c_int64),
        ("bytes_in", c_int64),
        ("bytes_plain", c_int64),
        ("bytes_sent", c_int64),
    )


class Segment(ctypes.Structure):
    """cgx_segment_t."""

    __slots__ = ()

    _fields_ = (
        ("offset", c_int64),
        ("numel", c_int64),
        ("bucket_size", c_int64),
        ("bits", c_int32),
        ("example", c_int32),
        ("config", c_void_p),
    )


class Config(ctypes.Structure):
    """cgx_config_t."""

    __slots__ = ()

    _fields_ = tuple((field["name"], c_int64) for field in CONFIG_FIELDS)


class Collective(_Sized):
    """cgx_collective_t."""

    __slots__ = ("configs", "pattern")

    pattern: "Collective"  # the original of this copy: it owns the memory behind the pointers
    configs: "list[Config]"  # the configs of segments

    _fields_ = (
        ("struct_size", c_size_t),
        ("comm", c_int32),
        ("verb", c_int32),
        ("dtype", c_int32),
        ("op", c_int32),
        ("config", Config),
        ("seed", c_int64),
        ("input", c_void_p),
        ("output", c_void_p),
        ("block_numel", c_int64),
        ("segments", POINTER(Segment)),
        ("num_segments", c_int64),
        ("name", c_char_p),
        ("occurrence", c_int64),
        ("timeout_s", c_double),
        ("inputs", POINTER(c_void_p)),
        ("outputs", POINTER(c_void_p)),
        ("seeds", POINTER(c_int64)),
        ("residuals", POINTER(c_void_p)),
        ("divisor", c_int64),
        ("device", c_int32),
        ("launch", c_int32),
        ("stream", c_void_p),
        ("device_seeds", c_void_p),
        ("device_seed", c_void_p),
        ("noise_rank", POINTER(c_int32)),
        ("input_splits", POINTER(c_int64)),
        ("output_splits", POINTER(c_int64)),
        ("peer", POINTER(c_int32)),
    )


class Plan(_Sized):
    """cgx_plan_t."""

    __slots__ = ()

    _fields_ = (
        ("struct_size", c_size_t),
        ("algorithm", c_int32),
        ("reserved", c_int32),
        ("payload_bytes", c_int64),
        ("exact_bytes", c_int64),
    )


class Carried(_Sized):
    """cgx_carried_t."""

    __slots__ = ()

    _fields_ = (
        ("struct_size", c_size_t),
        ("rank", c_int32),
        ("size", c_int32),
        ("call", POINTER(Collective)),
        ("devices", c_int32),
    )


class Codec(_Sized):
    """cgx_codec_t."""

    __slots__ = ()

    _fields_ = (
        ("struct_size", c_size_t),
        ("config", Config),
        ("seed", c_int64),
        ("first_index", c_int64),
        ("dtype", c_int32),
        ("rank", c_int32),
        ("phase", c_int32),
        ("device", c_int32),
        ("stream", c_void_p),
    )
