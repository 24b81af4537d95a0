"""Residuals: the quantization errors of each parameter's gradient on this rank, by name.

They are stored by name, because DistributedDataParallel rebuilds its buckets after the first step.
A residual belongs to one rank, or is equal on all ranks after consolidate(). In checkpoints a
rank's own residuals have a key with its rank, because torch.distributed.checkpoint saves equal keys
only once.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from cgx_ops import Config, Segment
from cgx_ops._core.consistency import require_same
from cgx_ops.errors import InvalidArgument
from cgx_ops.torch.averaging.arithmetic import full_precision, use_on_this_stream
from cgx_ops.torch.averaging.exact import gather_over, mean_over

# Keys in checkpoints.
_OWNERS, _SHARED = "owners", "all ranks"


class Residuals:
    """Residuals by parameter name, each with its parameter's size and its gradient's dtype.

    Attributes:
        tensors: flat, by name, on the device of the gradient.
        owner: the owning rank and the number of ranks; None if no rank owns them yet.
        consolidated: whether they are equal on all ranks.
        loaded: whether they come from a checkpoint and may be those of another rank.
    """

    loaded = False  # for residuals that were pickled by earlier versions

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.owner: tuple[int, int] | None = None
        self.consolidated = False

    # ---- 1. layers -------------------------------------------------------------------------------

    def of(
        self, name: str, like: torch.Tensor, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return a parameter's residual, to be read and written in place; zeros at first.

        Args:
            name: name of the parameter.
            like: the gradient in the form in which it is reduced.
            dtype: dtype of the residual; None: the gradient's.

        Raises:
            InvalidArgument: the existing residual has another size.
        """
        known, dtype = self.tensors.get(name), dtype or like.dtype
        if known is None:
            known = torch.zeros(like.numel(), dtype=dtype, device=like.device)
        elif known.numel() != like.numel():
            raise InvalidArgument(
                f"the residual of layer '{name}' has {known.numel()} elements, but its gradient "
                f"has {like.numel()}: the state belongs to another model; load this model's state"
            )
        # A checkpoint may have come from another device; a model may have changed its dtype.
        self.tensors[name] = known.to(dtype=dtype, device=like.device)
        return self.tensors[name]

    # ---- 2. the owner ----------------------------------------------------------------------------

    def claim(self, rank: int, size: int) -> None:
        """Set the owner to this rank.

        Residuals of this process stay its own if its rank changes, because the group was rebuilt.

        Args:
            rank: this rank.
            size: number of ranks.

        Raises:
            InvalidArgument: the residuals were loaded, and another rank owns them.
        """
        if self.tensors and self.loaded and self.owner not in (None, (rank, size)):
            raise InvalidArgument(
                f"the residuals are those of rank {self.owner[0]} of {self.owner[1]}, but this is "
                f"rank {rank} of {size}: load each rank's own state. For another number of ranks, "
                "call the state's consolidate() on all ranks before you save the checkpoint"
            )
        self.owner, self.consolidated, self.loaded = (rank, size), False, False

    def confirm(self, rank: int, size: int) -> None:
        """Note that loaded residuals are this rank's own, if they are, before its rank changes."""
        self.loaded = self.loaded and self.owner != (rank, size)

    def consolidate(self, group: dist.ProcessGroup) -> None:
        """Replace residuals by their mean over the ranks of `group`. Collective.

        Raises:
            InvalidArgument: ranks have residuals of different layers; every rank raises it.
        """
        mine = sorted(self.tensors.items())
        require_same(
            "consolidate",
            {f"a residual of '{name}', elements:": tensor.numel() for name, tensor in mine},
            gather_over(group),
            "Call consolidate() after the same step on all ranks",
            error=InvalidArgument,
        )
        for _, tensor in mine:
            tensor.copy_(mean_over(group, tensor))
        self.owner, self.consolidated = None, True

    # ---- 3. checkpoints --------------------------------------------------------------------------

    def _copy(self) -> "Residuals":
        copy = Residuals()
        copy.tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        copy.owner, copy.consolidated = self.owner, self.consolidated
        return copy

    def saved(self, rank: int, size: int, *, per_rank: bool) -> "dict[str, Residuals | int]":
        """Return copies by key for a checkpoint, and the number of ranks with their own.

        The number is 0 if all ranks share one set. The key of that set always exists, so that
        loading into a state without residuals is detected.

        Args:
            rank: this rank.
            size: number of ranks.
            per_rank: whether ranks have their own residuals, if they were not consolidated.
        """
        copy = self._copy()
        if self.consolidated or not per_rank:
            return {_OWNERS: 0, _SHARED: copy}
        if not self.tensors:
            copy.owner = rank, size
        assert copy.owner is not None
        rank, size = copy.owner
        return {_OWNERS: size, _SHARED: Residuals(), f"rank {rank} of {size}": copy}

    @classmethod
    def restored(cls, saved: "Mapping[str, Residuals | int]") -> "Residuals":
        """Return the residuals of a checkpoint.

        Raises:
            InvalidArgument: the checkpoint has one set per rank, and this rank's set was not
                loaded.
        """
        owners, found = saved[_OWNERS], saved[_SHARED]
        if owners:
            own = [each for each in saved.values() if isinstance(each, cls) and each.owner]
            found = next(iter(own), found)
        assert isinstance(found, cls)
        if owners and (found.owner is None or found.owner[1] != owners):
            raise InvalidArgument(
                f"the checkpoint has residuals of each of {owners} ranks, but this rank's own were "
                "not loaded: load it into a state with the same config, rules and number of ranks. "
                "For another number of ranks, call consolidate() on all ranks before you save it"
            )
        copy = found._copy()
        copy.loaded = True
        return copy


# ---- 4. decay ------------------------------------------------------------------------------------


def nothing() -> None:
    """Do nothing; the default function to call after an average."""


def decayed(
    kept: Sequence[torch.Tensor | None] | None,
    config: Config,
    segments: Sequence[Segment],
    *,
    copies: bool = False,
) -> tuple[list[torch.Tensor | None] | None, Callable[[], None]]:
    """Return the residuals for a collective, and a function to call when it is done.

    With a decay these are copies, so that a failed step leaves the residuals unchanged.

    Args:
        kept: the residual of each segment, or None.
        config: of the message.
        segments: of the message.
        copies: copy them even without a decay.
    """
    decays = [(segment.config or config).residual_decay for segment in segments]
    if kept is None or (all(decay == 1 for decay in decays) and not copies):
        return None if kept is None else list(kept), nothing
    lost = [None if e is None else e * d for e, d in zip(kept, decays, strict=True)]

    @full_precision()
    def keep() -> None:
        for e, new in zip(kept, lost, strict=True):
            if e is not None and new is not None:
                use_on_this_stream(new)
                e.copy_(new)

    return lost, keep
