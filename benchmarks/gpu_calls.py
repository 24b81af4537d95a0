"""Shared by the GPU benchmarks: calls of libcgx on torch's tensors, and a description of the GPU.

Calls are made ready once and then repeated, as a binding written in C++ would: what remains of
Python is one call of ctypes.
"""

from collections.abc import Callable
from ctypes import byref, c_int64
from dataclasses import dataclass
from typing import Any

import torch

from cgx_ops import Communicator, Config
from cgx_ops._core import library, structs, tables
from cgx_ops._core.call import Call

CUDA = 1  # cgx_device_t

Enqueue = Callable[[], object]  # puts something on the stream that was current when it was made


@dataclass(frozen=True)
class Ready:
    """A call of libcgx with its arguments; it holds the tensors that these point to."""

    function: str
    struct: structs.Collective | structs.Codec
    arguments: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]

    def __call__(self) -> None:
        library.call(self.function, byref(self.struct), *self.arguments)


def stream() -> int:
    """Return the current stream's handle."""
    return torch.cuda.current_stream().cuda_stream


def dtype_code(dtype: torch.dtype) -> int:
    """Return the cgx_dtype_t."""
    return tables.DTYPES[str(dtype).removeprefix("torch.")]


def allreduce(comm: Communicator, x: torch.Tensor, y: torch.Tensor, config: Config) -> Enqueue:
    """Return an allreduce of x into y."""
    call = Call("allreduce", "sum", config, "", None, 1, None)
    collective = call.collective(
        comm.id, dtype_code(x.dtype), x.data_ptr(), y.data_ptr(), x.numel()
    )
    collective.device, collective.stream = CUDA, stream()
    return Ready("cgx_enqueue", collective, (), (x, y))


def wire(comm: Communicator) -> str:
    """Return how the ranks' GPUs are connected, "direct" or "staged"; "" before the first call."""
    return library.text(comm._info().wire)


class Codec:
    """The kernels of one rank, on tensors of one dtype."""

    def __init__(self, dtype: torch.dtype, config: Config) -> None:
        self.codec = structs.Codec(
            config=config.native,
            dtype=dtype_code(dtype),
            seed=1,
            device=CUDA,
            stream=stream(),
        )

    def encoded_bytes(self, numel: int) -> int:
        count = c_int64()
        library.call("cgx_encoded_bytes", byref(self.codec), numel, byref(count))
        return count.value

    def quantize(self, values: torch.Tensor, message: torch.Tensor) -> Enqueue:
        arguments = values.data_ptr(), values.numel(), message.data_ptr()
        return Ready("cgx_quantize", self.codec, arguments, (values, message))

    def dequantize(self, message: torch.Tensor, values: torch.Tensor) -> Enqueue:
        arguments = message.data_ptr(), values.numel(), values.data_ptr()
        return Ready("cgx_dequantize", self.codec, arguments, (message, values))

    def reduce(self, messages: torch.Tensor, numel: int, reduced: torch.Tensor) -> Enqueue:
        """Decode the rows of `messages`, of numel values each, and encode their sum."""
        rows = messages.data_ptr(), messages.shape[0], messages.stride(0)
        arguments = (*rows, numel, reduced.data_ptr())
        return Ready("cgx_sum_encoded", self.codec, arguments, (messages, reduced))


def settings() -> dict[str, Any]:
    """Return the GPU and its software, for a report."""
    cuda = library.describe()["cuda"]
    return {
        "gpu": torch.cuda.get_device_name(),
        "gpus": torch.cuda.device_count(),
        "driver": cuda["driver"],
        "toolkit": cuda["built"],
    }
