"""Steps of carried calls for CUDA tensors (cgx.h, section 5), executed by those for CPU tensors.

The messages of a CUDA call have room for one of this rank to itself; those of a CPU call do not.
"""

import ctypes
from collections.abc import Callable
from ctypes import byref
from typing import Any

from cgx_ops._core import library, structs


def run(step: str, carried: structs.Carried, *arguments: Any) -> None:
    """Execute a step.

    Args:
        step: the function of the core.
        carried: a call for CPU tensors.
        *arguments: the other arguments, as for CUDA tensors.
    """
    _WITH_ROOM.get(step, _as_given(step))(carried, *arguments)


def _encode(carried: structs.Carried, messages: Any, nbytes: int) -> None:
    scatter = _scatter_bytes(carried)
    at, own = sum(scatter[: carried.rank]), scatter[carried.rank]
    compact = (ctypes.c_char * (nbytes - own))()
    library.call("cgx_carried_encode", byref(carried), compact, nbytes - own)
    ctypes.memmove(messages, compact.raw[:at] + bytes(own) + compact.raw[at:], nbytes)


def _reduce(carried: structs.Carried, arrived: Any, nbytes: int, *message: Any) -> None:
    own = _scatter_bytes(carried)[carried.rank]
    assert nbytes == own * carried.size, f"{nbytes} bytes arrived, not {carried.size} x {own}"
    raw, at = ctypes.string_at(arrived, nbytes), own * carried.rank
    compact = raw[:at] + raw[at + own :]
    library.call("cgx_carried_reduce", byref(carried), compact, len(compact), *message)


_WITH_ROOM: dict[str, Callable[..., None]] = {
    "cgx_carried_encode": _encode,
    "cgx_carried_reduce": _reduce,
}


def _as_given(step: str) -> Callable[..., None]:
    return lambda carried, *arguments: library.call(step, byref(carried), *arguments)


def _scatter_bytes(carried: structs.Carried) -> list[int]:
    """Return the sizes of the messages to each rank; 0 with one_shot."""
    algorithm, sizes = ctypes.c_int32(), ctypes.c_int64 * carried.size
    scatter, gather = sizes(), sizes()
    library.call("cgx_carried_plan", byref(carried), byref(algorithm), scatter, gather)
    return list(scatter)
