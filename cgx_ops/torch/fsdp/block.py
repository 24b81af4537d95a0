"""The layout of FSDP2's messages: the parameters that are sharded together.

1. Parameter: the position of a parameter in all ranks' blocks, which depends on the number of ranks
2. Block: one group of parameters, as segments of a message
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cgx_ops import Config, Rules, Segment
from cgx_ops.errors import InvalidArgument
from cgx_ops.torch._compat import parallel
from cgx_ops.torch.backend.groups import communicator_of
from cgx_ops.torch.graph.work import DTYPES

_TO_PREVENT_THIS = "To prevent this, call set_reduce_scatter_unused_params(True) on the module"

# ---- 1. parameters -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameter:
    """The position of a parameter in the blocks of its module's gradient, one block for each rank.

    Attributes:
        name: in the model.
        shape: of the whole parameter.
        dim: the dimension that is divided among the ranks, padded at the end.
        first: its first element in a block.
        numel: number of its elements in a block.
    """

    name: str
    shape: torch.Size
    dim: int
    first: int
    numel: int

    def _padded(self, ranks: int) -> list[int]:
        shape = self.part_shape(ranks)
        shape[self.dim] *= ranks
        return shape

    def part_shape(self, ranks: int) -> list[int]:
        """Return the shape of the part in a block, including padding."""
        shape = list(self.shape)
        shape[self.dim] = -(-shape[self.dim] // ranks)
        return shape

    def cut_from(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the whole parameter from (ranks, elements of a block)."""
        ranks = len(blocks)
        parts = blocks[:, self.first : self.first + self.numel]
        parts = parts.reshape(ranks, *self.part_shape(ranks))
        return torch.cat(parts.unbind(), self.dim).narrow(self.dim, 0, self.shape[self.dim])

    def put_into(self, blocks: torch.Tensor, whole: torch.Tensor) -> None:
        """Write the whole parameter to (ranks, elements of a block), with zeros as padding."""
        padded = blocks.new_zeros(self._padded(len(blocks)))
        padded.narrow(self.dim, 0, self.shape[self.dim]).copy_(whole)
        parts = torch.stack(padded.chunk(len(blocks), self.dim)).flatten(1)
        blocks[:, self.first : self.first + self.numel] = parts


# ---- 2. blocks -----------------------------------------------------------------------------------


class Block:
    """One group of parameters in one direction: the segments of a rank's block of its messages.

    Raises InvalidArgument if cgx_ops cannot connect the group's ranks.
    """

    def __init__(
        self,
        name: str,
        group: Any,
        names: dict[nn.Module, str],
        rules: Rules,
        config: Config,
    ) -> None:
        self.name, self._group, self._names = name, group, names
        self.rules, self._config = rules, config
        self._warned: set[str] = set()
        ranks = parallel.fsdp_shard_group(group)
        if ranks is None:
            raise InvalidArgument(
                f"the parameters of module '{name}' are replicated, not sharded: compress their "
                "gradients' allreduce with cgx_ops.torch.BackendOptions(compress='all') instead"
            )
        communicator_of(ranks)
        self.ranks = ranks

    def gathered(self, numel: int, dtype: torch.dtype) -> list[Segment] | None:
        """Return the segments of an all-gather; None if it must be exact."""
        if not parallel.fsdp_gathers_shards(self._group):
            return None  # these values were gathered before, and are quantized already
        parameters = parallel.fsdp_parameters(self._group)
        if dtype not in DTYPES or not all(parameter.plain for parameter in parameters):
            self._warn(f"its parameters are gathered exact, because they are sent as {dtype}")
            return None
        return self._segments(parameters, numel)

    def reduced(self, numel: int, dtype: torch.dtype) -> list[Segment] | None:
        """Return the segments of a reduce-scatter; None if it must be exact."""
        if dtype not in DTYPES:
            self._warn(f"its gradients are reduced exact, because they are sent as {dtype}")
            return None
        trainable = [p for p in parallel.fsdp_parameters(self._group) if p.trainable]
        return self._segments(trainable, numel)

    def averaged(self, numel: int, dtype: torch.dtype) -> list[Parameter] | None:
        """Return the parameters of an average over replicas; None if it must be exact."""
        exact = "its gradients are averaged exact over the replicas, because"
        if dtype not in DTYPES:
            self._warn(f"{exact} they are {dtype}")
        elif not self.complete(numel):
            self._warn(f"{exact} some of its parameters got none. {_TO_PREVENT_THIS}")
        else:
            return self.parameters()
        return None

    def complete(self, numel: int) -> bool:
        """Return whether a block of this size has the gradients of all trainable parameters."""
        parameters = parallel.fsdp_parameters(self._group)
        return numel == sum(p.numel for p in parameters if p.trainable)

    def parameters(self, *, frozen: bool = False) -> list[Parameter]:
        """Return the parameters of a block with complete gradients; also frozen ones if asked."""
        found, first = [], 0
        for p in parallel.fsdp_parameters(self._group):
            if p.trainable or frozen:
                found.append(Parameter(self._name_of(p), p.shape, p.dim, first, p.numel))
                first += p.numel
        return found

    def shards(self) -> dict[str, parallel.ShardedParameter]:
        """Return all parameters by name, in the order of their positions in a gathered block."""
        return {self._name_of(p): p for p in parallel.fsdp_parameters(self._group)}

    def layers(self) -> tuple[list[str], list[Segment]]:
        """Return the names of the trainable parameters, and their segments."""
        trainable = [p for p in parallel.fsdp_parameters(self._group) if p.trainable]
        numel = sum(p.numel for p in trainable)
        return [self._name_of(p) for p in trainable], self._segments(trainable, numel)

    def _name_of(self, parameter: parallel.ShardedParameter) -> str:
        return ".".join(filter(None, (self._names.get(parameter.module), parameter.name)))

    def _segments(
        self, parameters: Iterable[parallel.ShardedParameter], numel: int
    ) -> list[Segment]:
        """Return a segment for each parameter, or one for a block with other contents."""
        segments, offset = [], 0
        for p in parameters:
            name = self._name_of(p)
            config = self.rules.of(name, len(p.shape), self._config)
            segments.append(Segment(offset, p.numel, config))
            offset += p.numel
        if offset == numel:
            return segments
        self._warn(
            "some of its parameters got no gradient, so the message is quantized as a whole, "
            f"including parameters that should be exact. {_TO_PREVENT_THIS}"
        )
        return [Segment(0, numel)]

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            module = f"module '{self.name}'" if self.name else "the root module"
            warnings.warn(f"cgx_ops.torch.fsdp, {module}: {text}", stacklevel=2)


def rows_of(blocks: torch.Tensor, segment: Segment, ranks: int) -> list[torch.Tensor]:
    """Return the part of a segment in each rank's block."""
    rows = blocks.view(ranks, -1)[:, segment.offset : segment.offset + segment.numel]
    return list(rows.unbind())
