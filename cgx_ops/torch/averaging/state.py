"""AveragingState: the common state of successive averages, for DDP hooks, FSDP2 and optimizers."""

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from cgx_ops import Communicator, Config, Rules, Segment
from cgx_ops._core.call import call_seed
from cgx_ops._core.refusal import reason_of, refuse
from cgx_ops.config import require_feedback
from cgx_ops.errors import InvalidArgument, checked_seed
from cgx_ops.rules import require_rules
from cgx_ops.torch._compat.parallel import group_or_default
from cgx_ops.torch.averaging import layers
from cgx_ops.torch.averaging.layers import Layer
from cgx_ops.torch.averaging.loaded import require_keys
from cgx_ops.torch.averaging.residuals import Residuals
from cgx_ops.torch.averaging.sent import Sent
from cgx_ops.torch.backend.groups import communicator_of, era_of
from cgx_ops.torch.graph.carried import Carrier
from cgx_ops.torch.graph.carried_on_cpu import CpuCarrier
from cgx_ops.torch.graph.carried_on_cuda import CudaCarrier, can_gather
from cgx_ops.torch.graph.work import Residuals as ResidualsOfSegments
from cgx_ops.torch.graph.work import future_of, start

_log = logging.getLogger(__name__)
_GROUP = "group of rank"  # key of a group in checkpoints, with its lowest rank


