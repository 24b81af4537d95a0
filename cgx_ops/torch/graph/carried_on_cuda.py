"""CudaCarrier: allreduces of CUDA tensors by a process group's own collectives, such as NCCL's."""

import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

from cgx_ops._core import tables
from cgx_ops.torch._compat import parallel
from cgx_ops.torch.graph.carried import Carrier
from cgx_ops.torch.graph.work import Residuals, failed


def can_gather(group: dist.ProcessGroup) -> bool:
    """Return whether a group can gather CUDA tensors; gloo would read their memory on the host."""
    return group.size() == 1 or parallel.backend_name(group, torch.device("cuda")) != "gloo"


class CudaCarrier(Carrier):
    """Enqueues allreduces on a separate stream per GPU, which overlaps with the backward pass.

    The calling thread enqueues everything, as torch's own hooks do: kernels on the stream, and the
    group's collectives, which this stream waits for. The order of the calls is that of the group's
    other collectives.

    A rank that fails cannot reach the others: their collectives end with the group's timeout. It
    then sends nothing more on any of its GPUs, because all of them use the same group.
    """

    name = "cuda_carrier"
    device = tables.CUDA

    def __init__(self, group: dist.ProcessGroup, era: str = "") -> None:
        super().__init__(group, era)
        self._group = weakref.ref(group)  # a destroyed default group must end
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def _execute(
        self, work: Callable[[], None], result: torch.Tensor, uses: Residuals
    ) -> torch.futures.Future[torch.Tensor]:
        """Enqueue `work` on the stream of the device.

        Returns:
            A completed future. Its wait() and its callbacks make the then-current stream wait.
        """
        device = result.device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        reduced: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[device])
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for tensor in uses:
                if tensor is not None:
                    tensor.record_stream(stream)
            try:
                work()
            except Exception as error:
                return failed(error)
            reduced.set_result(result)
        return reduced

    def _exchange(self) -> dist.ProcessGroup:
        group = self._group()
        assert group is not None, "the process group was destroyed"
        return group

    def _stream_of(self, device: torch.device) -> int:
        return self._streams[device].cuda_stream

    def refuse(self, error: Exception) -> None:
        """Send nothing more, because this rank cannot start the next call."""
        self.disconnect(error)
