"""DeepGradientState: settings of Deep Gradient Compression, momenta, and what is not sent yet.

1. the state; all of it goes into checkpoints, but for what belongs to the process
2. whether an optimizer applies momentum a second time

The hook is in hook.py.
"""

import weakref
from collections.abc import Sequence
from typing import Any, Literal, Unpack

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cgx_ops import Config, Rules
from cgx_ops.config import Keywords, config_of
from cgx_ops.errors import InvalidArgument
from cgx_ops.methods.deep_gradient import Method, checked_config
from cgx_ops.torch.averaging.layers import Layer
from cgx_ops.torch.averaging.residuals import Residuals
from cgx_ops.torch.ddp.state import HookState

# ---- 1. the state --------------------------------------------------------------------------------


class DeepGradientState(HookState):
    """What deep_gradient_hook needs, of one model.

    Equal on all ranks but for the process group, momenta and residuals. It is saved, restored and
    consolidated as a QuantizedAllreduceState is: state_dict(), load_state_dict(), consolidate(),
    pickles, torch.save.

    Attributes:
        process_group: whose ranks average; None: the default group.
        density: the share of a layer's values that a rank sends, more than 0 and at most 1.
        momentum: m, at least 0 and less than 1. The optimizer must have none: see check().
        nesterov: whether it is Nesterov's.
        clip: before it is added, each rank's gradient of a layer is scaled down to an L2 norm, of
            this layer's elements, of at most clip / sqrt(W) for W ranks; None: it is not.
        warmup_steps: steps with more than `density`: a quarter of them each with 25 %, 6.25 %,
            1.5625 % and 0.390625 %, where that is more.
        config: how values travel: its compressor, "topk" or "threshold", its value_bits, its
            minimal_size, and its algorithm: "one_shot", where each rank sends to every other;
            "hierarchical", where ranks of a host add their gradients up, exact, and hosts send to
            each other; "auto" and "by_hosts", whichever of them fits the hosts. A layer's values
            are always chosen from all of it.
        rules: cgx_ops.Rules of bits=32 (exact), compressor, density and value_bits. None: the
            rules of the process.
        carrier: who moves the bytes, "native" or "c10d", as of QuantizedAllreduceState.
        steps: backward passes so far.
        momenta: u by layer, float32: a rank's own where the layer is sparse, else the average's.
        residuals: v by layer, float32: what of the sparse layers is not sent yet. In units of this
            rank's gradients; where a host's ranks add theirs up the first of them has the sum of
            all, the others zeros.
    """

    kept = (
        *HookState.kept, "density", "momentum", "nesterov", "clip", "warmup_steps", "momenta",
    )  # fmt: skip

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        density: float = 0.001,
        momentum: float = 0.9,
        nesterov: bool = False,
        clip: float | None = None,
        warmup_steps: int = 0,
        config: Config | None = None,
        rules: Rules | None = None,
        carrier: Literal["native", "c10d"] = "native",
        **keywords: Unpack[Keywords],
    ) -> None:
        """Make a state; config None: Config(compressor="topk").

        Keywords replace fields of config: bits, bucket_size, compressor, rounding.

        Raises:
            InvalidArgument (a ValueError): an argument is out of its range.
        """
        config = config_of(config or Config(compressor="topk"), **keywords)
        super().__init__(process_group, config, rules, carrier, seed=0)
        checked_config(self.config)
        self.density = density
        self.momentum = momentum
        self.nesterov = nesterov
        self.clip = clip
        self.warmup_steps = warmup_steps
        _ = self.method  # checks them
        self.momenta = Residuals()

    @property
    def method(self) -> Method:
        """The settings that say how gradients become what is sent."""
        return Method(self.density, self.momentum, self.nesterov, self.clip, self.warmup_steps)

    def connect(self) -> None:
        """Begin anew with what belongs to this process."""
        super().connect()
        self._parameters: dict[int, torch.Tensor] = {}
        self.gathered: set[str] = set()  # layers of which the host's first rank has everything
        _watch(self)

    def saved(self) -> dict[str, Any]:
        """Return what state_dict() does, of whichever group."""
        saved = super().saved()
        return saved | {"momenta": self.momenta.saved(*self.place, per_rank=True)}

    def restored(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return attributes from what was saved."""
        momenta = Residuals.restored(saved["momenta"])
        return super().restored(saved) | {"momenta": momenta, "gathered": set()}

    def by_layer(self) -> list[dict[str, Any]]:
        """Return what the state has of each layer."""
        return [*super().by_layer(), self.momenta.tensors]

    def report(self, found: Sequence[Layer]) -> None:
        """Log that training starts."""
        self.report_method(f"Deep Gradient Compression of density {self.density:g},", found)

    def keeps_residuals(self) -> bool:
        """Tell whether any layer may have a residual."""
        return True

    def consolidate(self) -> None:
        """Make residuals and momenta their mean over the ranks, equal everywhere. Collective.

        What is saved then can be loaded on any number of ranks: what is owed to the average is the
        same, and so is what momentum adds to it. By torch.distributed.checkpoint load it into a new
        state of which consolidate() was called too. The next backward makes them each rank's own.

        Raises:
            InvalidArgument: ranks have those of other layers.
        """
        super().consolidate()
        self.momenta.consolidate(self.group)
        self.gathered = set()

    # ---- 2. the optimizer ------------------------------------------------------------------------

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Require that an optimizer does not apply momentum to averages that have it already.

        It is called, too, before each step that uses what the hook averaged.

        Raises:
            InvalidArgument: it has momentum, and this state has.
        """
        for group in optimizer.param_groups:
            own = group.get("momentum") or (group.get("betas") or (0,))[0]
            if self.momentum and own:
                raise InvalidArgument(
                    f"DeepGradientState has momentum={self.momentum} and {type(optimizer).__name__}"
                    f" has momentum {float(own)}, which would be applied twice: give the optimizer "
                    "none (torch.optim.SGD(..., momentum=0)), or give the state momentum=0"
                )

    def note(self, parameters: Sequence[torch.Tensor]) -> None:
        """Remember parameters whose gradients become averages of this state."""
        self._parameters.update((id(p), p) for p in parameters)

    def take(self, optimizer: torch.optim.Optimizer) -> bool:
        """Tell whether an optimizer is about to use such gradients; forget them."""
        ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        used = self._parameters.keys() & ids
        for each in used:
            del self._parameters[each]
        return bool(used)


_states: "weakref.WeakSet[DeepGradientState]" = weakref.WeakSet()
_hooks: list[Any] = []


def _watch(state: DeepGradientState) -> None:
    """Have the optimizers of its model checked."""
    _states.add(state)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_check))


def _check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for state in list(_states):
        if state.take(optimizer):
            state.check(optimizer)
