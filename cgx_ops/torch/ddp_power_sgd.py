"""PowerSGD for DistributedDataParallel: gradients are sent as the product of two thin matrices.

    from cgx_ops.torch import ddp
    state = ddp.PowerSGDState(matrix_approximation_rank=2, start_powerSGD_iter=100)
    model.register_comm_hook(state, ddp.power_sgd_hook)

  1. the hooks: layer by layer, or each bucket as one matrix
  2. the plan: which matrices a bucket has, and what else
  3. two exchanges: all P with what is not factored, then all Q

Vogels, Karimireddy, Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization, NeurIPS 2019. The state is in ddp_power_sgd_state.py, the linear algebra in
low_rank.py. Names are those of torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from cgx_ops import Segment, low_rank
from cgx_ops.errors import InvalidArgument
from cgx_ops.rules import EXACT_BITS
from cgx_ops.torch._compat import GradBucket, group_or_default
from cgx_ops.torch.ddp_bucket import Seen, for_any_bucket, look_at, refuse, residuals_of, seeds_of
from cgx_ops.torch.ddp_power_sgd_state import PowerSGDState
from cgx_ops.torch.ddp_state import rules_of
from cgx_ops.torch.low_rank import Matrices, Part

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

    What goes wrong later is in the future, as with quantized_allreduce_hook. Gradients that are not
    finite make their layer's average so, on all ranks, and leave no residual.
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


@torch.no_grad()
def _hook(
    hook: str, state: PowerSGDState, bucket: GradBucket, *, batched: bool
) -> torch.futures.Future[torch.Tensor]:
    if not isinstance(state, PowerSGDState):
        raise InvalidArgument(f"{hook}: state is {type(state).__name__}; give a PowerSGDState")
    seen = look_at(hook, state, bucket)
    refuse(hook, seen)
    buffer = bucket.buffer()
    if seen.config is None or seen.step < state.start_powerSGD_iter:
        whole = [Segment(0, buffer.numel(), bits=EXACT_BITS)]
        name = f"power_sgd/{bucket.index()}"
        return state.average(buffer, state.config, segments=whole, seed=[0], name=name)
    if not all(layer.name for layer in seen.layers):
        raise InvalidArgument(
            f"{hook}: its state is kept by layer, but this model's names are not known: import "
            "cgx_ops.torch before DistributedDataParallel(model)"
        )
    if state.use_error_feedback:
        group = group_or_default(state.process_group)
        state.residuals.claim(group.rank(), group.size())
    return _Exchange(hook, state, bucket, seen, batched).start()


# ---- 2. the plan ---------------------------------------------------------------------------------


def _rows_and_columns(gradient: torch.Tensor) -> tuple[int, int]:
    """Return the shape of a gradient as a matrix, as it lies in memory."""
    if gradient.numel() == 0 or gradient.dim() == 0:
        return 1, gradient.numel()
    outermost = max(range(gradient.dim()), key=gradient.stride)
    rows = gradient.shape[outermost]
    return rows, gradient.numel() // rows


def _planned(
    state: PowerSGDState, seen: Seen, bucket: GradBucket, batched: bool
) -> tuple[list[Matrices], list[int]]:
    """Return a bucket's matrices, those of one shape behind each other, and its other layers."""
    parts = [
        Part(layer.name, bucket.buffer()[at : at + layer.numel], None)
        for layer, at in zip(seen.layers, seen.offsets, strict=True)
    ]
    if batched:
        side = math.ceil(math.sqrt(bucket.buffer().numel()))
        rank = min(side, state.matrix_approximation_rank)
        name = f"{parts[0].name}...{parts[-1].name} ({bucket.buffer().numel()})"
        return [Matrices([name], parts, side, side, rank)], []
    by_shape: dict[tuple[int, int, int], list[Part]] = {}
    others = []
    named = rules_of(state).rules
    for i, (part, gradient) in enumerate(zip(parts, bucket.gradients(), strict=True)):
        rows, columns = _rows_and_columns(gradient)
        rank = low_rank.rank_of(
            rows, columns, state.matrix_approximation_rank, state.min_compression_rate
        )
        if rank and not any(rule.matches(part.name) for rule in named):
            by_shape.setdefault((rows, columns, rank), []).append(part)
        else:
            others.append(i)
    matrices = []
    for shape, alike in by_shape.items():
        batches = [alike] if state.batch_tensors_with_same_shape else [[part] for part in alike]
        matrices += [Matrices([part.name for part in batch], batch, *shape) for batch in batches]
    return matrices, others


# ---- 3. two exchanges ----------------------------------------------------------------------------


