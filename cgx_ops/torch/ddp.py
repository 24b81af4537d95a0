"""A communication hook for DistributedDataParallel: gradients are averaged in a few bits a value.

    from cgx_ops.torch import ddp
    model = DistributedDataParallel(model)
    state = ddp.QuantizedAllreduceState(config=cgx_ops.Config(bits=4))
    model.register_comm_hook(state, ddp.quantized_allreduce_hook)

  1. the state: what travels how, and whose turn the noise is; all of it goes into checkpoints
  2. the hook: starts a bucket's collective, each layer with buckets (and bits) of its own, and
     returns its future
  3. who is who: modules under DistributedDataParallel are noticed when they are made, so that
     layers have names; over the backend "cgx" they get the hook unasked

The layout of torch's own hooks (torch.distributed.algorithms.ddp_comm_hooks), PowerSGD's above all.
"""

import logging
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

import cgx_ops
from cgx_ops import Communicator, Config, Segment
from cgx_ops.call import call_seed
from cgx_ops.errors import InvalidArgument, NotFound
from cgx_ops.torch import _compat, backend, layers
from cgx_ops.torch.carried import Carrier
from cgx_ops.torch.layers import Layer, Rules
from cgx_ops.torch.work import DTYPES, start

_log = logging.getLogger(__name__)

# ---- 1. the state --------------------------------------------------------------------------------


class QuantizedAllreduceState:
    """What quantized_allreduce_hook needs. Equal on all ranks but for the process group.

    It pickles, and torch.save and torch.load take it: config, rules, and how many steps were made,
    so that a run that is resumed continues to the same bits. Its process group is left out: the
    restored state uses the default one unless `process_group` is set.

    Attributes:
        process_group: whose ranks average; None: the default group.
        config: how values travel. Its algorithm "auto" is "sra" here: what a layer becomes must not
            depend on the other layers in its bucket, since DistributedDataParallel makes its
            buckets anew after the first step, and after each restart.
        rules: which layers travel otherwise; None: those that cgx_ops.torch.exclude_layer() and its
            like set. Parameters of one dimension are exact unless a rule names them.
        carrier: "native", cgx_ops' own transports: the group is one of the backend "cgx", or, under
            mpirun, of any backend and all ranks in MPI's order. "c10d": torch's own collectives,
            over any group. Same bits either way.
        steps: backward passes so far; the noise of a step derives from config.seed and this.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        config: Config | None = None,
        *,
        rules: Rules | None = None,
        carrier: Literal["native", "c10d"] = "native",
    ) -> None:
        """Make a state; config None: Config.from_env(), which CGX_* variables set."""
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            raise InvalidArgument(f"process_group is {process_group!r}; it must be one, or None")
        if carrier not in ("native", "c10d"):
            raise InvalidArgument(f"carrier is {carrier!r}; it must be 'native' or 'c10d'")
        config = Config.from_env() if config is None else config
        if config.algorithm == "auto":
            config = replace(config, algorithm="sra")
        if carrier == "c10d" and config.algorithm == "ring":
            raise InvalidArgument("carrier 'c10d' has no algorithm 'ring'; use 'sra'")
        self.process_group = process_group
        self.config = config
        self.rules = rules
        self.carrier = carrier
        self.steps = 0
        self._connect()

    def _connect(self) -> None:
        self._communicator: Communicator | None = None
        self._carrier: Carrier | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but what belongs to this process."""
        if self.process_group is not None:
            _log.warning(
                "a QuantizedAllreduceState is pickled without its process group: set process_group "
                "after it is restored, if it is not to be the default group"
            )
        kept = ("config", "rules", "carrier", "steps")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore it over the default group."""
        self.__dict__.update(state)
        self.process_group = None
        self._connect()

    def communicator(self) -> Communicator:
        """Return the ranks of the process group, as cgx_ops knows them.

        Raises:
            InvalidArgument: no communicator has them.
        """
        if self._communicator is None or self._communicator.closed:
            self._communicator = _communicator_of(_group_or_default(self.process_group))
        return self._communicator

    def carry(self) -> Carrier:
        """Return what moves bytes by torch's collectives. The first call is collective."""
        if self._carrier is None:
            self._carrier = Carrier(_group_or_default(self.process_group))
        return self._carrier


