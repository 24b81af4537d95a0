"""A stand-in for a GPU: programs for CUDA tensors run on CPU tensors and the core's CPU part.

install() replaces these for the whole process, before the program is imported:

    torch     the device "cuda" is the CPU; streams, events and graphs run immediately
    library   cgx_enqueue is cgx_run, and the codec's calls work on the CPU; number and types of the
              arguments are checked, and so are the device and the stream

A failed collective is reported late, as on a GPU: its results are NaN, and later calls raise.
Whether the host waits for the GPU cannot be tested: streams and events always report pending work.
"""

import contextlib
import ctypes
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from ctypes import byref, c_int64, pointer
from typing import Any

import torch
import torch.distributed.device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from cgx_ops import errors
from cgx_ops._core import library, structs
from cgx_ops._core.tables import CUDA
from support import carried_steps

NAME = "no GPU: its stand-in"

# ---- Streams, events and graphs ------------------------------------------------------------------

_HANDLES = itertools.count(0x1000, 0x10)
_now = threading.local()  # of a thread: `stream`, and `graph` while one is recorded


class Stream:
    """A torch.cuda.Stream without a queue."""

    known: set[int] = {0}  # noqa: RUF012  handles of all streams

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.cuda_stream = next(_HANDLES)
        self.known.add(self.cuda_stream)

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        pass

    def wait_stream(self, other: "Stream") -> None:
        pass

    def wait_event(self, event: "Event") -> None:
        pass

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record()
        return event


class Event:
    """A torch.cuda.Event. Its time is that of the host."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self._timed, self._at = enable_timing, 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        pass

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        """Return milliseconds."""
        assert self._timed and end._timed, "both events need enable_timing=True"
        return 1e3 * (end._at - self._at)


DEFAULT = Stream()
DEFAULT.cuda_stream = 0


def current_stream(device: object = None) -> Stream:
    return getattr(_now, "stream", DEFAULT)


@contextlib.contextmanager
def use(stream: Stream) -> Iterator[None]:
    """Do what torch.cuda.stream() does."""
    before, _now.stream = current_stream(), stream
    try:
        yield
    finally:
        _now.stream = before


class Graph:
    """A torch.cuda.CUDAGraph: records calls of torch and of libcgx while they run."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []

    def replay(self) -> None:
        for call in self.calls:
            call()


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)

        def again() -> None:
            found = func(*args, **kwargs)
            if isinstance(found, tuple):  # of torch.distributed: tensors and a Work
                found[-1].wait()
            else:  # the graph's results stay where they are
                made.copy_(torch.ops._c10d_functional.wait_tensor(found))

        self._graph.calls.append(again)
        return made


@contextlib.contextmanager
def record(graph: Graph) -> Iterator[None]:
    """Do what torch.cuda.graph() does; calls also run."""
    _now.graph = graph
    try:
        with use(Stream()), _Recorder(graph):
            yield
    finally:
        del _now.graph


# ---- torch ---------------------------------------------------------------------------------------


def _on_cpu(device: Any) -> Any:
    is_cuda = isinstance(device, (str, torch.device)) and str(device).split(":")[0] == "cuda"
    return "cpu" if is_cuda else device


def _with_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose arguments may name the device "cuda"."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        options.pop("pin_memory", None)  # needs a driver
        if "device" in options:
            options["device"] = _on_cpu(options["device"])
        return function(*map(_on_cpu, args), **options)

    return call


def _copies(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that copies pageable memory, which ranks that are threads must not do."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        assert threading.current_thread() is threading.main_thread(), (
            f"Tensor.{function.__name__}() by a thread may block its peers: use pinned memory, as "
            "support/cuda_core.py does"
        )
        return function(*args, **options)

    return call


def _to_gpu(x: torch.Tensor, device: object = None, non_blocking: bool = False) -> torch.Tensor:
    return x.clone()


