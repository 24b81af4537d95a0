"""HookState: the part of a communication hook's state that all hooks share."""

import pickle
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from cgx_ops._core.exchange import exchange
from cgx_ops._core.log import Tensors
from cgx_ops.errors import InvalidArgument
from cgx_ops.torch._compat.parallel import GradBucket
from cgx_ops.torch.averaging.exact import gather_over
from cgx_ops.torch.averaging.layers import Layer, segments_of
from cgx_ops.torch.averaging.loaded import require_layers
from cgx_ops.torch.averaging.reports import report_layers, report_start
from cgx_ops.torch.averaging.state import AveragingState, rules_of
from cgx_ops.torch.graph.work import failed


@dataclass
class _Pass:
    """A model's backward pass.

    Attributes:
        step: number of earlier steps of the state.
        index: of the pass's latest bucket.
        complete: whether this bucket is the model's last one.
    """

    step: int
    index: int = -1
    complete: bool = False


class HookState(AveragingState):
    """State of a communication hook for one model under DistributedDataParallel.

    It is compared with the model at the model's first bucket.

    Attributes:
        agreed: names of the attributes that are equal on all ranks, and change with each step.
        loaded: how a checkpoint was loaded that was not compared with a model yet, "strictly" or
            "partly"; else "".
        checked: the models that the state was compared with.
    """

    agreed: ClassVar[tuple[str, ...]] = ("steps",)
    loaded: Literal["", "strictly", "partly"] = ""
    _has_averaged = False  # in this process

    def connect(self) -> None:
        """Reset the attributes that belong to this process."""
        super().connect()
        self._agrees = False
        self._passes: weakref.WeakKeyDictionary[object, _Pass] = weakref.WeakKeyDictionary()
        self.checked: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()

    def agree(self) -> None:
        """Make the ranks continue from equal counts. Collective in the first call over a group.

        If members have changed, a step may have failed on some of them only. Then all take the
        counts of the member that is ahead. New ranks are never ahead.
        """
        group = self.group
        if self._agrees:
            return
        mine = self._has_averaged, {name: getattr(self, name) for name in self.agreed}
        gather = gather_over(group) if self.carrier == "c10d" else self._gather
        everyones = [pickle.loads(theirs) for theirs in gather(pickle.dumps(mine))]
        if members := [counts for has_averaged, counts in everyones if has_averaged]:
            self.adopt(max(members, key=lambda counts: counts["steps"]))
        self._agrees = self._has_averaged = True

    def _gather(self, mine: bytes) -> Sequence[bytes]:
        return exchange(mine, f"{type(self).__name__}/counts", self.communicator())

    def adopt(self, counts: dict[str, Any]) -> None:
        """Take the counts of another rank.

        Args:
            counts: its attributes in `agreed`, by name.
        """
        self.__dict__.update(counts)

    def step_of(self, model: object, bucket: GradBucket) -> int:
        """Return the step of a bucket. Count the step if the bucket is the first of its pass.

        Buckets of a backward pass arrive in the order of their indices. The first or the last one
        may be missing: with skip_all_reduce_unused_params=True, DistributedDataParallel skips
        buckets that have only unused parameters.

        Args:
            model: the owner of the bucket. Backward passes of several models may overlap.
            bucket: the bucket.

        Returns:
            The number of earlier steps.
        """
        now = self._passes.get(model)
        if now is None or now.complete or bucket.index() <= now.index:
            if now is not None and not now.complete:
                self.end_incomplete_pass()
            now = self._passes[model] = _Pass(self.steps)
            self.steps += 1
        now.index, now.complete = bucket.index(), bucket.is_last()
        return now.step

    def end_incomplete_pass(self) -> None:
        """Do what is left to do after a pass without the last bucket; called before the next one.

        Does nothing in this class.
        """

    def report(self, found: Sequence[Layer]) -> None:
        """Log that training starts, and how each layer is sent.

        Args:
            found: the layers of the model.
        """
        segments = segments_of(rules_of(self), found, [0] * len(found), self.config)
        names = [layer.name for layer in found]
        report_layers(
            (id(self), "DDP"), "DDP", self.process_group, self.config, names, segments, self.carrier
        )

    def report_method(self, what: str, found: Sequence[Layer]) -> None:
        """Log that training starts with a method.

        Args:
            what: the method, for example "PowerSGD of rank 1, the rest".
            found: the layers of the model.
        """
        what, tensors = f"DDP by {what}", Tensors(len(found), None)
        report_start((id(self), what), what, self.process_group, self.config, self.carrier, tensors)

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Restore the state in place from what `state_dict` returned.

        The process group, the carrier and the registered hook do not change. The name of the
        process group may differ from the saved one.

        Args:
            state_dict: what `state_dict` returned, on this rank or through
                torch.distributed.checkpoint.
            strict: True: the next backward raises InvalidArgument if the checkpoint has layers that
                the model does not have. False: it drops them with a warning.

        Raises:
            InvalidArgument: this is not the state_dict of such a state, it lacks this rank's
                residuals, or the carrier does not support the saved config.
        """
        super().load_state_dict(state_dict)
        self.checked = weakref.WeakSet()  # its rules may have changed
        self.loaded = "strictly" if strict else "partly"

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state over the default group."""
        super().__setstate__(state)
        self.loaded = "strictly"

    def by_layer(self) -> list[dict[str, Any]]:
        """Return the parts of the state that are stored by layer.

        Returns:
            Dicts whose keys are names of layers.
        """
        return [self.residuals.tensors]

    def require_layers(self, names: Collection[str]) -> None:
        """Compare a loaded state with the model's layers, once after load_state_dict().

        Args:
            names: names of the model's layers.

        Raises:
            InvalidArgument: the state has layers that the model does not have.
        """
        if self.loaded:
            strict = self.loaded == "strictly"
            require_layers(type(self).__name__, self.by_layer(), names, strict=strict)
            self.loaded = ""

    def prepared(
        self,
        device: torch.device,
        name: str,
        begin: Callable[[], torch.futures.Future[torch.Tensor]],
    ) -> torch.futures.Future[torch.Tensor]:
        """Call a function that prepares and starts a message; turn its error into a failed future.

        Args:
            device: of the message.
            name: name of the message. The other ranks' futures then hold the reason, too.
            begin: the function. An InvalidArgument that it raises is not put into a future.

        Returns:
            The future that `begin` returned, or a failed future.

        Raises:
            InvalidArgument: `begin` raised it.
        """
        try:
            with self.or_refuse(device, name):
                return begin()
        except InvalidArgument:
            raise
        except Exception as error:
            return failed(error)
