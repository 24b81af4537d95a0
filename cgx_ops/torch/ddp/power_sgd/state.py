"""PowerSGDState: settings of PowerSGD's hooks, each matrix's Q, and what was lost so far.

All of it goes into checkpoints, except parts of this process. The hooks are in hook.py.
"""

import logging
import re
from collections.abc import Collection, Sequence
from typing import Any, Literal, Unpack

import numpy as np
import torch
import torch.distributed as dist

from cgx_ops import Config, Rules
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.config import Keywords, config_of
from cgx_ops.errors import InvalidArgument, require_integer
from cgx_ops.methods import low_rank
from cgx_ops.torch.averaging.layers import Layer
from cgx_ops.torch.ddp.state import HookState

_log = logging.getLogger(__name__)
_BUCKET = re.compile(r"(.+)\.\.\.(.+) \([0-9]+\)")


def bucket_name(first: str, last: str, numel: int) -> str:
    """Return the name of a bucket that is one matrix, by its first and last layer and its size."""
    return f"{first}...{last} ({numel})"


class Factors:
    """What the last step found of each matrix: equal on all ranks.

    An object of its own, so that torch.distributed.checkpoint saves it whole, whatever is in it.

    Attributes:
        q: (columns, rank), float32, by the matrix's name.
        draws: how often PyTorch would have drawn seeds so far.
    """

    def __init__(self) -> None:
        self.q: dict[str, torch.Tensor] = {}
        self.draws = 0

    def copy(self) -> "Factors":
        """Return one whose tensors are its own."""
        other = Factors()
        other.q = {name: q.clone() for name, q in self.q.items()}
        other.draws = self.draws
        return other


