"""QuantizedModelAverager: averages a model's weights every few steps, with compressed differences.

The first average is exact. From then on each rank sends its difference from the last average, and
all ranks add the mean difference to it. Post-local SGD: Lin, Stich, Patel, Jaggi: Don't Use Large
Mini-Batches, Use Local SGD, ICLR 2020. Quantized differences: Reisizadeh et al.: FedPAQ, AISTATS
2020.
"""

from collections.abc import Iterable
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager

from cgx_ops import Config, Rules
from cgx_ops._core.consistency import require_same
from cgx_ops.config import Keywords, config_of
from cgx_ops.errors import InvalidArgument, require_integer
from cgx_ops.torch.averaging.arithmetic import full_precision
from cgx_ops.torch.averaging.exact import gather_over, state_ahead, values_on
from cgx_ops.torch.averaging.exchange import EXACT, Carriers, Exchange, check_parameters
from cgx_ops.torch.averaging.grad_scaler import refuse_grad_scaler
from cgx_ops.torch.averaging.loaded import require_keys

_CALLER = "QuantizedModelAverager"
_KEPT = ("step", "last", "exchange")


class Average:
    """The last average, equal on all ranks.

    A separate class, so that torch.distributed.checkpoint saves it as one object.

    Attributes:
        tensors: float32, one for each parameter, in order; empty before the first average.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self.tensors = [x.clone() for x in tensors]


class QuantizedModelAverager(ModelAverager):
    """Average parameters every `period` steps after `warmup_steps`, with compressed messages.

    A replacement for torch's PeriodicModelAverager: call `average_parameters` after each optimizer
    step, or pass the averager to torch's PostLocalSGDOptimizer. After an average all ranks have
    bitwise equal parameters. All ranks use the same arguments.

    It uses memory for a float32 copy of the parameters, and for a second one with error feedback.
    Save it with `state_dict`: the state_dict of PostLocalSGDOptimizer contains only its `step`.

    Args:
        period: number of steps between averages, at least 1.
        warmup_steps: number of first steps without averages, in which gradients should be averaged.
            Use the same value for start_localSGD_iter of PostLocalSGDState.
        process_group: the ranks that average. None: the default group.
        config: compressor, bits and the other settings. None: `Config()`, which is 4 bits. If
            `config.keeps_residuals` is True, the quantization error of each difference is added to
            the next one.
        rules: settings of parameters by their position in the list: "0", "1", ...
        carrier: "native" sends by cgx_ops' own transports, over a group of any backend. "c10d"
            sends by torch's collectives: CPU tensors by gloo, CUDA tensors by the process group,
            for example NCCL, not gloo. With the same algorithm, both give the same bits.
        seed: seed of random rounding, 0 or more.
        **keywords: `bits`, `bucket_size`, `compressor` or `rounding`; each overrides that field of
            `config`.

    Attributes:
        step: number of calls of `average_parameters` so far.
        last: the last average.
        exchange: settings and residuals of the messages.

    The arguments `period`, `warmup_steps` and `process_group` are also attributes.

    Raises:
        InvalidArgument: an argument is out of range.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from cgx_ops.torch.averaging import QuantizedModelAverager
        >>> dist.init_process_group("cgx", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> averager = QuantizedModelAverager(period=4, bits=4)
        >>> for _ in range(8):
        ...     optimizer.step()
        ...     averager.average_parameters(model.parameters())
        >>> averager.step
        8
        >>> dist.destroy_process_group()
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
        """Count a step, and average the parameters in place if an average is due.

        Collective if an average is due.

        Args:
            params: parameters, or the param_groups of an optimizer; the same ones in each call, in
                the same order on all ranks. Parameters that do not require gradients are not
                averaged. (torch's averagers skip parameters without a gradient, which may differ
                between ranks.)

        Raises:
            TypeError: a parameter is complex, sparse or float64.
            InvalidArgument: the parameters differ from those of the last average, cgx_ops cannot
                connect the process group, or the state belongs to another rank. Also if a
                torch.amp.GradScaler steps the PostLocalSGDOptimizer, because it would skip averages
                on one rank only.
            RuntimeError: a peer is late or lost, or passed other parameters; every rank raises it.
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
        names = [str(i) for i in range(len(parameters))]
        self.exchange.warn_of_unmatched(names)
        if not known:
            self.last = Average(self.exchange.mean(names, now, config=EXACT))
        else:
            with self.exchange.or_refuse(parameters[0].device, _CALLER):
                if [x.shape for x in known] != [p.shape for p in parameters]:
                    raise InvalidArgument(
                        f"{_CALLER}: the last average has {len(known)} parameters, but "
                        f"{len(parameters)} were passed, or their shapes differ: the average is "
                        "another model's; pass the same parameters in each call"
                    )
            # A checkpoint may have come from another device.
            known = [x.to(p.device) for x, p in zip(known, parameters, strict=True)]
            own = [p - x for p, x in zip(now, known, strict=True)]
            changes = self.exchange.mean(names, own)
            self.last.tensors = [x + c for x, c in zip(known, changes, strict=True)]
        for parameter, average in zip(parameters, self.last.tensors, strict=True):
            parameter.copy_(average)

    def synchronize(self, params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]) -> None:
        """Continue on all ranks from the one that has taken the most steps. Collective.

        Call it after the members of the group have changed, before the next step: the last average
        may have failed on some ranks only, and new ranks have none. All ranks take the parameters,
        the last average and the step of the rank that is ahead; of equal ones, the lowest. Ranks
        that were not behind keep their residuals; others start from zero, because the average
        contains theirs.

        Args:
            params: as for `average_parameters`.

        Raises:
            InvalidArgument: ranks have parameters of other shapes or dtypes; every rank raises it.
            RuntimeError: a peer is late or lost; the text names the rank.
        """
        parameters, group = _trained(params), self.exchange.group
        require_same(
            f"{_CALLER}.synchronize",
            {"parameters:": [f"{p.dtype} {[*p.shape]}" for p in parameters]},
            gather_over(group),
            "Make the same model on all ranks",
            error=InvalidArgument,
        )
        own = self.exchange.steps, bool(self.last.tensors)
        source, step, (averages, averaged) = state_ahead(group, self.step, own)
        found = [values_on(group, source, p) for p in parameters]
        # A checkpoint may have come from another device.
        last = zip(self.last.tensors or found, parameters, strict=True) if averaged else ()
        last = [values_on(group, source, x.to(p.device, torch.float32)) for x, p in last]
        # Nothing changes before all of it has arrived, so that a failed call can be repeated.
        for parameter, values in zip(parameters, found, strict=True):
            parameter.detach().copy_(values)
        self.step, self.last = step, Average(last)
        self.exchange.continue_at(averages)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint. With error feedback it differs between ranks.

        Returns:
            The state by name.
        """
        last = Average(self.last.tensors)
        return {"step": self.step, "last": last, "exchange": self.exchange.saved()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the averager in place from what `state_dict` returned.

        Args:
            state_dict: what `state_dict` returned, on this rank.

        Raises:
            InvalidArgument: this is not the state_dict of an averager, or it lacks this rank's
                residuals.
        """
        require_keys(_CALLER, state_dict, _KEPT)
        self.exchange.load_state_dict(state_dict["exchange"])
        self.step, self.last = state_dict["step"], Average(state_dict["last"].tensors)

    def consolidate(self) -> None:
        """Replace residuals by their mean over the ranks. Collective.

        A checkpoint that is saved afterwards can be loaded on any number of ranks.

        Raises:
            InvalidArgument: ranks have residuals of different parameters.
        """
        self.exchange.consolidate()


def _trained(params: Iterable[Any]) -> list[torch.Tensor]:
    """Return the parameters that require gradients, from a list or from param_groups."""
    flat: list[torch.Tensor] = []
    for each in params:
        flat += each["params"] if isinstance(each, dict) else [each]
    return [p for p in flat if p.requires_grad]
