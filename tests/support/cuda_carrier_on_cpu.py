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
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cgx_ops._core import structs
from cgx_ops.torch.averaging import exchange, residuals, state, unused_parameters
from cgx_ops.torch.averaging.power_sgd import exchange as power_sgd
from cgx_ops.torch.ddp.deep_gradient import hook as deep_gradient
from cgx_ops.torch.graph import carried, carried_on_cuda
from support import carried_steps

CPU = torch.device("cpu")
_SIDE = 0x51DE  # the handle of the carrier's stream
_CALLBACKS: tuple[Any, ...] = (exchange, residuals, unused_parameters, deep_gradient, power_sgd)


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


class Reads(TorchDispatchMode):
    """The operations on a stream that use memory of tensors made before.

    Attributes:
        by_address: the operation and the memory, by its address.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_address: dict[int, tuple[str, StorageWeakRef]] = {}
        self._made: dict[int, torch.UntypedStorage] = {}  # alive, so that no address is used twice

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = _storages((args, kwargs))
        for address in given.keys() - self._made.keys():
            self.by_address[address] = str(func), StorageWeakRef(given[address])
        found = func(*args, **kwargs or {})
        made = _storages(found)
        self._made |= {address: made[address] for address in made.keys() - self.by_address.keys()}
        return found


def _storages(values: Any) -> dict[int, torch.UntypedStorage]:
    # Integers are on the host also with a GPU: sizes, which torch copies.
    leaves = tree_leaves(values)
    tensors = [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors}


class StandIn:
    """The streams, futures and steps of a rank.

    Attributes:
        log: what happened, in order, with the stream.
        recorded: addresses of tensors whose memory the stream keeps.
    """

    def __init__(self) -> None:
        self._recorded_storages: set[int] = set()  # in the current use of the stream
        self._unrecorded: list[tuple[str, StorageWeakRef]] = []
        self.log: list[str] = []
        self.recorded: set[int] = set()
        self.caller = self.current = Stream(self.log, "caller", 0)
        self.side = Stream(self.log, "side", _SIDE)

    def carrier(self, group: dist.ProcessGroup, era: str = "") -> carried_on_cuda.CudaCarrier:
        """Return a carrier over a group whose collectives are logged."""
        made: Any = carried_on_cuda.CudaCarrier(group, era)
        made._group = lambda: Exchange(group, self)
        return made

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Make a stream current."""
        before, self.current = self.current, stream
        self._recorded_storages.clear()
        try:
            with Reads() as reads:
                yield
        finally:
            self.current = before
        missing = reads.by_address.keys() - self._recorded_storages
        self._unrecorded += [reads.by_address[address] for address in missing]

    def freed(self) -> list[str]:
        """Return the operations that used memory which was freed without being recorded."""
        return [operation for operation, memory in self._unrecorded if memory.expired()]

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
        self._recorded_storages.add(tensor.untyped_storage().data_ptr())

    def keep_all(self, *tensors: torch.Tensor | None) -> None:
        """Do what use_on_this_stream() does with CUDA tensors."""
        for each in tensors:
            if each is not None and self.current is self.side:
                self.keep(each, self.side)

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
        *((module, "use_on_this_stream", stand_in.keep_all) for module in _CALLBACKS),
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
