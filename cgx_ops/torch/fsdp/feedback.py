"""Error feedback for FSDP2: the quantization errors of a module's gradients on this rank.

In a reduce-scatter a rank quantizes only its own values, one block for each other rank. So a
residual is as long as all blocks together, which is the module's whole gradient.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from cgx_ops import Config
from cgx_ops._core import codec
from cgx_ops.errors import InvalidArgument
from cgx_ops.torch._compat.parallel import group_or_default
from cgx_ops.torch.averaging.arithmetic import full_precision
from cgx_ops.torch.averaging.residuals import Residuals
from cgx_ops.torch.fsdp.block import Parameter

# The format of 8-bit residuals: a byte for each value, and 8 bytes for each bucket.
_EIGHT_BITS = Config(bits=8, bucket_size=512, rounding="nearest")

# ---- 1. settings ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Feedback:
    """How residuals are stored between steps. The default stores them exactly.

    `LOCO` follows Xie, Lin, Toh, Zhou: LoCo, Low-Bit Communication Adaptor for Large-Scale Model
    Training (2024). It needs a quarter of the memory and averages the errors of steps.

    Args:
        bits: 32 stores residuals in the gradients' dtype; 8 in 8 bits, in buckets of 512.
        average: share of the old residual in the new one, at least 0 and less than 1: a new
            residual is average * residual + (1 - average) * error.
        reset: number of steps after which residuals become zero. 0: never.

    Each argument is also an attribute.

    Raises:
        InvalidArgument: an argument is out of range.

    Example:
        >>> from cgx_ops.torch import fsdp
        >>> fsdp.Feedback(bits=8, average=0.8, reset=1024) == fsdp.LOCO
        True
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


#: Error feedback of LoCo: residuals in 8 bits, averaged over steps, reset every 1024 steps.
LOCO = Feedback(bits=8, average=0.8, reset=1024)


def _encoded(residual: torch.Tensor) -> torch.Tensor:
    encoded = codec.quantize(residual.cpu().numpy(), _EIGHT_BITS)
    return torch.from_numpy(np.frombuffer(encoded, np.uint8).copy())


@dataclass(frozen=True)
class _Module:
    """A module's gradient: its size, one block for each rank, and the parameters in a block."""

    ranks: int
    numel: int
    parameters: Sequence[Parameter]


# ---- 2. residuals --------------------------------------------------------------------------------


