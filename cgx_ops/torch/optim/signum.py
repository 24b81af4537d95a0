"""Signum: the majority's signs of the ranks' momenta."""

from typing import Any

import torch
import torch.distributed as dist

from cgx_ops import Config, Rules
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.config import config_of
from cgx_ops.errors import InvalidArgument, require_share
from cgx_ops.torch.averaging.exchange import Carriers, Exchange
from cgx_ops.torch.optim.base import ExchangingOptimizer, ParamUpdate


class Signum(ExchangingOptimizer):
    """SigNUM with majority vote (Bernstein et al., ICLR 2019): every rank votes with signs.

        m <- momentum m + (1 - momentum) gradient          on each rank, of its gradients
        x <- x - lr (the sign that most ranks' m have + weight_decay x)

    One bit an element goes each way, and all elements step by lr. A vote has no zero: where as many
    ranks vote + as -, and where an m is 0, it counts as + in even steps and as - in odd ones, so
    that no element drifts (in the paper sign(0) is 0; on average this is, too). All parameters
    vote, vectors, too.

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

    def updates(self, params: list[ParamUpdate]) -> list[torch.Tensor]:
        """Change the states of parameters by their gradients; return what to step by."""
        side = 1.0 if self.exchange.steps % 2 == 0 else -1.0
        momenta = []
        for _, group, state, _, g in params:
            beta = group["momentum"]
            momenta.append(state["momentum_buffer"] * beta + g * (1 - beta))
        votes = self.averaged(params, [m * side for m in momenta])
        for each, m in zip(params, momenta, strict=True):
            each.state["momentum_buffer"] = m
        return [vote * side for vote in votes]
