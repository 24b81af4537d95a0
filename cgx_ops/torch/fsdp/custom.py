"""What all custom collectives of FSDP2 share."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from cgx_ops import Config, Segment
from cgx_ops.torch.backend.groups import communicator_of
from cgx_ops.torch.fsdp.block import Block
from cgx_ops.torch.fsdp.state import State
from cgx_ops.torch.graph.work import start


class Custom:
    """A custom collective that FSDP calls for one group of parameters.

    Args:
        block: the layout of the group's messages.
        config: settings of the messages.
        state: noise and residuals.
        plain: the communication that was installed before, which allocates buffers.
    """

    def __init__(self, block: Block, config: Config, state: State, plain: Any) -> None:
        self.plain = plain
        self._block, self._config, self._state = block, config, state

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a buffer for FSDP's values."""
        return self.plain.allocate(size, dtype=dtype, device=device)

    def start_gather(
        self,
        output: torch.Tensor,
        own: torch.Tensor,
        group: dist.ProcessGroup,
        segments: Sequence[Segment],
        seed: int,
        *,
        asynchronous: bool,
    ) -> dist.Work:
        """Start an all-gather of the group's weights, or of their differences."""
        return start(
            communicator_of(group),
            "all_gather",
            own,
            output,
            self._config,
            segments=segments,
            seed=seed,
            noise_rank=group.rank(),  # so that replicas get the same noise
            name=self._gather_name,
            asynchronous=asynchronous,
        )

    @property
    def _gather_name(self) -> str:
        return f"fsdp/all_gather/{self._block.name}"

    def open(self) -> None:
        """Prepare the collective. Call when it is installed."""

    def close(self) -> None:
        """Release what the collective holds. Call when another one replaces it."""


def plain_of(communication: Any) -> Any:
    """Return the communication that was installed before compress()."""
    return communication.plain if isinstance(communication, Custom) else communication


def replace_by(old: Any, new: Any) -> Any:
    """Close a communication, and return another one, open."""
    if isinstance(old, Custom):
        old.close()
    if isinstance(new, Custom):
        new.open()
    return new
