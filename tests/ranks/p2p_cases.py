"""What the rank programs of send and recv share: groups, and results computed by the oracle."""

import datetime
from collections.abc import Sequence
from typing import Any

import reference
import torch
import torch.distributed
from support import torch_cases as tc

from cgx_ops import Config
from cgx_ops.torch import BackendOptions

dist: Any = torch.distributed  # its annotations refer to torch internals
NEAREST = Config(4, 64, "nearest")


def new_group(ranks: Sequence[int] = (0, 1), timeout: float = 60) -> Any:
    options = BackendOptions(Config(8, 64, rounding="nearest"))
    limit = datetime.timedelta(seconds=timeout)
    return dist.new_group(list(ranks), timeout=limit, backend="cgx", pg_options=options)


def received(
    x: torch.Tensor, message: tuple[int, int], config: Config, size: int, seed: int = 0
) -> torch.Tensor:
    """Return what the oracle decodes from x, sent over message[0] -> message[1] in a group."""
    source, target = message
    splits = [[0] * size for _ in range(size)]
    splits[source][target] = x.numel()
    empty = torch.empty(0, dtype=x.dtype)
    xs = [tc.to_numpy(x if rank == source else empty) for rank in range(size)]
    segment = reference.Segment(0, 0, config.bits, config.bucket_size)  # pyright: ignore[reportArgumentType]
    rounding: Any = config.rounding or "nearest"
    ys = reference.all_to_all(xs, splits, segment, rounding=rounding, seeds=[seed] * size)
    return tc.from_numpy(ys[target]).reshape(x.shape)


def seed_of(group: Any, seed: int, message: tuple[int, int], tag: int, count: int) -> int:
    """Return the seed of the `count`-th message of this direction and tag (modulo 1024)."""
    name = f" message from {message[0]} to {message[1]}, tag {tag}"
    named = tc.named_seed(tc.named_seed(seed, group.group_name), name)
    return tc.gradient_seed(named, count)
