"""FSDP2's weights as differences: an all-gather sends what has changed since the last one.

All ranks have a copy of the gathered weights, the base, with equal bits. The owner of a shard sends
its difference from the base in few bits. All ranks, including the owner, add the decoded difference
to their base and compute with the sum. The quantization error is therefore a part of the owner's
next difference, and the weights of different ranks cannot drift apart.

The method is SDP4Bit's (Jia et al.: SDP4Bit: Toward 4-bit Communication Quantization in Sharded
Data Parallelism for LLM Training, NeurIPS 2024).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from cgx_ops import Config, Segment
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.config import require_feedback
from cgx_ops.errors import InvalidArgument
from cgx_ops.torch.backend.groups import communicator_of
from cgx_ops.torch.fsdp.block import Block
from cgx_ops.torch.fsdp.custom import Custom
from cgx_ops.torch.fsdp.gathered_weights import Base, Change
from cgx_ops.torch.fsdp.state import State

_EXACT = Config(bits=EXACT_BITS)


@dataclass(frozen=True)
class Differences:
    """Settings of weights that are gathered as differences from the last gathered weights.

    Every rank stores the gathered weights of the whole model, and its shard of them exact, in the
    dtype in which they are gathered. `State.base_nbytes` has the size in bytes.

    Args:
        config: settings of the differences. Rounding to nearest is suitable, because the
            quantization error is a part of the next difference.
        on_cpu: store the gathered weights of CUDA models in host memory, and copy them for each
            gather.

    Each argument is also an attribute.

    Raises:
        InvalidArgument: `config` is exact, or its error may exceed the difference, so that the
            weights would diverge.
        TypeError: `config` is not a Config.

    Example:
        >>> from cgx_ops.torch import fsdp
        >>> fsdp.Differences().config.bits
        4
    """

    config: Config = field(
        default_factory=lambda: Config(bits=4, bucket_size=128, rounding="nearest")
    )
    on_cpu: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.config, Config):
            raise TypeError(f"Differences.config is {self.config!r}; it must be a cgx_ops.Config")
        if self.config.is_exact:
            raise InvalidArgument(
                f"Differences.config is exact ({self.config}); exact weights need no differences: "
                "pass weights=None or weights=Config(compressor='lossless'), or a config with "
                "fewer bits"
            )
        require_convergence(self.config, "Differences.config")


def require_convergence(config: Config, what: str) -> None:
    """Raise InvalidArgument if the error of a config may exceed the difference that it encodes."""
    if config.is_exact:
        return
    try:
        require_feedback(replace(config, error_feedback=True))
    except InvalidArgument as error:
        raise InvalidArgument(f"{what} cannot send differences of weights: {error}") from None


class DifferenceGather(Custom):
    """The all-gather of one group of parameters, as differences.

    In a forward pass the ranks first agree on what changed, because all must send the same parts.
    """

    def __init__(self, block: Block, setting: Differences, state: State, plain: Any) -> None:
        super().__init__(block, setting.config, state, plain)
        self._base = Base(block, setting.on_cpu, lambda: state.reductions)
        state.bases.add(self._base)

    def open(self) -> None:
        """Prepare the base."""
        self._base.open()

    def close(self) -> None:
        """Release the base."""
        self._base.close()

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather the weights of all ranks into the output."""
        segments = self._block.gathered(input_tensor.numel(), input_tensor.dtype)
        if segments is None:
            return self.plain(output_tensor, input_tensor, group, async_op)
        base, seed = self._base, self._state.weights_seed(self._gather_name)
        if base.serves_backward:
            base.copy_to(output_tensor)
            return None

        own = input_tensor.clone()  # FSDP's input is a part of the output
        sent = [Segment(0, own.numel(), _EXACT)]
        changes = self._agreed(own, loaded := base.loaded(own), group)
        if loaded is not None:
            self.start_gather(output_tensor, loaded, group, sent, seed, asynchronous=False).wait()
            base.replace(output_tensor)
        if Change.REPLACED in changes:
            message, change_base = own, functools.partial(base.replace, output_tensor)
        else:
            sent = [each for each, change in zip(segments, changes, strict=True) if change]
            if not sent:
                base.copy_to(output_tensor)
                return None
            exact = [(each.config or self._config).is_exact for each in sent]
            message = own.clone()
            base.subtract_from(message, sent, exact)
            change_base = functools.partial(base.add, output_tensor, sent, exact)
        reductions = self._state.reductions

        def finish() -> None:
            change_base()
            base.note(own, reductions)

        # As for other gathers, asynchronous on the CPU in any case.
        asynchronous = async_op or own.device.type == "cpu"
        work = _Gather(
            self.start_gather(output_tensor, message, group, sent, seed, asynchronous=asynchronous),
            finish,
        )
        if asynchronous:
            return work
        work.finish()
        return None

    def _agreed(
        self, own: torch.Tensor, loaded: torch.Tensor | None, group: dist.ProcessGroup
    ) -> list[int]:
        """Return how each parameter changed on any rank."""
        changes = self._base.changes(own, loaded)
        has = int(loaded is not None)
        flags = np.array([*changes, has, -has], np.float32)
        name = f"fsdp/changes/{self._block.name}"
        *changed, most, least = communicator_of(group).allreduce(flags, "max", _EXACT, name=name)
        if most != -least:
            raise InvalidArgument(
                f"module '{self._block.name}': the state of fsdp.compress() was loaded on some "
                "ranks only: call load_state_dict() on all of them"
            )
        return list(map(int, changed))


class _Gather(dist.Work):
    """An all-gather whose end changes the base. FSDP waits for it before it uses the output."""

    def __init__(self, work: dist.Work, finish: Callable[[], None]) -> None:
        super().__init__()
        self._work, self._finish = work, finish

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._work.wait()
        self.finish()
        return True

    def finish(self) -> None:
        """Change the base, once."""
        self._finish()
        self._finish = _nothing


def _nothing() -> None:
    pass
