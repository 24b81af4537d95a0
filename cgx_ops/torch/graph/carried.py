"""Allreduces by torch's own collectives, for one process group (carrier "c10d").

For averages with state: layers have separate settings, seeds and residuals, and collectives run in
place, in the background, in the order of their start. The operators with carrier="c10d"
(torch_ops/carried.cc) are for graphs, with one Config for all tensors, which are copied. Both use
the same functions of the core.

Carrier has the steps. CPU tensors use carried_on_cpu.py, CUDA tensors carried_on_cuda.py.
"""

import abc
import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from ctypes import byref, c_int32, c_int64, c_void_p
from typing import Any

import torch
import torch.distributed as dist

from cgx_ops import Config, Segment
from cgx_ops._core import library, structs, tables
from cgx_ops._core.call import Call, Op
from cgx_ops._core.refusal import reason_of
from cgx_ops.errors import CgxError
from cgx_ops.torch._compat import parallel
from cgx_ops.torch.graph.work import DTYPES, Residuals, set_residuals

_FAILURE = "failure"  # key in the store: the first rank that failed, and the reason


class Carrier(abc.ABC):
    """Allreduces over a group's ranks, in the order of their start.

    Every rank of `group` creates the same number of Carriers of each class over it.

    After a failure a rank sends nothing more, because the order would no longer be the same on all
    ranks. It writes the reason to the store, where the other ranks find it when they fail.
    """

    name: str  # of the class, in the store
    device: int  # a cgx_device_t

    def __init__(self, group: dist.ProcessGroup, era: str = "") -> None:
        """Create the carrier of a group; connects it on CPUs. Collective over the ranks.

        Args:
            group: the ranks.
            era: distinguishes groups of this name with other members; the same on all ranks.
        """
        rank, size = group.rank(), group.size()
        store = parallel.PrefixStore(
            f"cgx_ops/{self.name}/{group.group_name}{era}", parallel.default_store()
        )
        # Separate keys for each Carrier, because a store may outlive its groups.
        self._store = parallel.PrefixStore(str(store.add(f"made/{rank}", 1)), store)
        self._rank, self._size, self._noise_rank = rank, size, dist.get_rank()
        self._failure = ""

    def start(
        self,
        buffer: torch.Tensor,
        config: Config,
        *,
        op: Op,
        segments: Sequence[Segment],
        seed: Sequence[int],
        residuals: Residuals | None = None,
        then: Callable[[], object] = lambda: None,
        result: torch.Tensor | None = None,
    ) -> torch.futures.Future[torch.Tensor]:
        """Start reducing `buffer` in place; return a future of it. Arguments as in work.start().

        Args:
            buffer: the buffer.
            config: settings of the message.
            op: "sum" or "avg".
            segments: of the buffer.
            seed: of each segment.
            residuals: of each segment, or None.
            then: called before the future completes; it may call reduce(). On a GPU it returns
                before its work is done, so it passes other tensors to use_on_this_stream().
            result: the value of the future, on the same device; None: the buffer.
        """

        def work() -> None:
            self.reduce(buffer, config, op=op, segments=segments, seed=seed, residuals=residuals)
            then()

        given = buffer if result is None else result
        return self._execute(work, given, (buffer, given, *(residuals or ())))

    @abc.abstractmethod
    def _execute(
        self, work: Callable[[], None], result: torch.Tensor, uses: Residuals
    ) -> torch.futures.Future[torch.Tensor]:
        """Execute `work` in the background, in the order of these calls.

        Args:
            work: calls reduce().
            result: the value of the future.
            uses: the tensors that `work` uses, or None.

        Returns:
            A future of `result`, or of the error that `work` raised.
        """

    @abc.abstractmethod
    def _exchange(self) -> Any:
        """Return the backend or process group whose collectives exchange the messages."""

    def _stream_of(self, device: torch.device) -> int | None:
        """Return the handle of the stream on which work for a device is executed."""
        return None

    @abc.abstractmethod
    def refuse(self, error: Exception) -> None:
        """Disconnect after the started calls, because this rank cannot start the next one."""

    def disconnect(self, error: Exception) -> None:
        """Send nothing more, and store the reason for the other ranks."""
        if self._failure:
            return
        self._failure = f"rank {self._rank} failed first: {reason_of(error)}"
        with contextlib.suppress(RuntimeError):  # the store is gone if its process has ended
            first = self._store.compare_set(_FAILURE, "", self._failure)
            self._failure = first.decode(errors="replace")

    def reduce(
        self,
        buffer: torch.Tensor,
        config: Config,
        *,
        op: Op,
        segments: Sequence[Segment],
        seed: Sequence[int],
        residuals: Residuals | None = None,
    ) -> None:
        """Reduce `buffer` in place. Called by start(), and in its `then`.

        On the CPU the call waits for the result, on a GPU only the current stream does.

        Raises:
            CgxError: the arguments are invalid.
            DistBackendError: a rank failed; the text names the first one.
        """
        if not self._failure:
            try:
                return self._reduce(buffer, config, op, segments, seed, residuals)
            except Exception as error:
                self.disconnect(error)
                if isinstance(error, CgxError) and not isinstance(error, dist.DistBackendError):
                    raise
        raise dist.DistBackendError(f"carrier 'c10d', rank {self._rank}: {self._failure}")

    def _reduce(
        self,
        buffer: torch.Tensor,
        config: Config,
        op: Op,
        segments: Sequence[Segment],
        seed: Sequence[int],
        residuals: Residuals | None,
    ) -> None:
        call = Call("allreduce", op, config, "", segments, seed, None)
        rank, size = self._rank, self._size
        address = buffer.data_ptr()
        collective = call.collective(0, DTYPES[buffer.dtype], address, address, buffer.numel())
        collective.noise_rank = ctypes.pointer(c_int32(self._noise_rank))
        set_residuals(collective, call, buffer, residuals)
        collective.device = self.device
        collective.stream = self._stream_of(buffer.device)
        carried = structs.Carried(rank=rank, size=size, call=ctypes.pointer(collective))
        algorithm, scatter, gather = c_int32(), (c_int64 * size)(), (c_int64 * size)()
        library.call("cgx_carried_plan", byref(carried), byref(algorithm), scatter, gather)
        stride = max(gather)
        exchange = self._exchange()

        def made(numel: int) -> torch.Tensor:
            return torch.empty(numel, dtype=torch.uint8, device=buffer.device)

        def step(function: str, numel: int, *inputs: torch.Tensor) -> torch.Tensor:
            message = made(numel)
            library.call(function, byref(carried), *_buffers(*inputs, message))
            return message

        if size == 1:
            library.call("cgx_carried_decode", byref(carried), None, 0)
            return
        if algorithm.value == tables.ALGORITHMS["one_shot"]:
            message = step("cgx_carried_encode", stride)
        else:
            to, came = list(scatter), [scatter[rank]] * size
            # GPUs have room for a message of a rank to itself (cgx.h).
            if self.device == tables.CPU:
                to[rank] = came[rank] = 0
            messages = step("cgx_carried_encode", sum(to))
            arrived = made(sum(came))
            exchange.alltoall_base(arrived, messages, came, to).wait()
            message = step("cgx_carried_reduce", stride, arrived)
        gathered = made(stride * size)
        exchange._allgather_base(gathered, message).wait()
        library.call("cgx_carried_decode", byref(carried), *_buffers(gathered))


def _buffers(*messages: torch.Tensor) -> Iterator[c_void_p | int]:
    for message in messages:
        yield from (c_void_p(message.data_ptr()), message.numel())
