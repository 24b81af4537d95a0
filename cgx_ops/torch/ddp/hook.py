"""Communication hooks for DistributedDataParallel: gradients are averaged in a few bits a value.

    from cgx_ops.torch import ddp
    model = DistributedDataParallel(model)
    state = ddp.QuantizedAllreduceState(config=cgx_ops.Config(bits=4))
    model.register_comm_hook(state, ddp.quantized_allreduce_hook)

  1. the state: what travels how, whose turn the noise is, and what compression has lost so far; all
     of it goes into checkpoints
  2. the hook: starts a bucket's collective, each layer with buckets (and bits) of its own, and
     returns its future
  3. a wrapper: hooks in bfloat16

The layout is that of torch's own hooks (torch.distributed.algorithms.ddp_comm_hooks).
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
    """What quantized_allreduce_hook needs, of one model.

    Equal on all ranks but for the process group and the residuals.

    It has the state_dict() and load_state_dict() that torch.distributed.checkpoint and others look
    for: config, rules, how many steps were made, and the residuals, so that a run that is resumed
    continues to the same bits. It pickles, too, and torch.save and torch.load take it. Its process
    group is left out: a state that is unpickled uses the default one unless `process_group` is set.
    Each rank's residuals are its own; consolidate() is for a restart on another number of ranks.

    Attributes:
        process_group: whose ranks average; None: the default group.
        config: how values travel, and whether what is lost of a gradient is added to the next one:
            if config.keeps_residuals is True, for layers that are compressed. Its algorithm
            "auto" is "by_hosts" here: what a layer becomes must not depend on the other layers in
            its bucket, since DistributedDataParallel makes its buckets anew after the first step,
            and after each restart.
        rules: cgx_ops.Rules, settings of layers by name. None: the rules of the process, which
            cgx_ops.torch.exclude_layer() and its like set.
        carrier: "native", cgx_ops' own transports: the group is one of the backend "cgx", or, under
            mpirun, of any backend and all ranks in MPI's order. "c10d": torch's own collectives,
            over any group; CPU tensors only. Same bits either way for one algorithm.
        unsupported: what happens to gradients that the core cannot average (float64, complex,
            sparse, on a GPU if cgx_ops was built without CUDA): "refuse" raises TypeError, "exact"
            has the process group average them.
        seed: of the noise: that of a layer derives from it, from `steps` and from the names of the
            layer and of the group.
        auto_bits: measure in the first backward which bits are fastest for one of the model's
            buckets (cgx_ops.bits_for), and set the bits of `config` to them. False from then on.
        adaptive: a planner.AdaptiveBits has each layer's bits follow its gradients, at the error of
            config.bits and fewer bytes, where no rule sets bits or a compressor; None: they stay.
            Of compressors "uniform" and "levels", with carrier "native".
        steps: backward passes so far.
        residuals: what was lost so far, by layer, in units of this rank's gradients.
    """

    kept = (*HookState.kept, "unsupported", "auto_bits", "adaptive")

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
        """Make a state; config None: Config(). Keywords replace fields of config: bits, ..."""
        if unsupported not in ("refuse", "exact"):
            raise InvalidArgument(f"unsupported is {unsupported!r}; it must be 'refuse' or 'exact'")
        super().__init__(process_group, config_of(config, **keywords), rules, carrier, seed)
        self.unsupported = unsupported
        self.auto_bits = auto_bits
        self.adaptive = adaptive
        check_carrier(carrier, self.config, chooses_bits=auto_bits or adaptive is not None)
        if auto_bits and adaptive is not None:
            raise InvalidArgument(
                "auto_bits and adaptive both choose the bits of layers: leave one out"
            )
        if auto_bits:
            require_choice(self.config)
        if adaptive is not None and self.config.bits == EXACT_BITS:
            raise InvalidArgument("adaptive bits need config.bits below 32, whose error they keep")
        if adaptive is not None:
            adaptive.check(self.config)

    def connect(self) -> None:
        """Begin anew with what belongs to this process."""
        super().connect()
        self._adaptation: Adaptation | None = None

    def adaptation(self, used: Config) -> Adaptation | None:
        """Return what adapts layers that travel by `used`; None: nothing does."""
        if self.adaptive is None or used is not self.config or used.bits == EXACT_BITS:
            return None
        if self._adaptation is None:
            self._adaptation = Adaptation(self.adaptive, "ddp/statistics")
        return self._adaptation

    def by_layer(self) -> list[dict[str, Any]]:
        """Return what the state has of each layer."""
        adaptive = [] if self.adaptive is None else [dict.fromkeys(self.adaptive.names)]
        return [*super().by_layer(), *adaptive]

    def require_layers(self, names: Collection[str]) -> None:
        """Compare a loaded state with the model's layers, once after load_state_dict()."""
        if self.loaded:
            super().require_layers(names)
            if self.adaptive is not None:
                self.adaptive.keep(names)

    def saved(self) -> dict[str, Any]:
        """Return what state_dict() does, of whichever group."""
        if self._adaptation is not None:
            self._adaptation.settle()
        return super().saved() | {"adaptive": copy.deepcopy(self.adaptive)}

    def restored(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return attributes from what was saved."""
        chooses = saved["adaptive"] is not None or saved["auto_bits"]
        check_carrier(saved["carrier"], saved["config"], chooses_bits=chooses)
        own = {"adaptive": copy.deepcopy(saved["adaptive"]), "_adaptation": None}
        return super().restored(saved) | own


# ---- 2. the hook ---------------------------------------------------------------------------------


@full_precision()
def quantized_allreduce_hook(
    state: QuantizedAllreduceState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over the ranks, in the bits that `state` says.

    Give it to DistributedDataParallel.register_comm_hook(), alone or inside torch's
    fp16_compress_wrapper or the bf16_compress_wrapper below.

    Args:
        state: a QuantizedAllreduceState.
        bucket: gradients in one flat float32, float16 or bfloat16 tensor, on the CPU or a GPU.

    Returns:
        A future of the same tensor, averaged in place; the hook itself does not wait. On a GPU it
        is complete at once, and who takes its value has the current stream wait.

    Raises:
        TypeError: gradients of another dtype, layout or device; it names the layer.
        InvalidArgument: the process group cannot be served, or is not the model's; a layer has
            another size than was registered.

    What goes wrong later (ranks disagree, a peer is gone or late) is in the future. backward()
    raises what any hook's future holds as a RuntimeError, with the text of the first error. On a
    GPU it makes the gradients NaN, and is in the next bucket's future.
    """
    hook = "quantized_allreduce_hook"
    require_state(hook, state, QuantizedAllreduceState)
    if state.auto_bits:
        decide_bits(hook, state, bucket)
        state.auto_bits = False
    info = inspect_bucket(hook, state, bucket)
    info.raise_refusal(state.or_refuse("ddp"))
    if info.problem and state.unsupported == "exact":
        with process_group.uncompressed():
            return default_hooks.allreduce_hook(state.group, bucket)
    refuse(hook, info, ", or give QuantizedAllreduceState(unsupported='exact')")

    def begin() -> torch.futures.Future[torch.Tensor]:
        adaptation = None if info.config is None else state.adaptation(info.config)
        layout = layout_of(hook, state, bucket, info, adaptation)
        return state.average(
            bucket.buffer(), layout.config, segments=layout.segments, seed=layout.seeds, name="ddp",
            residuals=layout.residuals, then=lambda _: layout.then(),
        )  # fmt: skip

    return state.prepared("ddp", begin)


# ---- 3. hooks in bfloat16, hooks by name ---------------------------------------------------------

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Return a hook that is given gradients as bfloat16, and whose averages become theirs again.

    It is torch's wrapper of this name, which DistributedDataParallel refuses, by its name, where
    there is no NCCL: the core needs none. torch's fp16_compress_wrapper is not refused.
    """
    wrapped = default_hooks.bf16_compress_wrapper(hook)  # type: ignore[arg-type]

    def hook_in_bf16(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return wrapped(state, bucket)  # type: ignore[arg-type]

    return hook_in_bf16
