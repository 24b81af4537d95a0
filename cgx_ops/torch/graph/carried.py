"""Allreduces by torch's own collectives, for one process group (carrier "c10d").

For averages with state: layers have separate settings, seeds and residuals, and collectives run in
place, in the background, in the order of their start. The operators with carrier="c10d"
(torch_ops/carried.cc) are for graphs, with one Config for all tensors, which are copied. Both use
the same functions of the core.
"""

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_int32, c_int64, c_void_p
from typing import Any

import torch
import torch.distributed as dist

from cgx_ops import Config, Segment
from cgx_ops._core import library, structs, tables
from cgx_ops._core.call import Call, Op
from cgx_ops.errors import CgxError
from cgx_ops.torch._compat import parallel
from cgx_ops.torch.graph.work import DTYPES, Residuals, reason_of, set_residuals

_FAILURE = "failure"  # key in the store: the first rank that failed, and the reason


class Carrier:
    """Allreduces of CPU tensors over a group's ranks, executed in order on a separate thread.

    The thread has its own gloo group, so that its collectives cannot mix with the caller's. Every
    rank of `group` creates the same number of Carriers over it.

    A rank that fails disconnects, because the order would no longer be the same on all ranks. The
    other ranks then fail immediately with the reason, which is in the store.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        rank, size = group.rank(), group.size()
        store = parallel.PrefixStore(
            f"cgx_ops/carrier/{group.group_name}", parallel.default_store()
        )
        # Separate keys for each Carrier, because a store may outlive its groups.
        store = parallel.PrefixStore(str(store.add(f"made/{rank}", 1)), store)
        timeout = parallel.group_timeout(group) or dist.default_pg_timeout
        self._rank, self._size, self._noise_rank = rank, size, dist.get_rank()
        self._store, self._failure = store, ""
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cgx-carrier")

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
            then: called on the thread before the future completes; it may call reduce().
            result: the value of the future; None: the buffer.
        """
        # Completed with an error or None. DistributedDataParallel treats an exception of a callback
        # as an error, but the value of set_exception() as a gradient.
        ended: torch.futures.Future[Any] = torch.futures.Future()

        def run() -> None:
            try:
                self.reduce(
                    buffer, config, op=op, segments=segments, seed=seed, residuals=residuals
                )
                then()
            except Exception as error:
                ended.set_result(error)
            else:
                ended.set_result(None)

        def reduced(future: torch.futures.Future[Any]) -> torch.Tensor:
            error = future.value()
            if error is not None:
                raise error
            return buffer if result is None else result

        self._thread.submit(run)
        return ended.then(reduced)

    def refuse(self, error: Exception) -> None:
        """Disconnect after the started calls, because this rank cannot start the next one."""
        self._thread.submit(self.disconnect, error)

    def disconnect(self, error: Exception) -> None:
        """Fail the collectives of the other ranks. Called on the thread only."""
        if self._failure:
            return
        self._failure = f"rank {self._rank} failed first: {reason_of(error)}"
        with contextlib.suppress(RuntimeError):  # the store is gone if its process has ended
            first = self._store.compare_set(_FAILURE, "", self._failure)
            self._failure = first.decode(errors="replace")
        self._gloo = None

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
        """Reduce `buffer` in place and wait. Called on the thread only, in start()'s `then`.

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
        carried = structs.Carried(rank=rank, size=size, call=ctypes.pointer(collective))
        algorithm, scatter, gather = c_int32(), (c_int64 * size)(), (c_int64 * size)()
        library.call("cgx_carried_plan", byref(carried), byref(algorithm), scatter, gather)
        stride = max(gather)

        def step(function: str, numel: int, *inputs: torch.Tensor) -> torch.Tensor:
            message = _bytes(numel)
            library.call(function, byref(carried), *_buffers(*inputs, message))
            return message

        if size == 1:
            library.call("cgx_carried_decode", byref(carried), None, 0)
            return
        if algorithm.value == tables.ALGORITHMS["one_shot"]:
            message = step("cgx_carried_encode", stride)
        else:
            to = [0 if peer == rank else count for peer, count in enumerate(scatter)]
            came = [0 if peer == rank else scatter[rank] for peer in range(size)]
            messages = step("cgx_carried_encode", sum(to))
            arrived = _bytes(sum(came))
            self._gloo.alltoall_base(arrived, messages, came, to).wait()
            message = step("cgx_carried_reduce", stride, arrived)
        gathered = _bytes(stride * size)
        self._gloo._allgather_base(gathered, message).wait()
        library.call("cgx_carried_decode", byref(carried), *_buffers(gathered))


def _bytes(number: int) -> torch.Tensor:
    return torch.empty(number, dtype=torch.uint8, device="cpu")


def _buffers(*messages: torch.Tensor) -> Iterator[c_void_p | int]:
    for message in messages:
        yield from (c_void_p(message.data_ptr()), message.numel())
