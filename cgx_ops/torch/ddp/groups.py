"""DistributedDataParallel in the groups of a plan, which may change while a model trains.

    state = ddp.PlannedAllreduceState(plan, config=Config(bits=4))
    model = DistributedDataParallel(module, bucket_cap_mb=0.25)
    model.register_comm_hook(state, ddp.planned_allreduce_hook)

Buckets are small, and the hook joins them: it keeps what it is given until the tensors of a group
are complete, then starts one collective on all that it has, where they lie. So groups are as fine
as buckets, in any PyTorch, and another plan needs no other buckets.

    1. the state: the plan, and the one that follows
    2. the hook: which message a bucket is in, and when that starts
    3. a message: one collective, and a future for each of its buckets
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
_STEPS_AHEAD = 2  # that another plan is announced
_PIECE = 1 << 16  # a number of steps travels in pieces of 16 bits: float32 has them exact


# ---- 1. the state --------------------------------------------------------------------------------


class PlannedAllreduceState(HookState):
    """What planned_allreduce_hook needs, of one model: see QuantizedAllreduceState too.

    Equal on all ranks but for the process group and the residuals. Bits, noise and residuals do not
    depend on the plan, so a run has the same results in any plan, and in several one after the
    other. How many bits tensors have is said by config and rules, not by the plan.

    Attributes:
        plan: which parameters share a message, by their names in the model. In checkpoints, too.
        process_group, config, rules, seed, steps, residuals: as of QuantizedAllreduceState. There
            is no carrier "c10d".
    """

    kept = (*HookState.kept, "plan")

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
        """Make a state; config None: Config(). Keywords replace fields of config: bits, ..."""
        if not isinstance(plan, Plan):
            raise InvalidArgument(f"plan is {plan!r}; give a cgx_ops.planner.Plan")
        super().__init__(process_group, config_of(config, **keywords), rules, "native", seed)
        self.plan = plan

    def connect(self) -> None:
        """Begin anew with what belongs to this process."""
        super().connect()
        self._next: tuple[int, Plan] | None = None  # from which step on, and which
        self._joining: _Joining | None = None  # of the backward pass that runs
        self._number: int | None = None  # of this state, as all ranks count them
        self._comparing = threading.Lock()
        self._compared = False
        self._difference: MismatchError | None = None  # how plans differ

    def replan(self, plan: Plan) -> int:
        """Go on by another plan of the same parameters, on all ranks from the same step on.

        Collective, between steps or beside them: ranks compare their plans and agree on the step.
        Two more steps go by the plan before, which checkpoints have until then; load_state_dict()
        drops what is announced. Nothing that is kept of tensors moves or is lost.

        Returns:
            The number of the first step that goes by the new plan; `steps` counts them.

        Raises:
            InvalidArgument: the plan is of other parameters.
            MismatchError: on every rank; it names the first parameter that differs.
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
        """Return attributes from what was saved; a plan that was announced is not of that run."""
        return super().restored(saved) | {"_next": None}

    def joining(self, bucket: GradBucket, info: BucketInfo) -> "_Joining":
        """Return what joins the buckets of the backward pass that this one belongs to."""
        if self._number is None:
            self._number = self.communicator().next_call(_HOOK)
        if self._joining is None or bucket.index() == 0:
            if self._next is not None and info.step >= self._next[0]:
                _, self.plan = self._next
                self._next = None
            self._joining = _Joining(self.plan)  # what a pass that failed has left is dropped
        return self._joining

    def explained(self, error: Exception, plan: Plan) -> Exception:
        """Return why a message on CPUs failed: ranks with different plans compare them, once."""
        with self._comparing:
            communicator = self.communicator()
            if not (self._compared or communicator.closed) and isinstance(error, MismatchError):
                # All ranks hear of that, and are here too; of other failures one alone may hear.
                self._compared = True
                try:
                    plan.agree(communicator, name=f"{_HOOK}/{self._number}")
                except MismatchError as difference:
                    self._difference = difference
                except CgxError:  # what went wrong first says more
                    pass
            return self._difference or error


