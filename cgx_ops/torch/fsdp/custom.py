"""What all custom collectives of FSDP2 share."""

from collections.abc import Sequence
from typing import Any

import torch

from cgx_ops import Config
from cgx_ops.torch.fsdp.block import Block
from cgx_ops.torch.fsdp.state import State


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
