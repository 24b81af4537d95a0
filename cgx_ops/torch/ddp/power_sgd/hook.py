"""PowerSGD for DistributedDataParallel: gradients are sent as the product of two thin matrices.

    from cgx_ops.torch import ddp
    state = ddp.PowerSGDState(matrix_approximation_rank=2, start_powerSGD_iter=100)
    model.register_comm_hook(state, ddp.power_sgd_hook)

  1. the hooks: layer by layer, or each bucket as one matrix
  2. two exchanges: all P with what is not factored, then all Q

Vogels, Karimireddy, Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization, NeurIPS 2019. The state is in state.py, which matrices a bucket has in plan.py, the
linear algebra in linear_algebra.py. Names are those of
torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from cgx_ops import Config, Segment
from cgx_ops._core import log
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.errors import InvalidArgument
from cgx_ops.methods import low_rank
from cgx_ops.torch._compat.parallel import GradBucket
from cgx_ops.torch.averaging.arithmetic import full_precision, use_on_this_stream
from cgx_ops.torch.averaging.residuals import decayed, nothing
from cgx_ops.torch.averaging.sent import Sent
from cgx_ops.torch.ddp.bucket import (
    BucketInfo,
    inspect_bucket,
    refuse,
    require_names,
    require_state,
    seeds_of,
)
from cgx_ops.torch.ddp.power_sgd.linear_algebra import Matrices, Part, Usable, usable_of
from cgx_ops.torch.ddp.power_sgd.plan import plan_of
from cgx_ops.torch.ddp.power_sgd.state import PowerSGDState
from cgx_ops.torch.ddp.unused_parameters import unused_kept

# ---- 1. the hooks --------------------------------------------------------------------------------


def power_sgd_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over the ranks, its matrices as products of thin ones.

    Give it to DistributedDataParallel.register_comm_hook(). A layer is a matrix of as many rows as
    its outermost dimension in memory has, (out, in * height * width) of a convolution. Two messages
    a bucket: all P with the tensors that are not factored, then all Q; of a matrix (n, m) together
    4 r (n + m) bytes in place of 4 n m.

    Args:
        state: a PowerSGDState.
        bucket: gradients in one flat float32, float16 or bfloat16 tensor, on the CPU or a GPU.
            Messages and all arithmetic are float32.

    Returns:
        A future of the same tensor, averaged in place; the hook does not wait for it.

    Raises:
        TypeError: gradients of another dtype, layout or device; it names the layer.
        InvalidArgument: the process group cannot be served, or is not the model's; names of layers
            are not known; the state is another model's, another rank's or another number of ranks'.

    What goes wrong later is in the future, as with quantized_allreduce_hook; then the residuals of
    the bucket's matrices are what they were, up to rounding. Gradients that are not finite make
    their layer's average so, on all ranks, and leave no residual.
    """
    return _hook("power_sgd_hook", state, bucket, batched=False)