class AveragingState:
    """The state to average the tensors of one model over the ranks, step by step.

    Attributes:
        kept: names of the attributes that checkpoints contain.
        process_group: the ranks that average. None: the default group.
        config: settings of the messages.
        rules: settings of layers by name. None: the rules of the process.
        carrier: "native" or "c10d".
        seed: seed of the noise of all layers and steps.
        steps: number of backward passes so far.
        residuals: the quantization errors of this rank's gradients, by layer.
    """

    kept: ClassVar[tuple[str, ...]] = ("config", "rules", "carrier", "seed", "steps", "residuals")

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        config: Config,
        rules: Rules | None,
        carrier: str,
        seed: int,
    ) -> None:
        if carrier not in ("native", "c10d"):
            raise InvalidArgument(f"carrier is {carrier!r}; it must be 'native' or 'c10d'")
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            raise InvalidArgument(
                f"process_group is {process_group!r}; it must be a ProcessGroup or None"
            )
        config = by_hosts(config)
        check_carrier(carrier, config)
        require_feedback(config)
        self.process_group = process_group
        self.config = config
        self.rules = None if rules is None else require_rules(rules)
        self.carrier = carrier
        self.seed = checked_seed(seed)
        self.steps = 0
        self.residuals = Residuals()
        self.connect()

    def connect(self) -> None:
        """Reset the attributes that belong to this process."""
        self._group: weakref.ref[dist.ProcessGroup] | None = None
        self._era = ""
        self._communicator: Communicator | None = None
        self._carriers: dict[str, Carrier] = {}  # by type of device

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as copies. Each rank saves its own.

        The ranks of a mesh may average in several groups. The state of a group without rank 0 is
        then under a key of that group, so that torch.distributed.checkpoint stores all groups
        separately.

        Returns:
            The state by name, without attributes of this process such as the process group.
        """
        first = min(ranks_of(self.process_group), default=0)
        return {f"{_GROUP} {first}": self.saved()} if first else self.saved()

    def saved(self) -> dict[str, Any]:
        """Return the content of state_dict(), without the name of the group.

        Returns:
            The saved attributes, by name.
        """
        saved = {"residuals": self.residuals.saved(*self.place, per_rank=self.keeps_residuals())}
        named = {name: getattr(self, name) for name in self.kept}
        return named | saved

    def joining_state_dict(self) -> dict[str, Any]:
        """Return the state for a rank that joins a running job, to load before its first step.

        The new rank gets the settings, the seed and the count of steps, which must be equal on all
        ranks. It has no residuals yet. The other ranks keep theirs, although their ranks and the
        number of ranks may change.

        Returns:
            What state_dict() returns, without this rank's own parts.
        """
        return self.saved() | {"residuals": Residuals().saved(*self.place, per_rank=False)}

    def keeps_residuals(self) -> bool:
        """Return whether any layer may have a residual.

        Returns:
            True if the config, the rules or loaded residuals allow for it.
        """
        return bool(self.residuals.tensors) or rules_of(self).may_keep_residuals(self.config)

    def consolidate(self) -> None:
        """Replace residuals by their mean over the ranks. Collective.

        A checkpoint that is saved afterwards can be loaded on any number of ranks; the pending
        correction of the average is unchanged. To load it with torch.distributed.checkpoint, call
        `consolidate` on the new state, too, before the load. The next backward makes residuals
        different across ranks again.

        Raises:
            InvalidArgument: ranks have residuals of different layers.
        """
        self.residuals.consolidate(self.group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state in place from what `state_dict` returned.

        The process group, the carrier and the registered hook do not change. The name of the
        process group may differ from the saved one.

        Args:
            state_dict: what `state_dict` returned, on this rank or through
                torch.distributed.checkpoint.

        Raises:
            InvalidArgument: this is not the state_dict of such a state, it lacks this rank's
                residuals, or the carrier does not support the saved config.
        """
        state_dict = next((x for n, x in state_dict.items() if n.startswith(_GROUP)), state_dict)
        require_keys(type(self).__name__, state_dict, self.kept)
        restored = self.restored(state_dict | {"carrier": self.carrier})
        for each in restored.values():
            if isinstance(each, Residuals) and dist.is_initialized():  # else place is not known yet
                each.confirm(*self.place)
        self.__dict__.update(restored)

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
        check_carrier(saved["carrier"], saved["config"])
        return saved | {"residuals": Residuals.restored(saved["residuals"])}

    def __getstate__(self) -> dict[str, Any]:
        """Return the saved attributes, for pickles."""
        if self.process_group not in (None, dist.group.WORLD):
            _log.warning(
                "a %s was copied or pickled without its process group: the copy averages over the "
                "default group unless you set its process_group",
                type(self).__name__,
            )
        return self.saved()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state over the default group."""
        self.__dict__.update(self.restored(state))
        self.process_group = None
        self.connect()

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the averages.

        If it changes, because process_group was set, the default group was created again or its
        members have changed, the attributes that belong to the old one are reset.
        """
        group = group_or_default(self.process_group)
        era = era_of(group)
        if self._group is None or self._group() is not group or self._era != era:
            if self._group is not None:
                self.connect()
            self._group, self._era = weakref.ref(group), era
        return group

    @property
    def place(self) -> tuple[int, int]:
        """The index of this rank in the group, and the number of ranks; (0, 1) without a group."""
        if self.process_group is None and not dist.is_initialized():
            return 0, 1
        return self.group.rank(), self.group.size()

    def communicator(self) -> Communicator:
        """Return the communicator of the process group. Collective in the first call.

        Returns:
            The communicator.

        Raises:
            InvalidArgument: torch.distributed does not list the group.
        """
        group = self.group
        if self._communicator is None or self._communicator.closed:
            self._communicator = communicator_of(group)
        return self._communicator

    def carry(self, device: torch.device) -> Carrier:
        """Return the carrier over torch's collectives. Collective in the first call for a type.

        Args:
            device: of the tensors. All GPUs have one carrier, because after a failure on one of
                them, messages on another would match the peers' pending ones.

        Returns:
            The carrier.

        Raises:
            InvalidArgument: Several ranks cannot gather CUDA tensors, because the group uses gloo.
        """
        group = self.group
        if device.type not in self._carriers:
            if device.type == "cuda" and not can_gather(group):
                raise InvalidArgument(
                    f"carrier='c10d': process group '{group.group_name}' uses gloo, which cannot "
                    "gather CUDA tensors: pass a group with NCCL, or use carrier='native'"
                )
            made = CudaCarrier if device.type == "cuda" else CpuCarrier
            self._carriers[device.type] = made(group, self._era)
        return self._carriers[device.type]

    def residuals_of(
        self,
        caller: str,
        config: Config,
        layers: Sequence[Layer],
        segments: Sequence[Segment],
        values: Sequence[torch.Tensor],
    ) -> list[torch.Tensor | None] | None:
        """Return the residual of each compressed layer with error feedback; None if there is none.

        The residuals are not multiplied by their decay yet.

        Args:
            caller: for errors.
            config: of the message.
            layers: in the message.
            segments: of each layer.
            values: the values of each layer; residuals have their dtype and device.

        Returns:
            A residual or None for each layer.

        Raises:
            InvalidArgument: such a layer has no name, or the residuals belong to another rank.
        """
        keeps = []
        for segment in segments:
            own = segment.config or config
            keeps.append(own.keeps_residuals and not own.is_short(segment.numel))
        if not any(keeps):
            return None
        self.residuals.claim(*self.place)
        if any(keep and not layer.name for layer, keep in zip(layers, keeps, strict=True)):
            raise InvalidArgument(
                f"{caller}: error feedback stores residuals by layer name, and this model's names "
                "are unknown: import cgx_ops.torch before you call DistributedDataParallel(model), "
                "or use Config(error_feedback=False)"
            )
        return [
            self.residuals.of(layer.name, value) if keep else None
            for layer, value, keep in zip(layers, values, keeps, strict=True)
        ]

    def seeds_of(self, names: Sequence[str], step: int) -> list[int]:
        """Return the seed of each layer's noise, which does not depend on the layer's message.

        Args:
            names: names of the layers.
            step: the step.

        Returns:
            A seed for each name.
        """
        group = self.group.group_name
        return [call_seed(self.seed, name, step, group) for name in names]

    @contextlib.contextmanager
    def or_refuse(self, device: torch.device, *names: str) -> Iterator[None]:
        """Refuse this rank's next messages of average() if the block that prepares them fails.

        The other ranks, which start these messages, then get the reason in their futures. This
        includes arguments that are invalid on one rank only.

        Over the carrier "c10d" on GPUs, they get the reason after the group's timeout.

        Args:
            device: of the messages.
            *names: names of the messages.
        """
        by = self.carry(device) if self.carrier == "c10d" else self.communicator()
        try:
            yield
        except Exception as error:
            if isinstance(by, Carrier):
                by.refuse(error)
            else:
                for name in names:
                    refuse(by, name, -1, reason_of(error))
                    _next(by, name)
            raise

    def average(
        self,
        buffer: torch.Tensor,
        config: Config,
        *,
        segments: Sequence[Segment],
        seed: Sequence[int],
        name: str,
        residuals: ResidualsOfSegments | None = None,
        then: Callable[[Sent], object] = lambda _: None,
        followers: Sequence[str] = (),
        result: torch.Tensor | None = None,
    ) -> torch.futures.Future[torch.Tensor]:
        """Average a buffer over the ranks in place, in the background.

        Args:
            buffer: of a dtype that the core supports.
            config: settings of the message.
            segments: its layers.
            seed: of each layer.
            name: name of the message, which identifies it across ranks. The carrier "c10d" uses the
                order of calls instead.
            residuals: of each segment, or None.
            then: called when the average is done, before the future completes. It may send further
                messages.
            followers: the names of these messages.
            result: the value of the future; None: the buffer.

        Returns:
            A future of the buffer, or of `result`. If this rank cannot start the message, the
            future holds the error.
        """
        if self.carrier == "c10d":
            carrier = self.carry(buffer.device)
            carried = Sent(carrier, 0, followers)
            return carrier.start(
                buffer, config, op="avg", segments=segments, seed=seed, residuals=residuals,
                then=lambda: carried.call(then), result=result,
            )  # fmt: skip
        comm = self.communicator()
        started = future_of(
            start, comm, "allreduce", buffer, buffer, config, op="avg",
            segments=segments, seed=seed, name=name, residuals=residuals,
        )  # fmt: skip

        sent = Sent(comm, _next(comm, name), followers)

        def done(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            averaged = future.value()[0]  # raises the message's error
            sent.call(then)
            return averaged if result is None else result

        return started.then(done)


def _next(comm: Communicator, name: str) -> int:
    """Count a message. Called where all ranks start, or refuse, messages in the same order.

    Threads start the followers of a message in any order.
    """
    return comm.next_call(f"{name}, then")


def check_carrier(carrier: str, config: Config, *, chooses_bits: bool = False) -> None:
    """Raise InvalidArgument for settings that the carrier "c10d" does not support."""
    if carrier != "c10d":
        return
    if config.algorithm in ("ring", "hierarchical"):
        raise InvalidArgument(
            f"carrier 'c10d' does not support algorithm {config.algorithm!r}; use 'sra'"
        )
    if chooses_bits:
        raise InvalidArgument(
            "carrier 'c10d' does not support adaptive bits or auto_bits: use carrier 'native'"
        )


def by_hosts(config: Config) -> Config:
    """Return a config whose algorithm does not depend on the size of a message."""
    return replace(config, algorithm="by_hosts") if config.algorithm == "auto" else config


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """Return the ranks of a group, None for the default one; [] if torch does not list it."""
    try:
        return dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return []


def rules_of(state: AveragingState) -> Rules:
    """Return the rules of a state."""
    return layers.process_rules() if state.rules is None else state.rules
