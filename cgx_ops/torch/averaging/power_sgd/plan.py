"""A bucket of gradients, and its plan for PowerSGD: which layers are matrices, how it is sent.

A plan takes longer to make than the arithmetic of a step, so it is made once and reused.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cgx_ops import Config, Segment
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.methods import low_rank
from cgx_ops.torch.averaging.layers import Layer, segments_of
from cgx_ops.torch.averaging.power_sgd.linear_algebra import Form
from cgx_ops.torch.averaging.power_sgd.state import LowRankState, bucket_name
from cgx_ops.torch.averaging.state import rules_of

# ---- 1. the bucket -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bucket:
    """Gradients that are averaged together: those of a DDP bucket, or the shards of a module.

    Attributes:
        key: identifies the bucket in the state's plans.
        name: name of its first message.
        noise: start of the names that determine the layers' noise.
        buffer: of all gradients, flat.
        layers: in order.
        gradients: of the layers, in the buffer.
        offsets: where each gradient starts in the buffer.
        config: of the layers that are not factored.
        step: number of earlier steps.
        finds_unused: whether no rank may have used some of the layers.
        is_last: whether it is the step's last bucket.
    """

    key: int | str
    name: str
    noise: str
    buffer: torch.Tensor
    layers: list[Layer]
    gradients: list[torch.Tensor]
    offsets: list[int]
    config: Config
    step: int
    finds_unused: bool
    is_last: bool


# ---- 2. the plan ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A bucket's matrices, its other layers, and its two messages.

    Attributes:
        follows_from: all inputs that determine the plan.
        sizes: elements of the bucket's layers.
        forms: the matrices; those of one shape are adjacent.
        others: indices of the layers that are not factored.
        config: of the first message: all P, then the other layers.
        first: segments of the first message. Each has its index in `others` if it is a compressed
            layer of these, else None.
        config_of_q: of the second message.
        second: segments of the second message.
        of_q: elements of each matrix's Q.
    """

    follows_from: tuple[Any, ...]
    sizes: list[int]
    forms: list[Form]
    others: list[int]
    config: Config
    first: list[tuple[Segment, int | None]]
    config_of_q: Config
    second: list[Segment]
    of_q: torch.Tensor

    @property
    def sent(self) -> int:
        """Number of elements of both messages."""
        last, end = self.first[-1][0], self.second[-1] if self.second else Segment(0, 0)
        return last.offset + last.numel + end.offset + end.numel


def plan_of(state: LowRankState, bucket: Bucket, batched: bool) -> Plan:
    """Return the plan of a bucket, which does not depend on the gradients' values.

    batched: whether the bucket is one matrix.
    """
    rules = rules_of(state)
    follows_from = (
        batched, bucket.layers, bucket.offsets, [(g.shape, g.stride()) for g in bucket.gradients],
        bucket.config,
        rules, state.matrix_approximation_rank, state.min_compression_rate,
        state.batch_tensors_with_same_shape, state.factor_bits,
    )  # fmt: skip
    plan = state.plans.get(bucket.key)
    if plan is None or plan.follows_from != follows_from:
        plan = state.plans[bucket.key] = _found(state, bucket, follows_from)
    return plan


# ---- 3. make a plan ------------------------------------------------------------------------------


def _found(state: LowRankState, bucket: Bucket, follows_from: tuple[Any, ...]) -> Plan:
    batched, rules = follows_from[0], rules_of(state)
    sizes = [layer.numel for layer in bucket.layers]
    assert bucket.offsets == _starts(sizes), "a bucket's layers lie end to end"
    forms = [_one_matrix(state, bucket)] if batched else _matrices(state, bucket)
    factored = {i for form in forms for i in form.members}
    others = [i for i in range(len(sizes)) if i not in factored]
    config, how = bucket.config, low_rank.FACTORS[state.factor_bits]
    ps = [math.prod(form.p_shape) for form in forms]
    starts = _starts([*ps, *(sizes[i] for i in others)])
    config_of_factors, qs = config.with_own(**how), [math.prod(form.q_shape) for form in forms]
    segments = [Segment(at, n, config_of_factors) for at, n in zip(starts, ps, strict=False)]
    segments += segments_of(rules, [bucket.layers[i] for i in others], starts[len(ps) :], config)
    places = [*(None for _ in ps), *range(len(others))]
    of_q = [(Segment(at, n), None) for at, n in zip(_starts(qs), qs, strict=True)]
    return Plan(
        follows_from, sizes, forms, others,
        config, _joined(config, zip(segments, places, strict=True)),
        config_of_factors, [segment for segment, _ in _joined(config_of_factors, of_q)],
        torch.tensor(
            [form.rank * form.shape[2] for form in forms for _ in form.names],
            dtype=torch.int64, device="cpu",
        ),
    )  # fmt: skip


def _rows_and_columns(gradient: torch.Tensor) -> tuple[int, int]:
    """Return the shape of a gradient as a matrix, in its memory order."""
    if gradient.numel() == 0 or gradient.dim() == 0:
        return 1, gradient.numel()
    outermost = max(range(gradient.dim()), key=gradient.stride)
    rows = gradient.shape[outermost]
    return rows, gradient.numel() // rows


def _one_matrix(state: LowRankState, bucket: Bucket) -> Form:
    """Return a bucket as one square matrix."""
    numel = sum(layer.numel for layer in bucket.layers)
    side = math.ceil(math.sqrt(numel))
    name = bucket_name(bucket.layers[0].name, bucket.layers[-1].name, numel)
    rank = min(side, state.matrix_approximation_rank)
    return Form((name,), tuple(range(len(bucket.layers))), (1, side, side), rank)


def _matrices(state: LowRankState, bucket: Bucket) -> list[Form]:
    """Return the layers to factor; those of one shape are adjacent."""
    by_shape: dict[tuple[int, int, int], list[int]] = {}
    rules = rules_of(state)
    for i, (layer, gradient) in enumerate(zip(bucket.layers, bucket.gradients, strict=True)):
        rows, columns = _rows_and_columns(gradient)
        rank = low_rank.rank_of(
            rows, columns, state.matrix_approximation_rank, state.min_compression_rate
        )
        if rank and not rules.match(layer.name):
            by_shape.setdefault((rows, columns, rank), []).append(i)
    forms = []
    for (rows, columns, rank), alike in by_shape.items():
        for batch in [alike] if state.batch_tensors_with_same_shape else [[i] for i in alike]:
            names = tuple(bucket.layers[i].name for i in batch)
            forms.append(Form(names, tuple(batch), (len(batch), rows, columns), rank))
    return forms


def _joined(
    config: Config, segments: Iterable[tuple[Segment, int | None]]
) -> list[tuple[Segment, int | None]]:
    """Merge adjacent exact segments."""
    joined: list[tuple[Segment, int | None]] = []
    for exact, run in itertools.groupby(segments, lambda each: _is_exact(config, each[0])):
        alike = list(run)
        if exact:
            numel = sum(segment.numel for segment, _ in alike)
            alike = [(Segment(alike[0][0].offset, numel, Config(bits=EXACT_BITS)), None)]
        joined += alike
    return joined


def _is_exact(config: Config, segment: Segment) -> bool:
    own = segment.config or config
    return own.bits == EXACT_BITS and not own.keeps_residuals


def _starts(numels: Sequence[int]) -> list[int]:
    """Return where each of several adjacent pieces starts."""
    return list(itertools.accumulate(numels, initial=0))[:-1]