def batched_power_sgd_hook(
    state: PowerSGDState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients as one square matrix, padded with zeros: a cruder PowerSGD.

    One P and one Q of ceil(sqrt(numel)) rows a bucket, biases and all, whatever config, rules and
    min_compression_rate say: fewer and larger products, and as a rule a worse approximation than
    power_sgd_hook's. Its Q belongs to a bucket: where DistributedDataParallel makes other buckets
    it begins anew, while residuals go on.

    Arguments, result and errors are power_sgd_hook's.
    """
    return _hook("batched_power_sgd_hook", state, bucket, batched=True)


@full_precision()
def _hook(
    hook: str, state: PowerSGDState, bucket: GradBucket, *, batched: bool
) -> torch.futures.Future[torch.Tensor]:
    require_state(hook, state, PowerSGDState)
    info = inspect_bucket(hook, state, bucket)
    name = f"power_sgd/{bucket.index()}"
    info.raise_refusal(state.or_refuse(name))
    refuse(hook, info)
    buffer = bucket.buffer()
    if info.config is None or info.step < state.start_powerSGD_iter:
        whole = [Segment(0, buffer.numel(), Config(bits=EXACT_BITS))]
        return state.average(buffer, state.config, segments=whole, seed=[0], name=name)
    require_names(hook, info)
    if state.use_error_feedback:
        state.residuals.claim(*state.place)
    return state.prepared(name, lambda: _Exchange(hook, state, bucket, info, batched).start())


# ---- 2. two exchanges ----------------------------------------------------------------------------


class _Exchange:
    """One bucket's way through a step."""

    def __init__(
        self, hook: str, state: PowerSGDState, bucket: GradBucket, info: BucketInfo, batched: bool
    ) -> None:
        self.state, self.buffer = state, bucket.buffer()
        self.plan = plan = plan_of(state, info, bucket, batched)
        self.size = state.group.size()
        self.name = f"power_sgd/{bucket.index()}"
        parts = [Part(gradient, None) for gradient in self.buffer.split(plan.sizes)]
        self.added = parts  # to residuals, if they have any, and not averaged yet
        self.matrices = [Matrices(form, [parts[i] for i in form.members]) for form in plan.forms]
        self.others = [parts[i] for i in plan.others]
        if state.use_error_feedback:
            cores = plan.others if state.feedback == "local" else ()  # the core keeps theirs
            for i, part in enumerate(parts):
                if i not in cores:
                    part.decay = plan.config.residual_decay
                    part.residual = state.residuals.of(
                        info.layers[i].name, part.gradient, dtype=torch.float32
                    )
        self.residuals, self.keep = self._cores(hook, info)
        self.qs = self._old_qs(info)
        self.restore = nothing
        if info.finds_unused:
            by_layer = state.residuals.tensors, state.factors.q
            kept = [[each.get(layer.name) for each in by_layer] for layer in info.layers]
            gradients = [part.gradient for part in parts]
            self.restore = unused_kept(state, gradients, kept, self.name)
        with self._or_taken_back():
            self.message, self.seeds = self._first(info, bucket)
        state.count(self.buffer.numel(), plan.sent, bucket.is_last())
        left_out = (self.buffer.numel() - plan.sent) * self.buffer.element_size()
        log.leave_out(2 * (self.size - 1) * left_out // self.size)

    def start(self) -> torch.futures.Future[torch.Tensor]:
        """Send P and the tensors that are not factored; the rest follows when they are there."""
        with self._or_taken_back():
            future = self.state.average(
                self.message, self.plan.config, name=self.name, seed=self.seeds,
                segments=[segment for segment, _ in self.plan.first], residuals=self.residuals,
                then=self._finish, followers=[f"{self.name}/q"] if self.matrices else [],
                result=self.buffer,
            )  # fmt: skip

        def ended(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            with self._or_taken_back():
                return future.value()

        return future.then(ended)

    @contextlib.contextmanager
    def _or_taken_back(self) -> Iterator[None]:
        """Have residuals be what they were where a step fails, which may be made again."""
        try:
            yield
        except Exception:
            for part in self.added:
                part.take_back()
            raise

    def _cores(
        self, hook: str, info: BucketInfo
    ) -> tuple[list[torch.Tensor | None] | None, Callable[[], None]]:
        """Return the residuals that the core keeps, of the first message's segments.

        And what is called when all is done.
        """
        state, plan = self.state, self.plan
        if state.feedback != "local":
            return None, nothing
        lossy = [(segment, place) for segment, place in plan.first if place is not None]
        found = [info.layers[plan.others[place]] for _, place in lossy]
        like = [self.others[place].gradient.float() for _, place in lossy]
        segments = [each for each, _ in lossy]
        kept = state.residuals_of(hook, plan.config, found, segments, like)
        taken, keep = decayed(kept, plan.config, segments)
        if taken is None:
            return None, nothing
        own = iter(taken)
        return [None if place is None else next(own) for _, place in plan.first], keep

    def _first(self, info: BucketInfo, bucket: GradBucket) -> tuple[torch.Tensor, list[int]]:
        """Return the first message, and its segments' seeds."""
        state, plan = self.state, self.plan
        ps = [m.project(q) for m, q in zip(self.matrices, self.qs, strict=True)]
        others = [part.added().float() for part in self.others]
        message = torch.cat([*(p.view(-1) for p in ps), *others])
        lossy = [place for _, place in plan.first if place is not None]
        found = [info.layers[plan.others[place]] for place in lossy]
        drawn = iter(seeds_of(state, found, info.step, bucket))
        return message, [0 if place is None else next(drawn) for _, place in plan.first]

    def _old_qs(self, info: BucketInfo) -> list[torch.Tensor]:
        """Return the Q that each of the matrices begins with, (count, columns, rank).

        With a warm start they are what the state knows, to be changed in place.
        """
        state, forms, known = self.state, self.plan.forms, self.state.factors.q
        fresh = [not (state.warm_start and all(n in known for n in form.names)) for form in forms]
        drawn = self._drawn_as_pytorch() if any(fresh) and state.feedback == "torch" else None
        found = []
        for i, form in enumerate(forms):
            if not fresh[i]:
                q = torch.stack([known[name] for name in form.names])
            elif drawn is not None:
                q = drawn[i]
            else:
                draw = 0 if state.warm_start else info.step
                each = functools.partial(
                    low_rank.first_q, state.random_seed, draw=draw, columns=form.shape[2],
                    rank=form.rank,
                )  # fmt: skip
                q = torch.from_numpy(np.stack([each(name=name) for name in form.names]))
            if q.shape != (form.shape[0], form.shape[2], form.rank):
                raise InvalidArgument(
                    f"the Q of layer '{form.names[0]}' has shape {tuple(q.shape[1:])}, and must "
                    f"have {(form.shape[2], form.rank)}: the state is another model's"
                )
            found.append(q.to(self.buffer.device))
            if state.warm_start:
                known.update(zip(form.names, found[-1].unbind(), strict=True))
        return found

    def _drawn_as_pytorch(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.state.pytorch_seed())
        return [
            torch.randn(
                form.shape[0], form.shape[2], form.rank, dtype=self.buffer.dtype,
                device=generator.device, generator=generator,
            ).float()
            for form in self.plan.forms
        ]  # fmt: skip

    def _finish(self, sent: Sent) -> None:
        self._second(sent)
        self.keep()
        self.restore()

    @full_precision()
    def _second(self, sent: Sent) -> None:
        """Take what the first message became; send Q and wait; write the averages."""
        epsilon = self.state.orthogonalization_epsilon / self.size
        use_on_this_stream(self.message, *(x for m in self.matrices for x in (m.values, m.basis)))
        ps, others = [math.prod(form.p_shape) for form in self.plan.forms], self.plan.others
        means = self.message.split([*ps, *(self.plan.sizes[i] for i in others)])
        # PyTorch adds epsilon to the norms of the sum.
        own = [
            m.project_back(p, epsilon).view(-1)
            for m, p in zip(self.matrices, means[: len(ps)], strict=True)
        ]
        mean_qs, shares, usables = self._averaged(own, sent) if own else ((), (), ())
        self.added = []
        for part, mean in zip(self.others, means[len(ps) :], strict=True):
            part.gradient.copy_(mean)
            if part.residual is not None:
                part.residual.sub_(mean).nan_to_num_(0.0, 0.0, 0.0)
        steps = zip(self.matrices, self.qs, mean_qs, shares, usables, strict=True)
        for m, q, mean, share, usable in steps:
            q.copy_(m.finish(mean, share, usable))

    def _averaged(
        self, own: Sequence[torch.Tensor], sent: Sent
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[Usable | None]]:
        """Return the averages of all Q, this rank's residual's share of each, and which are usable.

        With "torch" the share is the average; else its own, without what was lost of it on the way.
        """
        state, plan, numels = self.state, self.plan, [q.numel() for q in own]
        message = torch.cat(list(own))
        lost = None
        if state.feedback == "local" and state.factor_bits != EXACT_BITS:
            lost = [torch.zeros_like(q) for q in own]
        sent.follow(
            message, plan.config_of_q, segments=plan.second, seed=[0] * len(plan.second),
            name=f"{self.name}/q", residuals=lost,
        )  # fmt: skip
        means = message.split(numels)
        usables = usable_of(message, plan.of_q, [form.shape[0] for form in plan.forms])
        if state.feedback == "torch":
            return means, means, usables
        shares = own if lost is None else [q - e for q, e in zip(own, lost, strict=True)]
        return means, shares, usables
