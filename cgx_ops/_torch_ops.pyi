"""The compiled part of cgx_ops.torch: importing it registers torch.ops.cgx.*."""

import datetime
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

__file__: str
torch_version: str
cgx_version: str

def find_groups_by(finder: Callable[[str], int], sizer: Callable[[str], int]) -> None:
    """Have finder(group_name) return a communicator's id, sizer(group_name) the number of ranks."""

def make_errors_by(maker: Callable[[int, str], dist.DistBackendError]) -> None:
    """Have maker(status, text) return what failures among ranks raise. Once per process."""

def report_start_by(report: Callable[[str, str, int, int, str], None]) -> None:
    """Have report(what, config, rank, size, transport) called at first uses.

    They are those of operators and of the backend's exact reduce_scatter.
    """

def on_trace(callback: Callable[[], bool]) -> None:
    """Call callback() whenever an operator is traced, until it returns True. Once per process."""

def start(
    collective: int,
    input: torch.Tensor,  # noqa: A002
    output: torch.Tensor,
    residuals: Sequence[torch.Tensor],
    asynchronous: bool,
) -> dist.Work:
    """Start the cgx_collective_t at this address, on these tensors' memory; return its Work.

    Not asynchronous: CUDA tensors on the current stream.
    """

# ---- The backend "cgx": cgx_ops/torch/backend/process_group.py --------------------------------

class Compression:
    """The text of a Config, and the seed of its noise.

    larger: The same for messages of at least so many elements, in ascending order.
    """

    def __init__(
        self, config: str, seed: int, larger: Sequence[tuple[int, int, Compression]] = ...
    ) -> None: ...

class ScopeKind(enum.Enum):
    NONE = ...
    COMPRESSED = ...
    UNCOMPRESSED = ...

class Scope:
    """The block of `compressed()` or `uncompressed()` that the calling thread is in."""

    def __init__(self, kind: ScopeKind, compression: Compression | None = None) -> None: ...

def exchange_scope(scope: Scope) -> Scope:
    """Set the scope of the calling thread and return the previous one."""

def drain(seconds: float) -> None:
    """Wait until no callback of a future runs, or the seconds have passed."""

class Automatic(enum.Enum):
    """The allreduces that a group compresses outside of `compressed()` blocks."""

    GRADIENTS = ...
    EVERYTHING = ...
    NOTHING = ...

class Options(c10d.Backend.Options):
    """The settings of one group's backend."""

    automatic: Automatic

    def __init__(
        self, compression: Compression, automatic: Automatic, timeout: datetime.timedelta
    ) -> None: ...
    def set_compression(self, compression: Compression) -> None: ...

class Reconfigurations(Protocol):
    """The successive members of a group, made by cgx_ops.torch.backend.make."""

    def handle(self) -> str: ...
    def reconfigure(
        self,
        handles: list[str] | set[str],
        uuid: int,
        timeout: datetime.timedelta | None,
        disconnect: Callable[[str], None],
    ) -> tuple[int, int, int, dict[str, Any]]: ...

class Backend(c10d.Backend):
    """Allreduce by the core, everything else by an inner backend, chosen by kind of device."""

    def __init__(
        self,
        rank: int,
        size: int,
        communicator: int,
        inner: Mapping[str, Any],
        cuda: bool,
        options: Options,
        make_backend: Callable[[c10d.Store, int, int, Options], c10d.Backend],
        reconfigurations: Reconfigurations | None = None,
    ) -> None: ...
    @property
    def communicator(self) -> int: ...
    @property
    def _timeout(self) -> datetime.timedelta: ...
    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing: ranks outside a new group take no part in making it."""
