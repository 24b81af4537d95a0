"""Create communicators of processes that can already exchange small messages."""

from ctypes import addressof, c_int32, pointer

from cgx_ops import _numpy_ops
from cgx_ops._core import library, startup, structs
from cgx_ops._core.call import check_timeout
from cgx_ops._core.consistency import Gather
from cgx_ops.errors import InvalidArgument, require_integer


def create(
    rank: int,
    size: int,
    allgather: Gather,
    name: str,
    transport: str | None,
    timeout: float | None,
    noise_rank: int | None,
    elastic: bool,
    connect_timeout: float | None,
) -> int:
    """Return the id of a new communicator. See Communicator.create() for the arguments."""
    startup.check_environment()
    check_timeout(timeout)
    check_timeout(connect_timeout)
    size = require_integer("size", size, 1, 2**31 - 1)
    rank = require_integer("rank", rank, 0, size - 1)
    if noise_rank is not None:
        noise_rank = require_integer("noise_rank", noise_rank, 0, 2**31 - 1)

    def gather(mine: bytes) -> bytes:
        blobs = allgather(mine)
        if len(blobs) != size or any(len(blob) != len(mine) for blob in blobs):
            raise InvalidArgument(
                f"allgather returned blobs of {[len(blob) for blob in blobs]} bytes; it must "
                f"return {size} blobs of {len(mine)} bytes"
            )
        return b"".join(blobs)

    bootstrap = structs.Bootstrap(
        rank=rank,
        size=size,
        name=library.encode(name),
        transport=None if transport is None else library.encode(transport),
        timeout_s=timeout or 0.0,
        noise_rank=None if noise_rank is None else pointer(c_int32(noise_rank)),
        elastic=elastic,
        connect_timeout_s=connect_timeout or 0.0,
    )
    made = c_int32(-1)
    library.check(_numpy_ops.create(addressof(bootstrap), gather, addressof(made)))
    return made.value
