"""Helpers of the backend's checks: inputs, captured log lines, byte counts."""

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from support import torch_cases as tc

from cgx_ops import Communicator, Config

dist: Any = torch.distributed  # its annotations refer to torch internals
NEAREST = Config(bits=4, rounding="nearest", error_feedback=False)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
SIZES = (0, 1, 17, 511, 512, 513, 70_003)

Case = Callable[[int, int], None]


class Decisions(logging.Handler):
    """Capture the lines of the backend's logger."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")

    def taken(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines


DECISIONS = Decisions()
logging.getLogger("cgx_ops.torch.backend").addHandler(DECISIONS)
logging.getLogger("cgx_ops.torch.backend").setLevel(logging.DEBUG)


def inputs_of_ranks(
    n: int, numel: int, dtype: torch.dtype = torch.float32, call: int = 0
) -> list[Any]:
    return [tc.values(rank, numel, dtype, call) for rank in range(n)]


def equal_on_all_ranks(x: torch.Tensor | None) -> bool:
    """Return whether all ranks have the same bits."""
    assert x is not None
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, x)
    return all(tc.same_bits(x, other) for other in every)


def bytes_sent(call: Callable[[], object], group: str = "0") -> int:
    before = Communicator.find(group).bytes_sent
    call()
    return Communicator.find(group).bytes_sent - before
