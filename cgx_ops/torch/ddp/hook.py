"""The quantized allreduce as a communication hook for DistributedDataParallel.

The layout follows torch's own hooks (torch.distributed.algorithms.ddp_comm_hooks): a state, a hook,
and a wrapper that converts gradients to bfloat16.
"""

import copy
from collections.abc import Callable, Collection
from typing import Any, Literal, Unpack

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from cgx_ops import Config, Rules
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.autotune import require_choice
from cgx_ops.config import Keywords, config_of
from cgx_ops.errors import InvalidArgument
from cgx_ops.planner import AdaptiveBits
from cgx_ops.torch._compat.parallel import GradBucket
from cgx_ops.torch.averaging.adaptation import Adaptation
from cgx_ops.torch.averaging.arithmetic import full_precision
from cgx_ops.torch.averaging.state import check_carrier
from cgx_ops.torch.backend import process_group
from cgx_ops.torch.ddp.bucket import decide_bits, inspect_bucket, layout_of, refuse, require_state
from cgx_ops.torch.ddp.state import HookState

# ---- 1. the state --------------------------------------------------------------------------------


class QuantizedAllreduceState(HookState):
    """State of `quantized_allreduce_hook` for one model.

    All ranks use the same arguments, except for the process group. Save the state with each
    checkpoint: `state_dict` and `load_state_dict` cover config, rules, step count and residuals, so
    that a resumed run continues bit for bit, except for small layers of "entropy", which depend on
    the other layers of their bucket. torch.distributed.checkpoint, pickle and torch.save also
    accept the state. A copy or a pickle leaves the process group out and uses the default
    group until you set `process_group`.

    Residuals differ between ranks. Call `consolidate` before you save a checkpoint for another
    number of ranks.

    Args:
        process_group: the ranks that average. None: the default group.
        config: compressor, bits and the other settings. None: `Config()`, which is 4 bits. If
            `config.keeps_residuals` is True, the quantization error of each gradient is added to
            the next gradient. Algorithm "auto" becomes "by_hosts", so that a layer's result does
            not depend on the other layers of its bucket, except for small layers of "entropy".
        rules: settings of layers by name. None: the rules of the process, which
            `cgx_ops.torch.exclude_layer` and similar functions set.
        carrier: "native" sends by cgx_ops' own transports, over a group of any backend. "c10d"
            sends by torch's collectives: CPU tensors by gloo, CUDA tensors by the process group,
            for example NCCL, not gloo. With the same algorithm, both give the same bits.
        seed: seed of random rounding, 0 or more. Each layer's noise depends on it, on the step, and
            on the names of layer and group.
        unsupported: what to do with gradients that cgx_ops cannot average: float64, complex,
            sparse, or on a GPU without a CUDA build. "refuse" raises TypeError; "exact" lets the
            process group average them.
        auto_bits: measure in the first backward which bits are fastest for a bucket of this model
            (`cgx_ops.bits_for`), and use them in `config`. CPU only.
        adaptive: a `cgx_ops.planner.AdaptiveBits` that adapts each layer's bits to its gradients:
            the error of config.bits with fewer bytes; for compressor "entropy", each layer's rate,
            with the mean config.rate and the least error. Layers whose bits, rate or compressor a
            rule sets keep them. Needs carrier="native" and compressor "uniform", "levels" or
            "entropy". None: bits are constant.
        **keywords: `bits`, `bucket_size`, `compressor` or `rounding`; each overrides that field of
            `config`.

    Attributes:
        steps: number of backward passes so far.
        residuals: the quantization errors of this rank's gradients, by layer.

    Each argument except the keywords is also an attribute. `auto_bits` becomes False when the bits
    are chosen.

    Raises:
        InvalidArgument: an argument is out of range, or arguments contradict each other.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> from cgx_ops.torch import ddp
        >>> dist.init_process_group("cgx", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DistributedDataParallel(torch.nn.Linear(64, 64))
        >>> state = ddp.QuantizedAllreduceState(bits=2, compressor="levels")  # with error feedback
        >>> model.register_comm_hook(state, ddp.quantized_allreduce_hook)
        >>> model(torch.ones(8, 64)).sum().backward()
        >>> state.steps
        1
        >>> checkpoint = {"model": model.state_dict(), "hook": state.state_dict()}
        >>> dist.destroy_process_group()
    """

    kept = (*HookState.kept, "unsupported", "auto_bits", "adaptive")
    agreed = (*HookState.agreed, "adaptive")

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        config: Config | None = None,
        *,
        rules: Rules | None = None,
        carrier: Literal["native", "c10d"] = "native",
        seed: int = 0,
        unsupported: Literal["refuse", "exact"] = "refuse",
        auto_bits: bool = False,
        adaptive: AdaptiveBits | None = None,
        **keywords: Unpack[Keywords],
    ) -> None:
        if unsupported not in ("refuse", "exact"):
            raise InvalidArgument(f"unsupported is {unsupported!r}; it must be 'refuse' or 'exact'")
        super().__init__(process_group, config_of(config, **keywords), rules, carrier, seed)
        self.unsupported = unsupported
        self.auto_bits = auto_bits
        self.adaptive = adaptive
        check_carrier(carrier, self.config, chooses_bits=auto_bits or adaptive is not None)
        if auto_bits and adaptive is not None:
            raise InvalidArgument(
                "auto_bits and adaptive both choose the bits of layers: use only one of them"
            )
        if auto_bits:
            require_choice(self.config)
        if adaptive is not None and self.config.bits == EXACT_BITS:
            raise InvalidArgument("adaptive bits need config.bits below 32: it sets their error")
        if adaptive is not None:
            adaptive.check(self.config)

    def connect(self) -> None:
        """Reset the attributes that belong to this process."""
        super().connect()
        self._adaptation: Adaptation | None = None

    def adopt(self, counts: dict[str, Any]) -> None:
        """Take the counts of another rank, and its adaptive bits.

        Args:
            counts: its attributes in `agreed`, by name.
        """
        ahead = counts.pop("adaptive")
        super().adopt(counts)
        if self.adaptive is not None and ahead is not None:
            self.adaptive.adopt(ahead)

    def adaptation(self, used: Config) -> Adaptation | None:
        """Return the adaptation of the bits of layers that use a config.

        Args:
            used: the config of the message.

        Returns:
            The adaptation; None if these bits do not adapt.
        """
        if self.adaptive is None or used is not self.config or used.bits == EXACT_BITS:
            return None
        if self._adaptation is None:
            self._adaptation = Adaptation(self.adaptive, "ddp/statistics")
        return self._adaptation

    def by_layer(self) -> list[dict[str, Any]]:
        """Return the parts of the state that are stored by layer.

        Returns:
            Dicts whose keys are names of layers.
        """
        adaptive = [] if self.adaptive is None else [dict.fromkeys(self.adaptive.names)]
        return [*super().by_layer(), *adaptive]

    def require_layers(self, names: Collection[str]) -> None:
        """Compare a loaded state with the model's layers, once after load_state_dict().

        Args:
            names: names of the model's layers.

        Raises:
            InvalidArgument: the state has layers that the model does not have.
        """
        if self.loaded:
            super().require_layers(names)
            if self.adaptive is not None:
                self.adaptive.keep(names)

    def saved(self) -> dict[str, Any]:
        """Return the content of state_dict(), without the name of the group.

        Returns:
            The saved attributes, by name.
        """
        if self._adaptation is not None:
            self._adaptation.settle()
        return super().saved() | {"adaptive": copy.deepcopy(self.adaptive)}

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
        chooses = saved["adaptive"] is not None or saved["auto_bits"]
        check_carrier(saved["carrier"], saved["config"], chooses_bits=chooses)
        own = {"adaptive": copy.deepcopy(saved["adaptive"]), "_adaptation": None}
        return super().restored(saved) | own


