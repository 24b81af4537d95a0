"""The weights that all ranks have: the base of FSDP2's differences, and its checkpoints.

1. Base: of one group of parameters
2. Bases: of a model
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from cgx_ops import Segment
from cgx_ops.errors import InvalidArgument
from cgx_ops.torch._compat import parallel
from cgx_ops.torch.averaging.loaded import require_keys, require_layers
from cgx_ops.torch.fsdp.block import Block

# ---- 1. one group of parameters ------------------------------------------------------------------


@dataclass(frozen=True)
class _Noted:
    """A parameter at the time of a gather."""

    version: tuple[int, int]
    trainable: bool
    reductions: int

    @staticmethod
    def of(p: parallel.ShardedParameter, reductions: int) -> "_Noted":
        return _Noted(parallel.version_of(p), p.trainable, reductions)


class Base:
    """The gathered weights of one group of parameters, which are equal on all its ranks.

    Args:
        block: the layout of the group's messages.
        on_cpu: whether to store the weights in host memory.
    """

    def __init__(self, block: Block, on_cpu: bool) -> None:
        self._block, self._on_cpu = block, on_cpu
        self._values: torch.Tensor | None = None  # (ranks, elements of a block)
        self._noted: dict[str, _Noted] = {}  # the parameters at the last gather
        self._replaced = False  # whether other weights were loaded into the model
        self._loaded: dict[str, torch.Tensor] | None = None  # own parts, from a checkpoint
        self._current: set[str] = set()  # loaded parameters that had not changed since the gather
        self._hooks = [
            module.register_load_state_dict_post_hook(self._replace)
            for module in {p.module for p in self._shards.values()}
        ]

    def close(self) -> None:
        """Release the weights, and the hooks of the model."""
        for hook in self._hooks:
            hook.remove()
        self._values = self._loaded = None

    @property
    def _shards(self) -> dict[str, parallel.ShardedParameter]:
        return self._block.shards()

    @property
    def nbytes(self) -> int:
        """The size of the stored weights."""
        return 0 if self._values is None else self._values.nbytes

    # ---- gathers

    def changed(self, reductions: int) -> list[bool] | None:
        """Return which parameters changed since the last gather; None if all must be sent exact.

        They must if nothing was gathered yet, or if they changed otherwise than by training. The
        backward pass uses the weights of the forward pass.

        Args:
            reductions: the number of reductions of gradients so far.
        """
        if self._values is not None and parallel.in_backward():
            return [False] * len(self._shards)
        changes = [self._change(name, p, reductions) for name, p in self._shards.items()]
        if self._values is None or self._replaced or "otherwise" in changes:
            return None
        return [change == "by training" for change in changes]

    def _change(
        self, name: str, p: parallel.ShardedParameter, reductions: int
    ) -> Literal["by training", "otherwise"] | None:
        """Return how a parameter changed since the last gather."""
        noted = self._noted.get(name)
        if noted is None:
            return "by training"
        if noted.reductions == reductions:
            return None if noted.version == parallel.version_of(p) else "otherwise"
        new = _Noted.of(p, reductions)
        trained = p.trainable or noted.trainable or noted.version != new.version
        return "by training" if trained else None

    def subtract_from(
        self, own: torch.Tensor, sent: Sequence[Segment], exact: Sequence[bool], rank: int
    ) -> None:
        """Replace this rank's weights by their difference from the base.

        Args:
            own: this rank's weights.
            sent: the parts that will be sent; others do not change.
            exact: whether a part is sent as exact weights. Those do not change.
            rank: this rank.
        """
        assert self._values is not None
        known = self._values[rank]
        for segment, is_exact in zip(sent, exact, strict=True):
            if not is_exact:
                own[_run(segment)] -= known[_run(segment)].to(own.device)

    @torch.inference_mode(False)
    @torch.no_grad()
    def replace(self, output: torch.Tensor) -> None:
        """Make gathered weights the base."""
        place = torch.device("cpu") if self._on_cpu else output.device
        self._values = output.to(place, copy=True).view(self._block.ranks.size(), -1)

    @torch.no_grad()
    def add(self, output: torch.Tensor, sent: Sequence[Segment], exact: Sequence[bool]) -> None:
        """Add gathered differences to the base, and replace the output by the base.

        Args:
            output: what the ranks sent.
            sent: the parts that they sent.
            exact: whether a part has exact weights.
        """
        assert self._values is not None
        values, gathered = self._values.to(output.device), output.view(len(self._values), -1)
        for segment, is_exact in zip(sent, exact, strict=True):
            known, new = values[:, _run(segment)], gathered[:, _run(segment)]
            known.copy_(new) if is_exact else known.add_(new)
        self._values.copy_(values)  # has no effect if they are the same tensor
        self.copy_to(output)

    def note(self, reductions: int) -> None:
        """Remember the parameters that a gather starts with."""
        self._noted = {name: _Noted.of(p, reductions) for name, p in self._shards.items()}
        self._replaced = False

    def copy_to(self, output: torch.Tensor) -> None:
        """Write the base to the output of a gather."""
        assert self._values is not None
        output.copy_(self._values.flatten())

    def _replace(self, *_: object) -> None:
        self._replaced = self._loaded is None

    # ---- checkpoints

    def saved(self, reductions: int) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Yield the parameters: name, this rank's part as a DTensor, and whether it is current.

        Before the first gather, the parts are the parameters'.

        Args:
            reductions: the number of reductions of gradients so far.
        """
        rank, first = self._block.ranks.rank(), 0
        for name, p in self._shards.items():
            part = p.sharded.detach().clone()
            current = self._change(name, p, reductions) is None
            if self._loaded is not None:
                part, current = self._loaded.get(name, part), name in self._current
            elif self._values is not None:
                part = torch.empty_like(part, dtype=self._values.dtype)
                local = _local(part)
                local.copy_(_part(p, self._values[rank, first : first + p.numel], local))
            yield name, part, current
            first += p.numel

    def load(self, parts: Mapping[str, torch.Tensor], current: set[str]) -> None:
        """Set the parts that the next gather begins with."""
        self._values = None
        self._loaded = {name: parts[name] for name in self._shards if name in parts}
        self._current, self._replaced = current & set(self._loaded), False

    def loaded(self, own: torch.Tensor) -> torch.Tensor | None:
        """Return this rank's weights with the loaded parts in their places; None without any."""
        if self._loaded is None:
            return None
        block, first = own.clone(), 0
        for name, p in self._shards.items():
            if name in self._loaded:
                local = _local(self._loaded[name])
                _part(p, block[first : first + p.numel], local).copy_(local)
            first += p.numel
        return block

    def restore(self, output: torch.Tensor, reductions: int) -> None:
        """Make the gathered parts of all ranks the base, and forget the loaded ones."""
        self.replace(output)
        self.note(reductions)
        self._noted = {name: self._noted[name] for name in self._current}
        self._loaded = None


