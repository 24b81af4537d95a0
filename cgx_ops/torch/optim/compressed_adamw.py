"""CompressedAdamW: AdamW that sends its momentum compressed, and its variance rarely."""

import math
from dataclasses import asdict
from typing import Any, Unpack

import torch
import torch.distributed as dist

from cgx_ops import Config, Rules
from cgx_ops._core.adam import (
    MOMENTUM,
    VarianceSchedule,
    WarmupSteps,
    checked_warmup_config,
    checked_warmup_steps,
    has_settled,
    is_check,
    longest_update,
)
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.config import Keywords, config_of
from cgx_ops.errors import InvalidArgument, require_integer, require_share
from cgx_ops.rules import require_rules
from cgx_ops.torch.averaging.exchange import Carriers, Exchange
from cgx_ops.torch.averaging.loaded import require_keys
from cgx_ops.torch.averaging.state import by_hosts, check_carrier
from cgx_ops.torch.optim.base import ExchangingOptimizer, ParamUpdate


class CompressedAdamW(ExchangingOptimizer):
    """AdamW with a compressed momentum: about one bit per value over a long training.

    A step is one of two kinds. A *variance step* is a step of AdamW with the average of gradients,
    which are sent in 8 bits. A *momentum step* leaves the variance v unchanged. Each rank adds its
    gradient to the momentum m, and sends the update u = m / (sqrt(v) + eps) in 1 bit. The
    compression error is added to the next message::

        u <- average of compressed (beta1 m + (1 - beta1) gradient) / (sqrt(v) + eps)
        m <- u (sqrt(v) + eps)
        x <- x - lr (u / (1 - beta1^t) + weight_decay x)

    The first `warmup_steps` steps are variance steps. After them come `refreshes` variance steps
    at an interval of 1 step, then as many at intervals of 2, 4, 8, ... steps. A refresh counts in v
    like the steps since the last one, at most by a quarter.

    In AdamW the magnitude of u has a bound, because v contains the squares of the gradients in m.
    With a fixed v it has none, and training could diverge where v is tiny. So u is clipped to
    AdamW's bound, and a rank's own u to sqrt(ranks) times that bound.

    m and v have AdamW's bias correction, and weight decay is decoupled. Tang et al.: 1-bit Adam,
    ICML 2021. Lu et al.: 0/1 Adam, ICLR 2023.

    The optimizer needs each rank's own gradients: do not use a DistributedDataParallel that
    averages them. All ranks use the same arguments. The state of a parameter is `exp_avg` (m) and
    `exp_avg_sq` (v), float32, equal on all ranks. The entry `variance_weight` of a parameter group
    is the bias correction of v.

    Args:
        params: parameters, or groups of them, as in torch's optimizers.
        lr: learning rate, at least 0.
        betas: coefficients of m and v, at least 0 and less than 1.
        eps: added to sqrt(v), more than 0.
        weight_decay: decoupled weight decay, at least 0.
        warmup_steps: number of first steps that are variance steps, at least 1. "auto": a power of
            two, at least 8. The warm-up ends when v has changed by less than a factor of two, in
            the mean of its logarithm, while the number of steps doubled.
        refreshes: variance steps after the warm-up at each interval, before it doubles. 0: v stays
            fixed after the warm-up, as in 1-bit Adam.
        warmup_config: settings of gradients in variance steps, without error feedback. None: 8
            bits. `Config(bits=32)`: exact.
        process_group: the ranks that average. None: the default group.
        config: settings of the momentum's messages. None: 1 bit and a scale for each 512 values
            (compressor "levels"), after a rotation.
        rules: settings of parameters by their index over all groups: "0", "1", ... Parameters that
            they make exact are exact in variance steps, too.
        carrier: "native" sends by cgx_ops' own transports, over a group of any backend. "c10d"
            sends by torch's collectives: CPU tensors by gloo, CUDA tensors by the process group,
            for example NCCL, not gloo. With the same algorithm, both give the same bits.
        seed: seed of random rounding, 0 or more.
        **keywords: `bits`, `bucket_size`, `compressor` or `rounding`; each overrides that field of
            `config`.

    Attributes:
        exchange: settings of the messages, step count and residuals.
        schedule: the next variance step (`due`) and the `interval`, which is 0 in the warm-up.

    The arguments `warmup_steps`, `refreshes` and `warmup_config` are also attributes.

    Raises:
        InvalidArgument: an argument is out of range, `warmup_config` has error feedback, or a
            compressor is "sign", whose votes have no magnitude.
        TypeError: a parameter is complex, sparse or float64.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from cgx_ops.torch.optim import CompressedAdamW
        >>> dist.init_process_group("cgx", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(64, 1)  # without DistributedDataParallel
        >>> optimizer = CompressedAdamW(model.parameters(), lr=1e-3, warmup_steps=5)
        >>> for _ in range(20):
        ...     optimizer.zero_grad()
        ...     model(torch.randn(8, 64)).square().mean().backward()
        ...     optimizer.step()
        >>> optimizer.schedule.due, optimizer.schedule.interval
        (20, 4)
        >>> dist.destroy_process_group()
    """

    of_state = ("exp_avg", "exp_avg_sq")
    of_copy = (
        *ExchangingOptimizer.of_copy,
        *("warmup_steps", "refreshes", "warmup_config", "schedule"),
    )

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        warmup_steps: WarmupSteps = "auto",
        refreshes: int = 4,
        warmup_config: Config | None = None,
        process_group: dist.ProcessGroup | None = None,
        config: Config | None = None,
        rules: Rules = Rules(),  # noqa: B008  (immutable)
        carrier: Carriers = "native",
        seed: int = 0,
        **keywords: Unpack[Keywords],
    ) -> None:
        caller = "CompressedAdamW"
        self.warmup_steps: WarmupSteps = checked_warmup_steps(caller, warmup_steps)
        self.refreshes = require_integer(f"{caller}: refreshes", refreshes, 0)
        config = config_of(config or MOMENTUM, **keywords)
        votes = config.compressor == "sign" and config.bits != EXACT_BITS
        if votes or "sign" in require_rules(rules, f"{caller}: ").compressors:
            raise InvalidArgument(
                f"{caller}: compressor 'sign' sends votes, which have no magnitude: use Signum"
            )
        exchange = Exchange(caller, process_group, config, carrier, rules, seed)
        self.warmup_config = by_hosts(checked_warmup_config(caller, warmup_config, config))
        check_carrier(carrier, self.warmup_config)
        self.schedule = VarianceSchedule()
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"variance_weight": 0.0}, exchange)
        count = sum(len(group["params"]) for group in self.param_groups)
        exchange.warn_of_unmatched([str(i) for i in range(count)])

    def check_group(self, group: dict[str, Any]) -> None:
        """Check the settings of a group of parameters.

        Args:
            group: the group.

        Raises:
            InvalidArgument: a setting is out of range.
        """
        super().check_group(group)
        for i, beta in enumerate(group["betas"]):
            require_share(f"CompressedAdamW: betas[{i}]", beta)
        if not group["eps"] > 0:
            raise InvalidArgument(
                f"CompressedAdamW: eps is {group['eps']!r}; it must be more than 0"
            )

    def updates(self, params: list[ParamUpdate]) -> list[torch.Tensor]:
        """Update the states of parameters from their gradients.

        Args:
            params: the parameters.

        Returns:
            The update of each parameter, which is multiplied by lr.
        """
        step = self.exchange.steps
        if step == self.schedule.due:
            found = self._variance_step(params, step)
        else:
            found = self._momentum_step(params)
        return [
            u / (1 - each.group["betas"][0] ** (step + 1))
            for each, u in zip(params, found, strict=True)
        ]

    def _variance_step(self, params: list[ParamUpdate], step: int) -> list[torch.Tensor]:
        gradients = [each.gradient for each in params]
        gradients = self.averaged(params, gradients, config=self.warmup_config)
        for group in self.param_groups:
            kept = self.schedule.kept(group["betas"][1])
            group["variance_weight"] = group["variance_weight"] * kept + (1 - kept)
        for (_, group, state, *_), g in zip(params, gradients, strict=True):
            beta1, kept = group["betas"][0], self.schedule.kept(group["betas"][1])
            state["exp_avg"] = state["exp_avg"] * beta1 + g * (1 - beta1)
            state["exp_avg_sq"] = state["exp_avg_sq"] * kept + g * g * (1 - kept)
        self.schedule = self._advanced(params, step)
        return [each.state["exp_avg"] / _denominator(each) for each in params]

    def _advanced(self, params: list[ParamUpdate], step: int) -> VarianceSchedule:
        """Return the schedule after a variance step."""
        schedule, refreshes = self.schedule, self.refreshes
        if self.warmup_steps != "auto":
            return schedule.advanced(step, ends=step + 1 >= self.warmup_steps, refreshes=refreshes)
        ends = False
        if schedule.interval == 0 and is_check(step + 1):
            # A sum of integers is the same on every rank, whatever the order of the additions.
            levels = [_level(_variance(each)) for each in params]
            numel = sum(each.parameter.numel() for each in params)
            ends = has_settled(sum(levels), schedule.level, numel)
            schedule = VarianceSchedule(level=sum(levels))
        return schedule.advanced(step, ends=ends, refreshes=refreshes)

    def _momentum_step(self, params: list[ParamUpdate]) -> list[torch.Tensor]:
        root = math.sqrt(self.exchange.group.size())
        denominators, limits, own = [_denominator(each) for each in params], [], []
        for (_, group, state, _, g), d in zip(params, denominators, strict=True):
            beta1, beta2 = group["betas"]
            limits.append(longest_update(beta1, beta2))
            u = (state["exp_avg"] * beta1 + g * (1 - beta1)) / d
            # An infinity becomes NaN, because clamp() would hide it.
            own.append(u.clamp(-root * limits[-1], root * limits[-1]) + (u - u))
        means = self.averaged(params, own)
        found = [u.clamp(-most, most) for u, most in zip(means, limits, strict=True)]
        for each, u, d in zip(params, found, denominators, strict=True):
            each.state["exp_avg"] = u * d
        return found

    def _settings(self) -> dict[str, object]:
        own = ("schedule", "warmup_steps", "refreshes", "warmup_config")
        return super()._settings() | {name: getattr(self, name) for name in own}

    def _common(self) -> dict[str, Any]:
        return super()._common() | {"schedule": self.schedule}

    def _adopt(self, common: dict[str, Any]) -> None:
        super()._adopt(common)
        self.schedule = common["schedule"]

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint. Each rank saves its own.

        Returns:
            That of the other optimizers that communicate, plus "schedule".

        Raises:
            InvalidArgument: torch's get_state_dict() is the caller, which drops the additional
                keys.
        """
        return super().state_dict() | {"schedule": asdict(self.schedule)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Restore the optimizer from what `state_dict` returned; training continues bit for bit.

        Args:
            state_dict: what `state_dict` returned, on this rank or through
                torch.distributed.checkpoint.

        Raises:
            InvalidArgument: the state belongs to another optimizer or model, or lacks this rank's
                residuals.
        """
        schedule = state_dict.get("schedule", {})
        if state_dict.get("exchange", {}).get("caller") == self.exchange.caller:
            require_keys("CompressedAdamW.schedule", schedule, asdict(self.schedule))
        super().load_state_dict({k: x for k, x in state_dict.items() if k != "schedule"})
        self.schedule = VarianceSchedule(**schedule)


def _variance(each: ParamUpdate) -> torch.Tensor:
    """Return v with its bias correction."""
    return each.state["exp_avg_sq"] / each.group["variance_weight"]


def _denominator(each: ParamUpdate) -> torch.Tensor:
    return _variance(each).sqrt() + each.group["eps"]


def _level(v: torch.Tensor) -> int:
    """Return the sum of the logarithms of v in 1/16 octaves, from exponents and leading bits."""
    return int((v.view(torch.int32) >> 19).sum(dtype=torch.int64))
