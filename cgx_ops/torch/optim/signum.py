"""Signum: each element moves by the sign that most ranks' momenta have."""

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
    """Signum with majority vote: each element moves by the sign that most ranks' momenta have.

    Each message has one bit per element::

        m <- momentum m + (1 - momentum) gradient         (on each rank)
        x <- x - lr (sign of most ranks' m + weight_decay x)

    A tie, or an m of 0, counts as + in even steps and as - in odd steps, so that no element drifts.
    (The paper uses sign(0) = 0, which is the same on average.) All parameters vote, including
    biases and other vectors. The state of a parameter is `momentum_buffer` (m), float32, different
    on each rank. Bernstein et al.: signSGD with Majority Vote, ICLR 2019.

    The optimizer needs each rank's own gradients: do not use a DistributedDataParallel that
    averages them. All ranks use the same arguments.

    Args:
        params: parameters, or groups of them, as in torch's optimizers.
        lr: the step of each element.
        momentum: momentum coefficient, at least 0 (signSGD) and less than 1.
        weight_decay: decoupled weight decay, at least 0.
        process_group: the ranks that vote. None: the default group.
        config: settings of the votes, with compressor "sign". None: `Config(compressor="sign")`.
        carrier: "native" sends by cgx_ops' own transports, over a group of any backend. "c10d"
            sends by torch's collectives: CPU tensors by gloo, CUDA tensors by the process group,
            for example NCCL, not gloo. With the same algorithm, both give the same bits.

    Attributes:
        exchange: settings of the messages, and step count.

    Raises:
        InvalidArgument: an argument is out of range.
        TypeError: a parameter is complex, sparse or float64.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from cgx_ops.torch.optim import Signum
        >>> dist.init_process_group("cgx", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(64, 1)  # without DistributedDataParallel
        >>> optimizer = Signum(model.parameters(), lr=1e-3)
        >>> before = model.bias.item()
        >>> model(torch.ones(8, 64)).sum().backward()
        >>> optimizer.step()
        >>> round(before - model.bias.item(), 4)
        0.001
        >>> dist.destroy_process_group()
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
        config = config_of(config or Config(compressor="sign"))
        if config.compressor != "sign" or config.bits == EXACT_BITS:
            raise InvalidArgument(
                f"Signum: config is {config}; it must have compressor='sign', which sends votes"
            )
        every = Rules(exact_vectors=False)
        exchange = Exchange("Signum", process_group, config, carrier, every)
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults, exchange)

    def check_group(self, group: dict[str, Any]) -> None:
        """Check the settings of a group of parameters.

        Args:
            group: the group.

        Raises:
            InvalidArgument: a setting is out of range.
        """
        super().check_group(group)
        require_share("Signum: momentum", group["momentum"])

    def updates(self, params: list[ParamUpdate]) -> list[torch.Tensor]:
        """Update the states of parameters from their gradients.

        Args:
            params: the parameters.

        Returns:
            The update of each parameter, which is multiplied by lr.
        """
        side = 1.0 if self.exchange.steps % 2 == 0 else -1.0
        momenta = []
        for _, group, state, _, g in params:
            beta = group["momentum"]
            momenta.append(state["momentum_buffer"] * beta + g * (1 - beta))
        votes = self.averaged(params, [m * side for m in momenta])
        for each, m in zip(params, momenta, strict=True):
            each.state["momentum_buffer"] = m
        return [vote * side for vote in votes]
