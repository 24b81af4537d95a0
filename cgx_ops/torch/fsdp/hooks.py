"""FSDP2: gradients' reduce-scatter, and if asked parameters' all-gather, in a few bits.

    from torch.distributed.fsdp import fully_shard
    from cgx_ops.torch import fsdp

    dist.init_process_group("cgx")
    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    state = fsdp.compress(model, weights=fsdp.WEIGHTS)  # without `weights`: gradients only

The method is QSDP (Markov, Vladu, Guo, Alistarh: Quantized Distributed Training of Large Models
with Convergence Guarantees, ICML 2023): every rank keeps and updates its exact shard; what is
gathered, for forward and again for backward, is the shard quantized without bias by randomly
shifted grids; gradients are rounded stochastically; one-dimensional parameters (biases, norms)
travel exact. QSDP's defaults are 8 bits for both, in buckets of 1024.

Gradients by a biased compressor, such as Config(bits=1, compressor="levels"), have error feedback
(feedback.py). With planner.AdaptiveBits the bits of each parameter's gradient follow it
(averaging/adaptation.py).

Phases: compress() puts an all-gather and a reduce-scatter of ours into every module that
fully_shard wrapped (FSDP2's custom communication); these divide a rank's block into the parameters
that lie in it (block.py), each with its buckets; State numbers the noise, and holds
residuals (state.py).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from cgx_ops import Config, Rules
from cgx_ops._core.call import Op
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.config import require_feedback
from cgx_ops.errors import InvalidArgument, checked_seed
from cgx_ops.planner import AdaptiveBits
from cgx_ops.rules import require_rules
from cgx_ops.torch._compat import parallel
from cgx_ops.torch.averaging.layers import Layer, layer_name
from cgx_ops.torch.averaging.reports import report_layers
from cgx_ops.torch.backend.groups import communicator_of
from cgx_ops.torch.fsdp.block import Block, rows_of
from cgx_ops.torch.fsdp.feedback import Feedback
from cgx_ops.torch.fsdp.state import State
from cgx_ops.torch.graph.work import or_refuse, start

GRADIENTS = Config(bits=8, bucket_size=1024)
WEIGHTS = Config(bits=8, bucket_size=1024, rounding="shift")

# What FSDP asks of a reduce-scatter; PREMUL_SUM is a sum that a factor of its own scales.
_OPS: dict[str, Op] = {"SUM": "sum", "AVG": "avg", "PREMUL_SUM": "sum"}


def compress(
    model: nn.Module,
    gradients: Config | None = GRADIENTS,
    weights: Config | None = None,
    *,
    rules: Rules | None = None,
    feedback: Feedback | None = None,
    adaptive: AdaptiveBits | None = None,
    seed: int = 0,
) -> State:
    """Have the collectives of every module inside `model` that fully_shard wrapped compressed.

    Call it after the last fully_shard, on every rank alike; again to change what it set. Parameters
    are float32, float16 or bfloat16, as MixedPrecisionPolicy has them, on the CPU or a GPU (if
    cgx_ops is built with CUDA); with another
    dtype, or gathered by a tensor subclass's own means, they travel exact, with a warning.

    Args:
        model: holds FSDPModules, or is one.
        gradients: how they travel to be reduced; None: exact. Of Config all but the algorithm,
            gather_bits and intra_bits counts; "threshold" cannot be cut.
        weights: how they travel to be gathered; `WEIGHTS` for QSDP's; None: exact. Rounding to
            nearest biases training: use "shift" or "stochastic".
        rules: cgx_ops.Rules: settings of parameters by their names in `model`, in each direction
            that is not None. None: Rules(), by which parameters of at most one dimension are sent
            exact. Equal on all ranks. Rules of exclude_layer() apply to DistributedDataParallel
            alone.
        feedback: how residuals of gradients are kept, such as `LOCO`. None: Feedback(), where
            gradients.keeps_residuals says that there are any. On the CPU only.
        adaptive: a planner.AdaptiveBits has the bits of each parameter's gradient follow it, at the
            error of gradients.bits; those whose bits follow from `rules` keep them. Measured on the
            host. Where all ranks share all shards only.
        seed: of the noise.

    Returns:
        The state of the noise and residuals: save it with each checkpoint for a continuation that
        is the same to the bit.

    Raises:
        InvalidArgument (a ValueError): no module is wrapped, or one is only replicated; a process
            group has no communicator of cgx_ops; feedback for gradients that travel exact, or with
            which it does not converge. ValueError: a module shards its parameters over several
            meshes. TypeError: gradients or weights is not a Config, or rules is not a Rules.
    """
    for role, config in (("gradients", gradients), ("weights", weights)):
        if not isinstance(config, Config | None):
            raise TypeError(f"{role} is {config!r}; it must be a cgx_ops.Config or None")
    gathered = reduced = Rules() if rules is None else require_rules(rules)
    names = {module: layer_name(name) for name, module in model.named_modules()}
    wrapped = {name: module for module, name in names.items() if isinstance(module, FSDPModule)}
    if not wrapped:
        raise InvalidArgument(
            f"no module of this {type(model).__name__} is an FSDPModule: call "
            "torch.distributed.fsdp.fully_shard before compress"
        )
    every = list(model.named_parameters(remove_duplicate=False))
    known = [layer_name(name) for name, _ in every]
    gathered.warn_of_unmatched(known)
    if gradients is None and weights is not None:
        # Ours all the same: a reduction tells that weights were used, and need new noise.
        gradients, reduced = Config(bits=EXACT_BITS), Rules()
    if gradients is not None:
        require_feedback(gradients)
    if feedback is not None:
        if gradients is None:
            raise InvalidArgument("feedback is given, and gradients travel exact: leave it out")
        gradients = replace(gradients, error_feedback=True)  # refuses what does not converge
    elif gradients and any(
        reduced.of(layer_name(name), p.dim(), gradients).keeps_residuals for name, p in every
    ):
        feedback = Feedback()
    if adaptive is not None:
        if gradients is None or gradients.bits == EXACT_BITS:
            raise InvalidArgument(
                "adaptive bits need gradients of less than 32, whose error they keep"
            )
        adaptive.check(gradients)
    state = State(feedback, adaptive, checked_seed(seed))
    state.parameters = set(known)
    # Modules that were wrapped together have one group, which goes by the last one's name.
    groups = {
        group: (name, module)
        for name, module in wrapped.items()
        for group in parallel.fsdp_groups(module)
    }
    state.modules = {name for name, _ in groups.values()}
    reducing: list[Block] = []
    for group, (name, module) in groups.items():
        block = functools.partial(Block, name, group, names)
        gather: Any
        reduce: Any
        if any(parameter.trainable for parameter in parallel.fsdp_parameters(group)):
            state.trained.add(name)
        state.everywhere &= parallel.fsdp_mesh_size(group) == dist.get_world_size()
        gather, reduce = map(_plain, parallel.fsdp_communications(group))
        if weights is not None:
            gather = _AllGather(block(gathered, weights), weights, state, gather)
        if gradients is not None:
            reducing.append(block(reduced, gradients))
            reduce = _ReduceScatter(reducing[-1], gradients, state, reduce)
            reduce.before_first = functools.cache(functools.partial(_report, reducing, gradients))
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(reduce)
    if adaptive is not None and not state.everywhere:
        raise InvalidArgument(
            "adaptive bits: modules are sharded over some of the ranks only, which would choose "
            "others for the same parameters: leave `adaptive` out"
        )
    return state


def _report(blocks: Sequence[Block], config: Config) -> None:
    names, segments = (
        list(chain(*each)) for each in zip(*(b.layers() for b in blocks), strict=True)
    )
    report_layers((id(blocks), "FSDP2"), "FSDP2", blocks[0].ranks, config, names, segments)


def _plain(communication: Any) -> Any:
    """Return what was there before compress()."""
    return communication.plain if isinstance(communication, _Custom) else communication


class _Custom:
    """A collective that FSDP calls for one group of parameters."""

    def __init__(self, block: Block, config: Config, state: State, plain: Any) -> None:
        self.plain = plain
        self._block, self._config, self._state = block, config, state

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return self.plain.allocate(size, dtype=dtype, device=device)


class _AllGather(_Custom):
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
        # On the CPU even if it need not be asynchronous: FSDP waits for a Work where it uses the
        # weights, and that is all that lets a prefetched gather overlap with computation. On a GPU
        # the current stream is one that FSDP has for it.
        asynchronous = async_op or input_tensor.device.type == "cpu"
        name = f"fsdp/all_gather/{self._block.name}"
        work = start(
            communicator_of(group),
            "all_gather",
            input_tensor.clone(),  # FSDP's is a part of the output
            output_tensor,
            self._config,
            segments=segments,
            seed=self._state.weights_seed(name),
            noise_rank=group.rank(),  # so that replicas get the same
            name=name,
            asynchronous=asynchronous,
        )
        return work if asynchronous else None


class _ReduceScatter(_Custom):
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
        segments = self._block.reduced(output_tensor.numel(), output_tensor.dtype)
        if segments is None:
            return self.plain(output_tensor, input_tensor, group, op, async_op)
        kind = getattr(op, "op", op).name
        if kind not in _OPS:
            raise InvalidArgument(
                f"module '{self._block.name}' reduces gradients by {kind}; "
                "with compression it must be a sum, an average or a sum times a factor"
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
        kept, residual, residuals = self._state.kept, None, None
        keeps = [each.keeps_residuals for each in used]
        # Where gradients are missing, nobody knows whose a residual would be: it waits.
        if kept is not None and any(keeps) and complete:
            own = [p for p, keep in zip(self._block.parameters(), keeps, strict=True) if keep]
            with or_refuse(comm, name):
                residual = kept.take(self._block.name, input_tensor, group.size(), own)
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
        work.wait()  # FSDP uses the output at once, on a GPU on the current stream
        if kept is not None and residual is not None:
            kept.put(self._block.name, residual)
        if kind == "PREMUL_SUM":
            output_tensor.mul_(op.__getstate__()[1])
        return None
