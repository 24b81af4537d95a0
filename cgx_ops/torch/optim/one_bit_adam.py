"""OneBitAdam: Adam, whose variance is fixed after a warm-up, while momentum is compressed."""

from typing import Any, Unpack

import torch
import torch.distributed as dist

from cgx_ops import Config, Rules
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.config import Keywords, config_of
from cgx_ops.errors import InvalidArgument, require_integer, require_share
from cgx_ops.rules import require_rules
from cgx_ops.torch.averaging.exchange import Carriers, Exchange
from cgx_ops.torch.optim.base import ExchangingOptimizer, ParamUpdate


class OneBitAdam(ExchangingOptimizer):
    """1-bit Adam (Tang et al., ICML 2021): Adam, with a momentum that travels in one bit.

    The first `warmup_steps` steps are Adam's: gradients are averaged exact, m and v follow. Then v
    stays as it is. Each rank adds its own gradient to m, sends that compressed, and all go on with
    the average as m. What compression loses is added to what is sent next: of a rank's own message,
    and, on the rank that owns a part of a tensor, of that part's average. One residual holds both.

        x <- x - lr (m / (sqrt(v) + eps) + weight_decay x)

    As in the paper's algorithm and in DeepSpeed's code m and v are not divided by 1 - beta^t: in
    the first steps, while v is small, steps are up to (1 - beta1) / sqrt(1 - beta2) = 3.2 times
    Adam's. Begin with a small lr. Weight decay is decoupled, as in AdamW.

    Elements whose v is 0 when the warm-up ends (rows of an embedding that no batch had) stay where
    they are: of one bit they would get what their neighbours have, over eps. DeepSpeed has the user
    mask them.

    A parameter's state: exp_avg (m) and exp_avg_sq (v), float32, equal on all ranks.
    """

    of_state = ("exp_avg", "exp_avg_sq")
    of_copy = (*ExchangingOptimizer.of_copy, "warmup_steps")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        warmup_steps: int,
        process_group: dist.ProcessGroup | None = None,
        config: Config | None = None,
        rules: Rules = Rules(),  # noqa: B008  (immutable)
        carrier: Carriers = "native",
        seed: int = 0,
        **keywords: Unpack[Keywords],
    ) -> None:
        """Make an optimizer, equal on all ranks.

        Args:
            params: parameters, or groups of them, as of torch's optimizers.
            lr: at least 0; it and the next ones are as of torch.optim.AdamW, of groups, too.
            betas: of m and of v, at least 0 and less than 1.
            eps: more than 0.
            weight_decay: at least 0.
            warmup_steps: at least 1; 15 to 25 % of training in the paper. v must have settled.
            process_group: whose ranks average; None: the default group.
            config: how the momentum travels; None: 1 bit and a scale for each 512 values
                (compressor "levels").
            rules: settings of parameters by their place in the groups: "0", "1".
            carrier: who moves the bytes, as of cgx_ops.torch.ddp.QuantizedAllreduceState.
            seed: of the noise.
            **keywords: bits, bucket_size, compressor and rounding, which replace those of config.

        Raises:
            InvalidArgument (a ValueError): an argument is out of its range.
            TypeError: a parameter is complex, sparse or of float64.
        """
        # At least 1, for v to be more than 0.
        self.warmup_steps = require_integer("OneBitAdam: warmup_steps", warmup_steps, 1)
        config = config_of(config or Config(compressor="levels", bits=1), **keywords)
        votes = config.compressor == "sign" and config.bits != EXACT_BITS
        if votes or "sign" in require_rules(rules, "OneBitAdam: ").compressors:
            raise InvalidArgument("OneBitAdam: a vote has no magnitude: use Signum")
        exchange = Exchange("OneBitAdam", process_group, config, carrier, rules, seed)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, exchange)
        count = sum(len(group["params"]) for group in self.param_groups)
        exchange.warn_of_unmatched([str(i) for i in range(count)])

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise InvalidArgument if a setting of a group of parameters is out of its range."""
        super().check_group(group)
        for i, beta in enumerate(group["betas"]):
            require_share(f"OneBitAdam: betas[{i}]", beta)
        if not group["eps"] > 0:
            raise InvalidArgument(f"OneBitAdam: eps is {group['eps']!r}; it must be more than 0")

    def updates(self, params: list[ParamUpdate]) -> list[torch.Tensor]:
        """Change the states of parameters by their gradients; return what to step by."""
        warming_up = self.exchange.steps < self.warmup_steps
        gradients = [each.gradient for each in params]
        if warming_up:
            gradients = self.averaged(params, gradients, exact=True)
        momenta = []
        for (_, group, state, *_), g in zip(params, gradients, strict=True):
            beta1, beta2 = group["betas"]
            momenta.append(state["exp_avg"] * beta1 + g * (1 - beta1))
            if warming_up:
                state["exp_avg_sq"] = state["exp_avg_sq"] * beta2 + g * g * (1 - beta2)
        if not warming_up:
            momenta = [mean.clone() for mean in self.averaged(params, momenta)]
        for each, m in zip(params, momenta, strict=True):
            each.state["exp_avg"] = m
        return [_adams_step(each.state, each.group["eps"]) for each in params]


def _adams_step(state: dict[str, torch.Tensor], eps: float) -> torch.Tensor:
    m, v = state["exp_avg"], state["exp_avg_sq"]
    return torch.where(v == 0, 0.0, m / (v.sqrt() + eps))
