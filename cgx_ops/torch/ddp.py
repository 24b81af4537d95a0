"""A communication hook for DistributedDataParallel: gradients are averaged in a few bits a value.

    from cgx_ops.torch import ddp
    model = DistributedDataParallel(model)
    state = ddp.QuantizedAllreduceState(config=cgx_ops.Config(bits=4))
    model.register_comm_hook(state, ddp.quantized_allreduce_hook)

  1. the state: what travels how, whose turn the noise is, and what compression has lost so far; all
     of it goes into checkpoints
  2. the hook: starts a bucket's collective, each layer with buckets (and bits) of its own, and
     returns its future

The layout of torch's own hooks (torch.distributed.algorithms.ddp_comm_hooks), PowerSGD's above all.
ddp_models.py knows the names of layers; ddp_unasked.py attaches the hook over the backend "cgx".
"""

import logging
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import cgx_ops
from cgx_ops import Communicator, Config, Segment, _native
from cgx_ops.call import call_seed, with_segment
from cgx_ops.errors import InvalidArgument, NotFound
from cgx_ops.torch import backend, ddp_models, layers
from cgx_ops.torch._compat import GradBucket, group_or_default
from cgx_ops.torch.carried import Carrier
from cgx_ops.torch.layers import Layer, Rules
from cgx_ops.torch.residuals import Residuals
from cgx_ops.torch.work import DTYPES, devices, start

_log = logging.getLogger(__name__)

# ---- 1. the state --------------------------------------------------------------------------------


# What goes into checkpoints of a state.
_KEPT = ("config", "rules", "carrier", "unsupported", "steps", "residuals")

# What cannot be cut travels by one_shot.
_UNCUT = {row["name"] for row in _native.COMPRESSORS if not row["sliced"]}


class QuantizedAllreduceState:
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
            where config.keeps_residuals says so, for layers that are compressed. Its algorithm
            "auto" is "by_hosts" here: what a layer becomes must not depend on the other layers in
            its bucket, since DistributedDataParallel makes its buckets anew after the first step,
            and after each restart.
        rules: which layers travel otherwise; None: those that cgx_ops.torch.exclude_layer() and its
            like set. Parameters of one dimension are exact unless a rule names them.
        carrier: "native", cgx_ops' own transports: the group is one of the backend "cgx", or, under
            mpirun, of any backend and all ranks in MPI's order. "c10d": torch's own collectives,
            over any group; CPU tensors only. Same bits either way for one algorithm.
        unsupported: what happens to gradients that the core cannot average (float64, complex,
            sparse, on a GPU if cgx_ops was built without CUDA): "refuse" raises TypeError, "exact"
            has the process group average them.
        steps: backward passes so far; the noise of a layer derives from config.seed, this and the
            names of the layer and of the group.
        residuals: what was lost so far, by layer, in units of this rank's gradients.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        config: Config | None = None,
        *,
        rules: Rules | None = None,
        carrier: Literal["native", "c10d"] = "native",
        unsupported: Literal["refuse", "exact"] = "refuse",
    ) -> None:
        """Make a state; config None: Config.from_env(), which CGX_* variables set."""
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            raise InvalidArgument(f"process_group is {process_group!r}; it must be one, or None")
        if carrier not in ("native", "c10d"):
            raise InvalidArgument(f"carrier is {carrier!r}; it must be 'native' or 'c10d'")
        if unsupported not in ("refuse", "exact"):
            raise InvalidArgument(f"unsupported is {unsupported!r}; it must be 'refuse' or 'exact'")
        config = Config.from_env() if config is None else config
        if not isinstance(config, Config):
            raise InvalidArgument(
                f"config is {config!r}; give cgx_ops.Config(bits=, bucket_size=, minimal_size=); "
                "minimal_size is CGXState's layer_min_size"
            )
        if rules is not None and not isinstance(rules, Rules):
            raise InvalidArgument(f"rules is {rules!r}; give layers.Rules([...])")
        if config.algorithm == "auto":
            config = replace(config, algorithm="by_hosts")
        if carrier == "c10d" and (algorithm := config.algorithm) in ("ring", "hierarchical"):
            raise InvalidArgument(f"carrier 'c10d' has no algorithm {algorithm!r}; use 'sra'")
        self.process_group = process_group
        self.config = config
        self.rules = rules
        self.carrier = carrier
        self.unsupported = unsupported
        self.steps = 0
        self.residuals = Residuals()
        self._connect()

    def _connect(self) -> None:
        self._communicator: Communicator | None = None
        self._carrier: Carrier | None = None
        self._checked: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()

    def state_dict(self) -> dict[str, Any]:
        """Return everything but what belongs to this process; residuals are copied."""
        rank, size = 0, 1
        if self.process_group is not None or dist.is_initialized():
            group = group_or_default(self.process_group)
            rank, size = group.rank(), group.size()
        saved = self.residuals.saved(rank, size, per_rank=self._keeps_residuals())
        return {name: getattr(self, name) for name in _KEPT} | {"residuals": saved}

    def _keeps_residuals(self) -> bool:
        """Tell whether any layer may have a residual."""
        if self.residuals.tensors or self.config.keeps_residuals:
            return True
        own = (layers.translated(rule).overrides for rule in _rules_of(self).rules)
        return any(self.config.with_own(**each).keeps_residuals for each in own)

    def consolidate(self) -> None:
        """Make the residuals the mean over the ranks, equal everywhere. Collective.

        What is saved then can be loaded on any number of ranks: the correction that is pending, the
        mean of the ranks' residuals, is the same. By torch.distributed.checkpoint load it into a
        new state of which consolidate() was called too: so it asks for residuals of all ranks. The
        next backward makes residuals each rank's own again.

        Raises:
            InvalidArgument: ranks have residuals of other layers.
        """
        self.residuals.consolidate(group_or_default(self.process_group))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue, in place, where the state was that state_dict() was called of.

        Its process group, and the hook that has it, stay.

        Raises:
            InvalidArgument: this is not the state_dict() of such a state, or it lacks this rank's
                residuals.
        """
        if set(state_dict) != set(_KEPT):
            raise InvalidArgument(
                f"QuantizedAllreduceState.load_state_dict: the names are {sorted(state_dict)}, not "
                f"{sorted(_KEPT)}: give what state_dict() returned"
            )
        residuals = Residuals.restored(state_dict["residuals"])
        self.__dict__.update(state_dict, residuals=residuals)
        self._checked = weakref.WeakSet()  # its rules may be others

    def __getstate__(self) -> dict[str, Any]:
        """Return what is saved, for pickles."""
        if self.process_group is not None:
            _log.warning(
                "a QuantizedAllreduceState is pickled without its process group: set process_group "
                "after it is restored, if it is not to be the default group"
            )
        return self.state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore it over the default group."""
        self.__dict__.update(state, residuals=Residuals.restored(state["residuals"]))
        self.process_group = None
        self._connect()

    def communicator(self) -> Communicator:
        """Return the ranks of the process group, as cgx_ops knows them.

        Raises:
            InvalidArgument: no communicator has them.
        """
        if self._communicator is None or self._communicator.closed:
            self._communicator = _communicator_of(group_or_default(self.process_group))
        return self._communicator

    def carry(self) -> Carrier:
        """Return what moves bytes by torch's collectives. The first call is collective."""
        if self._carrier is None:
            self._carrier = Carrier(group_or_default(self.process_group))
        return self._carrier


