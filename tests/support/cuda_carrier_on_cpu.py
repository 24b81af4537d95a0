"""Run CudaCarrier on CPU tensors, because there is no GPU: stand-ins for streams and the GPU steps.

Streams are names; events are a log of what ran on which stream. The steps of the core check that
they are CUDA calls on the current stream, and run on the CPU (carried_steps.py).
"""

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from cgx_ops._core import structs
from cgx_ops.torch.averaging import state
from cgx_ops.torch.graph import carried, carried_on_cuda
from support import carried_steps

CPU = torch.device("cpu")
_SIDE = 0x51DE  # the handle of the carrier's stream


class Stream:
    """A stream that logs what it waits for."""

    def __init__(self, log: list[str], name: str, handle: int) -> None:
        self.log, self.name, self.cuda_stream = log, name, handle

    def wait_stream(self, other: "Stream") -> None:
        """Log the wait."""
        self.log.append(f"{self.name} waits for {other.name}")


class Exchange:
    """The collectives of a process group, which log on which stream they start."""

    def __init__(self, group: Any, stand_in: "StandIn") -> None:
        self.group, self.stand_in = group, stand_in

    def alltoall_base(self, *arguments: Any) -> dist.Work:
        """Start an all-to-all."""
        self.stand_in.log.append(f"all_to_all on {self.stand_in.current.name}")
        return self.group.alltoall_base(*arguments)

    def _allgather_base(self, *arguments: Any) -> dist.Work:
        self.stand_in.log.append(f"all_gather on {self.stand_in.current.name}")
        return self.group._allgather_base(*arguments)


class StandIn:
    """The streams, futures and steps of a rank.

    Attributes:
        log: what happened, in order, with the stream.
        recorded: addresses of tensors whose memory the stream keeps.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.recorded: set[int] = set()
        self.caller = self.current = Stream(self.log, "caller", 0)
        self.side = Stream(self.log, "side", _SIDE)

    def carrier(self, group: dist.ProcessGroup) -> carried_on_cuda.CudaCarrier:
        """Return a carrier over a group whose collectives are logged."""
        made: Any = carried_on_cuda.CudaCarrier(group)
        made._group = lambda: Exchange(group, self)
        return made

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Make a stream current."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def future(self, devices: list[torch.device]) -> Any:
        """Return a future that logs on which stream it completes."""
        assert devices == [CPU]
        made: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        complete = made.set_result

        def set_result(value: torch.Tensor) -> None:
            self.log.append(f"result on {self.current.name}")
            complete(value)

        made.set_result = set_result  # type: ignore[method-assign]
        return made

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Note that a stream uses a tensor's memory, as Tensor.record_stream does."""
        assert stream is self.side
        self.recorded.add(tensor.data_ptr())

    def call(self, function: str, reference: Any, *arguments: Any) -> None:
        """Run a function of the core, whose call must be one for the current stream."""
        mine: structs.Carried = reference._obj
        native = mine.call.contents
        assert (native.device, native.stream) == (1, _SIDE), (native.device, native.stream)
        assert self.current is self.side, function
        if function != "cgx_carried_plan":
            self.log.append(f"{function.removeprefix('cgx_carried_')} on {self.current.name}")
        native.device, native.stream = 0, None
        try:
            carried_steps.run(function, mine, *arguments)
        finally:
            native.device, native.stream = 1, _SIDE


@contextlib.contextmanager
def cuda_carriers() -> Iterator[StandIn]:
    """Let states use CudaCarrier for CPU tensors inside this block."""
    stand_in = StandIn()
    fake_torch = types.SimpleNamespace(
        cuda=types.SimpleNamespace(
            Stream=lambda _device: stand_in.side,
            current_stream=lambda _device: stand_in.current,
            stream=stand_in.stream,
        ),
        futures=types.SimpleNamespace(Future=stand_in.future),
    )

    fake_library = types.SimpleNamespace(call=stand_in.call)

    places: list[tuple[Any, str, Any]] = [
        (carried_on_cuda, "torch", fake_torch),
        (carried, "library", fake_library),
        (state, "CpuCarrier", stand_in.carrier),
        (torch.Tensor, "record_stream", lambda tensor, stream: stand_in.keep(tensor, stream)),
    ]
    before = [(of, name, getattr(of, name)) for of, name, _ in places]
    for of, name, value in places:
        setattr(of, name, value)
    try:
        yield stand_in
    finally:
        for of, name, value in before:
            setattr(of, name, value)
