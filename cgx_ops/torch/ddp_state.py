"""What the communication hooks of ddp.py share: a state that is saved, and the look at a bucket.

1. the state: ranks, Config, rules, steps, residuals; checkpoints of them
2. what every hook looks at first: who made the bucket, whether the core can average it, the names
   of its layers and how they travel
3. residuals and noise of layers that the core compresses
"""

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import cgx_ops
from cgx_ops import Communicator, Config, Segment, _native
from cgx_ops.call import call_seed, with_segment
from cgx_ops.errors import InvalidArgument, NotFound
from cgx_ops.torch import backend, ddp_models, layers
from cgx_ops.torch._compat import GradBucket, group_or_default
from cgx_ops.torch.layers import Layer, Rules
from cgx_ops.torch.residuals import Residuals
from cgx_ops.torch.work import DTYPES, devices

_log = logging.getLogger(__name__)

# ---- 1. the state --------------------------------------------------------------------------------


class HookState:
    """What a hook needs of one model: see QuantizedAllreduceState and PowerSGDState.

    Attributes:
        kept: the names of what goes into checkpoints.
        process_group: whose ranks average; None: the default group.
        config: how values travel.
        rules: which layers travel otherwise; None: those of the process.
        steps: backward passes so far.
        residuals: what was lost so far, by layer, in units of this rank's gradients.
    """

    kept: ClassVar[tuple[str, ...]] = ("config", "rules", "steps", "residuals")

    @property
    def on_cpu(self) -> str:
        """Why only tensors on the CPU can be averaged; "" if others can, too."""
        return ""

    def __init__(
        self, process_group: dist.ProcessGroup | None, config: Config | None, rules: Rules | None
    ) -> None:
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            raise InvalidArgument(f"process_group is {process_group!r}; it must be one, or None")
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
        self.process_group = process_group
        self.config = config
        self.rules = rules
        self.steps = 0
        self.residuals = Residuals()
        self.connect()

    def connect(self) -> None:
        """Begin anew with what belongs to this process."""
        self._communicator: Communicator | None = None
        self.checked: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()

    def state_dict(self) -> dict[str, Any]:
        """Return everything but what belongs to this process; residuals are copied."""
        rank, size = 0, 1
        if self.process_group is not None or dist.is_initialized():
            group = group_or_default(self.process_group)
            rank, size = group.rank(), group.size()
        saved = self.residuals.saved(rank, size, per_rank=self.keeps_residuals())
        return {name: getattr(self, name) for name in self.kept} | {"residuals": saved}

    def keeps_residuals(self) -> bool:
        """Tell whether any layer may have a residual."""
        if self.residuals.tensors or self.config.keeps_residuals:
            return True
        own = (layers.translated(rule).overrides for rule in rules_of(self).rules)
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
        if set(state_dict) != set(self.kept):
            raise InvalidArgument(
                f"{type(self).__name__}.load_state_dict: the names are {sorted(state_dict)}, not "
                f"{sorted(self.kept)}: give what state_dict() returned"
            )
        self.__dict__.update(self.restored(state_dict))
        self.checked = weakref.WeakSet()  # its rules may be others

    def restored(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return attributes from what was saved."""
        return saved | {"residuals": Residuals.restored(saved["residuals"])}

    def __getstate__(self) -> dict[str, Any]:
        """Return what is saved, for pickles."""
        if self.process_group is not None:
            _log.warning(
                "a %s is pickled without its process group: set process_group after it is "
                "restored, if it is not to be the default group",
                type(self).__name__,
            )
        return self.state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore it over the default group."""
        self.__dict__.update(self.restored(state))
        self.process_group = None
        self.connect()

    def communicator(self) -> Communicator:
        """Return the ranks of the process group, as cgx_ops knows them.

        Raises:
            InvalidArgument: no communicator has them.
        """
        if self._communicator is None or self._communicator.closed:
            self._communicator = _communicator_of(group_or_default(self.process_group))
        return self._communicator


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
            "backend 'cgx', or use QuantizedAllreduceState(carrier='c10d')"
        ) from None


def rules_of(state: HookState) -> Rules:
    """Return which layers travel otherwise."""
    return layers.process_rules() if state.rules is None else state.rules


# ---- 2. what a hook looks at first ---------------------------------------------------------------


@dataclass
class Seen:
    """A bucket, as a hook found it.

    Attributes:
        layers: of its gradients, in order; without a name where that is not known.
        offsets: where each begins in the bucket's buffer, if there is no problem.
        config: of the state, or of the block compressed(); None inside uncompressed().
        step: backward passes before this one.
        problem: what the core cannot average about it, and the remedy; "" if it can.
    """

    layers: list[Layer]
    offsets: list[int]
    config: Config | None
    step: int
    problem: str


