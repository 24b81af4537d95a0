"""Collectives of GPU memory without a binding: cgx_enqueue by ctypes, memory and streams by torch.

OnGpu       a Communicator whose collectives of numpy arrays run on the GPU
    allreduce   of torch tensors, on the current stream; returns immediately

Copies go through pinned memory. The driver holds a lock while it copies pageable memory and waits
for the stream: a rank that is another thread of this process could not start its part of a
collective, for which that stream may wait.
"""

import itertools
import threading
from ctypes import byref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cgx_ops import Communicator, Config
from cgx_ops._core import library, structs, tables
from cgx_ops._core.call import Call, Op
from cgx_ops._core.tables import CUDA

NUMEL = 300_000
CONFIG = Config(bits=4, rounding="stochastic")
Finding = Any  # the result of a scenario, as JSON
_GUARD = 128  # bytes on each side of a buffer: the alignment of the widest store of a warp
_PATTERN = 0xA5


class _Pinned(threading.local):
    """Pinned memory of a thread. Its allocation may wait for the GPU, so it is used again."""

    def __init__(self) -> None:
        self._held = torch.empty(0, dtype=torch.uint8)

    def of(self, nbytes: int) -> torch.Tensor:
        if self._held.numel() < max(nbytes, 1):
            size = max(nbytes, 2**25)
            self._held = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return self._held[:nbytes]


_pinned = _Pinned()


def to_gpu(array: npt.NDArray[Any]) -> torch.Tensor:
    """Return the bytes of a contiguous array in the GPU's memory."""
    staged = _pinned.of(array.nbytes)
    staged.numpy()[:] = array.reshape(-1).view(np.uint8)
    held = staged.to("cuda", non_blocking=True)
    wait()
    return held


def to_host(x: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Wait for the current stream, and return the bytes of a contiguous tensor."""
    staged = _pinned.of(x.nbytes)
    staged.copy_(x.view(-1).view(torch.uint8), non_blocking=True)
    wait()
    return staged.numpy().copy()


def wait() -> None:
    """Wait for the current stream."""
    end = torch.cuda.Event()
    end.record()
    end.synchronize()


class Values:
    """A copy of an array in the GPU's memory, between guard bytes.

    Its address is a multiple of the item size, and seldom of more.
    """

    _count = itertools.count()

    def __init__(self, array: npt.NDArray[Any]) -> None:
        shift = next(self._count) % 16 * array.itemsize
        self._at = slice(_GUARD + shift, _GUARD + shift + array.nbytes)
        held = np.full(self._at.stop + _GUARD, _PATTERN, np.uint8)
        held[self._at] = array.reshape(-1).view(np.uint8)
        self._shape, self._dtype = array.shape, array.dtype
        self._held = to_gpu(held)

    @property
    def address(self) -> int:
        return self._held.data_ptr() + self._at.start

    def array(self) -> npt.NDArray[Any]:
        """Wait for the current stream, check the guards, and return the values."""
        held = to_host(self._held)
        outside = np.concatenate([held[: self._at.start], held[self._at.stop :]])
        assert (outside == _PATTERN).all(), "bytes beside the buffer were written"
        return held[self._at].copy().view(self._dtype).reshape(self._shape)


class OnGpu(Communicator):
    """A communicator's ranks, named by its id. Collectives run on the current stream."""

    def _run(
        self,
        call: Call,
        source: npt.NDArray[Any],
        shape: tuple[int, ...],
        block: int,
        out: npt.NDArray[Any] | None,
        residual: npt.NDArray[Any] | None = None,
    ) -> npt.NDArray[Any]:
        assert residual is None, "run_cuda_core.py tests residuals"
        collective, result, *_ = call.prepare(*self._place(), source, shape, block, out)
        if out is None and call.segments is None:
            result.reshape(-1).view(np.uint8).fill(0xFF)  # NaN: every value must be written
        given = Values(source)
        gets = given if out is source else Values(result)
        enqueue(collective, given.address, gets.address)
        result[...] = gets.array()
        check(self)
        if gets is not given:
            assert given.array().tobytes() == source.tobytes(), "the input changed"
        return result


def allreduce(
    comm: Communicator,
    x: torch.Tensor,
    y: torch.Tensor,
    config: Config,
    op: Op = "sum",
    *,
    seed: int = 0,
    device_seeds: torch.Tensor | None = None,
    timeout: float | None = None,
) -> None:
    """Enqueue an allreduce of x into y on the current stream. The arguments are those of cgx.h."""
    dtype = tables.DTYPES[str(x.dtype).removeprefix("torch.")]
    call = Call("allreduce", op, config, "", None, seed, timeout)
    collective = call.collective(comm.id, dtype, 0, 0, x.numel())
    if device_seeds is not None:
        collective.device_seeds = device_seeds.data_ptr()
    enqueue(collective, x.data_ptr(), y.data_ptr())


def enqueue(collective: structs.Collective, source: int | None, result: int | None) -> None:
    """Call cgx_enqueue with these addresses, on the current stream."""
    collective.input, collective.output = source, result
    collective.device, collective.stream = CUDA, torch.cuda.current_stream().cuda_stream
    library.call("cgx_enqueue", byref(collective))


def check(comm: Communicator, *, finish: bool = False) -> None:
    """Raise the error of failed collectives on the GPU; finish: wait for all first."""
    library.call("cgx_comm_check", comm.id, finish)


def differs(y: torch.Tensor, want: np.ndarray) -> bool:
    """Wait for the current stream and compare bits."""
    return to_host(y).tobytes() != want.tobytes()