def _local(part: torch.Tensor) -> torch.Tensor:
    return part.to_local() if isinstance(part, DTensor) else part


def _part(p: parallel.ShardedParameter, block: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a parameter's part of a block, without padding."""
    return block.view(p.padded).narrow(p.dim, 0, like.shape[p.dim])


def _run(segment: Segment) -> slice:
    return slice(segment.offset, segment.offset + segment.numel)


# ---- 2. a model ----------------------------------------------------------------------------------


class Bases:
    """The bases of a model's groups of parameters."""

    def __init__(self) -> None:
        self._all: list[Base] = []
        self._saved: dict[str, Any] | None = None  # of a copy from a pickle

    def __bool__(self) -> bool:
        return bool(self._all or self._saved)

    def apart(self, reductions: int) -> "Bases":
        """Return a copy for pickles, without the model's modules."""
        copy = Bases()
        copy._saved = self.state_dict(reductions) if self else None
        return copy

    def add(self, base: Base) -> Base:
        """Add the base of another group, and return it."""
        self._all.append(base)
        return base

    @property
    def nbytes(self) -> int:
        """The size of all stored weights."""
        return sum(base.nbytes for base in self._all)

    def state_dict(self, reductions: int) -> dict[str, Any]:
        """Return this rank's part of each parameter, and 1 for those that are up to date.

        Args:
            reductions: the number of reductions of gradients so far.
        """
        if self._saved is not None:
            return self._saved
        saved = [each for base in self._all for each in base.saved(reductions)]
        return {
            "parts": {name: part for name, part, _ in saved},
            "current": {name: int(current) for name, _, current in saved},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool) -> None:
        """Restore the bases from what state_dict() returned."""
        require_keys("fsdp.State", state_dict, ("parts", "current"))
        parts, own = dict(state_dict["parts"]), self.state_dict(0)["parts"]
        require_layers("fsdp.State", [parts], list(own), strict=strict)
        for name, part in parts.items():
            found, expected = _shapes(part), _shapes(own[name])
            if found != expected:
                raise InvalidArgument(
                    f"the base of parameter '{name}' has the shape {found[0]}, on this rank "
                    f"{found[1]}, but the parameter has {expected[0]}, on this rank {expected[1]}: "
                    "load this model's state; after a change of the number of ranks, load it "
                    "through torch.distributed.checkpoint"
                )
        current = {name for name, value in state_dict["current"].items() if value}
        for base in self._all:
            base.load(parts, current)


def _shapes(part: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of a whole parameter, and of this rank's part."""
    return tuple(part.shape), tuple(_local(part).shape)
