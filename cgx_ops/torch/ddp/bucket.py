"""The steps that all communication hooks share: inspect a bucket, and lay out its message.

1. inspect_bucket(): which model the bucket belongs to, whether the core can average it, and the
   names of its layers
2. layout_of(): each layer's segment, noise and residual. They do not depend on the bucket, because
   DistributedDataParallel rebuilds its buckets after the first step
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from cgx_ops import Config, Segment, bits_for
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.errors import InvalidArgument
from cgx_ops.torch._compat.parallel import GradBucket
from cgx_ops.torch.averaging.adaptation import Adaptation
from cgx_ops.torch.averaging.layers import Layer, segments_of
from cgx_ops.torch.averaging.residuals import decayed, nothing
from cgx_ops.torch.averaging.state import by_hosts, ranks_of, rules_of
from cgx_ops.torch.averaging.unused_parameters import unused_kept
from cgx_ops.torch.backend import process_group
from cgx_ops.torch.ddp import models
from cgx_ops.torch.ddp.state import HookState
from cgx_ops.torch.graph.work import DTYPES, devices

_log = logging.getLogger(__name__)

# ---- 1. inspect a bucket -------------------------------------------------------------------------


@dataclass
class BucketInfo:
    """The properties of a bucket that hooks use.

    Attributes:
        layers: its layers, in order; their names are "" if unknown.
        gradients: the layers' gradients in the bucket's buffer; empty if there is a problem.
        offsets: where each gradient starts in the buffer.
        config: of the state, or of a compressed() block; None inside uncompressed().
        step: number of earlier backward passes.
        finds_unused: whether no rank may have used some of the layers.
        skips_unused: whether DistributedDataParallel skips buckets that have only unused layers.
        problem: why the core cannot average the bucket, and the remedy; "" if it can.
        refusal: why the state belongs to another model; "" if it does not. Raised later, where the
            other ranks receive the reason; an exception here would keep the model alive by its
            frames.
    """

    layers: list[Layer]
    gradients: list[torch.Tensor]
    offsets: list[int]
    config: Config | None
    step: int
    finds_unused: bool
    skips_unused: bool
    problem: str
    refusal: str

    def raise_refusal(self, reported: AbstractContextManager[None]) -> None:
        """Raise the refusal, if there is one, inside a block that reports it to the other ranks.

        Args:
            reported: HookState.or_refuse() with the names of the messages that these ranks start.

        Raises:
            InvalidArgument: the state belongs to another model.
        """
        if self.refusal:
            with reported:
                raise InvalidArgument(self.refusal)


def inspect_bucket(hook: str, state: HookState, bucket: GradBucket) -> BucketInfo:
    """Return the properties of a bucket; count the step with its first bucket.

    Args:
        hook: name of the hook, for errors.
        state: the hook's state.
        bucket: what DistributedDataParallel passed to the hook.

    Raises:
        TypeError: `bucket` is not a GradBucket.
        InvalidArgument: the model averages over other ranks.
    """
    if not isinstance(bucket, GradBucket):
        raise TypeError(
            f"{hook}: bucket is {type(bucket).__name__}, not a GradBucket. With "
            'torch._dynamo.config.optimize_ddp = "python_reducer" there are no buckets: use '
            "cgx_ops.torch.compress_collectives() there"
        )
    buffer, parameters = bucket.buffer(), bucket.parameters()
    wrappers = models.wrappers_of(parameters)
    refusal = _check_once(hook, state, wrappers)
    state.agree()
    names = models.names_of(wrappers[0]) if wrappers else {}
    scope = process_group.current_scope()
    config = by_hosts(scope) if isinstance(scope, Config) else state.config
    config = None if scope == "uncompressed" else config
    step = state.step_of(wrappers[0] if wrappers else state, bucket)
    problem = unsupported(buffer, parameters)
    gradients = [] if problem else bucket.gradients()
    return BucketInfo(
        [Layer(names.get(id(p), ""), p.dim(), p.numel()) for p in parameters],
        gradients,
        [int(g.storage_offset() - buffer.storage_offset()) for g in gradients],
        config,
        step,
        any(w.find_unused_parameters and not w.static_graph for w in wrappers[:1]),
        any(getattr(w, "skip_all_reduce_unused_params", False) for w in wrappers[:1]),
        problem,
        refusal,
    )


def require_state(hook: str, state: object, kind: type[HookState]) -> None:
    """Require that a hook was registered with a state of its class.

    Raises:
        InvalidArgument: it was not, for example with None, which torch's own hooks accept.
    """
    if not isinstance(state, kind):
        raise InvalidArgument(
            f"{hook}: the state is {type(state).__name__}; it must be a {kind.__name__}: "
            f"model.register_comm_hook(ddp.{kind.__name__}(...), ddp.{hook})"
        )


def require_names(hook: str, info: BucketInfo) -> None:
    """Require that the names of all layers of a bucket are known.

    Raises:
        InvalidArgument: a name is unknown.
    """
    if not all(layer.name for layer in info.layers):
        raise InvalidArgument(
            f"{hook}: settings and state are stored by layer name, and this model's names are "
            "unknown: import cgx_ops.torch before you call DistributedDataParallel(model)"
        )


def refuse(hook: str, info: BucketInfo, remedy: str = "") -> None:
    """Raise TypeError if the core cannot average a bucket."""
    if info.problem:
        listed = ", ".join(f"'{layer.name}'" for layer in info.layers[:4])
        raise TypeError(f"{hook}: the gradients of {listed} are {info.problem}{remedy}")


def unsupported(buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> str:
    """Return why the core cannot average a bucket, and the remedy; "" if it can."""
    if buffer.layout != torch.strided:
        return f"{buffer.layout}; make the layer with sparse=False"
    if buffer.device.type not in devices():
        return f"on {buffer.device}; rebuild cgx_ops with CUDA (nvcc on PATH or in CUDA_HOME)"
    # Buckets of complex parameters are real, with twice as many elements.
    for dtype in (buffer.dtype, *(p.dtype for p in parameters if p.is_complex())):
        if dtype not in DTYPES:
            return f"{dtype}; train it in float32, float16 or bfloat16: model.float()"
    return ""


def _check_once(hook: str, state: HookState, wrappers: list[DistributedDataParallel]) -> str:
    """Compare a state with the model whose gradients it receives, at the first bucket.

    Returns:
        Why the state belongs to another model; "" if it does not.
    """
    group = state.group
    if not wrappers or any(wrapper in state.checked for wrapper in wrappers):
        return ""
    ranks = ranks_of(group)
    for wrapper in wrappers:
        if ranks_of(wrapper.process_group) == ranks:
            break
    else:
        raise InvalidArgument(
            f"{hook}: the state averages over ranks {ranks}, DistributedDataParallel over "
            f"{ranks_of(wrappers[0].process_group)}; use the model's group: "
            "state.process_group = model.process_group"
        )
    models.check_layers(wrapper, rules_of(state))
    try:
        state.require_layers(models.layers_under(state))
    except InvalidArgument as error:
        return str(error)
    models.watch_dtypes(wrapper)
    state.checked.add(wrapper)
    state.report(models.trained_layers(wrapper))
    return ""


def decide_bits(hook: str, state: HookState, bucket: GradBucket) -> None:
    """Set the bits of a state's config to the fastest ones for the model's buckets.

    All layers get these bits, because a layer's result must not depend on the other layers of its
    bucket.

    Raises:
        InvalidArgument: the gradients are on a GPU, whose link is not measured, or the model
            averages over other ranks.
    """
    buffer, parameters = bucket.buffer(), bucket.parameters()
    if buffer.device.type != "cpu":
        raise InvalidArgument(
            f"{hook}: auto_bits=True measures CPU allreduces, but the gradients are on "
            f"{buffer.device}: set Config(bits=...) instead"
        )
    numel, element_bytes = buffer.numel(), min(4, buffer.element_size())
    wrappers = models.wrappers_of(parameters)
    if refusal := _check_once(hook, state, wrappers):
        raise InvalidArgument(refusal)
    if wrappers:
        every = sum(p.numel() for p in wrappers[0].module.parameters() if p.requires_grad)
        numel = min(every, wrappers[0].bucket_bytes_cap // element_bytes)
    bits = bits_for(state.communicator(), numel, state.config, element_bytes=element_bytes)
    state.config = state.config.with_own(bits=bits)
    _log.debug("%s: auto_bits chose %d bits, for messages of %d values", hook, bits, numel)


# ---- 2. lay out its message ----------------------------------------------------------------------


class Layout(NamedTuple):
    """The arguments of a bucket's collective besides its buffer; lists have one entry per segment.

    Attributes:
        config: of the message.
        segments: of the layers.
        seeds: of the layers' noise.
        residuals: of the layers, or None.
        then: a function to call after the collective, before the bucket is used.
    """

    config: Config
    segments: list[Segment]
    seeds: list[int]
    residuals: list[torch.Tensor | None] | None
    then: Callable[[], object]


def layout_of(
    hook: str,
    state: HookState,
    bucket: GradBucket,
    info: BucketInfo,
    adaptation: Adaptation | None = None,
) -> Layout:
    """Return the layout of a bucket that the core can average.

    Args:
        hook: name of the hook, for errors.
        state: the hook's state.
        bucket: the bucket.
        info: its properties.
        adaptation: sets the bits of segments, and measures what is sent in the steps that it
            chooses.

    Raises:
        InvalidArgument: rules or residuals need names of layers, which are unknown.
    """
    if info.config is None:
        whole = Segment(0, bucket.buffer().numel(), Config(bits=EXACT_BITS))
        return Layout(state.config, [whole], [0], None, nothing)
    rules = rules_of(state)
    if rules:
        require_names(hook, info)
    config = info.config
    segments = given = segments_of(rules, info.layers, info.offsets, config)
    if adaptation:
        adaptation.begin(state.communicator(), info.step, config, rules)
        segments = adaptation.segments(info.layers, given)
    gradients = info.gradients
    kept = state.residuals_of(hook, config, info.layers, segments, gradients)
    residuals, keep = decayed(kept, config, segments)
    seeds = seeds_of(state, info.layers, info.step, bucket)
    if adaptation:
        lost = None if residuals is None else [e if e is None else [e] for e in residuals]
        adaptation.measure(
            state.communicator(), info.layers, given, [[g] for g in gradients], lost,
            last=bucket.is_last(),
        )  # fmt: skip
    if kept is None or not info.finds_unused:
        return Layout(config, segments, seeds, residuals, keep)
    restore = unused_kept(state, gradients, [[residual] for residual in kept], "ddp")

    def then() -> None:
        keep()
        restore()

    return Layout(config, segments, seeds, residuals, then)


def seeds_of(state: HookState, layers: Sequence[Layer], step: int, bucket: GradBucket) -> list[int]:
    """Return the seed of each layer's noise, which must not depend on the layer's bucket."""
    names = [f"ddp/{layer.name or (bucket.index(), i)}" for i, layer in enumerate(layers)]
    return state.seeds_of(names, step)