class _Exchange:
    """One bucket's way through a step."""

    def __init__(
        self, hook: str, state: PowerSGDState, bucket: GradBucket, seen: Seen, batched: bool
    ) -> None:
        assert seen.config is not None
        self.state, self.buffer = state, bucket.buffer()
        self.config = for_any_bucket(seen.config, rules_of(state))
        self.size = group_or_default(state.process_group).size()
        self.name = f"power_sgd/{bucket.index()}"
        self.matrices, others = _planned(state, seen, bucket, batched)
        self.layers = [seen.layers[i] for i in others]
        self.others = [
            Part(layer.name, self.buffer[at : at + layer.numel], None)
            for layer, at in zip(self.layers, [seen.offsets[i] for i in others], strict=True)
        ]
        if state.use_error_feedback:
            factored = [part for each in self.matrices for part in each.parts]
            for part in factored if state.feedback == "local" else factored + self.others:
                like = part.gradient.new_empty(part.gradient.shape, dtype=torch.float32)
                part.residual = state.residuals.of(part.name, like, self.config.residual_decay)
        self.message, self.segments, self.residuals, self.seeds = self._first(hook, seen, bucket)
        sent = sum(m.p_numel + m.q_numel for m in self.matrices)
        exact = sum(layer.numel for layer in self.layers)
        state.count(self.buffer.numel(), exact + sent, bucket.is_last())

    def start(self) -> torch.futures.Future[torch.Tensor]:
        """Send P and the tensors that are not factored; the rest follows when they are there."""
        first = self.state.average(
            self.message, self.config, segments=self.segments, seed=self.seeds, name=self.name,
            residuals=self.residuals, then=self._second,
        )  # fmt: skip
        return first.then(lambda future: (future.value(), self.buffer)[1])

    def _first(self, hook: str, seen: Seen, bucket: GradBucket) -> Any:
        """Return the first message, its segments, residuals and seeds."""
        state, how = self.state, low_rank.FACTORS[self.state.factor_bits]
        ps = [m.project(q) for m, q in zip(self.matrices, self._old_qs(seen), strict=True)]
        starts = _starts([p.numel() for p in ps] + [layer.numel for layer in self.layers])
        pieces = [p.view(-1) for p in ps] + [part.added().float() for part in self.others]
        message = torch.cat(pieces)
        segments = [Segment(at, p.numel(), **how) for at, p in zip(starts, ps, strict=False)]
        segments += rules_of(state).segments(self.layers, starts[len(ps) :])
        residuals = None
        if state.feedback == "local":
            residuals = residuals_of(
                hook, state, self.config, self.layers, segments[len(ps) :], pieces[len(ps) :]
            )
        none = [None] * len(ps)
        seeds = [0] * len(ps) + seeds_of(state, self.config, self.layers, seen.step, bucket)
        return message, segments, None if residuals is None else none + residuals, seeds

    def _old_qs(self, seen: Seen) -> list[torch.Tensor]:
        """Return the Q that each of the matrices begins with, (count, columns, rank)."""
        state, known = self.state, self.state.factors.q
        fresh = [
            m for m in self.matrices if not (state.warm_start and all(n in known for n in m.names))
        ]
        drawn = self._drawn_as_pytorch() if fresh and state.feedback == "torch" else None
        found = []
        for i, m in enumerate(self.matrices):
            if m not in fresh:
                q = torch.stack([known[name] for name in m.names])
            elif drawn is not None:
                q = drawn[i]
            else:
                draw = 0 if state.warm_start else seen.step
                q = torch.from_numpy(
                    np.stack(
                        [
                            low_rank.first_q(state.random_seed, name, draw, m.shape[2], m.rank)
                            for name in m.names
                        ]
                    )
                )
            if q.shape != (m.shape[0], m.shape[2], m.rank):
                raise InvalidArgument(
                    f"the Q of layer '{m.names[0]}' has shape {tuple(q.shape[1:])}, and must have "
                    f"{(m.shape[2], m.rank)}: the state is another model's"
                )
            found.append(q.to(self.buffer.device))
        return found

    def _drawn_as_pytorch(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.state.pytorch_seed())
        return [
            torch.randn(
                m.shape[0], m.shape[2], m.rank, dtype=self.buffer.dtype, generator=generator
            ).float()
            for m in self.matrices
        ]

    @torch.no_grad()
    def _second(self) -> None:
        """Take what the first message became; send Q and wait; write the averages."""
        state, epsilon = self.state, self.state.orthogonalization_epsilon / self.size
        if self.message.is_cuda:  # callbacks have a stream of their own
            here = torch.cuda.current_stream(self.message.device)
            for x in (self.message, *(x for m in self.matrices for x in (m.values, m.basis))):
                x.record_stream(here)
        means = self.message.split(
            [m.p_numel for m in self.matrices] + [layer.numel for layer in self.layers]
        )
        ps, others = means[: len(self.matrices)], means[len(self.matrices) :]
        for part, mean in zip(self.others, others, strict=True):
            part.gradient.copy_(mean)
            if part.residual is not None:
                part.residual.sub_(mean).nan_to_num_(0.0, 0.0, 0.0)
        if not self.matrices:
            return
        # PyTorch adds epsilon to the norms of the sum.
        own = [m.project_back(p, epsilon).view(-1) for m, p in zip(self.matrices, ps, strict=True)]
        for m, mean, share in zip(self.matrices, *self._averaged(own), strict=True):
            q = m.finish(mean, share)
            if state.warm_start:
                state.factors.q.update(zip(m.names, q.unbind(), strict=True))

    def _averaged(
        self, own: Sequence[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Return the averages of all Q, and the part of each that is this rank's residual's share.

        With "torch" that is the average; else its own, without what was lost of it on the way.
        """
        state, numels = self.state, [q.numel() for q in own]
        message = torch.cat(list(own))
        segments = [Segment(at, n) for at, n in zip(_starts(numels), numels, strict=True)]
        lost = None
        if state.feedback == "local" and state.factor_bits != EXACT_BITS:
            lost = [torch.zeros_like(q) for q in own]
        how = self.config.with_own(**low_rank.FACTORS[state.factor_bits])
        state.average_more(
            message, how, segments=segments, seed=[0] * len(own), name=f"{self.name}/q",
            residuals=lost,
        )  # fmt: skip
        means = message.split(numels)
        if state.feedback == "torch":
            return means, means
        return means, own if lost is None else [q - e for q, e in zip(own, lost, strict=True)]


def _starts(numels: Sequence[int]) -> list[int]:
    """Return where each of several pieces begins, one behind the other."""
    return list(itertools.accumulate(numels, initial=0))[:-1]
