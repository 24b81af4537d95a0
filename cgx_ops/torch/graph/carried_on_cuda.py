"""CudaCarrier: allreduces of CUDA tensors by a process group's own collectives, such as NCCL's."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from cgx_ops import Config, Segment
from cgx_ops._core.call import Op
from cgx_ops.torch.graph.carried import CUDA, Carrier
from cgx_ops.torch.graph.work import Residuals, failed


class CudaCarrier(Carrier):
    """Enqueues allreduces on a separate stream, so that they overlap with the backward pass.

    The calling thread enqueues everything, as torch's own hooks do: kernels on the stream, and the
    group's collectives, which this stream waits for. With NCCL the host does not wait; gloo blocks
    it. The order of the calls is that of the group's other collectives.

    A rank that fails cannot reach the others: their collectives end with the group's timeout.
    """

    name = "cuda_carrier"
    device = CUDA

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        self._exchange = group
        self._stream = torch.cuda.Stream(device)
        self._stream_handle = self._stream.cuda_stream

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
        """Enqueue the reduction of `buffer` in place, and what `then` enqueues, on the stream.

        Returns:
            A completed future. Its wait() and its callbacks make the then-current stream wait.
        """
        reduced: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[buffer.device])
        self._stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(self._stream):
            for tensor in (buffer, result, *(residuals or ())):
                if tensor is not None:
                    tensor.record_stream(self._stream)
            try:
                self.reduce(
                    buffer, config, op=op, segments=segments, seed=seed, residuals=residuals
                )
                then()
            except Exception as error:
                return failed(error)
            reduced.set_result(buffer if result is None else result)
        return reduced

    def refuse(self, error: Exception) -> None:
        """Send nothing more, because this rank cannot start the next call."""
        self.disconnect(error)
