"""Shared by the GPU benchmarks: calls of libcgx on torch's tensors, and a description of the GPU.

Calls are prepared once and then repeated, as a binding written in C++ would: what remains of Python
is one call of ctypes.
"""

from collections.abc import Callable
from ctypes import byref, c_int32, c_int64, pointer
from dataclasses import dataclass
from typing import Any

import gpu_mps
import torch

from cgx_ops import Communicator, Config
from cgx_ops._core import library, structs, tables
from cgx_ops._core.call import Call

Enqueue = Callable[[], object]  # puts work on the stream that was current when it was made


@dataclass(frozen=True)
class Ready:
    """A call of libcgx with its arguments; it holds the tensors that these point to."""

    function: str
    struct: structs.Collective | structs.Codec | structs.Carried
    arguments: tuple[int | None, ...]
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
    return Ready("cgx_enqueue", _collective(comm.id, x, y.data_ptr(), config), (), (x, y))


def _collective(comm: int, x: torch.Tensor, result: int, config: Config) -> structs.Collective:
    call = Call("allreduce", "sum", config, "", None, 1, None)
    collective = call.collective(comm, dtype_code(x.dtype), x.data_ptr(), result, x.numel())
    collective.device, collective.stream = tables.CUDA, stream()
    return collective


class Codec:
    """The kernels of one rank, on tensors of one dtype."""

    def __init__(self, dtype: torch.dtype, config: Config) -> None:
        self.codec = structs.Codec(
            config=config.native,
            dtype=dtype_code(dtype),
            seed=1,
            device=tables.CUDA,
            stream=stream(),
        )

    def encoded_bytes(self, numel: int) -> int:
        count = c_int64()
        library.call("cgx_encoded_bytes", byref(self.codec), numel, byref(count))
        return count.value

    def quantize(self, values: torch.Tensor, message: torch.Tensor) -> Enqueue:
        arguments = values.data_ptr(), values.numel(), message.data_ptr(), None
        return Ready("cgx_quantize", self.codec, arguments, (values, message))

    def dequantize(self, message: torch.Tensor, values: torch.Tensor) -> Enqueue:
        arguments = message.data_ptr(), message.nbytes, values.numel(), values.data_ptr()
        return Ready("cgx_dequantize", self.codec, arguments, (message, values))

    def reduce(self, messages: torch.Tensor, numel: int, reduced: torch.Tensor) -> Enqueue:
        """Decode the rows of `messages`, of numel values each, and encode their sum."""
        rows = messages.data_ptr(), messages.shape[0], messages.stride(0)
        arguments = (*rows, numel, reduced.data_ptr())
        return Ready("cgx_sum_encoded", self.codec, arguments, (messages, reduced))


class Owner:
    """The owner of a shard in sra: it adds the messages of the others to its own values.

    Args:
        size: ranks; this is rank 0.
        numel: values of a shard.
        dtype: of the values.
        config: of the messages.
    """

    def __init__(self, size: int, numel: int, dtype: torch.dtype, config: Config) -> None:
        self._values = torch.randn(size * numel, device="cuda", dtype=dtype)
        self._calls = [_collective(-1, self._values, 0, config) for _ in range(size)]
        self._ranks = [
            structs.Carried(rank=rank, size=size, call=pointer(call))
            for rank, call in enumerate(self._calls)
        ]
        scatter, gather = ((c_int64 * size)() for _ in range(2))
        plan = byref(self._ranks[0]), byref(c_int32()), scatter, gather
        library.call("cgx_carried_plan", *plan)
        self._reduced = torch.empty(gather[0], dtype=torch.uint8, device="cuda")
        # The messages of another rank to all: that to rank 0 comes first.
        library.call("cgx_carried_plan", byref(self._ranks[1]), *plan[1:])
        sent = torch.empty(sum(scatter), dtype=torch.uint8, device="cuda")
        Ready("cgx_carried_encode", self._ranks[1], (sent.data_ptr(), sent.nbytes), (sent,))()
        # There is room for a message of rank 0 to itself, which is not read.
        self._arrived = sent[: scatter[0]].repeat(size)

    @property
    def bytes(self) -> int:
        """Bytes of this rank's values, the arrived messages and the result."""
        size = len(self._ranks)
        messages = self._arrived.nbytes // size * (size - 1)
        return self._values.nbytes // size + messages + self._reduced.nbytes

    def reduce(self) -> Enqueue:
        arrived, reduced = self._arrived, self._reduced
        arguments = arrived.data_ptr(), arrived.nbytes, reduced.data_ptr(), reduced.nbytes
        tensors = self._values, arrived, reduced
        return Ready("cgx_carried_reduce", self._ranks[0], arguments, tensors)


def seconds_on_device(enqueue: Enqueue, calls: int, cycles: int, before: int = 0) -> float:
    """Return the seconds of a call on the device: the mean of several that follow each other.

    Args:
        enqueue: the call.
        calls: how many are timed.
        cycles: of the GPU for which it first waits, so that all calls are there when they begin.
        before: how many calls precede the timed ones.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles)
    for _ in range(before):
        enqueue()
    begin.record()
    for _ in range(calls):
        enqueue()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def settings() -> dict[str, Any]:
    """Return the GPU and its software, for a report."""
    cuda = library.describe()["cuda"]
    return {
        "gpu": torch.cuda.get_device_name(),
        "gpus": torch.cuda.device_count(),
        "driver": cuda["driver"],
        "toolkit": cuda["built"],
        "mps": gpu_mps.running(),
    }
