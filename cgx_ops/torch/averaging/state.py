"""AveragingState: what averages that follow each other share, of a hook or of an optimizer.

Ranks, Config, rules, steps and residuals; checkpoints of them; who moves the bytes.
"""

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from cgx_ops import Communicator, Config, Rules, Segment
from cgx_ops._core import tables
from cgx_ops._core.call import call_seed
from cgx_ops.config import require_feedback
from cgx_ops.errors import InvalidArgument, checked_seed
from cgx_ops.rules import require_rules
from cgx_ops.torch._compat.parallel import group_or_default
from cgx_ops.torch.averaging import layers
from cgx_ops.torch.averaging.layers import Layer
from cgx_ops.torch.averaging.loaded import require_keys
from cgx_ops.torch.averaging.residuals import Residuals
from cgx_ops.torch.averaging.sent import Sent
from cgx_ops.torch.backend.groups import communicator_of
from cgx_ops.torch.graph.carried import Carrier
from cgx_ops.torch.graph.work import Residuals as ResidualsOfSegments
from cgx_ops.torch.graph.work import future_of, reason_of, refuse, start

_log = logging.getLogger(__name__)
_GROUP = "group of rank"  # the name of a group in checkpoints: with its lowest rank


# Compressors whose messages cannot be cut use one_shot.
_UNCUT = {row["name"] for row in tables.COMPRESSORS.values() if not row["sliced"]}