def _group_or_default(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group() if group is None else group


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
        bucket: gradients in one flat float32, float16 or bfloat16 tensor on the CPU.

    Returns:
        A future of the same tensor, averaged in place; the hook itself does not wait.

    Raises:
        TypeError: gradients of another dtype, layout or device; it names the layer.
        InvalidArgument: the process group cannot be served.
        torch.distributed.DistBackendError: in the future; ranks disagree, a peer is gone or late.
    """
    buffer = bucket.buffer()
    parameters = bucket.parameters()
    _refuse_others(buffer, parameters)
    scope = backend.current_scope()
    config = scope if isinstance(scope, Config) else state.config
    if scope == "uncompressed":
        segments = [Segment(0, buffer.numel(), bits=layers.EXACT_BITS)]
    else:
        rules = layers.process_rules() if state.rules is None else state.rules
        found = [_layer(parameter, rules) for parameter in parameters]
        base = buffer.storage_offset()
        offsets = [int(g.storage_offset() - base) for g in bucket.gradients()]
        segments = rules.segments(found, offsets, config)
    # One seed for all buckets of a step: the noise of a layer must not depend on its bucket.
    seed = call_seed(config.seed, "ddp", state.steps)
    if bucket.is_last():
        state.steps += 1
    if state.carrier == "c10d":
        return state.carry().start(buffer, config, op="avg", segments=segments, seed=seed)
    work = start(
        state.communicator(),
        "allreduce",
        buffer,
        buffer,
        config,
        op="avg",
        segments=segments,
        seed=seed,
        name="ddp",
    )
    return work.get_future().then(lambda future: future.value()[0])


def _refuse_others(buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> None:
    """Raise for gradients that the core cannot average."""
    if buffer.layout != torch.strided:
        what, remedy = f"{buffer.layout}", "make the layer with sparse=False"
    elif buffer.device.type != "cpu":
        what, remedy = f"on {buffer.device}", "this build serves the CPU"
    elif buffer.dtype not in DTYPES:
        what, remedy = f"{buffer.dtype}", "train it in float32, float16 or bfloat16: model.float()"
    else:
        return
    names = ", ".join(f"'{_name_of(p)}'" for p in parameters[:4])
    raise TypeError(
        f"quantized_allreduce_hook: the gradients of {names} are {what}; {remedy}, or leave them "
        "out of this DistributedDataParallel"
    )


# ---- 3. who is who -------------------------------------------------------------------------------

# Modules under DistributedDataParallel, and the names of their parameters by id, made when needed.
_wrapped: weakref.WeakKeyDictionary[nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()


def register() -> None:
    """Notice every DistributedDataParallel from now on. Once per process."""
    register_module_module_registration_hook(_on_registration)
    torch.serialization.add_safe_globals(
        [QuantizedAllreduceState, quantized_allreduce_hook, Rules, layers.Rule, Config]
    )


def _on_registration(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """See DistributedDataParallel take its module: torch calls this for every submodule."""
    if torch.compiler.is_compiling():  # modules that dynamo looks into are made already
        return
    if name != "module" or not isinstance(parent, DistributedDataParallel) or child is None:
        return
    _wrapped[child] = {}
    ddp = weakref.ref(parent)

    def before_first_forward(_module: nn.Module, _inputs: Any) -> None:
        handle.remove()
        wrapper = ddp()
        if wrapper is not None:
            _attach(wrapper)

    hook: Any = torch.compiler.disable(before_first_forward)
    handle = parent.register_forward_pre_hook(hook)


def _attach(wrapper: DistributedDataParallel) -> None:
    """Give a DistributedDataParallel over the backend "cgx" the hook, if it has none."""
    group = _group_or_default(wrapper.process_group)
    options = backend.options_of(group)
    if options is None or _compat.has_comm_hook(wrapper):
        return
    named = list(wrapper.module.named_parameters())
    layers.check_model([Layer(name, p.dim(), p.numel()) for name, p in named])
    if options.config.bits == layers.EXACT_BITS and not layers.process_rules():
        return
    state = QuantizedAllreduceState(group, options.config)
    wrapper.register_comm_hook(state, quantized_allreduce_hook)
    _log.debug(
        "group '%s': DistributedDataParallel's gradients are compressed layer by layer",
        group.group_name,
    )


def _layer(parameter: torch.Tensor, rules: Rules) -> Layer:
    name = _name_of(parameter)
    if rules and not name:
        raise InvalidArgument(
            "quantized_allreduce_hook: a rule names layers, but this model's names are not known: "
            "import cgx_ops.torch before DistributedDataParallel(model)"
        )
    return Layer(name, parameter.dim(), parameter.numel())


def _name_of(parameter: torch.Tensor) -> str:
    """Return a parameter's name in the module that DistributedDataParallel wraps; "" if unknown."""
    for look_again in (False, True):
        for module, names in _wrapped.items():
            if look_again:
                names.update({id(p): name for name, p in module.named_parameters()})
            name = names.get(id(parameter))
            # An id may have passed to another tensor, and a module may have changed.
            if name is not None and dict(module.named_parameters()).get(name) is parameter:
                return name
    return ""