class ModuleResiduals:
    """The residuals of a model's modules on this rank, and the number of their uses.

    A module's residual is stored under the module's name, in the layout of its last reduce-scatter.
    Residuals that were consolidated, or whose parameters no longer get gradients, are stored under
    the parameters' names until a reduce-scatter of the module merges them.
    """

    def __init__(self, feedback: Feedback) -> None:
        self.feedback = feedback
        self.by_name = Residuals()
        self.counts: dict[str, int] = {}
        self._modules: dict[str, _Module] = {}

    @full_precision()
    def take(
        self, name: str, values: torch.Tensor, ranks: int, parameters: Sequence[Parameter]
    ) -> torch.Tensor:
        """Return a module's residual for a reduce-scatter, which changes it.

        Args:
            name: name of the module.
            values: the input of the reduce-scatter.
            ranks: number of ranks.
            parameters: those of the module that have residuals.
        """
        self.by_name.claim(dist.get_rank(), dist.get_world_size())
        module = _Module(ranks, values.numel(), parameters)
        if self._modules.get(name) != module:  # parameters were frozen or unfrozen
            self._cut(name)
        self._modules[name] = module
        self._lay_out(name, values)
        if self.feedback.bits == 32:
            residual = self.by_name.of(name, values)
            return residual if self.feedback.average == 0 else residual.clone()
        decoded = self._decoded(name, values.numel())
        return decoded.to(device=values.device, dtype=values.dtype)

    @full_precision()
    def put(self, name: str, lost: torch.Tensor) -> None:
        """Store the residual from take() after a reduce-scatter has updated it."""
        feedback, share = self.feedback, self.feedback.average
        count = self.counts[name] = self.counts.get(name, 0) + 1
        known = self.by_name.tensors
        if feedback.bits == 32:
            if share:
                known[name].mul_(share).add_(lost, alpha=1 - share)
        else:
            new = self._decoded(name, lost.numel()).mul_(share)
            known[name] = _encoded(new.add_(lost.float().cpu(), alpha=1 - share))
        if feedback.reset and count % feedback.reset == 0:
            del known[name]

    def _decoded(self, name: str, numel: int) -> torch.Tensor:
        encoded = self.by_name.tensors.get(name)
        if encoded is None:
            return torch.zeros(numel, dtype=torch.float32, device="cpu")
        return torch.from_numpy(
            codec.dequantize(encoded.numpy().tobytes(), numel, "float32", _EIGHT_BITS)
        )

    def _lay_out(self, name: str, values: torch.Tensor) -> None:
        """Merge consolidated residuals of parameters into their module's residual."""
        known = self.by_name.tensors
        module = self._modules[name]
        whole = [p for p in module.parameters if p.name in known]
        if not whole:
            return
        residual = torch.zeros(module.numel, dtype=torch.float32, device=values.device)
        for parameter in whole:
            found = known.pop(parameter.name)
            if found.numel() != parameter.shape.numel():
                raise InvalidArgument(
                    f"the residual of parameter '{parameter.name}' has {found.numel()} elements, "
                    f"but the parameter has {parameter.shape.numel()}: the state belongs to "
                    "another model; load this model's state"
                )
            parameter.put_into(residual.view(module.ranks, -1), found.view(parameter.shape))
        known[name] = residual.to(values.dtype) if self.feedback.bits == 32 else _encoded(residual)

    def _cut(self, name: str) -> None:
        """Split a module's residual, if it has one, into those of its parameters."""
        known = self.by_name.tensors
        if name not in known:
            return
        module, quantized = self._modules[name], self.feedback.bits == 8
        residual = self._decoded(name, module.numel) if quantized else known[name]
        for parameter in module.parameters:
            whole = parameter.cut_from(residual.view(module.ranks, -1))
            known[parameter.name] = whole.float().flatten()
        del known[name]

    def consolidate(self) -> None:
        """Replace residuals by their mean over all ranks, by parameter. Collective.

        Raises:
            InvalidArgument: ranks have residuals of different parameters.
        """
        for name in self._modules:
            self._cut(name)
        self.by_name.consolidate(group_or_default(None))

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; residuals are under a key of this rank."""
        place = dist.get_rank(), dist.get_world_size()
        saved = self.by_name.saved(*place, per_rank=True)
        # Lists: torch.distributed.checkpoint would require the current keys of these dicts.
        counts, modules = list(self.counts.items()), list(self._modules.items())
        return {
            "feedback": self.feedback, "counts": counts, "modules": modules, "residuals": saved
        }  # fmt: skip

    def load_state_dict(
        self, state_dict: Mapping[str, Any], modules: Mapping[str, Collection[str]]
    ) -> None:
        """Restore the state from what state_dict() returned.

        Args:
            state_dict: what it returned.
            modules: the names of the parameters that are sharded together here, by module. A
                residual of other modules, or of more parameters, is split by parameter.

        Raises:
            InvalidArgument: the residuals are stored differently, or belong to another rank.
        """
        if state_dict["feedback"] != self.feedback:
            raise InvalidArgument(
                f"the checkpoint has {state_dict['feedback']}, but fsdp.compress() was called with "
                f"{self.feedback}: use the same feedback"
            )
        self.by_name = Residuals.restored(state_dict["residuals"])
        self.counts = dict(state_dict["counts"])
        self._modules = dict(state_dict["modules"])
        for name, module in list(self._modules.items()):
            if any(p.name not in modules.get(name, ()) for p in module.parameters):
                self._cut(name)
                del self._modules[name]
                self.counts.pop(name, None)


torch.serialization.add_safe_globals([Feedback, ModuleResiduals, _Module, Parameter])
