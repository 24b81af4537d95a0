"""One step of PowerSGD over a flat buffer: all P with the other layers, then all Q."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from cgx_ops._core import log
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.errors import InvalidArgument
from cgx_ops.methods import low_rank
from cgx_ops.torch.averaging.arithmetic import full_precision, use_on_this_stream
from cgx_ops.torch.averaging.power_sgd.linear_algebra import Matrices, Part, Usable, usable_of
from cgx_ops.torch.averaging.power_sgd.plan import Bucket, plan_of
from cgx_ops.torch.averaging.power_sgd.state import LowRankState
from cgx_ops.torch.averaging.residuals import decayed, nothing
from cgx_ops.torch.averaging.sent import Sent
from cgx_ops.torch.averaging.unused_parameters import unused_kept


class Exchange:
    """The two messages of one bucket in a step.

    Its residuals are added to the gradients when it is created, and its average is written to the
    bucket after start().

    Args:
        caller: for errors.
        state: settings, factors and residuals.
        bucket: the gradients.
        batched: whether the bucket is one matrix.

    Raises:
        InvalidArgument: the factors or residuals belong to another model or rank.
    """

    def __init__(
        self, caller: str, state: LowRankState, bucket: Bucket, *, batched: bool = False
    ) -> None:
        if state.use_error_feedback:
            state.residuals.claim(*state.place)
        self.state, self.bucket = state, bucket
        self.plan = plan = plan_of(state, bucket, batched)
        self.size = state.group.size()
        parts = [Part(gradient, None) for gradient in bucket.buffer.split(plan.sizes)]
        self.added = parts  # parts whose gradients are in their residuals, but not averaged yet
        self.matrices = [Matrices(form, [parts[i] for i in form.members]) for form in plan.forms]
        self.others = [parts[i] for i in plan.others]
        if state.use_error_feedback:
            cores = plan.others if state.feedback == "local" else ()  # the core updates theirs
            for i, part in enumerate(parts):
                if i not in cores:
                    part.decay = plan.config.residual_decay
                    part.residual = state.residuals.of(
                        bucket.layers[i].name, part.gradient, dtype=torch.float32
                    )
        self.residuals, self.keep = self._cores(caller)
        self.qs = self._old_qs()
        self.restore = nothing
        if bucket.finds_unused:
            by_layer = state.residuals.tensors, state.factors.q
            kept = [[each.get(layer.name) for each in by_layer] for layer in bucket.layers]
            gradients = [part.gradient for part in parts]
            self.restore = unused_kept(state, gradients, kept, bucket.name)
        with self._or_taken_back():
            self.message, self.seeds = self._first()
        state.count(bucket.buffer.numel(), plan.sent, bucket.is_last)
        left_out = (bucket.buffer.numel() - plan.sent) * bucket.buffer.element_size()
        log.leave_out(2 * (self.size - 1) * left_out // self.size)

    def start(self) -> torch.futures.Future[torch.Tensor]:
        """Send P and the tensors that are not factored; their callback sends Q."""
        with self._or_taken_back():
            future = self.state.average(
                self.message, self.plan.config, name=self.bucket.name, seed=self.seeds,
                segments=[segment for segment, _ in self.plan.first], residuals=self.residuals,
                then=self._finish, result=self.bucket.buffer,
                followers=[f"{self.bucket.name}/q"] if self.matrices else [],
            )  # fmt: skip

        def ended(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            with self._or_taken_back():
                return future.value()

        return future.then(ended)

    @contextlib.contextmanager
    def _or_taken_back(self) -> Iterator[None]:
        """Restore residuals if the step fails, so that it can be repeated."""
        try:
            yield
        except Exception:
            for part in self.added:
                part.take_back()
            raise

    def _cores(self, caller: str) -> tuple[list[torch.Tensor | None] | None, Callable[[], None]]:
        """Return the residuals that the core updates, for the segments of the first message.

        Also returns a function to call when the step is done.
        """
        state, plan = self.state, self.plan
        if state.feedback != "local":
            return None, nothing
        lossy = [(segment, place) for segment, place in plan.first if place is not None]
        found = [self.bucket.layers[plan.others[place]] for _, place in lossy]
        like = [self.others[place].gradient.float() for _, place in lossy]
        segments = [each for each, _ in lossy]
        kept = state.residuals_of(caller, plan.config, found, segments, like)
        taken, keep = decayed(kept, plan.config, segments)
        if taken is None:
            return None, nothing
        own = iter(taken)
        return [None if place is None else next(own) for _, place in plan.first], keep

    def _first(self) -> tuple[torch.Tensor, list[int]]:
        """Return the first message, and the seeds of its segments."""
        bucket, plan = self.bucket, self.plan
        ps = [m.project(q) for m, q in zip(self.matrices, self.qs, strict=True)]
        others = [part.added().float() for part in self.others]
        message = torch.cat([*(p.view(-1) for p in ps), *others])
        lossy = [place for _, place in plan.first if place is not None]
        names = [f"{bucket.noise}/{bucket.layers[plan.others[place]].name}" for place in lossy]
        drawn = iter(self.state.seeds_of(names, bucket.step))
        return message, [0 if place is None else next(drawn) for _, place in plan.first]

    def _old_qs(self) -> list[torch.Tensor]:
        """Return the Q that each of the matrices starts with, (count, columns, rank).

        With a warm start these are the tensors in the state, which the step changes in place.
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
                draw = 0 if state.warm_start else self.bucket.step
                each = functools.partial(
                    low_rank.first_q, state.random_seed, draw=draw, columns=form.shape[2],
                    rank=form.rank,
                )  # fmt: skip
                q = torch.from_numpy(np.stack([each(name=name) for name in form.names]))
            if q.shape != (form.shape[0], form.shape[2], form.rank):
                raise InvalidArgument(
                    f"the Q of layer '{form.names[0]}' has shape {tuple(q.shape[1:])}; it must be "
                    f"{(form.shape[2], form.rank)}: the state belongs to another model; load this "
                    "model's state"
                )
            found.append(q.to(self.bucket.buffer.device))
            if state.warm_start:
                known.update(zip(form.names, found[-1].unbind(), strict=True))
        return found

    def _drawn_as_pytorch(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.state.pytorch_seed())
        return [
            torch.randn(
                form.shape[0], form.shape[2], form.rank, dtype=self.bucket.buffer.dtype,
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
        """Take the averages of the first message; send Q and wait; write the averages."""
        epsilon = self.state.orthogonalization_epsilon / self.size
        of_matrices = (x for m in self.matrices for x in (m.values, m.basis))
        use_on_this_stream(self.message, *self.qs, *of_matrices)
        ps, others = [math.prod(form.p_shape) for form in self.plan.forms], self.plan.others
        means = self.message.split([*ps, *(self.plan.sizes[i] for i in others)])
        # Divided by size, because PyTorch adds epsilon to the norms of the sum.
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
        """Return the averages of all Q, this rank's shares of them, and which averages are usable.

        The share determines the residual. With "torch" it is the average; with "local" it is this
        rank's Q without the error of sending it.
        """
        state, plan, numels = self.state, self.plan, [q.numel() for q in own]
        message = torch.cat(list(own))
        lost = None
        if state.feedback == "local" and state.factor_bits != EXACT_BITS:
            lost = [torch.zeros_like(q) for q in own]
        sent.follow(
            message, plan.config_of_q, segments=plan.second, seed=[0] * len(plan.second),
            name=f"{self.bucket.name}/q", residuals=lost,
        )  # fmt: skip
        means = message.split(numels)
        usables = usable_of(message, plan.of_q, [form.shape[0] for form in plan.forms])
        if state.feedback == "torch":
            return means, means, usables
        shares = own if lost is None else [q - e for q, e in zip(own, lost, strict=True)]
        return means, shares, usables
