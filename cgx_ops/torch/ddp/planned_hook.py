"""A communication hook that sends gradients in the groups of a plan.

The plan may change during training. Use small buckets (`bucket_cap_mb=0.25`). The hook collects
buckets until all tensors of a group are there, then starts one collective on them without copying.
So groups are as fine as buckets, and a new plan needs no new buckets.
"""

import threading
from collections import Counter
from typing import Any, Unpack

import numpy as np
import torch
import torch.distributed as dist

from cgx_ops import Config, Rules
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.config import Keywords, config_of
from cgx_ops.errors import CgxError, InvalidArgument, MismatchError
from cgx_ops.planner import Plan
from cgx_ops.torch._compat.parallel import GradBucket
from cgx_ops.torch.averaging.arithmetic import full_precision
from cgx_ops.torch.averaging.layers import layer_name
from cgx_ops.torch.ddp.bucket import (
    BucketInfo,
    Layout,
    inspect_bucket,
    layout_of,
    refuse,
    require_names,
    require_state,
)
from cgx_ops.torch.ddp.state import HookState
from cgx_ops.torch.graph.work import future_of, start_apart

_HOOK = "planned_allreduce_hook"
_EXACT = Config(bits=EXACT_BITS)
_STEPS_AHEAD = 2  # steps from replan() to the new plan
_PIECE = 1 << 16  # step counts are sent in 16-bit pieces, which float32 represents exactly


# ---- 1. the state --------------------------------------------------------------------------------


