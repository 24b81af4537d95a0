"""Confirmation: a message after an average, so that no rank uses an average that another lacks.

A rank sends it once it has the average, and receives it only if all ranks have sent it. So if one
rank has received it, all ranks have the average. After a lost rank the others can then continue
from equal states: see DiLoCo.regroup().
"""

import torch
import torch.distributed as dist

from cgx_ops import Config, Segment
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.torch.averaging.arithmetic import use_on_this_stream
from cgx_ops.torch.averaging.sent import Sent


class Confirmation:
    """The confirmation of one average, an exact sum of zeros.

    Attributes:
        name: of its message.
        average: the buffer of the average.
    """

    def __init__(self, average: torch.Tensor, name: str) -> None:
        self.name, self.average = f"{name}/confirmed", average
        self._sum = average.new_zeros(1)
        self._is_sent = False

    def follow(self, sent: Sent, config: Config) -> None:
        """Send it and wait for the others'. Call it when the average is complete."""
        self._is_sent = True
        use_on_this_stream(self._sum)
        whole = [Segment(0, 1, Config(bits=EXACT_BITS))]
        sent.follow(self._sum, config, segments=whole, seed=[0], name=self.name)

    def require(self) -> None:
        """Raise if it failed on a GPU, where a failure makes the values NaN. Waits for the GPU.

        Raises:
            DistBackendError: a peer is late or lost.
        """
        if float(self._sum) != 0:
            raise dist.DistBackendError("a peer is late or lost; the next collective names it")

    @property
    def has_average(self) -> bool:
        """Whether this rank has the average. Call it after the message has ended or failed."""
        if not self._is_sent:
            return False
        return not self.average.is_cuda or bool(self.average.isfinite().all())
