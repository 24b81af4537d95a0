"""Settings of PowerSGD for the replicas of HSDP."""

from dataclasses import dataclass

import torch

from cgx_ops import Config
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.config import check_config
from cgx_ops.errors import require_integer
from cgx_ops.methods import low_rank


@dataclass(frozen=True)
class PowerSGD:
    """How `compress` averages gradients over replicas in low rank.

    Each rank has a shard of a parameter's gradient. It counts as a matrix of n rows and m columns,
    with one row for each index of its first dimension. The replicas of the shard average it as two
    factors: 4 rank (n + m) bytes instead of 4 n m. The part of a rank's shard that its factors do
    not represent is its residual, which is added in the next step.

    Args:
        rank: columns of both factors, at least 1.
        start: number of first reductions of a module that are averaged exact.
        min_compression_rate: a shard is factored only if its factors have this many times fewer
            elements.
        factor_bits: how factors are sent: 32 exact, 16 as bfloat16, 8 quantized. Residuals include
            the rounding error.
        warm_start: whether a step starts with the factor of the last step instead of a random one.
        config: settings of the shards that are not factored. None: exact. Its algorithm is also
            used for factors. error_feedback=False disables all residuals, and residual_decay scales
            residuals before they are added.

    Each argument is also an attribute.

    Raises:
        InvalidArgument: an argument is out of range, or `config` is not a Config.

    Example:
        >>> from cgx_ops.torch import fsdp
        >>> fsdp.PowerSGD(rank=4, start=100).factor_bits
        32
    """

    rank: int = 1
    start: int = 0
    min_compression_rate: float = 2
    factor_bits: int = 32
    warm_start: bool = True
    config: Config | None = None

    def __post_init__(self) -> None:
        require_integer("PowerSGD.rank", self.rank, 1)
        require_integer("PowerSGD.start", self.start, 0)
        low_rank.checked_rate(self.min_compression_rate)
        low_rank.checked_factor_bits(self.factor_bits)
        check_config(self.config, "PowerSGD.config")

    @property
    def rest(self) -> Config:
        """The settings of shards that are not factored."""
        return self.config or Config(bits=EXACT_BITS)


torch.serialization.add_safe_globals([PowerSGD])
