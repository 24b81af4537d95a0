"""Residuals: what compression has lost of each parameter's gradient on this rank, by name.

1. of(): a layer's, which a collective reads and writes in place
2. whose they are: one rank's own, or (consolidated) equal on all ranks
3. checkpoints: a rank's own under a key of its own, so that torch.distributed.checkpoint, which
   saves equal keys once, keeps those of all ranks
4. decay: on copies, which replace the residuals once a step has succeeded

By name, because DistributedDataParallel makes its buckets anew after the first step.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from cgx_ops import Config, Segment
from cgx_ops._core.consistency import require_same
from cgx_ops.errors import InvalidArgument
from cgx_ops.torch.averaging.arithmetic import full_precision, use_on_this_stream
from cgx_ops.torch.averaging.exact import gather_over, mean_over

# Keys of what is saved.
_OWNERS, _SHARED = "owners", "all ranks"


class Residuals:
    """Tensors by parameter name, each of its parameter's size and of its gradient's dtype.

    Attributes:
        tensors: flat, by name, on the device of the gradient.
        owner: whose they are, a rank and the number of ranks that have others; None: nobody's yet.
        consolidated: whether they are equal on all ranks.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.owner: tuple[int, int] | None = None
        self.consolidated = False

    # ---- 1. layers -------------------------------------------------------------------------------

    def of(
        self, name: str, like: torch.Tensor, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return a parameter's residual, zeros at first, to be read and written in place.

        Args:
            name: of the parameter.
            like: its gradient, as it is reduced.
            dtype: of the residual; None: the gradient's.

        Raises:
            InvalidArgument: the one that there is has another size.
        """
        known, dtype = self.tensors.get(name), dtype or like.dtype
        if known is None:
            known = torch.zeros(like.numel(), dtype=dtype, device=like.device)
        elif known.numel() != like.numel():
            raise InvalidArgument(
                f"the residual of layer '{name}' has {known.numel()} elements, its gradient "
                f"{like.numel()}: the state is another model's"
            )
        # A checkpoint may have come from another device; a model may have changed its dtype.
        self.tensors[name] = known.to(dtype=dtype, device=like.device)
        return self.tensors[name]

    # ---- 2. whose they are -----------------------------------------------------------------------

    def claim(self, rank: int, size: int) -> None:
        """Have them be this rank's own, of so many ranks.

        Raises:
            InvalidArgument: they are another rank's.
        """
        if self.tensors and self.owner not in (None, (rank, size)):
            raise InvalidArgument(
                f"the residuals are those of rank {self.owner[0]} of {self.owner[1]}, and this is "
                f"rank {rank} of {size}: load each rank's own, or, for another number of ranks, "
                "call the state's consolidate() on all ranks before the checkpoint is saved"
            )
        self.owner, self.consolidated = (rank, size), False

    def consolidate(self, group: dist.ProcessGroup) -> None:
        """Make them the mean over the ranks of `group`: collective.

        Raises:
            InvalidArgument: ranks have residuals of other layers (on every rank).
        """
        mine = sorted(self.tensors.items())
        require_same(
            "consolidate",
            {f"a residual of '{name}', elements:": tensor.numel() for name, tensor in mine},
            gather_over(group),
            "Call it after the same step on all ranks",
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
        """Return copies by key, for a checkpoint, and how many ranks have their own (0: none).

        The key of all ranks is always there, so that a load by a state without residuals is told.

        Args:
            rank: this one.
            size: the number of ranks.
            per_rank: whether ranks have their own, if they were not consolidated.
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
        """Return those of a checkpoint.

        Raises:
            InvalidArgument: the checkpoint has each rank's own, and this rank's were not loaded.
        """
        owners, found = saved[_OWNERS], saved[_SHARED]
        if owners:
            own = [each for each in saved.values() if isinstance(each, cls) and each.owner]
            found = next(iter(own), found)
        assert isinstance(found, cls)
        if owners and (found.owner is None or found.owner[1] != owners):
            raise InvalidArgument(
                f"the checkpoint has residuals of each of {owners} ranks, and this rank's own are "
                "not among what was loaded: load it into a state with the same config, rules and "
                "number of ranks; for another number of ranks call consolidate() on all ranks "
                "before it is saved"
            )
        return found._copy()


# ---- 4. decay ------------------------------------------------------------------------------------


def nothing() -> None:
    """Do nothing when averages are there."""


def decayed(
    kept: Sequence[torch.Tensor | None] | None,
    config: Config,
    segments: Sequence[Segment],
    *,
    copies: bool = False,
) -> tuple[list[torch.Tensor | None] | None, Callable[[], None]]:
    """Return the residuals for a collective, and a function to call when it is done.

    With a decay that is a copy, so that a step that fails leaves the residuals unchanged.

    Args:
        kept: the residual of each segment, or None.
        config: of the message.
        segments: of the message.
        copies: copy them whatever the decay.
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
