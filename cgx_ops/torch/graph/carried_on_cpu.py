"""CpuCarrier: allreduces of CPU tensors by gloo."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from cgx_ops import Config, Segment
from cgx_ops._core.call import Op
from cgx_ops.torch._compat import parallel
from cgx_ops.torch.graph.carried import CPU, Carrier
from cgx_ops.torch.graph.work import Residuals


class CpuCarrier(Carrier):
    """Executes allreduces on a separate thread.

    The thread has its own gloo group, so that its collectives cannot mix with the caller's. A rank
    that fails closes this group, so that the other ranks fail immediately.
    """

    name = "carrier"
    device = CPU

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        timeout = parallel.group_timeout(group) or dist.default_pg_timeout
        self._exchange = dist.ProcessGroupGloo(self._store, self._rank, self._size, timeout=timeout)
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
        """Start reducing `buffer` in place on the thread, which also calls `then`."""
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
        super().disconnect(error)
        self._exchange = None
