"""HookState: what the states of all communication hooks share.

An AveragingState of one model under DistributedDataParallel, which is compared with the model at
its first bucket.
"""

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from cgx_ops._core.log import Tensors
from cgx_ops.errors import InvalidArgument
from cgx_ops.torch.averaging.layers import Layer, segments_of
from cgx_ops.torch.averaging.loaded import require_layers
from cgx_ops.torch.averaging.reports import report_layers, report_start
from cgx_ops.torch.averaging.state import AveragingState, rules_of
from cgx_ops.torch.graph.work import failed


class HookState(AveragingState):
    """What a hook needs of one model: see QuantizedAllreduceState and PowerSGDState.

    Attributes:
        loaded: how a checkpoint was loaded that was not compared with a model yet.
        checked: the models that it was compared with.
    """

    loaded: Literal["", "strictly", "partly"] = ""

    def connect(self) -> None:
        """Reset the parts that belong to this process."""
        super().connect()
        self.checked: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()

    def report(self, found: Sequence[Layer]) -> None:
        """Log that training starts, and how the layers of a model travel."""
        segments = segments_of(rules_of(self), found, [0] * len(found), self.config)
        names = [layer.name for layer in found]
        report_layers(
            (id(self), "DDP"), "DDP", self.process_group, self.config, names, segments, self.carrier
        )

    def report_method(self, what: str, found: Sequence[Layer]) -> None:
        """Log that training starts by a method, such as "PowerSGD of rank 1, the rest"."""
        what, tensors = f"DDP by {what}", Tensors(len(found), None)
        report_start((id(self), what), what, self.process_group, self.config, self.carrier, tensors)

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Continue, in place, where the state was that state_dict() was called of.

        Its process group, its carrier, and the hook that has it, stay. Groups' names do not count.
        The next backward raises InvalidArgument if the state is of layers that no model of the hook
        has; with strict=False it drops them, with a warning.

        Raises:
            InvalidArgument: as AveragingState.load_state_dict().
        """
        super().load_state_dict(state_dict)
        self.checked = weakref.WeakSet()  # its rules may be others
        self.loaded = "strictly" if strict else "partly"

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore it over the default group."""
        super().__setstate__(state)
        self.loaded = "strictly"

    def by_layer(self) -> list[dict[str, Any]]:
        """Return what the state has of each layer."""
        return [self.residuals.tensors]

    def require_layers(self, names: Collection[str]) -> None:
        """Compare a loaded state with the model's layers, once after load_state_dict().

        Raises:
            InvalidArgument: it has other layers.
        """
        if self.loaded:
            strict = self.loaded == "strictly"
            require_layers(type(self).__name__, self.by_layer(), names, strict=strict)
            self.loaded = ""

    def prepared(
        self, name: str, begin: Callable[[], torch.futures.Future[torch.Tensor]]
    ) -> torch.futures.Future[torch.Tensor]:
        """Return begin(), which prepares and starts a message, or a future of its error.

        Args:
            name: of the message; the other ranks have the reason in their futures, too.
            begin: may raise InvalidArgument, which is not put into a future.
        """
        try:
            with self.or_refuse(name):
                return begin()
        except InvalidArgument:
            raise
        except Exception as error:
            return failed(error)