def _require_same(old: Plan, new: Plan) -> None:
    numels = [dict(zip(plan.names, plan.numels, strict=True)) for plan in (old, new)]
    for name in [*numels[0], *numels[1]]:
        before, after = (of.get(name) for of in numels)
        if before != after:
            raise InvalidArgument(
                f"replan: the plan is of other parameters: {name!r} had {before} values and has "
                f"{after} (None: there is no such parameter)"
            )


# ---- 2. the hook ---------------------------------------------------------------------------------


@full_precision()
def planned_allreduce_hook(
    state: PlannedAllreduceState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over the ranks, in one message with others of its group.

    Args:
        state: a PlannedAllreduceState.
        bucket: as of quantized_allreduce_hook. One that has tensors of two groups goes with the
            later one; tensors of several dtypes or devices are never in one message.

    Returns:
        A future of the bucket's buffer, averaged in place, as of quantized_allreduce_hook.

    Raises:
        TypeError: gradients of another dtype, layout or device; it names the layer.
        InvalidArgument: the plan is of another model, and as quantized_allreduce_hook.

    Ranks with different plans hear of it at the first message that differs: what is in its future,
    and so what backward() raises, names the first tensor that differs.
    """
    require_state(_HOOK, state, PlannedAllreduceState)
    info = inspect_bucket(_HOOK, state, bucket)
    info.raise_refusal(state.or_refuse("ddp"))
    refuse(_HOOK, info, ", or use quantized_allreduce_hook with unsupported='exact'")
    joining = state.joining(bucket, info)
    with state.or_refuse("ddp"):
        layout = layout_of(_HOOK, state, bucket, info)
    future = joining.add(state, bucket, layout)
    if joining.completes(info, last=bucket.is_last()):
        joining.start(state)
    return future


class _Joining:
    """The buckets of one backward pass, on their way into messages."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        names = [layer_name(name) for name in plan.names]
        self._numels = dict(zip(names, plan.numels, strict=True))
        self._group_of = {names[i]: g for g, group in enumerate(plan.groups) for i in group}
        self._missing = Counter(self._group_of.values())
        self._waiting: dict[tuple[Any, ...], _Message] = {}  # by what a message has one of

    def add(
        self, state: PlannedAllreduceState, bucket: GradBucket, layout: Layout
    ) -> torch.futures.Future[torch.Tensor]:
        """Put a bucket into the message that starts next; return its future."""
        buffer = bucket.buffer()
        kind = buffer.dtype, buffer.device, layout.config
        message = self._waiting.setdefault(kind, _Message(layout.config, buffer.device))
        return message.add(buffer, layout)

    def completes(self, info: BucketInfo, *, last: bool) -> bool:
        """Count the tensors of a bucket, and tell whether they complete a group, or the pass."""
        require_names(_HOOK, info)
        complete = last
        for layer in info.layers:
            if self._numels.pop(layer.name, None) != layer.numel:
                raise InvalidArgument(
                    f"{_HOOK}: the plan is of another model: it has no parameter {layer.name!r} "
                    f"of {layer.numel} values, or had it before. Make it of the names that the "
                    "module has without DistributedDataParallel, as Arrivals.numels does"
                )
            group = self._group_of[layer.name]
            self._missing[group] -= 1
            complete = complete or not self._missing[group]
        if last and self._numels:
            raise InvalidArgument(
                f"{_HOOK}: the plan is of another model, which has no {next(iter(self._numels))!r} "
                "that needs a gradient"
            )
        return complete

    def start(self, state: PlannedAllreduceState) -> None:
        """Start what is waiting."""
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
        # Of what went wrong, or None.
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
                future.value()  # raises what went wrong
                for layout in self._layouts:
                    layout.then()
            except Exception as error:
                self._ended.set_result(state.explained(error, plan) if self._on_cpu else error)
            else:
                self._ended.set_result(None)

        started.add_done_callback(end)
