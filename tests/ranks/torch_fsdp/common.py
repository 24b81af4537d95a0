"""Helpers of the FSDP2 checks: a model, comparisons, and messages.

1. models and weights
2. recorded(): every message that FSDP hands to the core, and the oracle's result
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import reference
import torch
import torch.distributed as dist
from support import torch_cases as tc
from torch import nn
from torch.distributed.distributed_c10d import (
    _resolve_process_group,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

from cgx_ops import Config, Segment
from cgx_ops.torch.fsdp import custom, hooks

WIDTH, CLASSES, BATCH = 33, 10, 8
EXACT = Config(bits=32)
FEW = Config(bits=4, bucket_size=64)


class Block(nn.Module):
    """Layers with odd numbers of rows, which ranks cannot divide evenly; with biases and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


class Model(nn.Module):
    """Model of blocks, used in order, each `times` times."""

    def __init__(self, times: int = 1, recompute: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.times, self.recompute = times, recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            for _ in range(self.times):
                x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def batch(step: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's inputs and labels of a step."""
    rank = dist.get_rank()
    labels = torch.arange(BATCH) * (rank + step + 1) % CLASSES
    return tc.values(rank, BATCH * WIDTH, dtype, step).view(BATCH, WIDTH), labels


def sharded(model: Model, **options: Any) -> Any:
    """Shard each block and the root; all ranks begin with equal weights."""
    torch.manual_seed(5)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def full(parameter: Any) -> torch.Tensor:
    return parameter.detach().full_tensor()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the full exact weights (collective)."""
    return {name: full(p) for name, p in model.named_parameters()}


def same_on_all_ranks(tensors: dict[str, torch.Tensor]) -> bool:
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, tensors)
    return all(
        tc.same_bits(one[name], tensor) for one in everyones for name, tensor in tensors.items()
    )


# ---- every message, bit for bit ------------------------------------------------------------------


@dataclass
class Message:
    verb: str
    input: torch.Tensor
    output: torch.Tensor
    segments: list[Segment]
    seed: int
    config: Config
    op: str
    group: dist.ProcessGroup | None = None
    host: int = 0  # of this rank


@contextmanager
def recorded() -> Iterator[list[Message]]:
    """Yield a list of the messages that FSDP hands to the core in the block."""
    messages: list[Message] = []
    original: Callable[..., dist.Work] = hooks.start

    def start(comm: Any, verb: Any, source: Any, output: Any, config: Config, **options: Any):
        before = source.clone()
        work = original(comm, verb, source, output, config, **options)
        work.wait()
        messages.append(
            Message(
                verb,
                before,
                output.clone(),
                options["segments"],
                options["seed"],
                config,
                options.get("op", "sum"),
                _resolve_process_group(comm.name),
                comm.host,
            )
        )
        return work

    hooks.start = custom.start = start
    try:
        yield messages
    finally:
        hooks.start = custom.start = original


def equals_the_oracle(message: Message) -> bool:
    """Return whether this rank's output is the oracle's result for all ranks' inputs."""
    group, config = message.group, message.config
    everyones: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, (message.input, message.seed, message.host), group)
    segments = [
        reference.Segment(s.offset, s.numel, own.bits, own.bucket_size)
        for s in message.segments
        for own in [s.config or config]
    ]
    options: dict[str, Any] = {
        "rounding": config.rounding or "stochastic",  # the default of the uniform compressor
        "seeds": [seed for _, seed, _ in everyones],
        "minimal_size": config.minimal_size,
    }
    inputs = [tc.to_numpy(x) for x, _, _ in everyones]
    if message.verb == "all_gather":
        want = reference.all_gather(inputs, segments, **options)
    else:
        # Replicas gather the same weights, but reduce with different noise.
        options["noise_ranks"] = dist.get_process_group_ranks(group)
        options |= {"algorithm": config.algorithm, "intra_bits": config.intra_bits or 0}
        options["hosts"] = [host for _, _, host in everyones]
        blocks = reference.reduce_scatter(inputs, segments, op=message.op, **options)  # type: ignore[arg-type]
        want = blocks[dist.get_rank(group)]
    return bool((tc.to_numpy(message.output).view("V1") == want.view("V1")).all())


def expected_segments(module: nn.Module, size: int, bits: int) -> list[tuple[int, int]]:
    """Return (elements in a block, bits) of a wrapped module's own parameters.

    bits: the bits of matrices.
    """
    shapes = [p.shape for _, p in own_parameters(module)]
    return [
        (-(-shape[0] // size) * shape[1:].numel(), 32 if len(shape) == 1 else bits)
        for shape in shapes
    ]


def bits_of(message: Message) -> list[tuple[int, int]]:
    """Return (elements, bits) of a message's segments."""
    return [(s.numel, (s.config or message.config).bits) for s in message.segments]


def own_parameters(module: nn.Module) -> list[tuple[str, Any]]:
    inner = [child for child in module.modules() if isinstance(child, FSDPModule)]
    others = {id(p) for child in inner if child is not module for p in child.parameters()}
    return [(name, p) for name, p in module.named_parameters() if id(p) not in others]
