"""The weights that all ranks have: the base of FSDP2's differences, and its checkpoints.

1. Base: of one group of parameters
2. Bases: of a model
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cgx_ops import Segment
from cgx_ops.errors import InvalidArgument
from cgx_ops.torch._compat import parallel
from cgx_ops.torch.averaging.loaded import require_keys, require_layers
from cgx_ops.torch.fsdp.block import Block

_PARTS = ("base", "gathered")  # of a parameter, in a checkpoint

# ---- 1. one group of parameters ------------------------------------------------------------------


class Change(IntEnum):
    """How a parameter changed since the last gather. The largest value of all ranks counts.

    Attributes:
        NONE: it did not; nothing is sent.
        TRAINED: gradients were reduced; the difference is sent.
        REPLACED: otherwise, or nothing was gathered yet; the whole group is sent exact.
    """

    NONE = 0
    TRAINED = 1
    REPLACED = 2


class Base:
    """The gathered weights of one group of parameters, which are equal on all its ranks.

    Args:
        block: the layout of the group's messages.
        on_cpu: whether to store the weights in host memory.
        count: returns the number of reductions of gradients so far.
    """

    def __init__(self, block: Block, on_cpu: bool, count: Callable[[], int]) -> None:
        self._block, self._on_cpu, self._count = block, on_cpu, count
        self._values: torch.Tensor | None = None  # (ranks, elements of a block)
        self._own: torch.Tensor | None = None  # this rank's exact weights at the last gather
        self._reductions: int | None = None  # of gradients, before the last gather
        self._replaced = False  # whether weights were loaded into a module
        self._loaded: dict[str, Mapping[str, torch.Tensor]] | None = None  # from a checkpoint
        self._hooks: list[Any] = []

    def open(self) -> None:
        """Observe which modules load weights."""
        modules = {p.module for p in self._shards.values()}
        self._hooks = [m.register_load_state_dict_post_hook(self._replace) for m in modules]

    def close(self) -> None:
        """Release the weights, and the hooks of the model."""
        for hook in self._hooks:
            hook.remove()
        self._values = self._own = self._loaded = None

    @property
    def _shards(self) -> dict[str, parallel.ShardedParameter]:
        return self._block.shards()

    @property
    def nbytes(self) -> int:
        """The size of the stored weights."""
        return sum(x.nbytes for x in (self._values, self._own) if x is not None)

    @property
    def serves_backward(self) -> bool:
        """Whether autograd runs, which uses the weights of the forward pass."""
        return self._values is not None and parallel.in_backward()

    # ---- gathers

    def loaded(self, own: torch.Tensor) -> torch.Tensor | None:
        """Return this rank's part of a loaded base, which must be gathered first.

        Args:
            own: this rank's weights. They replace missing parts.

        Returns:
            The part; None if nothing was loaded since the last gather.
        """
        if self._loaded is None:
            return None
        base, gathered = own.clone(), own.clone()
        for name, p, run in self._runs():
            for block, parts in zip((base, gathered), self._loaded.values(), strict=True):
                if name in parts:
                    local = _local(parts[name])
                    _unpadded(p, block[run], local).copy_(local)
        self._own, self._reductions = gathered.to(self._place(own)), None
        return base

    def changes(self, own: torch.Tensor, known: torch.Tensor | None) -> list[Change]:
        """Return how each parameter changed on this rank.

        Args:
            own: this rank's weights.
            known: this rank's part of a loaded base.
        """
        if known is None and self._values is not None:
            known = self._values[self._block.ranks.rank()]
        if known is None or self._own is None or self._replaced:
            return [Change.REPLACED] * len(self._shards)
        trained = self._reductions != self._count()
        return [
            _change(own[run], self._own[run], known[run], trained) for _, _, run in self._runs()
        ]

    def subtract_from(
        self, own: torch.Tensor, sent: Sequence[Segment], exact: Sequence[bool]
    ) -> None:
        """Replace this rank's weights by their difference from the base.

        Args:
            own: this rank's weights.
            sent: the parts that will be sent; others do not change.
            exact: whether a part is sent as exact weights. Those do not change.
        """
        assert self._values is not None
        known = self._values[self._block.ranks.rank()]
        for segment, is_exact in zip(sent, exact, strict=True):
            if not is_exact:
                own[_run(segment)] -= known[_run(segment)].to(own.device)

    @torch.inference_mode(False)
    @torch.no_grad()
    def replace(self, output: torch.Tensor) -> None:
        """Make gathered weights the base, and forget loaded ones."""
        self._values = output.to(self._place(output), copy=True).view(self._block.ranks.size(), -1)
        self._loaded = None

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

    @torch.inference_mode(False)
    @torch.no_grad()
    def note(self, own: torch.Tensor, reductions: int) -> None:
        """Remember this rank's exact weights of a gather that succeeded."""
        self._own = own.to(self._place(own), copy=True)
        self._reductions, self._replaced = reductions, False

    def copy_to(self, output: torch.Tensor) -> None:
        """Write the base to the output of a gather."""
        assert self._values is not None
        output.copy_(self._values.flatten())

    def _place(self, tensor: torch.Tensor) -> torch.device:
        return torch.device("cpu") if self._on_cpu else tensor.device

    def _runs(self) -> Iterator[tuple[str, parallel.ShardedParameter, slice]]:
        """Yield the parameters with their positions in a block."""
        first = 0
        for name, p in self._shards.items():
            yield name, p, slice(first, first + p.numel)
            first += p.numel

    def _replace(self, *_: object) -> None:
        self._replaced = self._loaded is None

    # ---- checkpoints

    def saved(self) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
        """Yield the parameters: this rank's parts of the base and of the exact gathered weights.

        The parts are DTensors. Before the first gather they are the parameters'. NaN lets the first
        gather after a load send exact weights, as the next one would here.
        """
        rank, is_replaced = self._block.ranks.rank(), self._is_replaced()
        for name, p, run in self._runs():
            exact = p.sharded.detach()
            if self._loaded is not None:
                base, gathered = (parts.get(name, exact) for parts in self._loaded.values())
            elif self._values is not None and self._own is not None:
                base = _part(exact, p, self._values[rank, run])
                gathered = _part(exact, p, self._own[run])
                if is_replaced:
                    base, gathered = (torch.full_like(x, math.nan) for x in (base, gathered))
            else:
                base = gathered = exact
            yield name, (base.clone(), gathered.clone())

    def _is_replaced(self) -> bool:
        """Return whether weights were loaded, or changed without a reduction, since a gather."""
        if self._replaced or self._own is None or self._reductions != self._count():
            return self._replaced
        for _, p, run in self._runs():
            gathered = _local(_part(p.sharded.detach(), p, self._own[run]))
            if not torch.equal(gathered, _local(p.sharded).to(gathered.dtype)):
                return True
        return False

    def load(self, parts: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Set the parts that the next gather begins with."""
        self._values, self._replaced, self._loaded = None, False, dict(parts)


def _change(own: torch.Tensor, last: torch.Tensor, known: torch.Tensor, trained: bool) -> Change:
    if torch.equal(own, last.to(own.device)):
        return Change.NONE
    # No difference leads from a base that is not finite to weights that are.
    return Change.TRAINED if trained and known.isfinite().all() else Change.REPLACED


def _run(segment: Segment) -> slice:
    return slice(segment.offset, segment.offset + segment.numel)


def _local(part: torch.Tensor) -> torch.Tensor:
    return part.to_local() if isinstance(part, DTensor) else part


def _unpadded(
    p: parallel.ShardedParameter, block: torch.Tensor, like: torch.Tensor
) -> torch.Tensor:
    """Return a parameter's part of a block, without padding."""
    return block.view(p.padded).narrow(p.dim, 0, like.shape[p.dim])


def _part(exact: torch.Tensor, p: parallel.ShardedParameter, block: torch.Tensor) -> torch.Tensor:
    """Return a parameter's part of a block, as a DTensor like the parameter."""
    part = torch.empty_like(exact, dtype=block.dtype)
    _local(part).copy_(_unpadded(p, block, _local(part)))
    return part


# ---- 2. a model ----------------------------------------------------------------------------------


class Bases:
    """The bases of a model's groups of parameters."""

    def __init__(self) -> None:
        self._all: list[Base] = []
        self._saved: dict[str, Any] | None = None  # of a copy from a pickle

    def __bool__(self) -> bool:
        return bool(self._all or self._saved)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for pickles, without the model's modules."""
        return {"_all": [], "_saved": self.state_dict() if self else None}

    def add(self, base: Base) -> Base:
        """Add the base of another group, and return it."""
        self._all.append(base)
        return base

    @property
    def nbytes(self) -> int:
        """The size of all stored weights."""
        return sum(base.nbytes for base in self._all)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's parts of the base and of the exact gathered weights, by parameter."""
        if self._saved is not None:
            return self._saved
        saved = dict(each for base in self._all for each in base.saved())
        return {part: {name: of[i] for name, of in saved.items()} for i, part in enumerate(_PARTS)}

    def checked(self, state_dict: Mapping[str, Any], strict: bool) -> dict[str, Any]:
        """Return what state_dict() returned, without other models' layers.

        Raises:
            InvalidArgument: it does not fit this model or this number of ranks.
        """
        require_keys("fsdp.State", state_dict, _PARTS)
        parts, own = {part: dict(state_dict[part]) for part in _PARTS}, self.state_dict()["base"]
        require_layers("fsdp.State", list(parts.values()), list(own), strict=strict)
        for part, tensors in parts.items():
            for name, tensor in tensors.items():
                found, expected = _shapes(tensor), _shapes(own[name])
                if found != expected:
                    raise InvalidArgument(
                        f"the {part} weights of parameter '{name}' have the shape {found[0]}, on "
                        f"this rank {found[1]}, but the parameter has {expected[0]}, on this rank "
                        f"{expected[1]}: load this model's state; after a change of the number of "
                        "ranks, load it through torch.distributed.checkpoint"
                    )
        return parts

    def load(self, parts: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Restore the bases from what checked() returned."""
        for base in self._all:
            base.load(parts)


def _shapes(part: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of a whole parameter, and of this rank's part."""
    return tuple(part.shape), tuple(_local(part).shape)
