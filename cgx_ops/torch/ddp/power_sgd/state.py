"""PowerSGDState: settings, factors and residuals of the PowerSGD hooks."""

import re
from collections.abc import Collection, Sequence
from typing import Any, Literal, Unpack

import torch.distributed as dist

from cgx_ops import Config, Rules
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.config import Keywords, config_of
from cgx_ops.errors import InvalidArgument, require_integer
from cgx_ops.methods import low_rank
from cgx_ops.torch.averaging.layers import Layer
from cgx_ops.torch.averaging.power_sgd.state import LowRankState
from cgx_ops.torch.ddp.state import HookState

_BUCKET = re.compile(r"(.+)\.\.\.(.+) \([0-9]+\)")


class PowerSGDState(LowRankState, HookState):
    """State of `power_sgd_hook` and `batched_power_sgd_hook` for one model.

    Names and defaults follow torch's PowerSGDState. All ranks use the same arguments, except for
    the process group. Save it in checkpoints like a `QuantizedAllreduceState`: by `state_dict`,
    `load_state_dict`, pickle or torch.save, and with `consolidate` for another number of ranks.

    Args:
        process_group: the ranks that average. None: the default group.
        config: settings of the tensors that are not factored. Its algorithm is also used for P and
            Q. None: these tensors are sent exact.
        rules: settings of layers by name. A layer that a rule matches is not factored. None: the
            rules of the process, which `cgx_ops.torch.exclude_layer` and similar functions set.
        feedback: how residuals are computed. "local": a rank's matrix minus its own contribution to
            the average. Nothing is lost over all ranks, and residuals are bounded. "torch": a
            rank's input minus the average, for all tensors, as in PyTorch. Differences between
            ranks are then never corrected, and residuals grow.
        matrix_approximation_rank: number of columns of P and Q, at least 1.
        start_powerSGD_iter: number of backward passes that are averaged exact first; at least 2
            with error feedback or warm start.
        min_compression_rate: a matrix is factored only if P and Q together have this many times
            fewer elements.
        use_error_feedback: whether the error of a matrix is added to its next gradient. Residuals
            are float32 tensors of the gradients' sizes, multiplied by config.residual_decay in each
            step.
        warm_start: whether a step starts with the previous step's Q instead of a new random one.
        orthogonalization_epsilon: added to the norms of P's columns before the division by these
            norms. Columns of zeros do not need it.
        random_seed: seed of the first Q, 0 to 2**32 - 1. With feedback="torch", PyTorch's random
            numbers are used.
        compression_stats_logging_frequency: number of steps between two log lines of
            `compression_stats`.
        batch_tensors_with_same_shape: whether matrices of one shape in a bucket are copied and
            multiplied together.
        factor_bits: how P and Q are sent: 32 exact, 16 as bfloat16, 8 quantized. With
            feedback="local", the residuals include the rounding error of Q.
        carrier: "native" sends by cgx_ops' own transports, over a group of any backend. "c10d"
            sends by torch's collectives: CPU tensors by gloo, CUDA tensors by the process group,
            for example NCCL, not gloo. With the same algorithm, both give the same bits.
        **keywords: `bits`, `bucket_size`, `compressor` or `rounding`; each overrides that field of
            `config`.

    Attributes:
        steps: number of backward passes so far.
        residuals: the errors of this rank's gradients so far, by layer.
        factors: the last Q of each matrix.
        total_numel_before_compression: number of gradient elements so far.
        total_numel_after_compression: number of sent elements so far.

    Each argument except the keywords is also an attribute.

    Raises:
        InvalidArgument: an argument is out of range.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> from cgx_ops.torch import ddp
        >>> dist.init_process_group("cgx", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DistributedDataParallel(torch.nn.Linear(64, 64))
        >>> state = ddp.PowerSGDState(matrix_approximation_rank=2, start_powerSGD_iter=2)
        >>> model.register_comm_hook(state, ddp.power_sgd_hook)
        >>> for _ in range(3):  # two exact steps, then PowerSGD
        ...     model(torch.randn(8, 64)).square().sum().backward()
        >>> state.compression_stats()[0] > 10
        True
        >>> dist.destroy_process_group()
    """

    kept = (
        *HookState.kept, "feedback", "matrix_approximation_rank", "start_powerSGD_iter",
        "min_compression_rate", "use_error_feedback", "warm_start", "orthogonalization_epsilon",
        "random_seed", "compression_stats_logging_frequency", "batch_tensors_with_same_shape",
        "factor_bits", "factors", "total_numel_before_compression",
        "total_numel_after_compression", "next_stats_report",
    )  # fmt: skip

    agreed = (*HookState.agreed, "_draws")

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        config: Config | None = None,
        rules: Rules | None = None,
        feedback: Literal["local", "torch"] = "local",
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1000,  # noqa: N803  (PyTorch's name)
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
        factor_bits: int = 32,
        carrier: Literal["native", "c10d"] = "native",
        **keywords: Unpack[Keywords],
    ) -> None:
        if config is keywords.get("compressor") is keywords.get("bits") is None:
            keywords["bits"] = EXACT_BITS
        super().__init__(process_group, config_of(config, **keywords), rules, carrier, seed=0)
        if feedback not in ("local", "torch"):
            raise InvalidArgument(f"feedback is {feedback!r}; it must be 'local' or 'torch'")
        if (use_error_feedback or warm_start) and start_powerSGD_iter <= 1:
            raise InvalidArgument(
                f"start_powerSGD_iter is {start_powerSGD_iter}; with use_error_feedback or "
                "warm_start it must be at least 2, because DistributedDataParallel rebuilds its "
                "buckets after the first step"
            )
        if not orthogonalization_epsilon >= 0:
            raise InvalidArgument(
                f"orthogonalization_epsilon is {orthogonalization_epsilon!r}; it must be at least 0"
            )
        if type(random_seed) is not int or not 0 <= random_seed < 2**32:
            raise InvalidArgument(f"random_seed is {random_seed!r}; it must be 0 to 2**32 - 1")
        rank = require_integer("matrix_approximation_rank", matrix_approximation_rank, 1)
        self.feedback = feedback
        self.matrix_approximation_rank = rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = low_rank.checked_rate(min_compression_rate)
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.random_seed = self.seed = random_seed
        self.compression_stats_logging_frequency = max(1, compression_stats_logging_frequency)
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self.factor_bits = low_rank.checked_factor_bits(factor_bits)

    @property
    def _draws(self) -> int:
        return self.factors.draws

    def adopt(self, counts: dict[str, Any]) -> None:
        """Take the counts of another rank, also that of drawn seeds.

        Args:
            counts: its attributes in `agreed`, by name.
        """
        self.factors.draws, self._rng = counts.pop("_draws"), None
        super().adopt(counts)

    def end_incomplete_pass(self) -> None:
        """Log the compression rate, which is otherwise logged with the last bucket."""
        if self.total_numel_after_compression:
            self.report_stats()

    def by_layer(self) -> list[dict[str, Any]]:
        """Return the parts of the state that are stored by layer.

        Returns:
            Dicts whose keys are names of layers.
        """
        return [*super().by_layer(), self.factors.q]

    def require_layers(self, names: Collection[str]) -> None:
        """Compare a loaded state with the model's layers, once after load_state_dict().

        A Q of batched_power_sgd_hook belongs to a bucket, which is identified by its first and last
        layer.

        Args:
            names: names of the model's layers.

        Raises:
            InvalidArgument: the state has layers that the model does not have.
        """
        buckets = [
            name
            for name in self.factors.q
            if (ends := _BUCKET.fullmatch(name)) and set(ends.groups()) <= set(names)
        ]
        super().require_layers({*names, *buckets})

    def report(self, found: Sequence[Layer]) -> None:
        """Log that training starts.

        Args:
            found: the layers of the model.
        """
        self.report_method(f"PowerSGD of rank {self.matrix_approximation_rank}, the rest", found)