class AveragingState:
    """What is needed to average the tensors of one model over the ranks, step by step.

    Attributes:
        kept: the names of what goes into checkpoints.
        process_group: whose ranks average; None: the default group.
        config: how values travel.
        rules: settings of layers by name; None: those of the process.
        carrier: who moves the bytes, "native" or "c10d".
        seed: of the noise of all layers and steps.
        steps: backward passes so far.
        residuals: what was lost so far, by layer, in units of this rank's gradients.
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
            raise InvalidArgument(f"process_group is {process_group!r}; it must be one, or None")
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
        """Begin anew with what belongs to this process."""
        self._group: weakref.ref[dist.ProcessGroup] | None = None
        self._communicator: Communicator | None = None
        self._carrier: Carrier | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return everything but what belongs to this process, as copies.

        Where the ranks of a mesh average in several groups, that of a group without rank 0 is under
        the group's name, so that torch.distributed.checkpoint keeps all groups' apart.
        """
        first = min(ranks_of(self.process_group), default=0)
        return {f"{_GROUP} {first}": self.saved()} if first else self.saved()

    def saved(self) -> dict[str, Any]:
        """Return what state_dict() does, of whichever group."""
        saved = {"residuals": self.residuals.saved(*self.place, per_rank=self.keeps_residuals())}
        named = {name: getattr(self, name) for name in self.kept}
        return named | saved

    def keeps_residuals(self) -> bool:
        """Tell whether any layer may have a residual."""
        return bool(self.residuals.tensors) or rules_of(self).may_keep_residuals(self.config)

    def consolidate(self) -> None:
        """Make the residuals the mean over the ranks, equal everywhere. Collective.

        What is saved then can be loaded on any number of ranks: the correction that is pending, the
        mean of the ranks' residuals, is the same. By torch.distributed.checkpoint load it into a
        new state of which consolidate() was called too: so it asks for residuals of all ranks. The
        next backward makes residuals each rank's own again.

        Raises:
            InvalidArgument: ranks have residuals of other layers.
        """
        self.residuals.consolidate(self.group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue, in place, where the state was that state_dict() was called of.

        Its process group, its carrier, and the hook that has it, stay. Groups' names do not count.

        Raises:
            InvalidArgument: this is not the state_dict() of such a state, or it lacks this rank's
                residuals, or its carrier cannot do what is asked there.
        """
        state_dict = next((x for n, x in state_dict.items() if n.startswith(_GROUP)), state_dict)
        require_keys(type(self).__name__, state_dict, self.kept)
        self.__dict__.update(self.restored(state_dict | {"carrier": self.carrier}))

    def restored(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return attributes from a checkpoint.

        Raises:
            InvalidArgument: this rank's residuals are not there; the carrier cannot do this.
        """
        check_carrier(saved["carrier"], saved["config"])
        return saved | {"residuals": Residuals.restored(saved["residuals"])}

    def __getstate__(self) -> dict[str, Any]:
        """Return what is saved, for pickles."""
        if self.process_group not in (None, dist.group.WORLD):
            _log.warning(
                "a %s is copied or pickled without its process group: the copy averages over the "
                "default group unless you set process_group",
                type(self).__name__,
            )
        return self.saved()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore it over the default group."""
        self.__dict__.update(self.restored(state))
        self.process_group = None
        self.connect()

    @property
    def group(self) -> dist.ProcessGroup:
        """The group whose ranks average.

        Where it is another one than before (process_group was set, or the default group was made
        anew) what belonged to that one is dropped.
        """
        group = group_or_default(self.process_group)
        if self._group is None or self._group() is not group:
            if self._group is not None:
                self.connect()
            self._group = weakref.ref(group)
        return group

    @property
    def place(self) -> tuple[int, int]:
        """The number of this rank in the group, and how many there are; without a group 0 of 1."""
        if self.process_group is None and not dist.is_initialized():
            return 0, 1
        return self.group.rank(), self.group.size()

    def communicator(self) -> Communicator:
        """Return the ranks of the process group, as cgx_ops knows them.

        Raises:
            InvalidArgument: no communicator has them.
        """
        group = self.group
        if self._communicator is None or self._communicator.closed:
            self._communicator = communicator_of(group)
        return self._communicator

    def carry(self) -> Carrier:
        """Return what moves bytes by torch's collectives. The first call is collective."""
        group = self.group
        if self._carrier is None:
            self._carrier = Carrier(group)
        return self._carrier

    def residuals_of(
        self,
        caller: str,
        config: Config,
        layers: Sequence[Layer],
        segments: Sequence[Segment],
        values: Sequence[torch.Tensor],
    ) -> list[torch.Tensor | None] | None:
        """Return the residual of each layer that is compressed and has one; None if none has.

        They have not decayed yet.

        Args:
            caller: for errors.
            config: of the message.
            layers: in the message.
            segments: of each.
            values: what travels of each, whose dtype and device its residual has.

        Raises:
            InvalidArgument: such a layer has no name; the residuals are another rank's.
        """
        keeps = []
        for segment in segments:
            own = segment.config or config
            smallest = max(tables.SMALLEST_COMPRESSED, own.minimal_size)
            keeps.append(own.keeps_residuals and segment.numel >= smallest)
        if not any(keeps):
            return None
        self.residuals.claim(*self.place)
        if any(keep and not layer.name for layer, keep in zip(layers, keeps, strict=True)):
            raise InvalidArgument(
                f"{caller}: error feedback keeps residuals by layer, but this "
                "model's names are not known: import cgx_ops.torch before "
                "DistributedDataParallel(model), or give Config(error_feedback=False)"
            )
        return [
            self.residuals.of(layer.name, value) if keep else None
            for layer, value, keep in zip(layers, values, keeps, strict=True)
        ]

    def seeds_of(self, names: Sequence[str], step: int) -> list[int]:
        """Return the seed of the noise of each layer, which does not depend on its message."""
        group = self.group.group_name
        return [call_seed(self.seed, name, step, group) for name in names]

    @contextlib.contextmanager
    def or_refuse(self, *names: str) -> Iterator[None]:
        """Refuse this rank's next messages of average() if the block that prepares them fails.

        The other ranks, which start theirs, have the reason in their futures. Arguments that only
        one rank finds wrong count, too.

        Args:
            *names: of the messages.
        """
        by = self.carry() if self.carrier == "c10d" else self.communicator()
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
        """Average a buffer over the ranks in place, in the background; arguments as work.start().

        Args:
            buffer: of the dtypes that the core knows.
            config: how it travels.
            segments: its layers.
            seed: of each.
            name: matches it with what other ranks average; the carrier "c10d" goes by the order.
            residuals: of each segment, or None.
            then: called when it is done, and before the future is; others may follow it there.
            followers: the names of those.
            result: what the future holds; None: the buffer.

        Returns:
            A future of the buffer, or of `result`; of the error, too, where this rank cannot start.
        """
        if self.carrier == "c10d":
            carrier = self.carry()
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
            averaged = future.value()[0]  # raises what went wrong
            sent.call(then)
            return averaged if result is None else result

        return started.then(done)


def _next(comm: Communicator, name: str) -> int:
    """Count a message: called where ranks start, or refuse, messages in the same order.

    What follows a message is started on threads, in any order.
    """
    return comm.next_call(f"{name}, then")


def check_carrier(carrier: str, config: Config, *, chooses_bits: bool = False) -> None:
    """Raise InvalidArgument for what the carrier "c10d" does not have."""
    if carrier != "c10d":
        return
    if config.algorithm in ("ring", "hierarchical"):
        raise InvalidArgument(f"carrier 'c10d' has no algorithm {config.algorithm!r}; use 'sra'")
    if chooses_bits:
        raise InvalidArgument(
            "carrier 'c10d' has no adaptive bits and no auto_bits: use carrier 'native'"
        )


def by_hosts(config: Config) -> Config:
    """Return a config whose algorithm does not follow from a message's size."""
    return replace(config, algorithm="by_hosts") if config.algorithm == "auto" else config


def for_any_message(config: Config, rules: Rules) -> Config:
    """Return a config by which a layer becomes the same in any message.

    Where one layer cannot be cut, its message cannot: then none is.
    """
    used = {config.compressor} | rules.compressors
    if config.algorithm == "by_hosts" and used & _UNCUT:
        return replace(config, algorithm="one_shot")
    return config


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """Return the ranks of a group, None for the default one; none if torch does not list it."""
    try:
        return dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return []


def rules_of(state: AveragingState) -> Rules:
    """Return which layers travel otherwise."""
    return layers.process_rules() if state.rules is None else state.rules