class PowerSGDState(HookState):
    """What power_sgd_hook and batched_power_sgd_hook need, of one model.

    Equal on all ranks but for the process group and the residuals. It is saved, restored and
    consolidated as a QuantizedAllreduceState is: state_dict(), load_state_dict(), consolidate(),
    pickles, torch.save.

    Attributes:
        process_group: whose ranks average; None: the default group.
        config: how tensors travel that are not factored; their error feedback is that of
            QuantizedAllreduceState, but with feedback="torch". Its algorithm is also that of P and
            Q.
        rules: cgx_ops.Rules. A layer that a rule matches is not factored. None: the rules of the
            process.
        feedback: what a rank's residual is. "local": its matrix without what its own Q made of it,
            so that over all ranks gradients and old residuals are the average (as a sum) and the
            new residuals, and residuals are bounded. "torch": its input without the average, for
            all tensors, which is PyTorch's trajectory; where ranks' gradients differ, what differs
            is never paid back, and residuals grow.
        matrix_approximation_rank: columns of P and Q, at least 1.
        start_powerSGD_iter: backward passes before it that are averaged exact; at least 2 with
            error feedback or warm start.
        min_compression_rate: a matrix is factored if P and Q have more than so many times fewer
            elements; others travel by config.
        use_error_feedback: whether what is lost of a matrix is added to its next gradient. Its
            residual is float32, of the gradient's size, multiplied by config.residual_decay.
        warm_start: whether a step begins with the last one's Q, or with one that is drawn anew.
        orthogonalization_epsilon: added to the norms of P's columns before they are divided by
            these. Columns of zeros need none.
        random_seed: of the first Q. Of "local" each follows from this and the matrix's name; of
            "torch" they are those that PyTorch draws.
        compression_stats_logging_frequency: so many steps apart, compression_stats() is logged.
        batch_tensors_with_same_shape: whether matrices of one shape in a bucket are multiplied
            together, from a copy of them.
        factor_bits: how P and Q travel: 32 exact, 16 as bfloat16, 8 quantized. With "local" what is
            lost of Q is in the residuals too.
        carrier: who moves the bytes, "native" or "c10d", as of QuantizedAllreduceState.
        steps: backward passes so far.
        residuals: what was lost so far, by layer, in units of this rank's gradients.
        factors: each matrix's last Q.
        total_numel_before_compression, total_numel_after_compression: elements so far.
    """

    kept = (
        *HookState.kept, "feedback", "matrix_approximation_rank", "start_powerSGD_iter",
        "min_compression_rate", "use_error_feedback", "warm_start", "orthogonalization_epsilon",
        "random_seed", "compression_stats_logging_frequency", "batch_tensors_with_same_shape",
        "factor_bits", "factors", "total_numel_before_compression",
        "total_numel_after_compression", "next_stats_report",
    )  # fmt: skip

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
        """Make a state; config None: tensors that are not factored travel exact.

        Keywords replace fields of config: bits, bucket_size, compressor, rounding.

        Raises:
            InvalidArgument (a ValueError): an argument is out of its range.
        """
        if config is keywords.get("compressor") is keywords.get("bits") is None:
            keywords["bits"] = EXACT_BITS
        super().__init__(process_group, config_of(config, **keywords), rules, carrier, seed=0)
        if feedback not in ("local", "torch"):
            raise InvalidArgument(f"feedback is {feedback!r}; it must be 'local' or 'torch'")
        if (use_error_feedback or warm_start) and start_powerSGD_iter <= 1:
            raise InvalidArgument(
                f"start_powerSGD_iter is {start_powerSGD_iter}; with use_error_feedback or "
                "warm_start it must be at least 2, because DistributedDataParallel makes its "
                "buckets anew after the first step"
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
        self.factors = Factors()
        self.total_numel_before_compression = self.total_numel_after_compression = 0
        self.next_stats_report = 0

    def connect(self) -> None:
        """Begin anew with what belongs to this process."""
        super().connect()
        self._rng: np.random.RandomState | None = None
        self.plans: dict[int, Any] = {}

    def saved(self) -> dict[str, Any]:
        """Return what state_dict() does, of whichever group."""
        return super().saved() | {"factors": self.factors.copy()}

    def restored(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return attributes from what was saved."""
        return super().restored(saved) | {"factors": saved["factors"].copy(), "_rng": None}

    def by_layer(self) -> list[dict[str, Any]]:
        """Return what the state has of each layer."""
        return [*super().by_layer(), self.factors.q]

    def require_layers(self, names: Collection[str]) -> None:
        """Compare a loaded state with the model's layers, once after load_state_dict().

        A Q of batched_power_sgd_hook belongs to a bucket, known by its first and its last layer.
        """
        buckets = [
            name
            for name in self.factors.q
            if (ends := _BUCKET.fullmatch(name)) and set(ends.groups()) <= set(names)
        ]
        super().require_layers({*names, *buckets})

    def report(self, found: Sequence[Layer]) -> None:
        """Log that training starts."""
        self.report_method(f"PowerSGD of rank {self.matrix_approximation_rank}, the rest", found)

    def keeps_residuals(self) -> bool:
        """Tell whether any layer may have a residual."""
        return self.use_error_feedback or super().keeps_residuals()

    def compression_stats(self) -> tuple[float, int, int]:
        """Return the elements that were averaged by PowerSGD so far, and those that were sent.

        Returns:
            The first over the second (0 before the first step), and both.
        """
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after else 0), before, after

    def count(self, before: int, after: int, last: bool) -> None:
        """Count a bucket's elements, and log the counts where it is time."""
        self.total_numel_before_compression += before
        self.total_numel_after_compression += after
        if last and self.steps >= self.next_stats_report and self.place[0] == 0:
            rate, *numels = self.compression_stats()
            _log.info("PowerSGD after %d steps: rate %.1f, elements %s", self.steps, rate, numels)
            self.next_stats_report = self.steps + self.compression_stats_logging_frequency

    def pytorch_seed(self) -> int:
        """Return the next seed that PyTorch's state would draw."""
        if self._rng is None:
            self._rng = np.random.RandomState(self.random_seed)
            for _ in range(self.factors.draws):
                self._rng.randint(1_000_000_000)
        self.factors.draws += 1
        return int(self._rng.randint(1_000_000_000))
