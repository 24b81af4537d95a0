"""Exchange: averages lists of tensors over the ranks, in one compressed message each.

Used for differences of weights (averager.py, diloco/) and for momenta (optim/). With error
feedback, the residual of each tensor is added to the next tensor of its name. An exchange that
fails leaves residuals unchanged.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Literal

import torch
import torch.distributed as dist

from cgx_ops import Config, Rules, Segment
from cgx_ops._core.adam import config_of_gradients
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.errors import InvalidArgument
from cgx_ops.rules import require_rules
from cgx_ops.torch.averaging.arithmetic import full_precision, use_on_this_stream
from cgx_ops.torch.averaging.confirmation import Confirmation
from cgx_ops.torch.averaging.layers import Layer, segments_of
from cgx_ops.torch.averaging.residuals import decayed, nothing
from cgx_ops.torch.averaging.sent import Sent
from cgx_ops.torch.averaging.state import AveragingState
from cgx_ops.torch.graph.work import DTYPES, devices

Carriers = Literal["native", "c10d"]
EXACT = Config(bits=EXACT_BITS)


class Flight:
    """A pending average.

    Attributes:
        like: the tensors that are averaged.
    """

    def __init__(
        self,
        like: Sequence[torch.Tensor],
        future: torch.futures.Future[torch.Tensor] | None = None,
        keep: Callable[[], None] = nothing,
        confirmation: Confirmation | None = None,
    ) -> None:
        """Describe a pending average.

        Args:
            like: the tensors.
            future: of the means, flat and concatenated. None: `like` are the means already.
            keep: called when the means are there; it updates the residuals.
            confirmation: the message that follows, if there is one.
        """
        self.like = like
        self._future, self._keep, self._confirmation = future, keep, confirmation

    @full_precision()
    def wait(self) -> list[torch.Tensor]:
        """Wait for the means, and their confirmation, and return them; update the residuals.

        Raises:
            RuntimeError: the exchange failed.
        """
        if self._future is not None:
            buffer = self._future.wait()
            if self._confirmation is not None:
                self._confirmation.require()
            self._accept(buffer)
        return list(self.like)

    @property
    def is_confirmed(self) -> bool:
        """Whether wait() has returned the means, so that the residuals are those after them."""
        return self._future is None

    @property
    def has_means(self) -> bool:
        """Whether this rank has the means, although wait() failed: the confirmation did."""
        return self._confirmation is not None and self._confirmation.has_average

    @full_precision()
    def accept(self) -> list[torch.Tensor]:
        """Return the means if has_means, although wait() failed; update the residuals."""
        if self._future is not None:
            assert self._confirmation is not None
            self._accept(self._confirmation.average)
        return list(self.like)

    def _accept(self, buffer: torch.Tensor) -> None:
        self._keep()
        pieces = buffer.split([x.numel() for x in self.like])
        self.like = [piece.view(x.shape) for piece, x in zip(pieces, self.like, strict=True)]
        self._future = None


class Exchange(AveragingState):
    """The ranks, the config and the residuals of successive averages.

    Attributes:
        caller: name of the owner, for errors and to identify messages.
        steps: number of averages so far.
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
        """Warn once about rules that match none of these parameter names, which must be all."""
        assert self.rules is not None
        self.rules.warn_of_unmatched(names, f"{self.caller}: ")

    def continue_at(self, steps: int) -> None:
        """Take the count, not a lower one, of a rank whose parameters this rank takes.

        If this rank is behind, its residuals are cleared: the other one's averages contain them.
        """
        if steps > self.steps:
            self.residuals.tensors.clear()
        self.steps = steps

    def require_kept(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        """Require that ranks store the values that they do not send, for means over senders."""
        assert self.rules is not None
        for name, x in zip(names, tensors, strict=True):
            own = self.rules.of(name, x.dim(), self.config)
            if not own.is_exact and (own.compressor != "topk" or not own.keeps_residuals):
                raise InvalidArgument(
                    f"{self.caller}: mean_over='senders' needs compressor='topk' with error "
                    f"feedback, but '{name}' is sent by {own.compressor!r}, with "
                    f"error_feedback={own.keeps_residuals}: use Config(compressor='topk')"
                )

    def mean(
        self,
        names: Sequence[str],
        tensors: Sequence[torch.Tensor],
        *,
        config: Config | None = None,
    ) -> list[torch.Tensor]:
        """Return the mean of each tensor over the ranks; arguments and errors as start().

        A failed call does not count as a step, on any rank.
        """
        steps = self.steps
        try:
            return self.start(names, tensors, config=config).wait()
        except Exception:
            self.steps = steps
            raise

    @full_precision()
    def start(
        self,
        names: Sequence[str],
        tensors: Sequence[torch.Tensor],
        *,
        config: Config | None = None,
        of_senders: bool = False,
        confirms: bool = False,
    ) -> Flight:
        """Start averaging tensors over the ranks; the means are bitwise equal on all ranks.

        Args:
            names: names of the tensors, which identify residuals and noise.
            tensors: float32, of any shapes, on one device. All ranks pass the same number and
                shapes. They may be changed after the call.
            config: settings of this message, without error feedback; residuals do not change.
                Tensors that the rules make exact are exact here, too. None: those of the exchange.
            of_senders: average each value over the ranks that sent it, for a compressor that does
                not send all values. A second message counts these ranks.
            confirms: let the average fail unless all ranks have its means, by one more message.
        """
        step, self.steps = self.steps, self.steps + 1
        if not tensors:
            return Flight([])
        with self.or_refuse(tensors[0].device, self.caller):
            return self._start(
                names, tensors, step, config, of_senders=of_senders, confirms=confirms
            )

    def _start(
        self,
        names: Sequence[str],
        tensors: Sequence[torch.Tensor],
        step: int,
        own: Config | None,
        *,
        of_senders: bool,
        confirms: bool,
    ) -> Flight:
        starts = list(accumulate((x.numel() for x in tensors), initial=0))
        buffer = torch.cat([x.reshape(-1) for x in tensors])
        if own is not None and own.bits == EXACT_BITS:
            segments = [Segment(0, buffer.numel(), EXACT)]
            future = self.average(
                buffer, self.config, segments=segments, seed=[0], name=self.caller
            )
            return Flight(tensors, future)
        rules = self.rules
        assert rules is not None
        config = self.config
        found = [Layer(n, x.dim(), x.numel()) for n, x in zip(names, tensors, strict=True)]
        segments = segments_of(rules, found, starts[:-1], config)
        if own is not None:
            segments = [
                replace(s, config=config_of_gradients(own, s.config or config)) for s in segments
            ]
            config = own
        kept = self.residuals_of(self.caller, config, found, segments, tensors)
        lost, keep = decayed(kept, config, segments, copies=True)
        seeds = self.seeds_of([f"{self.caller}/{name}" for name in names], step)
        followers: dict[str, Callable[[Sent], object]] = {}
        if of_senders:
            name = f"{self.caller}/senders"
            followers[name] = self._of_senders(buffer, config, segments, seeds, lost, name)
        confirmation = Confirmation(buffer, self.caller) if confirms else None
        if confirmation is not None:
            followers[confirmation.name] = partial(confirmation.follow, config=config)

        def then(sent: Sent) -> None:
            for follow in followers.values():
                follow(sent)

        future = self.average(
            buffer, config, segments=segments, seed=seeds, name=self.caller, residuals=lost,
            then=then, followers=list(followers),
        )  # fmt: skip
        return Flight(tensors, future, keep, confirmation)

    @full_precision()
    def any_rank(self, flag: bool) -> bool:
        """Return whether a flag is set on any rank. Collective; does not count as an average."""
        share = torch.tensor([flag], dtype=torch.float32, device="cpu")
        whole = [Segment(0, 1, EXACT)]
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
        """Return a function that converts means over all ranks into means over senders."""
        # A value was sent if its new residual differs from it, bit by bit. So add the old residual
        # here, not in the core.
        pieces = buffer.split([segment.numel for segment in segments])
        for piece, e in zip(pieces, lost or (), strict=False):
            if e is not None:
                piece += e
                e.zero_()
        wanted, size = buffer.clone(), self.group.size()

        def then(sent: Sent) -> None:
            use_on_this_stream(wanted)
            count = torch.ones_like(wanted)
            parts = (x.split([segment.numel for segment in segments]) for x in (count, wanted))
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
    """Return a config that sends the same values with 1 bit each."""
    if config.is_exact:
        return config
    return replace(config, value_bits=1, error_feedback=None)


def check_parameters(caller: str, parameters: Sequence[torch.Tensor]) -> None:
    """Require parameters whose values the core can send.

    Raises:
        TypeError: a parameter is complex, sparse, float64, on an unsupported device, or a DTensor,
            of which each rank has only a part.
        InvalidArgument: there are none, or they are on several devices.
    """
    if not parameters:
        raise InvalidArgument(f"{caller}: no parameter requires a gradient")
    for i, parameter in enumerate(parameters):
        what = f"{caller}: parameter {i} of shape {tuple(parameter.shape)} is"
        if hasattr(parameter, "full_tensor"):  # importing DTensor is slow
            raise TypeError(
                f"{what} a DTensor, but averages need whole parameters on each rank. With FSDP2, "
                "use cgx_ops.torch.fsdp.compress(model), or leave fully_shard out"
            )
        if parameter.layout != torch.strided:
            raise TypeError(f"{what} {parameter.layout}; only dense ones can be averaged")
        if parameter.dtype not in DTYPES:
            raise TypeError(
                f"{what} {parameter.dtype}; train it in float32, float16 or bfloat16: model.float()"
            )
        if parameter.device.type not in devices():
            raise TypeError(
                f"{what} on {parameter.device}; rebuild cgx_ops with CUDA (nvcc on PATH or in "
                "CUDA_HOME)"
            )
        if parameter.device != parameters[0].device:
            raise InvalidArgument(
                f"{what} on {parameter.device}, parameter 0 on {parameters[0].device}; all "
                "parameters must be on one device"
            )