# ---- 2. the hook ---------------------------------------------------------------------------------


@full_precision()
def quantized_allreduce_hook(
    state: QuantizedAllreduceState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over the ranks with a compressed allreduce.

    Register it with `DistributedDataParallel.register_comm_hook`, alone or inside torch's
    fp16_compress_wrapper or `bf16_compress_wrapper`. Later failures, such as a rank with other
    arguments or a lost peer, are stored in the future. `backward` then raises a RuntimeError with
    the text of the first error. On a GPU such a failure sets the gradients to NaN, and the next
    bucket's future holds the error. With carrier="c10d" failures on a GPU are those of the process
    group.

    Args:
        state: a `QuantizedAllreduceState`.
        bucket: gradients in one flat float32, float16 or bfloat16 tensor, on the CPU or a GPU.

    Returns:
        A future of the same tensor, averaged in place. The hook does not wait for it. On a GPU the
        future is complete immediately, and reading its value makes the current stream wait.

    Raises:
        TypeError: the dtype, layout or device of gradients is not supported; the text names the
            layers.
        InvalidArgument: cgx_ops cannot connect the process group, the group is not the model's, or
            a layer was registered with another size.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> from cgx_ops.torch import ddp
        >>> dist.init_process_group("cgx", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DistributedDataParallel(torch.nn.Linear(64, 64))
        >>> state = ddp.QuantizedAllreduceState(bits=4)
        >>> model.register_comm_hook(state, ddp.quantized_allreduce_hook)
        >>> model(torch.ones(8, 64)).sum().backward()
        >>> model.module.weight.grad.shape
        torch.Size([64, 64])
        >>> dist.destroy_process_group()
    """
    hook = "quantized_allreduce_hook"
    require_state(hook, state, QuantizedAllreduceState)
    if state.auto_bits:
        decide_bits(hook, state, bucket)
        state.auto_bits = False
    info = inspect_bucket(hook, state, bucket)
    device = bucket.buffer().device
    info.raise_refusal(state.or_refuse(device, "ddp"))
    if info.problem and state.unsupported == "exact":
        with process_group.uncompressed():
            return default_hooks.allreduce_hook(state.group, bucket)
    refuse(hook, info, ", or use QuantizedAllreduceState(unsupported='exact')")

    def begin() -> torch.futures.Future[torch.Tensor]:
        adaptation = None if info.config is None else state.adaptation(info.config)
        layout = layout_of(hook, state, bucket, info, adaptation)
        return state.average(
            bucket.buffer(), layout.config, segments=layout.segments, seed=layout.seeds, name="ddp",
            residuals=layout.residuals, then=lambda _: layout.then(),
        )  # fmt: skip

    return state.prepared(device, "ddp", begin)


# ---- 3. hooks in bfloat16 ------------------------------------------------------------------------

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Wrap a hook so that it receives and returns gradients in bfloat16.

    Unlike torch's wrapper of this name, DistributedDataParallel accepts it without NCCL. torch's
    own fp16_compress_wrapper works without NCCL, too.

    Args:
        hook: a communication hook.

    Returns:
        A hook that converts the bucket to bfloat16, calls `hook`, and converts the average back.

    Raises:
        Exception: the returned hook raises what `hook` raises.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> from cgx_ops.torch import ddp
        >>> dist.init_process_group("cgx", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DistributedDataParallel(torch.nn.Linear(64, 64))
        >>> hook = ddp.bf16_compress_wrapper(ddp.quantized_allreduce_hook)
        >>> model.register_comm_hook(ddp.QuantizedAllreduceState(bits=4), hook)
        >>> model(torch.ones(8, 64)).sum().backward()
        >>> model.module.weight.grad.dtype
        torch.float32
        >>> dist.destroy_process_group()
    """
    wrapped = default_hooks.bf16_compress_wrapper(hook)  # type: ignore[arg-type]

    def hook_in_bf16(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return wrapped(state, bucket)  # type: ignore[arg-type]

    return hook_in_bf16
