"""DeepGradientState: settings, momenta and residuals of deep_gradient_hook."""

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
    """State of `deep_gradient_hook` for one model.

    The hook applies momentum itself, so use an optimizer without momentum; see `check`. All ranks
    use the same arguments, except for the process group. Save it in checkpoints like a
    `QuantizedAllreduceState`: by `state_dict`, `load_state_dict`, pickle or torch.save, and with
    `consolidate` for another number of ranks.

    Args:
        process_group: the ranks that average. None: the default group.
        density: share of a layer's values that a rank sends, more than 0 and at most 1.
        momentum: momentum coefficient, at least 0 and less than 1.
        nesterov: whether to use Nesterov momentum.
        clip: clip each layer's gradient on each rank to an L2 norm of clip / sqrt(ranks). None: no
            clipping.
        warmup_steps: number of first steps that send more: a quarter of them each with 25 %, 6.25
            %, 1.5625 % and 0.390625 %, but never less than `density`.
        config: settings of the messages: compressor "topk", value_bits, minimal_size and algorithm.
            With "one_shot" every rank sends to every other rank. With "hierarchical" the ranks of a
            host first add up their gradients exactly. "auto" and "by_hosts" choose by the number of
            hosts. None: `Config(compressor="topk")`.
        rules: settings of layers by name: bits=32 (exact), density and value_bits. None: the
            rules of the process, which `cgx_ops.torch.exclude_layer` and similar functions set.
        carrier: "native" sends by cgx_ops' own transports, over a group of any backend. "c10d"
            sends by torch's collectives: CPU tensors by gloo, CUDA tensors by the process group,
            for example NCCL, not gloo. With the same algorithm, both give the same bits.
        **keywords: `bits`, `bucket_size`, `compressor` or `rounding`; each overrides that field of
            `config`.

    Attributes:
        steps: number of backward passes so far.
        momenta: momentum buffers u by layer, float32. Of sparse layers each rank has its own; the
            others are equal on all ranks.
        residuals: accumulated gradients v of the sparse layers that were not sent yet, float32.
            With "hierarchical", the first rank of a host has the sum of its host and the others
            have zeros.

    Each argument except the keywords is also an attribute.

    Raises:
        InvalidArgument: an argument is out of range.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> from cgx_ops.torch import ddp
        >>> dist.init_process_group("cgx", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DistributedDataParallel(torch.nn.Linear(64, 64))
        >>> state = ddp.DeepGradientState(density=0.01, momentum=0.9, warmup_steps=400)
        >>> model.register_comm_hook(state, ddp.deep_gradient_hook)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # momentum is in the hook
        >>> model(torch.ones(8, 64)).sum().backward()
        >>> optimizer.step()
        >>> state.steps
        1
        >>> dist.destroy_process_group()
    """

    kept = (
        *HookState.kept, "density", "momentum", "nesterov", "clip", "warmup_steps", "momenta",
    )  # fmt: skip
    agreed = (*HookState.agreed, "_exact_momenta")

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
        config = config_of(config or Config(compressor="topk"), **keywords)
        super().__init__(process_group, config, rules, carrier, seed=0)
        checked_config(self.config)
        self.density = density
        self.momentum = momentum
        self.nesterov = nesterov
        self.clip = clip
        self.warmup_steps = warmup_steps
        _ = self.method  # validates them
        self.momenta = Residuals()

    @property
    def method(self) -> Method:
        """The settings that determine what is sent, as one value."""
        return Method(self.density, self.momentum, self.nesterov, self.clip, self.warmup_steps)

    def connect(self) -> None:
        """Reset the attributes that belong to this process."""
        super().connect()
        self._parameters: dict[int, torch.Tensor] = {}
        self.gathered: set[str] = set()  # layers whose sums are on the host's first rank
        _watch(self)

    def saved(self) -> dict[str, Any]:
        """Return the content of state_dict(), without the name of the group.

        Returns:
            The saved attributes, by name.
        """
        saved = super().saved()
        return saved | {"momenta": self.momenta.saved(*self.place, per_rank=True)}

    def joining_state_dict(self) -> dict[str, Any]:
        """Return the state for a rank that joins a running job, to load before its first step.

        Returns:
            What state_dict() returns, without residuals and without the momenta of sparse layers.
        """
        momenta = Residuals()
        momenta.tensors = self._exact_momenta
        saved = momenta.saved(*self.place, per_rank=False)
        return super().joining_state_dict() | {"momenta": saved}

    @property
    def _exact_momenta(self) -> dict[str, torch.Tensor]:
        """The momenta of layers that are sent exact, which are equal on all ranks."""
        sparse = self.residuals.tensors
        return {name: u.cpu() for name, u in self.momenta.tensors.items() if name not in sparse}

    def adopt(self, counts: dict[str, Any]) -> None:
        """Take the counts of another rank, and its momenta of exact layers.

        Args:
            counts: its attributes in `agreed`, by name.
        """
        self.momenta.tensors.update(counts.pop("_exact_momenta"))
        super().adopt(counts)

    def restored(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Convert a checkpoint into attributes.

        Args:
            saved: what saved() returned.

        Returns:
            Attributes by name.

        Raises:
            InvalidArgument: the carrier does not support the saved config, or this rank's residuals
                are missing.
        """
        momenta = Residuals.restored(saved["momenta"])
        return super().restored(saved) | {"momenta": momenta, "gathered": set()}

    def by_layer(self) -> list[dict[str, Any]]:
        """Return the parts of the state that are stored by layer.

        Returns:
            Dicts whose keys are names of layers.
        """
        return [*super().by_layer(), self.momenta.tensors]

    def report(self, found: Sequence[Layer]) -> None:
        """Log that training starts.

        Args:
            found: the layers of the model.
        """
        self.report_method(f"Deep Gradient Compression of density {self.density:g},", found)

    def keeps_residuals(self) -> bool:
        """Return whether any layer may have a residual.

        Returns:
            True.
        """
        return True

    def consolidate(self) -> None:
        """Replace residuals and momenta by their means over the ranks. Collective.

        A checkpoint that is saved afterwards can be loaded on any number of ranks. The pending
        corrections of the average, and what momentum adds to them, are unchanged. To load it with
        torch.distributed.checkpoint, call `consolidate` on the new state, too, before the load. The
        next backward makes residuals and momenta different across ranks again.

        Raises:
            InvalidArgument: ranks have residuals of different layers.
        """
        super().consolidate()
        self.momenta.consolidate(self.group)
        self.gathered = set()

    # ---- 2. the optimizer ------------------------------------------------------------------------

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if an optimizer would apply momentum a second time.

        Called automatically before each step that uses averages of the hook.

        Args:
            optimizer: the optimizer of the model.

        Raises:
            InvalidArgument: both the optimizer and this state have momentum.
        """
        for group in optimizer.param_groups:
            own = group.get("momentum") or (group.get("betas") or (0,))[0]
            if self.momentum and own:
                raise InvalidArgument(
                    f"DeepGradientState has momentum={self.momentum} and {type(optimizer).__name__}"
                    f" has momentum {float(own)}, so momentum would be applied twice: use "
                    "torch.optim.SGD(..., momentum=0), or DeepGradientState(momentum=0)"
                )

    def note(self, parameters: Sequence[torch.Tensor]) -> None:
        """Record parameters whose gradients this state averages.

        Args:
            parameters: the parameters of a bucket.
        """
        self._parameters.update((id(p), p) for p in parameters)

    def take(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer is about to use averages of this state; clear their record.

        Args:
            optimizer: the optimizer that steps.

        Returns:
            Whether it has one of the recorded parameters.
        """
        ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        used = self._parameters.keys() & ids
        for each in used:
            del self._parameters[each]
        return bool(used)


_states: "weakref.WeakSet[DeepGradientState]" = weakref.WeakSet()
_hooks: list[Any] = []


def _watch(state: DeepGradientState) -> None:
    """Check the optimizers that use averages of a state."""
    _states.add(state)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_check))


def _check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for state in list(_states):
        if state.take(optimizer):
            state.check(optimizer)
