"""OneBitAdam: Adam with a compressed momentum, and a variance that is fixed after a warm-up."""

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
    """1-bit Adam: Adam with a momentum that is sent in one bit per value after a warm-up.

    The first `warmup_steps` steps are Adam's, with exact averages. Then v is fixed. In each later
    step a rank adds its gradient to m and sends m compressed; all ranks continue with the average
    as m. The compression error is added to the next message::

        x <- x - lr (m / (sqrt(v) + eps) + weight_decay x)

    As in the paper and in DeepSpeed, m and v are not divided by 1 - beta^t. So the first steps are
    up to (1 - beta1) / sqrt(1 - beta2) = 3.2 times as large as Adam's: warm up lr. Weight decay is
    decoupled, as in AdamW. Elements whose v is 0 at the end of the warm-up, such as embedding rows
    that no batch used, are not updated any more. In one bit, their m would be as large as their
    neighbors', divided by eps. (With DeepSpeed, the user masks them.) Tang et al.: 1-bit Adam,
    ICML 2021.

    The optimizer needs each rank's own gradients: do not use a DistributedDataParallel that
    averages them. All ranks use the same arguments. The state of a parameter is `exp_avg` (m) and
    `exp_avg_sq` (v), float32, equal on all ranks.

    Args:
        params: parameters, or groups of them, as in torch's optimizers.
        lr: learning rate, at least 0.
        betas: coefficients of m and v, at least 0 and less than 1.
        eps: added to sqrt(v), more than 0.
        weight_decay: decoupled weight decay, at least 0.
        warmup_steps: number of first steps with exact averages, at least 1; 15 to 25 % of training
            in the paper. v must have converged.
        process_group: the ranks that average. None: the default group.
        config: settings of the momentum's messages. None: 1 bit and a scale for each 512 values
            (compressor "levels").
        rules: settings of parameters by their index over all groups: "0", "1", ...
        carrier: "native" sends by cgx_ops' own transports, over a group of any backend. "c10d"
            sends by torch's collectives: CPU tensors by gloo, CUDA tensors by the process group,
            for example NCCL. With the same algorithm, both give the same bits.
        seed: seed of random rounding, 0 or more.
        **keywords: `bits`, `bucket_size`, `compressor` or `rounding`; each overrides that field of
            `config`.

    Attributes:
        exchange: settings of the messages, step count and residuals.

    The argument `warmup_steps` is also an attribute.

    Raises:
        InvalidArgument: an argument is out of range, or the compressor is "sign", whose votes have
            no magnitude.
        TypeError: a parameter is complex, sparse or float64.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from cgx_ops.torch.optim import OneBitAdam
        >>> dist.init_process_group("cgx", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(64, 1)  # without DistributedDataParallel
        >>> optimizer = OneBitAdam(model.parameters(), lr=1e-3, warmup_steps=5)
        >>> for _ in range(10):  # 5 steps of Adam, then 5 with 1 bit per value
        ...     optimizer.zero_grad()
        ...     model(torch.randn(8, 64)).square().mean().backward()
        ...     optimizer.step()
        >>> dist.destroy_process_group()
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
        # At least 1, so that v is more than 0.
        self.warmup_steps = require_integer("OneBitAdam: warmup_steps", warmup_steps, 1)
        config = config_of(config or Config(compressor="levels", bits=1), **keywords)
        votes = config.compressor == "sign" and config.bits != EXACT_BITS
        if votes or "sign" in require_rules(rules, "OneBitAdam: ").compressors:
            raise InvalidArgument(
                "OneBitAdam: compressor 'sign' sends votes, which have no magnitude: use Signum"
            )
        exchange = Exchange("OneBitAdam", process_group, config, carrier, rules, seed)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, exchange)
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
            require_share(f"OneBitAdam: betas[{i}]", beta)
        if not group["eps"] > 0:
            raise InvalidArgument(f"OneBitAdam: eps is {group['eps']!r}; it must be more than 0")

    def updates(self, params: list[ParamUpdate]) -> list[torch.Tensor]:
        """Update the states of parameters from their gradients.

        Args:
            params: the parameters.

        Returns:
            The update of each parameter, which is multiplied by lr.
        """
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