def _to(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    moves = any(_on_cpu(each) is not each for each in (*args, options.get("device")))
    return _TO(x.clone() if moves else x, *args, **options)


_TO = _with_cpu(torch.Tensor.to)
_FACTORIES = ["arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros"]
_LIKE = ["empty_like", "full_like", "ones_like", "zeros_like"]
_OF_CUDA: dict[str, Any] = {
    "CUDAGraph": Graph,
    "Event": Event,
    "Stream": Stream,
    "_sleep": lambda cycles: None,
    "current_stream": current_stream,
    "default_stream": lambda device=None: DEFAULT,
    "device_count": lambda: 1,
    "empty_cache": lambda: None,
    "get_device_capability": lambda device=None: (8, 0),
    "get_device_name": lambda device=None: NAME,
    "graph": record,
    "manual_seed": torch.manual_seed,
    "set_device": lambda device: None,
    "stream": use,
    "synchronize": lambda device=None: None,
}


def _replace_torch() -> None:
    for name in (*_FACTORIES, *_LIKE):
        setattr(torch, name, _with_cpu(getattr(torch, name)))
    for name, function in _OF_CUDA.items():
        assert hasattr(torch.cuda, name), name
        setattr(torch.cuda, name, function)
    tensor: Any = torch.Tensor
    tensor.cuda, tensor.cpu = _copies(_to_gpu), _copies(tensor.cpu)
    tensor.to, tensor.pin_memory = _to, lambda x: x
    tensor.is_cuda = property(lambda x: True)
    tensor.record_stream = lambda x, stream: None
    torch.compile = lambda function, **options: function  # compiled tests take longer
    mesh: Any = torch.distributed.device_mesh
    mesh.init_device_mesh = _with_cpu(mesh.init_device_mesh)


# ---- libcgx --------------------------------------------------------------------------------------

_call = library.call
_LATE = (errors.DeadlineExceeded, errors.MismatchError, errors.PeerFailed)
_failures: dict[int, errors.CgxError] = {}  # by communicator
_connected: set[int] = set()  # communicators


def call(name: str, *arguments: Any) -> None:
    """Do what library.call() does, with the GPU's calls on the CPU."""
    expected = getattr(library.LIBRARY, name).argtypes
    # ctypes accepts more arguments than a function has.
    assert len(arguments) == len(expected), f"{name}: {arguments} instead of {expected}"
    _REPLACED.get(name, functools.partial(_call, name))(*arguments)


def _check_stream(handle: int | None) -> None:
    assert (handle or 0) in Stream.known, f"{handle} is not the handle of a stream"


def _enqueue(reference: Any) -> None:
    collective: structs.Collective = reference._obj
    if collective.device != CUDA:
        return _call("cgx_enqueue", reference)  # raises its error
    _check_stream(collective.stream)
    if graph := getattr(_now, "graph", None):
        graph.calls.append(functools.partial(_run, collective))
    return _run(collective)


def _run(collective: structs.Collective) -> None:
    comm = collective.comm
    _raise_failure(comm)
    here = structs.Collective.from_buffer_copy(collective)
    here.device, here.stream = 0, None
    if here.device_seeds:
        here.seeds = ctypes.cast(here.device_seeds, ctypes.POINTER(c_int64))
    if here.device_seed:
        here.seed = c_int64.from_address(here.device_seed).value
    here.device_seeds = here.device_seed = None
    try:
        _call("cgx_run", byref(here))
        _connected.add(comm)
    except _LATE as error:
        _failures[comm] = error
        if here.output:
            size = 4 if here.dtype == 0 else 2  # bytes of a value
            ctypes.memset(here.output, 0xFF, here.block_numel * size)  # NaN


def _check(comm: int, finish: int) -> None:
    _call("cgx_comm_check", comm, finish)
    _raise_failure(comm)


def _raise_failure(comm: int) -> None:
    if comm in _failures:
        raise _failures[comm]


def _info(comm: int, reference: Any) -> None:
    _call("cgx_comm_info", comm, reference)
    if comm in _connected:
        reference._obj.wire = b"staged" if reference._obj.transport == b"mpi" else b"direct"


def _carried(step: str) -> Callable[..., None]:
    def run(reference: Any, *arguments: Any) -> None:
        carried: structs.Carried = reference._obj
        collective = structs.Collective.from_buffer_copy(carried.call.contents)
        if collective.device != CUDA:
            return _call(step, reference, *arguments)
        _check_stream(collective.stream)
        collective.device, collective.stream = 0, None
        here = structs.Carried(rank=carried.rank, size=carried.size, call=pointer(collective))
        return carried_steps.run(step, here, *arguments)

    return run


def _codec(name: str) -> Callable[..., None]:
    def run(reference: Any, *arguments: Any) -> None:
        codec: structs.Codec = reference._obj
        here = structs.Codec.from_buffer_copy(codec)
        if codec.device == CUDA:
            _check_stream(codec.stream)
            here.device, here.stream = 0, None
        _call(name, byref(here), *arguments)

    return run


_STEPS = ("plan", "encode", "reduce", "decode")
_REPLACED: dict[str, Callable[..., None]] = {
    "cgx_enqueue": _enqueue,
    "cgx_comm_check": _check,
    "cgx_comm_info": _info,
    **{name: _codec(name) for name in ("cgx_quantize", "cgx_dequantize", "cgx_sum_encoded")},
    **{f"cgx_carried_{step}": _carried(f"cgx_carried_{step}") for step in _STEPS},
}


def install() -> None:
    """Replace the GPU for the rest of this process."""
    _replace_torch()
    library.call = call
