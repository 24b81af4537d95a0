"""CudaCarrier: allreduces of CUDA tensors by a process group's own collectives, such as NCCL's."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from cgx_ops import Config, Segment
from cgx_ops._core import structs
from cgx_ops._core.call import Op
from cgx_ops.torch.graph.carried import Carrier
from cgx_ops.torch.graph.work import Residuals, failed

_CUDA = 1  # a cgx_device_t


class CudaCarrier(Carrier):
    """Enqueues allreduces on a separate stream, so that they overlap with the backward pass.

    The calling thread enqueues everything, as torch's own hooks do: kernels on the stream, and the
    group's collectives, which this stream waits for. With NCCL the host does not wait; gloo blocks
    it. The order of the calls is that of the group's other collectives.

    A rank that fails cannot reach the others: their collectives end with the group's timeout.
    """

    name = "cuda_carrier"
    sends_to_itself = True

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        self._group = group
        self._stream = torch.cuda.Stream(device)

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

    def _place(self, collective: structs.Collective) -> None:
        collective.device, collective.stream = _CUDA, self._stream.cuda_stream

    def _all_to_all(
        self, output: torch.Tensor, given: torch.Tensor, came: list[int], to: list[int]
    ) -> None:
        dist.all_to_all_single(output, given, came, to, group=self._group)

    def _all_gather(self, output: torch.Tensor, given: torch.Tensor) -> None:
        dist.all_gather_into_tensor(output, given, group=self._group)