class PlannedAllreduceState(HookState):
    """State of `planned_allreduce_hook` for one model.

    All ranks use the same arguments, except for the process group. Results do not depend on the
    plan, nor on changes of the plan: bits, noise and residuals follow from config, rules and
    layers. Small layers of compressor "entropy" are an exception: those of a group share blocks.
    The bits of the plan are not used.

    Args:
        plan: which parameters share a message, by their names in the model.
        process_group: the ranks that average. None: the default group.
        config: compressor, bits and the other settings. None: `Config()`, which is 4 bits.
        rules: settings of layers by name. None: the rules of the process, which
            `cgx_ops.torch.exclude_layer` and similar functions set.
        seed: seed of random rounding, 0 or more.
        **keywords: `bits`, `bucket_size`, `compressor` or `rounding`; each overrides that field of
            `config`.

    Attributes:
        plan: the plan in use. Checkpoints contain it.
        steps: number of backward passes so far.
        residuals: the quantization errors of this rank's gradients, by layer.

    Each argument except the keywords is also an attribute.

    Raises:
        InvalidArgument: `plan` is not a Plan, or an argument is out of range.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> from cgx_ops.planner import Plan
        >>> from cgx_ops.torch import ddp
        >>> dist.init_process_group("cgx", store=dist.HashStore(), rank=0, world_size=1)
        >>> plan = Plan(("weight", "bias"), (4096, 64), (4, 32), ((1, 0),))  # one message
        >>> state = ddp.PlannedAllreduceState(plan, bits=4)
        >>> model = DistributedDataParallel(torch.nn.Linear(64, 64), bucket_cap_mb=0.25)
        >>> model.register_comm_hook(state, ddp.planned_allreduce_hook)
        >>> model(torch.ones(8, 64)).sum().backward()
        >>> state.steps
        1
        >>> dist.destroy_process_group()
    """

    kept = (*HookState.kept, "plan")
    agreed = (*HookState.agreed, "plan")

    def __init__(
        self,
        plan: Plan,
        process_group: dist.ProcessGroup | None = None,
        config: Config | None = None,
        *,
        rules: Rules | None = None,
        seed: int = 0,
        **keywords: Unpack[Keywords],
    ) -> None:
        if not isinstance(plan, Plan):
            raise InvalidArgument(f"plan is {plan!r}; it must be a cgx_ops.planner.Plan")
        super().__init__(process_group, config_of(config, **keywords), rules, "native", seed)
        self.plan = plan

    def connect(self) -> None:
        """Reset the attributes that belong to this process."""
        super().connect()
        self._next: tuple[int, Plan] | None = None  # its first step, and the next plan
        self._joining: _Joining | None = None  # the current backward pass
        self._number: int | None = None  # index of this state, the same on all ranks
        self._comparing = threading.Lock()
        self._compared = False
        self._difference: MismatchError | None = None  # the difference of plans

    def replan(self, plan: Plan) -> int:
        """Switch to another plan for the same parameters, on all ranks at the same step.

        Collective; call it between steps or while one runs. The ranks compare their plans and agree
        on a step. The old plan applies to two more steps, and checkpoints contain it until then.
        `load_state_dict` and a change of members discard a switch that has not happened on all
        ranks. Residuals are unaffected.

        Args:
            plan: the new plan.

        Returns:
            The number of the first step that uses the new plan, counted as in `steps`.

        Raises:
            InvalidArgument: the plan has other parameters.
            MismatchError: ranks have different plans. Every rank raises it; the text names the
                first parameter that differs.
        """
        _require_same(self.plan, plan)
        communicator = self.communicator()
        plan.agree(communicator)
        mine = np.array([divmod(self.steps, _PIECE)], np.float32)
        pieces = communicator.all_gather(mine, _EXACT, name=f"{_HOOK}/replan").astype(int)
        first = int((pieces @ [_PIECE, 1]).max()) + _STEPS_AHEAD
        self._next = first, plan
        return first

    def restored(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Convert a checkpoint into attributes. A pending replan() is discarded.

        Args:
            saved: what saved() returned.

        Returns:
            Attributes by name.
        """
        return super().restored(saved) | {"_next": None}

    def joining(self, bucket: GradBucket, info: BucketInfo) -> "_Joining":
        """Return the object that joins the buckets of this bucket's backward pass.

        Args:
            bucket: the bucket.
            info: what inspect_bucket() returned for it.

        Returns:
            The joining of the backward pass, a new one for the pass's first bucket.
        """
        if self._number is None:
            self._number = self.communicator().next_call(_HOOK)
        if self._joining is None or bucket.index() == 0:
            if self._next is not None and info.step >= self._next[0]:
                _, self.plan = self._next
                self._next = None
            self._joining = _Joining(self.plan)  # drops the rest of a failed pass
        return self._joining

    def explained(self, error: Exception, plan: Plan) -> Exception:
        """Return the cause of a failed CPU message, after comparing plans across ranks once.

        Args:
            error: the failure.
            plan: this rank's plan.

        Returns:
            A MismatchError that names the difference if plans differ, else `error`.
        """
        with self._comparing:
            communicator = self.communicator()
            if not (self._compared or communicator.closed) and isinstance(error, MismatchError):
                # A mismatch reaches all ranks, so all compare. Other failures may reach only one.
                self._compared = True
                try:
                    plan.agree(communicator, name=f"{_HOOK}/{self._number}")
                except MismatchError as difference:
                    self._difference = difference
                except CgxError:  # the first error is more useful
                    pass
            return self._difference or error


def _require_same(old: Plan, new: Plan) -> None:
    numels = [dict(zip(plan.names, plan.numels, strict=True)) for plan in (old, new)]
    for name in [*numels[0], *numels[1]]:
        before, after = (of.get(name) for of in numels)
        if before != after:
            raise InvalidArgument(
                f"replan: the plan has other parameters: {name!r} has {before} values in the old "
                f"plan and {after} in the new one (None: no such parameter)"
            )


# ---- 2. the hook ---------------------------------------------------------------------------------


@full_precision()
def planned_allreduce_hook(
    state: PlannedAllreduceState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over the ranks, in one message with its group of the plan.

    If ranks have different plans, the first message that differs fails on all ranks. Its error,
    which `backward` raises, names the first tensor that differs.

    Args:
        state: a `PlannedAllreduceState`.
        bucket: gradients in one flat float32, float16 or bfloat16 tensor. A bucket with tensors of
            two groups joins the later one. Tensors of different dtypes or devices never share a
            message.

    Returns:
        A future of the same tensor, averaged in place. The hook does not wait for it.

    Raises:
        TypeError: the dtype, layout or device of gradients is not supported; the text names the
            layers.
        InvalidArgument: the plan belongs to another model, cgx_ops cannot connect the process
            group, the group is not the model's, or a layer was registered with another size. Also
            if the model has skip_all_reduce_unused_params=True.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> from cgx_ops.planner import Plan
        >>> from cgx_ops.torch import ddp
        >>> dist.init_process_group("cgx", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DistributedDataParallel(torch.nn.Linear(64, 64), bucket_cap_mb=0.25)
        >>> plan = Plan(("weight", "bias"), (4096, 64), (4, 32), ((0,), (1,)))  # two messages
        >>> state = ddp.PlannedAllreduceState(plan, bits=4)
        >>> model.register_comm_hook(state, ddp.planned_allreduce_hook)
        >>> model(torch.ones(8, 64)).sum().backward()
        >>> model.module.weight.grad.shape
        torch.Size([64, 64])
        >>> dist.destroy_process_group()
    """
    require_state(_HOOK, state, PlannedAllreduceState)
    info = inspect_bucket(_HOOK, state, bucket)
    device = bucket.buffer().device
    info.raise_refusal(state.or_refuse(device, "ddp"))
    refuse(_HOOK, info, ", or use quantized_allreduce_hook with unsupported='exact'")
    if info.skips_unused:
        raise InvalidArgument(
            f"{_HOOK}: the model has skip_all_reduce_unused_params=True, so that torch skips "
            "buckets that a group may wait for: leave this option False, or use "
            "quantized_allreduce_hook"
        )
    joining = state.joining(bucket, info)
    with state.or_refuse(device, "ddp"):
        layout = layout_of(_HOOK, state, bucket, info)
    future = joining.add(state, bucket, layout)
    if joining.completes(info, last=bucket.is_last()):
        joining.start(state)
    return future


class _Joining:
    """The buckets of one backward pass and the messages that they wait for."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        names = [layer_name(name) for name in plan.names]
        self._numels = dict(zip(names, plan.numels, strict=True))
        self._group_of = {names[i]: g for g, group in enumerate(plan.groups) for i in group}
        self._missing = Counter(self._group_of.values())
        self._waiting: dict[tuple[Any, ...], _Message] = {}  # by dtype, device and config

    def add(
        self, state: PlannedAllreduceState, bucket: GradBucket, layout: Layout
    ) -> torch.futures.Future[torch.Tensor]:
        """Add a bucket to the message that starts next; return its future."""
        buffer = bucket.buffer()
        kind = buffer.dtype, buffer.device, layout.config
        message = self._waiting.setdefault(kind, _Message(layout.config, buffer.device))
        return message.add(buffer, layout)

    def completes(self, info: BucketInfo, *, last: bool) -> bool:
        """Count a bucket's tensors; return whether they complete a group or the pass."""
        require_names(_HOOK, info)
        complete = last
        for layer in info.layers:
            if self._numels.pop(layer.name, None) != layer.numel:
                raise InvalidArgument(
                    f"{_HOOK}: the plan belongs to another model: it has no parameter "
                    f"{layer.name!r} of {layer.numel} values, or the parameter came twice. Use the "
                    "names that the module has without DistributedDataParallel: Arrivals.numels"
                )
            group = self._group_of[layer.name]
            self._missing[group] -= 1
            complete = complete or not self._missing[group]
        if last and self._numels:
            raise InvalidArgument(
                f"{_HOOK}: the plan belongs to another model: this model has no parameter "
                f"{next(iter(self._numels))!r} that requires a gradient"
            )
        return complete

    def start(self, state: PlannedAllreduceState) -> None:
        """Start all waiting messages."""
        waiting, self._waiting = self._waiting, {}
        for message in waiting.values():
            message.start(state, self.plan)


# ---- 3. a message --------------------------------------------------------------------------------


class _Message:
    """Buckets of one dtype, device and Config that share a collective."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._config, self._on_cpu = config, device.type == "cpu"
        self._tensors: list[torch.Tensor] = []
        self._layouts: list[Layout] = []
        # Completed with an error or None.
        devices: Any = None if self._on_cpu else [device]
        self._ended: torch.futures.Future[Any] = torch.futures.Future(devices=devices)

    def add(self, buffer: torch.Tensor, layout: Layout) -> torch.futures.Future[torch.Tensor]:
        for segment in layout.segments:
            self._tensors.append(buffer.narrow(0, segment.offset, segment.numel))
        self._layouts.append(layout)

        def averaged(ended: torch.futures.Future[Any]) -> torch.Tensor:
            error = ended.value()
            if error is not None:
                raise error
            return buffer

        return self._ended.then(averaged)

    def start(self, state: PlannedAllreduceState, plan: Plan) -> None:
        residuals = [
            residual
            for layout in self._layouts
            for residual in layout.residuals or [None] * len(layout.segments)
        ]
        started = future_of(
            start_apart, state.communicator(), self._tensors, self._config, op="avg", name="ddp",
            segments=[segment for layout in self._layouts for segment in layout.segments],
            seed=[seed for layout in self._layouts for seed in layout.seeds],
            residuals=residuals if any(each is not None for each in residuals) else None,
        )  # fmt: skip

        def end(future: torch.futures.Future[Any]) -> None:
            try:
                future.value()  # raises the message's error
                for layout in self._layouts:
                    layout.then()
            except Exception as error:
                self._ended.set_result(state.explained(error, plan) if self._on_cpu else error)
            else:
                self._ended.set_result(None)

        started.add_done_callback(end)
