"""CpuCarrier: allreduces of CPU tensors by gloo."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from cgx_ops._core import tables
from cgx_ops.torch._compat import parallel
from cgx_ops.torch.graph.carried import Carrier
from cgx_ops.torch.graph.work import Residuals


class CpuCarrier(Carrier):
    """Executes allreduces on a separate thread.

    The thread has its own gloo group, so that its collectives cannot mix with the caller's. A rank
    that fails closes this group, so that the other ranks fail immediately.
    """

    name = "carrier"
    device = tables.CPU

    def __init__(self, group: dist.ProcessGroup, era: str = "") -> None:
        super().__init__(group, era)
        timeout = parallel.group_timeout(group) or dist.default_pg_timeout
        store: Any = self._store
        store = store.clone()  # the program's store keeps its own timeout
        store.set_timeout(timeout)
        try:
            self._gloo: Any = dist.ProcessGroupGloo(store, self._rank, self._size, timeout=timeout)
        except RuntimeError as error:
            raise dist.DistBackendError(
                f"carrier 'c10d', group '{group.group_name}': rank {self._rank} did not connect to "
                f"all {self._size} ranks within {timeout.total_seconds():g} s; check that they are "
                f"running and use this group: {error}"
            ) from error
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cgx-carrier")

    def _execute(
        self, work: Callable[[], None], result: torch.Tensor, uses: Residuals
    ) -> torch.futures.Future[torch.Tensor]:
        """Execute `work` on the thread."""
        # Completed with an error or None. DistributedDataParallel treats an exception of a callback
        # as an error, but the value of set_exception() as a gradient.
        ended: torch.futures.Future[Any] = torch.futures.Future()

        def run() -> None:
            try:
                work()
            except Exception as error:
                ended.set_result(error)
            else:
                ended.set_result(None)

        def reduced(future: torch.futures.Future[Any]) -> torch.Tensor:
            error = future.value()
            if error is not None:
                raise error
            return result

        self._thread.submit(run)
        return ended.then(reduced)

    def _exchange(self) -> Any:
        return self._gloo

    def refuse(self, error: Exception) -> None:
        """Disconnect after the started calls, because this rank cannot start the next one."""
        self._thread.submit(self.disconnect, error)

    def disconnect(self, error: Exception) -> None:
        """Fail the collectives of the other ranks. Called on the thread only."""
        super().disconnect(error)
        self._gloo = None
