"""torchft over the backend "cgx": process groups whose ranks come and go.

ProcessGroup serves torchft's Manager, and so its DistributedDataParallel, LocalSGD and DiLoCo.
DistributedDataParallel adds error feedback. No other module of cgx_ops imports torchft.
"""

# Without torchft, pyright resolves the imports to this file.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportUntypedBaseClass=false
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import parallel
from torchft.manager import Manager
from torchft.process_group import ProcessGroupDummy, ProcessGroupWrapper

from cgx_ops import Communicator, Config, Rules, Segment
from cgx_ops._core import library
from cgx_ops.errors import CgxError, InvalidArgument
from cgx_ops.torch._compat.parallel import GradBucket, Store
from cgx_ops.torch.averaging.layers import Layer
from cgx_ops.torch.averaging.residuals import Residuals
from cgx_ops.torch.backend import groups
from cgx_ops.torch.backend.process_group import BackendOptions, make_backend, native_options
from cgx_ops.torch.ddp.hook import QuantizedAllreduceState, quantized_allreduce_hook

# ---- 1. the process group ------------------------------------------------------------------------


class ProcessGroup(ProcessGroupWrapper):
    """Reconfigurable process group over the backend "cgx", for `torchft.Manager(pg=...)`.

    Each new quorum aborts the old backend and connects a new one through the quorum's store.
    Collectives in flight end with an error, which the Manager handles. Results of the new group
    equal those of any group with the same name, ranks and seeds. The name is the prefix in the
    address of the quorum's store, such as "torchft/3/0".

    With `BackendOptions(compress="gradients")`, the default, the group compresses what torchft's
    DistributedDataParallel sends during backward. LocalSGD's parameters and DiLoCo's
    pseudo-gradients are then exact. `compress="all"` compresses every sum of floats: use it with
    DiLoCo, and not with LocalSGD, whose parameters would be rounded.

    Args:
        options: what the group compresses, and how; the same on all ranks. None:
            `BackendOptions()`.
        timeout: limit of each collective, and of connecting a new quorum.

    Attributes:
        options: the argument.

    Raises:
        InvalidArgument: the options have `auto_bits`, which would measure in every quorum.

    Example:
        >>> from cgx_ops import Config
        >>> from cgx_ops.torch import BackendOptions
        >>> from cgx_ops.torch.integrations.torchft import ProcessGroup
        >>> group = ProcessGroup(BackendOptions(Config(bits=4)))
        >>> group.getBackendName()
        'torchft-cgx'
    """

    def __init__(
        self, options: BackendOptions | None = None, timeout: timedelta = timedelta(seconds=60)
    ) -> None:
        super().__init__(timeout)
        self.options = BackendOptions() if options is None else options
        if self.options.auto_bits:
            raise InvalidArgument(
                "auto_bits is not supported with torchft, because it would measure in every "
                "quorum: set Config(bits=...)"
            )
        self._name = ""
        self._place = 0, 1  # rank and size

    def configure(self, store_addr: str, *arguments: Any, **keywords: Any) -> None:
        """Abort the backend and connect the ranks of a quorum. torchft's Manager calls this.

        Args:
            store_addr: address of the quorum's store, host:port/prefix. The prefix becomes the
                group's name.
            *arguments: the other arguments of torchft's ProcessGroup.configure.
            **keywords: the same.

        Raises:
            DistBackendError: the ranks cannot be connected, or one of them does not arrive.
        """
        name = store_addr.partition("/")[2]
        groups.forget(self._name, era=name)
        self._name = name
        super().configure(store_addr, *arguments, **keywords)

    def _create_pg(self, store: Store, rank: int, world_size: int) -> dist.ProcessGroup:
        self._place = rank, world_size
        options = native_options(self.options, self._name, self._timeout)
        backend = make_backend(
            store, rank, world_size, options, self.options, noise_rank=rank, elastic=True
        )
        group = dist.ProcessGroup(store, rank, world_size)
        for device in ("cpu", "cuda"):
            kind = dist.ProcessGroup.BackendType.CUSTOM
            group._register_backend(torch.device(device), kind, backend)
        return group

    def errored(self) -> Exception | None:
        """Return the late failure of a collective on a GPU, or None. torchft's Manager calls this.

        Returns:
            The failure, after which a step must not be committed.
        """
        try:
            library.call("cgx_comm_check", Communicator.find(self._name).id, 0)
        except CgxError as error:
            return error
        return None

    @property
    def group_name(self) -> str:
        """The name of the current quorum's group; "" before the first quorum."""
        return self._name

    def rank(self) -> int:
        """Return this replica's rank in the current quorum.

        Returns:
            The rank; 0 before the first quorum.
        """
        return self._place[0]

    def size(self) -> int:
        """Return the number of replicas in the current quorum.

        Returns:
            The number; 1 before the first quorum.
        """
        return self._place[1]

    def getBackendName(self) -> str:  # noqa: N802  (torchft's name)
        """Return the name of the backend.

        Returns:
            The name.
        """
        return "torchft-cgx"


# ---- 2. DDP with error feedback ------------------------------------------------------------------


