"""LowRankState: settings, factors, residuals and counts of PowerSGD, for DDP and FSDP2."""

import logging
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from cgx_ops import Config, Rules
from cgx_ops.torch.averaging.state import AveragingState

_log = logging.getLogger(__name__)


def bucket_name(first: str, last: str, numel: int) -> str:
    """Return the name of a bucket that is one matrix: its first and last layer, and its size."""
    return f"{first}...{last} ({numel})"


class Factors:
    """The factors that the last step found for each matrix, equal on all ranks.

    A separate class, so that torch.distributed.checkpoint saves it as one object.

    Attributes:
        q: Q of each matrix by name: (columns, rank), float32.
        draws: number of seeds that PyTorch's hook would have drawn so far.
    """

    def __init__(self) -> None:
        self.q: dict[str, torch.Tensor] = {}
        self.draws = 0

    def copy(self) -> "Factors":
        """Return a deep copy."""
        other = Factors()
        other.q = {name: q.clone() for name, q in self.q.items()}
        other.draws = self.draws
        return other


class LowRankState(AveragingState):
    """The state of PowerSGD for one model. Subclasses document and check the settings.

    The settings are those of `ddp.PowerSGDState`, by the same names. The defaults are here.

    Attributes:
        factors: the last Q of each matrix.
        total_numel_before_compression: number of gradient elements so far.
        total_numel_after_compression: number of sent elements so far.
    """

    feedback: Literal["local", "torch"] = "local"
    matrix_approximation_rank: int = 1
    min_compression_rate: float = 2
    use_error_feedback: bool = True
    warm_start: bool = True
    orthogonalization_epsilon: float = 0
    random_seed: int = 0
    compression_stats_logging_frequency: int = 10_000
    batch_tensors_with_same_shape: bool = False
    factor_bits: int = 32

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        config: Config,
        rules: Rules | None,
        carrier: str,
        seed: int,
    ) -> None:
        super().__init__(process_group, config, rules, carrier, seed)
        self.factors = Factors()
        self.total_numel_before_compression = self.total_numel_after_compression = 0
        self.next_stats_report = 0

    def connect(self) -> None:
        """Reset the attributes that belong to this process."""
        super().connect()
        self._rng: np.random.RandomState | None = None
        self.plans: dict[int | str, Any] = {}

    def saved(self) -> dict[str, Any]:
        """Return the content of state_dict(), without the name of the group.

        Returns:
            The saved attributes, by name.
        """
        return super().saved() | {"factors": self.factors.copy()}

    def restored(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Convert a checkpoint into attributes.

        Args:
            saved: what saved() returned.

        Returns:
            Attributes by name.

        Raises:
            InvalidArgument: the carrier does not support the saved config, or this rank's residuals
                are missing.
        """
        return super().restored(saved) | {"factors": saved["factors"].copy(), "_rng": None}

    def keeps_residuals(self) -> bool:
        """Return whether any layer may have a residual.

        Returns:
            True if the config, the rules or loaded residuals allow for it.
        """
        return self.use_error_feedback or super().keeps_residuals()

    def compression_stats(self) -> tuple[float, int, int]:
        """Return the compression rate so far.

        Returns:
            A tuple of the rate (0 before the first step), the number of gradient elements, and the
            number of sent elements.
        """
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after else 0), before, after

    def count(self, before: int, after: int, last: bool) -> None:
        """Count the elements of a bucket, and log the counts when they are due.

        Args:
            before: number of gradient elements.
            after: number of sent elements.
            last: whether this is the step's last bucket.
        """
        self.total_numel_before_compression += before
        self.total_numel_after_compression += after
        if last:
            self.report_stats()

    def report_stats(self) -> None:
        """Log the counts if they are due."""
        if self.steps >= self.next_stats_report and self.place[0] == 0:
            rate, *numels = self.compression_stats()
            _log.info(
                "PowerSGD after %d steps: compression rate %.1f (%d elements sent as %d)",
                self.steps, rate, *numels,
            )  # fmt: skip
            self.next_stats_report = self.steps + self.compression_stats_logging_frequency

    def pytorch_seed(self) -> int:
        """Draw the next seed that PyTorch's state would draw.

        Returns:
            The seed.
        """
        if self._rng is None:
            self._rng = np.random.RandomState(self.random_seed)
            for _ in range(self.factors.draws):
                self._rng.randint(1_000_000_000)
        self.factors.draws += 1
        return int(self._rng.randint(1_000_000_000))
