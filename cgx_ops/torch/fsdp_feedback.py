"""Error feedback for FSDP2: what compression has lost of a module's gradients on this rank.

In a reduce-scatter a rank loses of its own values only: its encoding of each other rank's block. So
a residual is as long as all blocks together, which is the module's whole gradient.

  1. Feedback: how residuals are kept: as they are, or as LoCo does it
  2. Kept: them, by module; what a checkpoint of fsdp.State has of them
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from cgx_ops import Config, codec
from cgx_ops.errors import InvalidArgument
from cgx_ops.torch.residuals import Residuals

# How residuals of 8 bits are kept: a byte a value, and 8 bytes for each bucket.
_EIGHT_BITS = Config(bits=8, bucket_size=512, rounding="nearest")

# ---- 1. how --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Feedback:
    """How residuals are kept between steps. The default gives nothing up.

    `LOCO` is that of Xie, Lin, Toh, Zhou: LoCo, Low-Bit Communication Adaptor for Large-Scale Model
    Training (2024): a quarter of the memory, and errors of single steps are averaged out.

    Attributes:
        bits: 32: in the gradients' dtype; 8: in 8 bits, in buckets of 512.
        average: share of the old residual in the new one, at least 0 and less than 1: a residual
            becomes average * residual + (1 - average) * what this step lost.
        reset: it becomes zero after so many steps; 0: never.
    """

    bits: Literal[8, 32] = 32
    average: float = 0.0
    reset: int = 0

    def __post_init__(self) -> None:
        for name, right, accepted in (
            ("bits", self.bits in (8, 32), "8 or 32"),
            ("average", 0 <= self.average < 1, "at least 0 and less than 1"),
            ("reset", type(self.reset) is int and self.reset >= 0, "a number of steps, or 0"),
        ):
            if not right:
                value = getattr(self, name)
                raise InvalidArgument(f"Feedback.{name} is {value!r}; it must be {accepted}")


LOCO = Feedback(bits=8, average=0.8, reset=1024)

# ---- 2. what -------------------------------------------------------------------------------------


class Kept:
    """The residuals of a model's modules on this rank, and how often each was used."""

    def __init__(self, feedback: Feedback) -> None:
        self.feedback = feedback
        self.residuals = Residuals()
        self.counts: dict[str, int] = {}

    def take(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return a module's residual for a reduce-scatter of these values, which changes it."""
        self.residuals.claim(dist.get_rank(), dist.get_world_size())
        if self.feedback.bits == 32:
            residual = self.residuals.of(name, values)
            return residual if self.feedback.average == 0 else residual.clone()
        return self._decoded(name, values.numel()).to(values.dtype)

    def put(self, name: str, lost: torch.Tensor) -> None:
        """Keep what a reduce-scatter has made of what take() returned."""
        feedback, share = self.feedback, self.feedback.average
        count = self.counts[name] = self.counts.get(name, 0) + 1
        known = self.residuals.tensors
        if feedback.bits == 32:
            if share:
                known[name].mul_(share).add_(lost, alpha=1 - share)
        else:
            new = self._decoded(name, lost.numel()).mul_(share).add_(lost.float(), alpha=1 - share)
            encoded = codec.quantize(new.numpy(), _EIGHT_BITS)
            known[name] = torch.from_numpy(np.frombuffer(encoded, np.uint8).copy())
        if feedback.reset and count % feedback.reset == 0:
            del known[name]

    def _decoded(self, name: str, numel: int) -> torch.Tensor:
        encoded = self.residuals.tensors.get(name)
        if encoded is None:
            return torch.zeros(numel)
        return torch.from_numpy(
            codec.dequantize(encoded.numpy().tobytes(), numel, "float32", _EIGHT_BITS)
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint has; residuals under a key of this rank's own."""
        place = dist.get_rank(), dist.get_world_size()
        saved = self.residuals.saved(*place, per_rank=True)
        # A list: torch.distributed.checkpoint would ask for the keys that this dict has now.
        counts = list(self.counts.items())
        return {"feedback": self.feedback, "counts": counts, "residuals": saved}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where the state was that state_dict() was called of.

        Raises:
            InvalidArgument: residuals that were kept in another way, or are another rank's.
        """
        if state_dict["feedback"] != self.feedback:
            raise InvalidArgument(
                f"the checkpoint has {state_dict['feedback']}, fsdp.compress() was given "
                f"{self.feedback}: give it the same"
            )
        self.residuals = Residuals.restored(state_dict["residuals"])
        self.counts = dict(state_dict["counts"])