class DistributedDataParallel(parallel.DistributedDataParallel):
    """DistributedDataParallel over a torchft Manager that compresses each layer's gradient.

    It replaces torchft's class of this name. It adds error feedback and rules for layers, and sends
    buckets while backward continues. `hook_state(model)` returns its state.

    A step's new residuals are used once the Manager has committed the step. A failed step leaves
    them unchanged. Replicas that stay keep their residuals in every quorum. A replica that joins or
    heals starts from zero, and so does a spare that does not participate. The Manager transfers the
    state itself; register only your model and your optimizer.

    Args:
        manager: the Manager, whose `pg` is the next argument.
        module: the module to train.
        process_group: a ProcessGroup of this module.
        config: compressor, bits and the other settings. None: those of the process group.
        rules: settings of layers by name. None: the rules of the process.
        seed: seed of random rounding, 0 or more.
        **keywords: further arguments of torch's DistributedDataParallel.

    Raises:
        InvalidArgument: `process_group` is of another class, or `seed` is out of range.

    Example:
        `manager` and `group` are a torchft Manager and its ProcessGroup:

        >>> import torch
        >>> import torchft
        >>> from cgx_ops import Config
        >>> from cgx_ops.torch.integrations.torchft import DistributedDataParallel, ProcessGroup
        >>> def wrap(manager: torchft.Manager, group: ProcessGroup) -> DistributedDataParallel:
        ...     config = Config(bits=2, compressor="levels")  # with error feedback
        ...     return DistributedDataParallel(manager, torch.nn.Linear(64, 64), group, config)
    """

    def __init__(
        self,
        manager: Manager,
        module: nn.Module,
        process_group: ProcessGroup,
        config: Config | None = None,
        *,
        rules: Rules | None = None,
        seed: int = 0,
        **keywords: Any,
    ) -> None:
        if not isinstance(process_group, ProcessGroup):
            raise InvalidArgument(
                f"process_group is {type(process_group).__name__}; it must be a "
                "cgx_ops.torch.integrations.torchft.ProcessGroup"
            )
        # Messages are buckets. Only find_unused_parameters prevents that DDP rebuilds them after
        # the first step, which would make those of new replicas differ.
        super().__init__(
            module, process_group=ProcessGroupDummy(0, 1), find_unused_parameters=True, **keywords
        )
        chosen = process_group.options.config if config is None else config
        state = ManagedState(manager, process_group, chosen, rules, seed)
        self.register_comm_hook(state, _managed_hook)
        manager.register_state_dict_fn("cgx_ops", state.load_state_dict, state.joining_state_dict)


class ManagedState(QuantizedAllreduceState):
    """State of the hook of DistributedDataParallel, whose steps a torchft Manager commits.

    Attributes:
        manager: the Manager.
        sent: the new residuals of the last attempted step, by layer.
        attempted: the Manager's number of that step.
    """

    def __init__(
        self,
        manager: Manager,
        process_group: ProcessGroup,
        config: Config,
        rules: Rules | None,
        seed: int,
    ) -> None:
        super().__init__(process_group, config, rules=rules, seed=seed)
        self.manager = manager
        self.sent: dict[str, torch.Tensor] = {}
        self.attempted = -1

    def agree(self) -> None:
        """Do nothing: the Manager's step is equal on all replicas of a quorum."""

    def begin(self) -> None:
        """Begin a step: use or drop the residuals of the last one."""
        self._settle()
        self.sent = {}
        if not self.manager.is_participating():
            self.residuals = Residuals()
        self.steps = self.attempted = self.manager.current_step()

    def _settle(self) -> None:
        if self.sent and self.manager.current_step() == self.attempted + 1:  # it was committed
            self.residuals.claim(*self.place)
            self.residuals.tensors.update(self.sent)
            self.sent = {}

    def residuals_of(
        self,
        caller: str,
        config: Config,
        layers: Sequence[Layer],
        segments: Sequence[Segment],
        values: Sequence[torch.Tensor],
    ) -> list[torch.Tensor | None] | None:
        """Return copies of the residuals, which replace them when the step is committed."""
        kept = super().residuals_of(caller, config, layers, segments, values)
        if kept is None:
            return None
        copies = [None if residual is None else residual.clone() for residual in kept]
        named = zip(layers, copies, strict=True)
        self.sent |= {layer.name: copy for layer, copy in named if copy is not None}
        return copies

    def saved(self) -> dict[str, Any]:
        """Return the content of state_dict(), with the residuals of committed steps.

        Returns:
            The saved attributes, by name.
        """
        self._settle()
        return super().saved()

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Restore the state in place, when this replica heals or resumes from a checkpoint.

        Args:
            state_dict: what state_dict() or joining_state_dict() returned.
            strict: see HookState.load_state_dict.
        """
        if self.attempted != self.manager.current_step():
            self.sent = {}  # of a step that the other replicas have left behind
        super().load_state_dict(state_dict, strict)


def _managed_hook(state: ManagedState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the participants of the quorum; the Manager receives failures."""
    manager, gradients = state.manager, bucket.buffer()
    if not manager.errored():
        manager.wait_quorum()
    if manager.errored():  # the step will not be committed
        skipped: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        skipped.set_result(gradients)
        return skipped
    if bucket.index() == 0:
        state.begin()
    if not manager.is_participating():
        gradients.zero_()
    share = state.group.size() / manager.num_participants()

    def averaged(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        return future.value() if share == 1 else future.value().mul_(share)

    return manager.wrap_future(quantized_allreduce_hook(state, bucket).then(averaged), gradients)