def _communicator_of(group: dist.ProcessGroup) -> Communicator:
    try:
        return Communicator.find(group.group_name)
    except NotFound:
        world = cgx_ops.init()
        if (world.rank, world.size) == (group.rank(), group.size()):
            return world
        raise InvalidArgument(
            f"process group '{group.group_name}' ({group.size()} ranks, backend "
            f"{dist.get_backend(group)}) is none of cgx_ops' communicators; make it with the "
            "backend 'cgx', or give QuantizedAllreduceState(carrier='c10d')"
        ) from None


# ---- 2. the hook ---------------------------------------------------------------------------------


def quantized_allreduce_hook(
    state: QuantizedAllreduceState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over the ranks, in the bits that `state` says.

    Give it to DistributedDataParallel.register_comm_hook(), alone or inside torch's
    fp16_compress_wrapper or bf16_compress_wrapper.

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
    GPU it makes the gradients NaN, and the next bucket's hook raises it.
    """
    if not isinstance(bucket, GradBucket):
        raise TypeError(
            f"quantized_allreduce_hook: bucket is {type(bucket).__name__}, not a GradBucket. With "
            'torch._dynamo.config.optimize_ddp = "python_reducer" there are no buckets: use '
            "cgx_ops.torch.compress_collectives() there"
        )
    buffer, parameters = bucket.buffer(), bucket.parameters()
    wrappers = ddp_models.wrappers_of(parameters)
    _check_once(state, wrappers)
    names = ddp_models.names_of(wrappers[0]) if wrappers else {}
    scope = backend.current_scope()
    config = scope if isinstance(scope, Config) else state.config
    residuals = None
    step = state.steps
    if bucket.is_last():
        state.steps += 1

    problem = _unsupported(state, buffer, parameters)
    if problem and state.unsupported == "exact":
        with backend.uncompressed():
            return default_hooks.allreduce_hook(group_or_default(state.process_group), bucket)
    if problem:
        listed = ", ".join(f"'{names.get(id(p), '')}'" for p in parameters[:4])
        raise TypeError(
            f"quantized_allreduce_hook: the gradients of {listed} are {problem}, or give "
            "QuantizedAllreduceState(unsupported='exact')"
        )

    if scope == "uncompressed":
        segments, seeds = [Segment(0, buffer.numel(), bits=layers.EXACT_BITS)], [0]
    else:
        rules = _rules_of(state)
        if rules and not names:
            raise InvalidArgument(
                "quantized_allreduce_hook: a rule names layers, but this model's names are not "
                "known: import cgx_ops.torch before DistributedDataParallel(model)"
            )
        found = [Layer(names.get(id(p), ""), p.dim(), p.numel()) for p in parameters]
        base = buffer.storage_offset()
        offsets = [int(g.storage_offset() - base) for g in bucket.gradients()]
        config = _for_any_bucket(config, rules)
        segments = rules.segments(found, offsets)
        residuals = _residuals_of(state, config, found, segments, bucket.gradients())
        # The noise of a layer must not depend on its bucket, nor be that of another.
        group_name = group_or_default(state.process_group).group_name
        seeds = [
            call_seed(config.seed, f"ddp/{layer.name or (bucket.index(), i)}", step, group_name)
            for i, layer in enumerate(found)
        ]
    if state.carrier == "c10d":
        return state.carry().start(
            buffer, config, op="avg", segments=segments, seed=seeds, residuals=residuals
        )
    work = start(
        state.communicator(),
        "allreduce",
        buffer,
        buffer,
        config,
        op="avg",
        segments=segments,
        seed=seeds,
        name="ddp",
        residuals=residuals,
    )
    return work.get_future().then(lambda future: future.value()[0])


def _for_any_bucket(config: Config, rules: Rules) -> Config:
    """Return a config by which a layer becomes the same in any bucket.

    Where one layer cannot be cut, its bucket cannot: then none is.
    """
    used = {config.compressor, *(rule.compressor for rule in rules.rules)}
    if config.algorithm == "by_hosts" and used & _UNCUT:
        return replace(config, algorithm="one_shot")
    return config


def _residuals_of(
    state: QuantizedAllreduceState,
    config: Config,
    found: Sequence[Layer],
    segments: Sequence[Segment],
    gradients: Sequence[torch.Tensor],
) -> list[torch.Tensor | None] | None:
    """Return the residual of each layer that is compressed and has one; None if none has."""
    keeps = []
    for segment in segments:
        own = with_segment(config, segment)
        smallest = max(_native.SMALLEST_COMPRESSED, own.minimal_size)
        keeps.append(own.keeps_residuals and segment.numel >= smallest)
    if not any(keeps):
        return None
    group = group_or_default(state.process_group)
    state.residuals.claim(group.rank(), group.size())
    for layer, kept in zip(found, keeps, strict=True):
        if kept and not layer.name:
            raise InvalidArgument(
                "quantized_allreduce_hook: error feedback keeps residuals by layer, but this "
                "model's names are not known: import cgx_ops.torch before "
                "DistributedDataParallel(model), or give Config(error_feedback=False)"
            )
    return [
        state.residuals.of(layer.name, gradient, config.residual_decay) if kept else None
        for layer, gradient, kept in zip(found, gradients, keeps, strict=True)
    ]


def _unsupported(
    state: QuantizedAllreduceState, buffer: torch.Tensor, parameters: Sequence[torch.Tensor]
) -> str:
    """Return what the core cannot average about a bucket, and the remedy; "" if it can."""
    if buffer.layout != torch.strided:
        return f"{buffer.layout}; make the layer with sparse=False"
    if buffer.device.type not in devices():
        return f"on {buffer.device}; build cgx_ops with CUDA (nvcc on PATH or in CUDA_HOME)"
    if state.carrier == "c10d" and buffer.device.type != "cpu":
        return f"on {buffer.device}; carrier 'c10d' encodes on the CPU: use the backend 'cgx'"
    # Buckets of complex parameters are real, with twice as many elements.
    for dtype in (buffer.dtype, *(p.dtype for p in parameters if p.is_complex())):
        if dtype not in DTYPES:
            return f"{dtype}; train it in float32, float16 or bfloat16: model.float()"
    return ""


def _check_once(state: QuantizedAllreduceState, wrappers: list[DistributedDataParallel]) -> None:
    """Compare a state with the model whose gradients it gets, when it first gets them."""
    if not wrappers or any(wrapper in state._checked for wrapper in wrappers):
        return
    ranks = dist.get_process_group_ranks(group_or_default(state.process_group))
    for wrapper in wrappers:
        if ddp_models.ranks_of(wrapper) == ranks:
            break
    else:
        raise InvalidArgument(
            f"quantized_allreduce_hook: the state averages over ranks {ranks}, "
            f"DistributedDataParallel over {ddp_models.ranks_of(wrappers[0])}; give it the model's "
            "group: state.process_group = model.process_group"
        )
    ddp_models.check_layers(wrapper, _rules_of(state))
    ddp_models.watch_dtypes(wrapper)
    state._checked.add(wrapper)


def _rules_of(state: QuantizedAllreduceState) -> Rules:
    return layers.process_rules() if state.rules is None else state.rules
