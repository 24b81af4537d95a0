"""QuantizedModelAverager: weights are averaged every few steps, and travel as what changed.

    from cgx_ops.torch.averaging import QuantizedModelAverager
    averager = QuantizedModelAverager(period=4, warmup_steps=100, config=cgx_ops.Config(bits=4))
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), 0.1), averager)

  1. the first time parameters are averaged exact; the average is kept, equal on all ranks
  2. from then on each rank sends its differences to the last average, and all add the mean of these
     to it

Post-local SGD: Lin, Stich, Patel, Jaggi: Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020.
That differences are what to quantize: Reisizadeh et al.: FedPAQ, AISTATS 2020.
"""

from collections.abc import Iterable
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager

from cgx_ops import Config, Rules
from cgx_ops.config import Keywords, config_of
from cgx_ops.errors import InvalidArgument, require_integer
from cgx_ops.torch.averaging.arithmetic import full_precision
from cgx_ops.torch.averaging.exchange import Carriers, Exchange, check_parameters
from cgx_ops.torch.averaging.grad_scaler import refuse_grad_scaler
from cgx_ops.torch.averaging.loaded import require_keys

_CALLER = "QuantizedModelAverager"
_KEPT = ("step", "last", "exchange")


class Average:
    """The last average: equal on all ranks.

    An object of its own, so that torch.distributed.checkpoint saves it whole, whatever is in it.

    Attributes:
        tensors: float32, one for each parameter, in order; none before the first average.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self.tensors = [x.clone() for x in tensors]


class QuantizedModelAverager(ModelAverager):
    """Averages parameters every `period` steps, after `warmup_steps`, in a Config's bits.

    It stands where torch's PeriodicModelAverager stands: average_parameters() after each step of
    the optimizer, or inside of torch's PostLocalSGDOptimizer. After an average all ranks have the
    same parameters, to the bit.

    It takes the memory of a copy of the parameters in float32, and of another one with error
    feedback. state_dict() and load_state_dict() save and restore it; PostLocalSGDOptimizer's save
    its `step` alone.

    Attributes:
        period: steps from one average to the next.
        warmup_steps: so many steps first nothing is averaged: gradients should be.
        process_group: whose ranks average.
        step: calls of average_parameters() so far.
        last: the last average.
        exchange: how differences travel, and what was lost of them.
    """

    def __init__(
        self,
        period: int,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
        *,
        config: Config | None = None,
        rules: Rules = Rules(),  # noqa: B008  (immutable)
        carrier: Carriers = "native",
        seed: int = 0,
        **keywords: Unpack[Keywords],
    ) -> None:
        """Make an averager, equal on all ranks.

        Args:
            period: at least 1.
            warmup_steps: at least 0; as many as PostLocalSGDState's start_localSGD_iter.
            process_group: None: the default group.
            config: how differences travel; None: Config(). Residuals are added to the next ones
                where config.keeps_residuals is True, as with gradients.
            rules: settings of parameters by their place in the list: "0", "1".
            carrier: who moves the bytes, as of cgx_ops.torch.ddp.QuantizedAllreduceState.
            seed: of the noise.
            **keywords: bits, bucket_size, compressor and rounding, which replace those of config.

        Raises:
            InvalidArgument (a ValueError): an argument is out of its range.
        """
        self.period = require_integer(f"{_CALLER}: period", period, 1)
        self.warmup_steps = require_integer(f"{_CALLER}: warmup_steps", warmup_steps, 0)
        super().__init__(process_group)
        self.last = Average()
        self.exchange = Exchange(
            _CALLER, process_group, config_of(config, **keywords), carrier, rules, seed
        )

    @full_precision()
    def average_parameters(
        self, params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]
    ) -> None:
        """Count a step, and if it is time average the parameters in place. Collective then.

        Args:
            params: parameters, or an optimizer's param_groups; the same ones in every call, in one
                order on all ranks. Those that require no gradient are left alone. (torch's
                averagers leave those without a gradient alone, which may differ between ranks.)

        Raises:
            TypeError: a parameter is complex, sparse or of float64.
            InvalidArgument: the parameters are not those of the last average; the process group
                cannot be served, or the state is another rank's; a torch.amp.GradScaler steps the
                PostLocalSGDOptimizer, and would skip averages on one rank only.
            RuntimeError: a peer is late or gone, or gave other parameters (on every rank).
        """
        refuse_grad_scaler(
            f"{_CALLER}.average_parameters",
            "step the inner optimizer by scaler.step(optimizer.optim), then call "
            "average_parameters() in every iteration",
        )
        after_warmup = self.step - self.warmup_steps
        if after_warmup >= 0 and after_warmup % self.period == 0:
            self._average(_trained(params))
        self.step += 1

    def _average(self, parameters: list[torch.Tensor]) -> None:
        check_parameters(_CALLER, parameters)
        known, now = self.last.tensors, [p.to(torch.float32) for p in parameters]
        places = [str(i) for i in range(len(parameters))]
        self.exchange.warn_of_unmatched(places)
        if not known:
            self.last = Average(self.exchange.mean(places, now, exact=True))
        else:
            with self.exchange.or_refuse(_CALLER):
                if [x.shape for x in known] != [p.shape for p in parameters]:
                    raise InvalidArgument(
                        f"{_CALLER}: the last average was of {len(known)} parameters, and these "
                        f"are {len(parameters)}, or of other shapes: it is another model's"
                    )
            # A checkpoint may have come from another device.
            known = [x.to(p.device) for x, p in zip(known, parameters, strict=True)]
            own = [p - x for p, x in zip(now, known, strict=True)]
            changes = self.exchange.mean(places, own)
            self.last.tensors = [x + c for x, c in zip(known, changes, strict=True)]
        for parameter, average in zip(parameters, self.last.tensors, strict=True):
            parameter.copy_(average)

    def state_dict(self) -> dict[str, Any]:
        """Return what is saved: each rank's own, if there is error feedback."""
        last = Average(self.last.tensors)
        return {"step": self.step, "last": last, "exchange": self.exchange.saved()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue, in place, where the averager was that state_dict() was called of.

        Raises:
            InvalidArgument: this is not the state_dict() of an averager, or lacks this rank's
                residuals.
        """
        require_keys(_CALLER, state_dict, _KEPT)
        self.exchange.load_state_dict(state_dict["exchange"])
        self.step, self.last = state_dict["step"], Average(state_dict["last"].tensors)

    def consolidate(self) -> None:
        """Make residuals their mean over the ranks, so that any number of ranks loads them.

        Collective. As of cgx_ops.torch.ddp.QuantizedAllreduceState.
        """
        self.exchange.consolidate()


def _trained(params: Iterable[Any]) -> list[torch.Tensor]:
    """Return the parameters of a list, or of param_groups, that require gradients."""
    flat: list[torch.Tensor] = []
    for each in params:
        flat += each["params"] if isinstance(each, dict) else [each]
    return [p for p in flat if p.requires_grad]
