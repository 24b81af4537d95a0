"""Compressed FSDP2 collectives, installed through FSDP2's custom communication.

The method is QSDP (Markov, Vladu, Guo, Alistarh: Quantized Distributed Training of Large Models
with Convergence Guarantees, ICML 2023). Every rank stores and updates its exact shard. Forward and
backward gather the shards, quantized without bias by randomly shifted grids. Gradients are rounded
stochastically. One-dimensional parameters (biases, norms) are sent exact.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from cgx_ops import Config, Rules
from cgx_ops._core.call import Op
from cgx_ops._core.refusal import or_refuse
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.config import require_feedback
from cgx_ops.errors import InvalidArgument, checked_seed
from cgx_ops.planner import AdaptiveBits
from cgx_ops.rules import require_rules
from cgx_ops.torch._compat import parallel
from cgx_ops.torch.averaging.layers import Layer, layer_name
from cgx_ops.torch.averaging.reports import report_layers
from cgx_ops.torch.backend.groups import communicator_of
from cgx_ops.torch.fsdp.all_reduce import install_hooks, remove_hooks
from cgx_ops.torch.fsdp.block import Block, rows_of
from cgx_ops.torch.fsdp.custom import Custom, plain_of, replace_by
from cgx_ops.torch.fsdp.differences import DifferenceGather, Differences, require_convergence
from cgx_ops.torch.fsdp.feedback import Feedback
from cgx_ops.torch.fsdp.power_sgd import PowerSGD
from cgx_ops.torch.fsdp.state import State
from cgx_ops.torch.graph.work import start

#: Settings of QSDP for gradients: 8 bits in buckets of 1024.
GRADIENTS = Config(bits=8, bucket_size=1024)
#: Settings of QSDP for weights: 8 bits in buckets of 1024, with randomly shifted grids.
WEIGHTS = Config(bits=8, bucket_size=1024, rounding="shift")

# Reductions that FSDP uses; PREMUL_SUM is a sum that is scaled by a factor.
_OPS: dict[str, Op] = {"SUM": "sum", "AVG": "avg", "PREMUL_SUM": "sum"}


def compress(
    model: nn.Module,
    gradients: Config | None = GRADIENTS,
    weights: Config | Differences | None = None,
    *,
    rules: Rules = Rules(),  # noqa: B008  (immutable)
    feedback: Feedback | None = None,
    adaptive: AdaptiveBits | None = None,
    replicas: dist.ProcessGroup | DeviceMesh | None = None,
    replica_gradients: PowerSGD | Config | None = GRADIENTS,
    seed: int = 0,
) -> State:
    """Compress the collectives of every module in a model that `fully_shard` wrapped.

    Call it on all ranks after the last fully_shard. Call it again to change the settings.
    Parameters may be float32, float16 or bfloat16, also through MixedPrecisionPolicy, on the CPU,
    or on a GPU if cgx_ops was built with CUDA. Parameters of other dtypes, and tensor subclasses
    that gather themselves, are sent exact, with a warning.

    Args:
        model: a module that contains FSDPModules, or is one.
        gradients: settings of the gradients' reduce-scatter. None: exact. gather_bits has
            no effect. If hosts have several ranks, `algorithm` and `intra_bits` determine how
            values cross between hosts.
        weights: settings of the weights' all-gather. A `Differences` sends changes only. A Config,
            for example `WEIGHTS`, sends the weights; use rounding "shift" or "stochastic" for them,
            because rounding to nearest biases training. None: exact.
        rules: settings of parameters by name, for both directions. The default sends biases
            and other one-dimensional parameters exact. `cgx_ops.torch.exclude_layer` and
            similar functions have no effect on FSDP2. Equal on all ranks.
        feedback: how residuals of gradients are stored, for example `LOCO`. None: `Feedback()` if
            `gradients.keeps_residuals` is True.
        adaptive: a `cgx_ops.planner.AdaptiveBits` that adapts the bits of each parameter's
            gradient, with the error of gradients.bits; for compressor "entropy" the rates, with the
            mean gradients.rate. Parameters whose bits or rate a rule sets keep them. Measured on
            the host. All modules must be sharded over all ranks.
        replicas: for HSDP, the ranks with the same shards, as a process group or a mesh of one
            dimension, for example mesh["replicate"] if modules are sharded over mesh["shard"].
            Gradients are averaged over them, too. The first of them sends the parameters of
            wrapped modules to the others. CPU only.
        replica_gradients: settings of this average: `PowerSGD` for low rank, or a Config. Both may
            use error feedback. None: exact.
        seed: seed of random rounding, 0 or more.

    Returns:
        The state of noise and residuals. Save it with each checkpoint, so that a resumed run
        continues bit for bit.

    Raises:
        InvalidArgument: no module is wrapped, a module is only replicated, cgx_ops cannot connect a
            process group, or `feedback` or `adaptive` does not fit `gradients`. Also if `replicas`
            do not have this rank's shards, or `replica_gradients` has no `replicas`. Or a module
            shards its parameters over several meshes.
        TypeError: `gradients`, `weights` or `rules` is of another type. With `replicas`, also if
            parameters are not on the CPU.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.fsdp import fully_shard
        >>> from cgx_ops.torch import fsdp
        >>> dist.init_process_group("cgx", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
        >>> model = fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        >>> state = fsdp.compress(model, weights=fsdp.WEIGHTS)
        >>> model(torch.ones(8, 64)).sum().backward()
        >>> checkpoint = state.state_dict()  # save it beside model and optimizer
        >>> dist.destroy_process_group()
    """
    if replicas is None and replica_gradients is not GRADIENTS:
        raise InvalidArgument(
            "replica_gradients has no effect without replicas: pass the ranks with the same shards"
        )
    if not isinstance(gradients, Config | None):
        raise TypeError(f"gradients is {gradients!r}; it must be a cgx_ops.Config or None")
    if not isinstance(weights, Config | Differences | None):
        raise TypeError(
            f"weights is {weights!r}; it must be a cgx_ops.Config, a fsdp.Differences or None"
        )
    gathered = reduced = require_rules(rules, "fsdp.compress: ")
    names = {module: layer_name(name) for name, module in model.named_modules()}
    wrapped = {name: module for module, name in names.items() if isinstance(module, FSDPModule)}
    if not wrapped:
        raise InvalidArgument(
            f"no module of this {type(model).__name__} is an FSDPModule: call "
            "torch.distributed.fsdp.fully_shard before compress"
        )
    for name, module in wrapped.items():
        if len(parallel.fsdp_groups(module)) > 1:
            raise InvalidArgument(
                f"module '{name}' is sharded over several meshes, and torch accepts no custom "
                "collectives for it: call fully_shard for its parts, with one mesh each"
            )
    every = list(model.named_parameters(remove_duplicate=False))
    known = [layer_name(name) for name, _ in every]
    gathered.warn_of_unmatched(known)
    if isinstance(weights, Differences):
        for name, p in zip(known, (p for _, p in every), strict=True):
            require_convergence(gathered.of(name, p.dim(), weights.config), f"parameter '{name}'")
    if gradients is None and weights is not None:
        # Install ours anyway: a reduction shows that the weights were used and need new noise.
        gradients, reduced = Config(bits=EXACT_BITS), Rules()
    if gradients is not None:
        require_feedback(gradients)
    if feedback is not None:
        if gradients is None:
            raise InvalidArgument("feedback has no effect on exact gradients: leave it out")
        gradients = replace(gradients, error_feedback=True)  # raises if it does not converge
    elif gradients and any(
        reduced.of(layer_name(name), p.dim(), gradients).keeps_residuals for name, p in every
    ):
        feedback = Feedback()
    if adaptive is not None:
        if gradients is None or gradients.bits == EXACT_BITS:
            raise InvalidArgument(
                "adaptive bits need gradients with less than 32 bits: they set the error"
            )
        adaptive.check(gradients)
    state = State(feedback, adaptive, checked_seed(seed))
    state.parameters = set(known)
    # Modules that were wrapped together share a group, which has the last one's name.
    groups = {
        group: (name, module)
        for name, module in wrapped.items()
        for group in parallel.fsdp_groups(module)
    }
    state.groups = list(groups)
    reducing: list[Block] = []
    installed: list[tuple[FSDPModule, tuple[Any, Any], tuple[Any, Any]]] = []
    for group, (name, module) in groups.items():
        block = functools.partial(Block, name, group, names)
        gather: Any
        reduce: Any
        if any(parameter.trainable for parameter in parallel.fsdp_parameters(group)):
            state.trained.add(name)
        state.everywhere &= parallel.fsdp_mesh_size(group) == dist.get_world_size()
        old = parallel.fsdp_communications(group)
        gather, reduce = map(plain_of, old)
        if isinstance(weights, Differences):
            gather = DifferenceGather(block(gathered, weights.config), weights, state, gather)
        elif weights is not None:
            gather = _AllGather(block(gathered, weights), weights, state, gather)
        if gradients is not None:
            reducing.append(block(reduced, gradients))
            state.modules[name] = set(reducing[-1].shards())
            reduce = _ReduceScatter(reducing[-1], gradients, state, reduce)
            reduce.before_first = functools.cache(functools.partial(_report, reducing, gradients))
        installed.append((module, old, (gather, reduce)))
    if adaptive is not None and not state.everywhere:
        raise InvalidArgument(
            "adaptive bits: modules are sharded over some of the ranks only, which would choose "
            "different bits for the same parameters: leave `adaptive` out"
        )
    modules = {group: module for group, (_, module) in groups.items()}
    if replicas is None:
        remove_hooks(modules)
    else:
        exact = Config(bits=EXACT_BITS)
        blocks = {g: Block(name, g, names, gathered, exact) for g, (name, _) in groups.items()}
        state.replicas = install_hooks(
            modules, blocks, replicas, replica_gradients, gathered, state.seed
        )
        state.everywhere = (
            state.replicas.shards * state.replicas.group.size() == dist.get_world_size()
        )
    state.reshard()
    for module, old, new in installed:  # all arguments are valid
        gather, reduce = map(replace_by, old, new)
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(reduce)
    return state


def _report(blocks: Sequence[Block], config: Config) -> None:
    names, segments = (
        list(chain(*each)) for each in zip(*(b.layers() for b in blocks), strict=True)
    )
    report_layers((id(blocks), "FSDP2"), "FSDP2", blocks[0].ranks, config, names, segments)


class _AllGather(Custom):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        segments = self._block.gathered(input_tensor.numel(), input_tensor.dtype)
        if segments is None:
            return self.plain(output_tensor, input_tensor, group, async_op)
        # Asynchronous on the CPU in any case: FSDP waits for the Work where it uses the weights, so
        # that a prefetched gather overlaps with computation. On a GPU the current stream is one
        # that FSDP uses for gathers.
        asynchronous = async_op or input_tensor.device.type == "cpu"
        work = self.start_gather(
            output_tensor,
            input_tensor.clone(),  # FSDP's input is a part of the output
            group,
            segments,
            self._state.weights_seed(self._gather_name),
            asynchronous=asynchronous,
        )
        return work if asynchronous else None


class _ReduceScatter(Custom):
    before_first: Callable[[], None]  # logs that training starts

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.before_first()
        self._state.begin_reduction()
        segments = self._block.reduced(output_tensor.numel(), output_tensor.dtype)
        if segments is None:
            return self.plain(output_tensor, input_tensor, group, op, async_op)
        kind = getattr(op, "op", op).name
        if kind not in _OPS:
            raise InvalidArgument(
                f"module '{self._block.name}' reduces gradients by {kind}; with compression it "
                "must be a sum, an average or a scaled sum"
            )
        name = f"fsdp/reduce_scatter/{self._block.name}"
        comm, given = communicator_of(group), segments
        complete = self._block.complete(output_tensor.numel())
        adaptation = self._state.adaptation(self._block, comm, self._config)
        found: list[Layer] = []
        if adaptation is not None and complete:
            parameters = self._block.parameters()
            found = [Layer(p.name, len(p.shape), p.numel * group.size()) for p in parameters]
            segments = adaptation.segments(found, given)
        used = [segment.config or self._config for segment in segments]
        stored, residual, residuals = self._state.residuals, None, None
        keeps = [each.keeps_residuals for each in used]
        # If gradients are missing, a residual cannot be assigned to parameters, so skip it.
        if stored is not None and any(keeps) and complete:
            own = [p for p, keep in zip(self._block.parameters(), keeps, strict=True) if keep]
            with or_refuse(comm, name):
                residual = stored.take(self._block.name, input_tensor, group.size(), own)
            for segment, each in zip(segments, used, strict=True):
                if each.residual_decay != 1:
                    for row in rows_of(residual, segment, group.size()):
                        row.mul_(each.residual_decay)
            residuals = [
                residual[segment.offset :] if own else None
                for segment, own in zip(segments, keeps, strict=True)
            ]
        if adaptation is not None:
            rows = functools.partial(rows_of, ranks=group.size())
            lost: list[list[torch.Tensor] | None] | None = None
            if residual is not None:
                pairs = zip(segments, keeps, strict=True)
                lost = [rows(residual, segment) if own else None for segment, own in pairs]
            measured = given if found else []
            values = [rows(input_tensor, segment) for segment in measured]
            last = self._state.ends_a_step
            adaptation.measure(comm, found, measured, values, lost, last=last)
        shared = any(each.compressor == "randk" for each in used)
        work = start(
            comm,
            "reduce_scatter",
            input_tensor,
            output_tensor,
            self._config,
            op=_OPS[kind],
            segments=segments,
            seed=self._state.gradients_seed(name, shared=shared),
            name=name,
            asynchronous=False,
            residuals=residuals,
        )
        work.wait()  # FSDP uses the output immediately, on a GPU on the current stream
        if stored is not None and residual is not None:
            stored.put(self._block.name, residual)
        if kind == "PREMUL_SUM":
            output_tensor.mul_(op.__getstate__()[1])
        return None
