"""Optimizers that average by themselves, and send a momentum in one bit instead of gradients.

    from cgx_ops.torch.optim import OneBitAdam, Signum
    optimizer = OneBitAdam(model.parameters(), lr=1e-3, warmup_steps=1000)

  1. OneBitAdam: Adam, whose variance is kept as it is after a warm-up, while momentum is compressed
  2. Signum: the majority's signs of the ranks' momenta

Gradients must be each rank's own: a model without DistributedDataParallel, or in one with the hook
CommHookType.NOOP, which copies parameters and buffers at the start. What both do alike is in
exchanging_optimizer.py.
"""

from typing import Any, Unpack

import torch
import torch.distributed as dist

from cgx_ops import Config, Rules
from cgx_ops.config import Keywords, config_of
from cgx_ops.errors import InvalidArgument, require_integer, require_share
from cgx_ops.rules import EXACT_BITS, require_rules
from cgx_ops.torch.averaging.exchange import Carriers, Exchange
from cgx_ops.torch.optim.base import ExchangingOptimizer, Trained

# ---- 1. 1-bit Adam -------------------------------------------------------------------------------


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

    def updates(self, trained: list[Trained]) -> list[torch.Tensor]:
        """Change the states of parameters by their gradients; return what to step by."""
        warming_up = self.exchange.steps < self.warmup_steps
        gradients = [each.gradient for each in trained]
        if warming_up:
            gradients = self.averaged(trained, gradients, exact=True)
        momenta = []
        for (_, group, state, *_), g in zip(trained, gradients, strict=True):
            beta1, beta2 = group["betas"]
            momenta.append(state["exp_avg"] * beta1 + g * (1 - beta1))
            if warming_up:
                state["exp_avg_sq"] = state["exp_avg_sq"] * beta2 + g * g * (1 - beta2)
        if not warming_up:
            momenta = [mean.clone() for mean in self.averaged(trained, momenta)]
        for each, m in zip(trained, momenta, strict=True):
            each.state["exp_avg"] = m
        return [_adams_step(each.state, each.group["eps"]) for each in trained]


def _adams_step(state: dict[str, torch.Tensor], eps: float) -> torch.Tensor:
    m, v = state["exp_avg"], state["exp_avg_sq"]
    return torch.where(v == 0, 0.0, m / (v.sqrt() + eps))


# ---- 2. SigNUM -----------------------------------------------------------------------------------


class Signum(ExchangingOptimizer):
    """SigNUM with majority vote (Bernstein et al., ICLR 2019): every rank votes with signs.

        m <- momentum m + (1 - momentum) gradient          on each rank, of its own gradients
        x <- x - lr (the sign that most ranks' m have + weight_decay x)

    One bit an element goes each way, and all elements step by lr. A vote has no zero: where as many
    ranks vote + as -, and where an m is 0, it counts as + in even steps and as - in odd ones, so
    that nobody drifts (the paper's sign(0) is 0; on average this is, too). All parameters vote,
    vectors, too.

    A parameter's state: momentum_buffer (m), float32, each rank's own.
    """

    of_state = of_rank = ("momentum_buffer",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        process_group: dist.ProcessGroup | None = None,
        config: Config | None = None,
        carrier: Carriers = "native",
    ) -> None:
        """Make an optimizer, equal on all ranks.

        Args:
            params: parameters, or groups of them, as of torch's optimizers.
            lr: what an element steps by.
            momentum: at least 0 (signSGD) and less than 1.
            weight_decay: at least 0.
            process_group: whose ranks vote; None: the default group.
            config: how votes travel; its compressor is "sign". None: Config(compressor="sign").
            carrier: who moves the bytes, as of cgx_ops.torch.ddp.QuantizedAllreduceState.

        Raises:
            InvalidArgument (a ValueError): an argument is out of its range.
            TypeError: a parameter is complex, sparse or of float64.
        """
        config = config_of(config or Config(compressor="sign"))
        if config.compressor != "sign" or config.bits == EXACT_BITS:
            raise InvalidArgument(
                f"Signum: config is {config}; give one with compressor='sign', whose sum is a vote"
            )
        every = Rules(exact_vectors=False)
        exchange = Exchange("Signum", process_group, config, carrier, every)
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults, exchange)

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise InvalidArgument if a setting of a group of parameters is out of its range."""
        super().check_group(group)
        require_share("Signum: momentum", group["momentum"])

    def updates(self, trained: list[Trained]) -> list[torch.Tensor]:
        """Change the states of parameters by their gradients; return what to step by."""
        side = 1.0 if self.exchange.steps % 2 == 0 else -1.0
        momenta = []
        for _, group, state, _, g in trained:
            beta = group["momentum"]
            momenta.append(state["momentum_buffer"] * beta + g * (1 - beta))
        votes = self.averaged(trained, [m * side for m in momenta])
        for each, m in zip(trained, momenta, strict=True):
            each.state["momentum_buffer"] = m
        return [vote * side for vote in votes]
