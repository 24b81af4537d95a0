"""Exchange: the average of a list of tensors over the ranks, one message, in a Config's bits.

For differences of weights (averager.py, diloco/) and momenta (optim/). With error feedback the
residual of each tensor, by name, is added to the next one. An exchange that fails leaves residuals
unchanged.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Literal

import torch
import torch.distributed as dist

from cgx_ops import Config, Rules, Segment
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.errors import InvalidArgument
from cgx_ops.rules import require_rules
from cgx_ops.torch.averaging.arithmetic import full_precision
from cgx_ops.torch.averaging.layers import Layer, segments_of
from cgx_ops.torch.averaging.residuals import decayed, nothing
from cgx_ops.torch.averaging.sent import Sent
from cgx_ops.torch.averaging.state import AveragingState, for_any_message
from cgx_ops.torch.graph.work import DTYPES, devices

Carriers = Literal["native", "c10d"]
_EXACT = Config(bits=EXACT_BITS)


class Flight:
    """Means under way.

    Attributes:
        like: the tensors of which they are.
    """

    def __init__(
        self,
        like: Sequence[torch.Tensor],
        future: torch.futures.Future[torch.Tensor] | None = None,
        keep: Callable[[], None] = nothing,
    ) -> None:
        """Have them under way.

        Args:
            like: the tensors.
            future: of the means, flat, end to end; None: these are they already.
            keep: called when they are there; it changes the residuals.
        """
        self.like = like
        self._future, self._keep = future, keep

    @full_precision()
    def wait(self) -> list[torch.Tensor]:
        """Return the means, when they are there; only then residuals change.

        Raises:
            RuntimeError: what the exchange failed with.
        """
        if self._future is not None:
            buffer = self._future.wait()
            self._keep()
            pieces = buffer.split([x.numel() for x in self.like])
            self.like = [piece.view(x.shape) for piece, x in zip(pieces, self.like, strict=True)]
            self._future = None
        return list(self.like)


class Exchange(AveragingState):
    """The ranks, the Config and the residuals of averages that follow each other.

    Attributes:
        caller: its owner's name, for errors and to match messages.
        steps: averages so far.
    """

    kept = (*AveragingState.kept, "caller")

    def __init__(
        self,
        caller: str,
        process_group: dist.ProcessGroup | None,
        config: Config,
        carrier: Carriers,
        rules: Rules = Rules(),  # noqa: B008  (immutable)
        seed: int = 0,
    ) -> None:
        super().__init__(process_group, config, require_rules(rules, f"{caller}: "), carrier, seed)
        self.caller = caller

    def warn_of_unmatched(self, names: Sequence[str]) -> None:
        """Warn, once, of rules that match none of these parameters, which are all."""
        assert self.rules is not None
        self.rules.warn_of_unmatched(names, f"{self.caller}: ")

    def require_kept(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        """Require that a rank keeps the values that it does not send, for means over senders."""
        assert self.rules is not None
        for name, x in zip(names, tensors, strict=True):
            own = self.rules.of(name, x.dim(), self.config)
            if own.bits != EXACT_BITS and (own.compressor != "topk" or not own.keeps_residuals):
                raise InvalidArgument(
                    f"{self.caller}: mean_over='senders' needs the values that each rank keeps "
                    f"back, and '{name}' is sent by {own.compressor!r}, with "
                    f"error_feedback={own.keeps_residuals}: give Config(compressor='topk')"
                )

    def mean(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], *, exact: bool = False
    ) -> list[torch.Tensor]:
        """Return the mean of each tensor over the ranks; arguments and errors as start().

        One that fails does not count, on any rank.
        """
        steps = self.steps
        try:
            return self.start(names, tensors, exact=exact).wait()
        except Exception:
            self.steps = steps
            raise

    @full_precision()
    def start(
        self,
        names: Sequence[str],
        tensors: Sequence[torch.Tensor],
        *,
        exact: bool = False,
        of_senders: bool = False,
    ) -> Flight:
        """Start the mean of each tensor over the ranks, equal on all of them, to the bit.

        Args:
            names: of the tensors: that of a residual and of noise.
            tensors: float32, of any shapes, on one device; as many on all ranks, of equal shapes.
                They may change at once.
            exact: whether they travel exact; residuals then stay as they are.
            of_senders: the mean of each value is over the ranks that sent it, of a compressor that
                keeps back the rest. How many these were is a second message.
        """
        step, self.steps = self.steps, self.steps + 1
        if not tensors:
            return Flight([])
        with self.or_refuse(self.caller):
            return self._start(names, tensors, step, exact=exact, of_senders=of_senders)

    def _start(
        self,
        names: Sequence[str],
        tensors: Sequence[torch.Tensor],
        step: int,
        *,
        exact: bool,
        of_senders: bool,
    ) -> Flight:
        starts = list(accumulate((x.numel() for x in tensors), initial=0))
        buffer = torch.cat([x.reshape(-1) for x in tensors])
        if exact:
            segments = [Segment(0, buffer.numel(), _EXACT)]
            future = self.average(
                buffer, self.config, segments=segments, seed=[0], name=self.caller
            )
            return Flight(tensors, future)
        rules = self.rules
        assert rules is not None
        config = for_any_message(self.config, rules)
        found = [Layer(n, x.dim(), x.numel()) for n, x in zip(names, tensors, strict=True)]
        segments = segments_of(rules, found, starts[:-1], config)
        kept = self.residuals_of(self.caller, config, found, segments, tensors)
        lost, keep = decayed(kept, config, segments, copies=True)
        seeds = self.seeds_of([f"{self.caller}/{name}" for name in names], step)
        then: Callable[[Sent], object] = lambda _: None  # noqa: E731
        senders = f"{self.caller}/senders"
        if of_senders:
            then = self._of_senders(buffer, config, segments, seeds, lost, senders)
        future = self.average(
            buffer, config, segments=segments, seed=seeds, name=self.caller, residuals=lost,
            then=then, followers=[senders] if of_senders else [],
        )  # fmt: skip
        return Flight(tensors, future, keep)

    @full_precision()
    def any_rank(self, flag: bool) -> bool:
        """Return whether a flag is set on any rank. Collective; does not count as an average."""
        share = torch.tensor([flag], dtype=torch.float32, device="cpu")
        whole = [Segment(0, 1, _EXACT)]
        name = f"{self.caller}/any_rank"
        self.average(share, self.config, segments=whole, seed=[0], name=name).wait()
        return bool(share)

    def _of_senders(
        self,
        buffer: torch.Tensor,
        config: Config,
        segments: Sequence[Segment],
        seeds: Sequence[int],
        lost: Sequence[torch.Tensor | None] | None,
        name: str,
    ) -> Callable[[Sent], None]:
        """Return what makes means over all ranks, in the buffer, those over senders."""
        # What is lost is compared with the very bits that were encoded.
        pieces = buffer.split([segment.numel for segment in segments])
        for piece, e in zip(pieces, lost or (), strict=False):
            if e is not None:
                piece += e
                e.zero_()
        owed, size = buffer.clone(), self.group.size()

        def then(sent: Sent) -> None:
            count = torch.ones_like(owed)
            parts = (x.split([segment.numel for segment in segments]) for x in (count, owed))
            for mine, all_, e in zip(*parts, lost or (), strict=False):
                if e is not None:
                    torch.ne(all_, e, out=mine)
            ones = _with_one_bit(config)
            one_bit = [
                replace(s, config=_with_one_bit(s.config) if s.config else None) for s in segments
            ]
            sent.follow(count, ones, segments=one_bit, seed=seeds, name=name)
            buffer.mul_(size).div_((count * size).round_().clamp_(min=1))

        return then


def _with_one_bit(config: Config) -> Config:
    """Return a config by which the values that a rank sent travel in one bit."""
    if config.bits == EXACT_BITS:
        return config
    return replace(config, value_bits=1, error_feedback=None)


def check_parameters(caller: str, parameters: Sequence[torch.Tensor]) -> None:
    """Require parameters whose values the core can carry.

    Raises:
        TypeError: one is complex, sparse, of float64, or where the core has no values; or a
            DTensor, of which each rank has a part.
        InvalidArgument: there are none, or they are on several devices.
    """
    if not parameters:
        raise InvalidArgument(f"{caller}: there is no parameter that requires a gradient")
    for i, parameter in enumerate(parameters):
        what = f"{caller}: parameter {i} of shape {tuple(parameter.shape)} is"
        if hasattr(parameter, "full_tensor"):  # to import DTensor takes long
            raise TypeError(
                f"{what} a DTensor, of which a rank has a part; averages are of whole copies. With "
                "FSDP2 use cgx_ops.torch.fsdp.compress(model), or leave fully_shard out"
            )
        if parameter.layout != torch.strided:
            raise TypeError(f"{what} {parameter.layout}; only dense ones can be averaged")
        if parameter.dtype not in DTYPES:
            raise TypeError(
                f"{what} {parameter.dtype}; train it in float32, float16 or bfloat16: model.float()"
            )
        if parameter.device.type not in devices():
            raise TypeError(
                f"{what} on {parameter.device}; build cgx_ops with CUDA (nvcc on PATH or in "
                "CUDA_HOME)"
            )
        if parameter.device != parameters[0].device:
            raise InvalidArgument(
                f"{what} on {parameter.device}, parameter 0 on {parameters[0].device}: one message "
                "is of one device"
            )
