"""Adaptive bits of DDP and FSDP2: this process's part of a planner.AdaptiveBits.

1. begin(): at the start of a step, completed averages are processed, and bits may change
2. segments() and measure(): layers without fixed bits get theirs, and are measured when it is due
3. after the last message of a step, the ranks average their measurements in the background
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from cgx_ops import Communicator, Config, Request, Rules, Segment
from cgx_ops._core.codec import statistic_at
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.planner.adaptive import LAG, AdaptiveBits, Sample
from cgx_ops.planner.rates import settings_of
from cgx_ops.torch.averaging.layers import Layer
from cgx_ops.torch.graph.work import DTYPES

_log = logging.getLogger(__name__)

Runs = Sequence[torch.Tensor]


class _Exchange(NamedTuple):
    """A pending average: a sample, and the request that will have its losses."""

    sample: Sample
    request: Request


class Adaptation:
    """AdaptiveBits of one model's gradients, in this process.

    Call begin(), segments() and measure() for each message.
    """

    def __init__(self, adaptive: AdaptiveBits, name: str) -> None:
        """Start; `name` identifies the averages across ranks."""
        self._adaptive, self._name = adaptive, name
        self._communicator: Communicator | None = None  # whose ranks have the same settings
        self._config, self._rules = Config(), Rules()  # of the next message
        self._step = -1
        self._found: dict[str, tuple[int, float]] = {}  # of this step: numel, loss per value
        self._under_way: list[_Exchange] = []

    def begin(self, communicator: Communicator, step: int, config: Config, rules: Rules) -> None:
        """Prepare a message; set the bits of a step before its first message.

        The first call in a process is collective. It raises MismatchError if ranks start with
        different settings.
        """
        self._config, self._rules = config, rules
        if self._communicator is None or self._communicator.id != communicator.id:
            self._under_way.clear()  # of ranks that have changed
            self._found.clear()
            self._adaptive.agree(communicator)
            self._communicator = communicator
        if step == self._step:
            return
        if self._found:  # the last message was not marked
            self._start(communicator)
        self._step = step
        self._take(until=step - LAG)
        if self._adaptive.advance(step, config) and communicator.rank == 0:
            budget = (
                "at the least error"
                if config.compressor == "entropy"
                else f"for the error of {config.bits} bits"
            )
            _log.info(
                "step %d: %.3g bits a value on average, %s: %s",
                step, self._adaptive.mean_bits, budget, self._adaptive.bits,
            )  # fmt: skip

    def segments(self, layers: Sequence[Layer], segments: Sequence[Segment]) -> list[Segment]:
        """Return the layers' segments, with the current bits or rates where none are fixed."""
        bits = self._adaptive.bits
        return [
            replace(each, config=self._with_bits(each, bits[layer.name]))
            if layer.name in bits and self._is_free(layer)
            else each
            for layer, each in zip(layers, segments, strict=True)
        ]

    def _with_bits(self, segment: Segment, bits: float) -> Config:
        return (segment.config or self._config).with_own(**settings_of(bits))

    def measure(
        self,
        communicator: Communicator,
        layers: Sequence[Layer],
        segments: Sequence[Segment],
        gradients: Sequence[Runs],
        residuals: Sequence[Runs | None] | None,
        *,
        last: bool,
    ) -> None:
        """Measure a message before it is reduced, if that is due; exchange after the last one.

        Args:
            communicator: the ranks.
            layers: of the message.
            segments: of each layer, before segments() set its bits.
            gradients: of each layer, as runs with separate buckets.
            residuals: of each layer, or None. Gradient plus residual is measured.
            last: whether this is known to be the last message of the step.
        """
        if not self._adaptive.measures(self._step):
            return
        lost = residuals or [None] * len(layers)
        for layer, segment, runs, residual in zip(layers, segments, gradients, lost, strict=True):
            config = segment.config or self._config
            if not config.is_short(runs[0].numel()) and self._is_free(layer):
                how = self._adaptive.measured_by(config)
                pairs = zip(runs, residual or [None] * len(runs), strict=True)
                found = sum(_statistic(values, e, how) for values, e in pairs)
                self._found[layer.name] = layer.numel, found / layer.numel
        if last and self._found:
            self._start(communicator)

    def _is_free(self, layer: Layer) -> bool:
        """Return whether the layer has a name, and no rule sets its bits, rate or encoding."""
        fixed = self._rules.fix_bits(layer.name, layer.dimensions, self._config)
        return bool(layer.name) and not fixed

    def settle(self) -> None:
        """Complete pending averages and measurements, so that a checkpoint includes them."""
        if self._found and self._communicator is not None:
            self._start(self._communicator)
        self._take(until=self._step)

    def _start(self, communicator: Communicator) -> None:
        names = tuple(sorted(self._found))  # one order; buckets change after the first step
        numels, losses = zip(*(self._found[name] for name in names), strict=True)
        request = communicator.allreduce_async(
            np.array(losses, np.float32), "avg", Config(bits=EXACT_BITS), name=self._name
        )
        self._found = {}
        self._under_way.append(_Exchange(Sample(self._step, names, numels, ()), request))

    def _take(self, until: int) -> None:
        """Give AdaptiveBits the averages of steps up to this one."""
        while self._under_way and self._under_way[0].sample.step <= until:
            sample, request = self._under_way.pop(0)
            self._adaptive.arrive(sample._replace(losses=tuple(request.wait().tolist())))


def _statistic(values: torch.Tensor, residual: torch.Tensor | None, config: Config) -> float:
    """Return the statistic of a gradient plus its residual, measured on the host."""
    flat = values.detach().reshape(-1)
    if residual is not None:
        flat = flat.float() + residual.float()
    flat = flat.cpu().contiguous()
    return statistic_at(flat.data_ptr(), flat.numel(), DTYPES[flat.dtype], config)