def look_at(hook: str, state: HookState, bucket: GradBucket) -> Seen:
    """Look at a bucket, and count the step that it is the last one of.

    Args:
        hook: its name, for errors.
        state: the hook's.
        bucket: which DistributedDataParallel gave the hook.

    Raises:
        TypeError: it is no bucket. InvalidArgument: the model is over other ranks.
    """
    if not isinstance(bucket, GradBucket):
        raise TypeError(
            f"{hook}: bucket is {type(bucket).__name__}, not a GradBucket. With "
            'torch._dynamo.config.optimize_ddp = "python_reducer" there are no buckets: use '
            "cgx_ops.torch.compress_collectives() there"
        )
    buffer, parameters = bucket.buffer(), bucket.parameters()
    wrappers = ddp_models.wrappers_of(parameters)
    _check_once(hook, state, wrappers)
    names = ddp_models.names_of(wrappers[0]) if wrappers else {}
    scope = backend.current_scope()
    config = scope if isinstance(scope, Config) else state.config
    config = None if scope == "uncompressed" else config
    step = state.steps
    if bucket.is_last():
        state.steps += 1
    problem = unsupported(state, buffer, parameters)
    gradients = [] if problem else bucket.gradients()
    return Seen(
        [Layer(names.get(id(p), ""), p.dim(), p.numel()) for p in parameters],
        [int(g.storage_offset() - buffer.storage_offset()) for g in gradients],
        config,
        step,
        problem,
    )


def refuse(hook: str, seen: Seen, remedy: str = "") -> None:
    """Raise TypeError if the core cannot average a bucket."""
    if seen.problem:
        listed = ", ".join(f"'{layer.name}'" for layer in seen.layers[:4])
        raise TypeError(f"{hook}: the gradients of {listed} are {seen.problem}{remedy}")


def unsupported(state: HookState, buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> str:
    """Return what the core cannot average about a bucket, and the remedy; "" if it can."""
    if buffer.layout != torch.strided:
        return f"{buffer.layout}; make the layer with sparse=False"
    if buffer.device.type not in devices():
        return f"on {buffer.device}; build cgx_ops with CUDA (nvcc on PATH or in CUDA_HOME)"
    if state.on_cpu and buffer.device.type != "cpu":
        return f"on {buffer.device}; {state.on_cpu}"
    # Buckets of complex parameters are real, with twice as many elements.
    for dtype in (buffer.dtype, *(p.dtype for p in parameters if p.is_complex())):
        if dtype not in DTYPES:
            return f"{dtype}; train it in float32, float16 or bfloat16: model.float()"
    return ""


def _check_once(hook: str, state: HookState, wrappers: list[DistributedDataParallel]) -> None:
    """Compare a state with the model whose gradients it gets, when it first gets them."""
    if not wrappers or any(wrapper in state.checked for wrapper in wrappers):
        return
    ranks = dist.get_process_group_ranks(group_or_default(state.process_group))
    for wrapper in wrappers:
        if ddp_models.ranks_of(wrapper) == ranks:
            break
    else:
        raise InvalidArgument(
            f"{hook}: the state averages over ranks {ranks}, "
            f"DistributedDataParallel over {ddp_models.ranks_of(wrappers[0])}; give it the model's "
            "group: state.process_group = model.process_group"
        )
    ddp_models.check_layers(wrapper, rules_of(state))
    ddp_models.watch_dtypes(wrapper)
    state.checked.add(wrapper)


# ---- 3. layers that the core compresses ----------------------------------------------------------

# What cannot be cut travels by one_shot.
_UNCUT = {row["name"] for row in _native.COMPRESSORS if not row["sliced"]}


def for_any_bucket(config: Config, rules: Rules) -> Config:
    """Return a config by which a layer becomes the same in any bucket.

    Where one layer cannot be cut, its bucket cannot: then none is.
    """
    used = {config.compressor, *(rule.compressor for rule in rules.rules)}
    if config.algorithm == "by_hosts" and used & _UNCUT:
        return replace(config, algorithm="one_shot")
    return config


def residuals_of(
    hook: str,
    state: HookState,
    config: Config,
    found: Sequence[Layer],
    segments: Sequence[Segment],
    values: Sequence[torch.Tensor],
) -> list[torch.Tensor | None] | None:
    """Return the residual of each layer that is compressed and has one; None if none has.

    values: what travels of each layer, whose dtype and device its residual has.
    """
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
                f"{hook}: error feedback keeps residuals by layer, but this "
                "model's names are not known: import cgx_ops.torch before "
                "DistributedDataParallel(model), or give Config(error_feedback=False)"
            )
    return [
        state.residuals.of(layer.name, value, config.residual_decay) if kept else None
        for layer, value, kept in zip(found, values, keeps, strict=True)
    ]


def seeds_of(
    state: HookState, config: Config, found: Sequence[Layer], step: int, bucket: GradBucket
) -> list[int]:
    """Return the seed of each layer's noise, which must not depend on its bucket."""
    group_name = group_or_default(state.process_group).group_name
    return [
        call_seed(config.seed, f"ddp/{layer.name or (bucket.index(), i)}", step, group_name)
        for i, layer in enumerate(found)
    ]
