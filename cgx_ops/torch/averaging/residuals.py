"""Residuals: what compression has lost of each parameter's gradient on this rank, by name.

1. of(): a layer's, which a collective reads and writes in place
2. whose they are: one rank's own, or (consolidated) equal on all ranks
3. checkpoints: a rank's own under a key of its own, so that torch.distributed.checkpoint, which
   saves equal keys once, keeps those of all ranks

By name, because DistributedDataParallel makes its buckets anew after the first step.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from cgx_ops.errors import InvalidArgument
from cgx_ops.torch.backend import process_group

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
        mine = [(name, tensor.numel()) for name, tensor in sorted(self.tensors.items())]
        everyones: list[list[tuple[str, int]] | None] = [None] * group.size()
        dist.all_gather_object(everyones, mine, group)
        for rank, other in enumerate(everyones):
            if other != everyones[0]:
                raise InvalidArgument(
                    f"consolidate: rank 0 has residuals of {everyones[0]}, rank {rank} of {other}: "
                    "call it after the same step on all ranks"
                )
        for name, _ in mine:
            mean = self.tensors[name].float()
            with process_group.uncompressed():
                dist.all_reduce(mean, group=group)
            self.tensors[name].copy_(mean / group.size())
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
