"""Call the functions of cgx.h: turn statuses into exceptions, and describe the build.

The import gives libcgx the path of libmpi. libcgx opens it when cgx_init() finds an MPI job.
"""

import json
import os
from ctypes import POINTER, byref, c_char_p, c_double, c_int, c_int32, c_int64, c_void_p
from typing import Any

from cgx_ops import errors
from cgx_ops._core.binary import LIBRARY, REBUILD, built_with, find_mpi
from cgx_ops._core.structs import (
    CALLBACK,
    Bootstrap,
    Carried,
    Codec,
    Collective,
    CommInfo,
    Config,
    Plan,
    Traffic,
)
from cgx_ops._core.tables import CONFIG_FIELDS

_TEXTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("cgx_last_error", "cgx_version"), ()),
    **dict.fromkeys(("cgx_config_fields", "cgx_compressors", "cgx_verbs"), ()),
    "cgx_compressor_name": (c_int64,),
}
_CALLS: dict[str, tuple[Any, ...]] = {
    "cgx_last_error_field": (),  # returns an index
    "cgx_describe": (POINTER(c_char_p),),
    "cgx_describe_mpi": (POINTER(c_char_p),),
    "cgx_set_mpi_path": (c_char_p,),
    "cgx_init": (POINTER(c_int32),),
    "cgx_finish": (),
    "cgx_finalize": (),
    "cgx_comm_create": (POINTER(Bootstrap), POINTER(c_int32)),
    "cgx_comm_create_local": (c_int32, c_char_p, c_double, POINTER(c_int32)),
    "cgx_comm_split": (c_int32, c_int32, c_int32, c_char_p, POINTER(c_int32)),
    "cgx_comm_group": (c_int32, POINTER(c_int32), c_int32, c_char_p, POINTER(c_int32)),
    "cgx_comm_find": (c_char_p, POINTER(c_int32)),
    "cgx_comm_next": (c_int32, POINTER(c_int32)),
    "cgx_comm_info": (c_int32, POINTER(CommInfo)),
    "cgx_traffic": (POINTER(Traffic),),
    "cgx_carried_traffic": (POINTER(Traffic),),
    "cgx_comm_find_lost": (c_int32, c_double),
    "cgx_comm_close": (c_int32,),
    "cgx_comm_abort": (c_int32, c_char_p),
    "cgx_start": (POINTER(Collective), c_void_p, c_void_p, POINTER(c_void_p)),
    "cgx_run": (POINTER(Collective),),
    "cgx_run_for": (POINTER(Collective), c_double, POINTER(c_void_p)),
    "cgx_test": (c_void_p, POINTER(c_int32)),
    "cgx_notify": (c_void_p, CALLBACK, c_void_p),
    "cgx_wait": (c_void_p,),
    "cgx_wait_for": (c_void_p, c_double, POINTER(c_int32)),
    "cgx_config_parse": (c_char_p, POINTER(Config)),
    "cgx_config_override": (c_char_p, POINTER(Config)),
    "cgx_config_text": (POINTER(Config), POINTER(c_char_p)),
    "cgx_config_check_feedback": (POINTER(Config),),
    "cgx_config_seed_use": (POINTER(Config), POINTER(c_int32)),
    "cgx_config_is_exact": (POINTER(Config), POINTER(c_int32)),
    "cgx_enqueue": (POINTER(Collective),),
    "cgx_comm_check": (c_int32, c_int32),
    "cgx_stream_recording": (c_void_p, POINTER(c_int32)),
    "cgx_plan": (POINTER(Collective), POINTER(Plan)),
    "cgx_refuse": (POINTER(Collective), c_int, c_char_p),
    "cgx_sum": (c_int32, POINTER(c_void_p), c_int32, c_int64, c_void_p),
    "cgx_convert": (c_int32, c_void_p, c_int32, c_void_p, c_int64),
    "cgx_convert_residual": (c_void_p, c_int32, c_void_p, c_int64),
    "cgx_carried_plan": (POINTER(Carried), POINTER(c_int32), POINTER(c_int64), POINTER(c_int64)),
    "cgx_carried_encode": (POINTER(Carried), c_void_p, c_int64),
    "cgx_carried_reduce": (POINTER(Carried), c_void_p, c_int64, c_void_p, c_int64),
    "cgx_carried_decode": (POINTER(Carried), c_void_p, c_int64),
    "cgx_encoded_bytes": (POINTER(Codec), c_int64, POINTER(c_int64)),
    "cgx_quantize": (POINTER(Codec), c_void_p, c_int64, c_void_p, POINTER(c_int64)),
    "cgx_dequantize": (POINTER(Codec), c_void_p, c_int64, c_int64, c_void_p),
    "cgx_statistic": (POINTER(Codec), c_void_p, c_int64, POINTER(c_double)),
    "cgx_sum_encoded": (POINTER(Codec), c_void_p, c_int32, c_int64, c_int64, c_void_p),
}


for _functions, _returned in ((_TEXTS, c_char_p), (_CALLS, c_int)):
    for _name, _arguments in _functions.items():
        _function = getattr(LIBRARY, _name)
        _function.argtypes, _function.restype = _arguments, _returned


def encode(text: str) -> bytes:
    """Return text as bytes for C, where a NUL would end it."""
    if "\0" in text:
        raise errors.InvalidArgument(f"{text!r} contains a NUL character; names must not")
    return text.encode()


def text(pointer: bytes | None) -> str:
    """Decode a C string of libcgx; "" for NULL."""
    return (pointer or b"").decode(errors="replace")


def call(name: str, *arguments: Any) -> None:
    """Call a function of cgx.h that returns a status; raise a CgxError if it failed.

    The call releases the GIL, so that other threads run while this one waits for its peers.
    """
    check(getattr(LIBRARY, name)(*arguments))


def check(status: int) -> None:
    """Raise the CgxError of a status, unless it is success."""
    if status:
        field = LIBRARY.cgx_last_error_field()
        name = CONFIG_FIELDS[field]["name"] if field >= 0 else None
        raise errors.from_status(status, text(LIBRARY.cgx_last_error()), name)


def parse_config(text: str) -> Config:
    """Return the config that cgx_config_parse() reads from a text, or raise InvalidArgument."""
    config = Config()
    call("cgx_config_parse", text.encode(), byref(config))
    return config


def call_for_id(name: str, *arguments: Any) -> int:
    """Call a function whose last parameter receives a communicator's id; return the id."""
    result = c_int32(-1)
    call(name, *arguments, byref(result))
    return result.value


def version() -> str:
    """Return the version of the loaded libcgx."""
    return text(LIBRARY.cgx_version())


def describe() -> dict[str, Any]:
    """Return what this build supports, as cgx_describe() lists it. It starts nothing."""
    return _described("cgx_describe")


def describe_mpi() -> dict[str, Any]:
    """Return "library", the version line of the MPI library, and "cuda_aware", a bool.

    This loads the library, but does not start MPI.

    Raises:
        CgxError: The library is missing, or the process has loaded another MPI.
    """
    return _described("cgx_describe_mpi")


def _described(function: str) -> dict[str, Any]:
    found = c_char_p()
    call(function, byref(found))
    return json.loads(text(found.value))


if version() != built_with()["version"]:
    raise errors.SystemFailure(
        f"This process has loaded libcgx {version()}, but this cgx_ops is version "
        f"{built_with()['version']}: another copy of cgx_ops was loaded first. Keep one copy on "
        f"sys.path, or build this one again: {REBUILD}"
    )
if _libmpi := find_mpi():
    call("cgx_set_mpi_path", os.fsencode(_libmpi))
