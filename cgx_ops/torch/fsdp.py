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
(fsdp_feedback.py). With planner.AdaptiveBits the bits of each parameter's gradient follow it
(adaptation.py).

Phases: compress() puts an all-gather and a reduce-scatter of ours into every module that
fully_shard wrapped (FSDP2's custom communication); these divide a rank's block into the parameters
that lie in it (fsdp_block.py), each with buckets of its own; State numbers the noise, and holds
residuals.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from cgx_ops import Communicator, Config
from cgx_ops.call import Op, call_seed, with_segment
from cgx_ops.errors import InvalidArgument
from cgx_ops.planner import AdaptiveBits
from cgx_ops.rules import EXACT_BITS
from cgx_ops.torch import _compat, layers
from cgx_ops.torch.adaptation import Adaptation
from cgx_ops.torch.fsdp_block import Block, communicator_of, rows_of
from cgx_ops.torch.fsdp_feedback import LOCO as LOCO
from cgx_ops.torch.fsdp_feedback import Feedback, Kept
from cgx_ops.torch.layers import Layer, Rule, Rules
from cgx_ops.torch.work import start

GRADIENTS = Config(bits=8, bucket_size=1024)
WEIGHTS = Config(bits=8, bucket_size=1024, rounding="shift")

# What FSDP asks of a reduce-scatter; PREMUL_SUM is a sum that a factor of its own scales.
_OPS: dict[str, Op] = {"SUM": "sum", "AVG": "avg", "PREMUL_SUM": "sum"}


def one_dimensional(name: str, shape: torch.Size) -> bool:
    """Tell whether a parameter has at most one dimension, as biases and norms have."""
    return len(shape) <= 1


class State:
    """Which noise comes next, and residuals: what a checkpoint needs besides model and optimizer.

    Equal on all ranks, but for residuals. It has the state_dict() and load_state_dict() that
    torch.distributed.checkpoint asks for, and pickles.

    Weights get new noise in the first forward after a backward. Until then every gather of theirs
    sees the same noise, so backward and recomputed activations use forward's weights, and so do
    evaluations. Gradients get new noise in every reduction.
    """

    def __init__(
        self, feedback: Feedback | None = None, adaptive: AdaptiveBits | None = None
    ) -> None:
        self.kept = None if feedback is None else Kept(feedback)
        self.adaptive = adaptive
        self.everywhere = True
        self._adaptation: Adaptation | None = None
        self._steps = -1
        self._reduced: set[str] = set()  # modules, in this step
        self._draws = 0
        self._reductions = 0
        self._used = False  # a backward used this draw

    def state_dict(self) -> dict[str, Any]:
        """Return it by name: integers, and with error feedback this rank's residuals (copied)."""
        saved: dict[str, Any] = {"draws": self._draws, "reductions": self._reductions}
        saved["used"] = int(self._used)
        if self.kept is not None:
            saved["kept"] = self.kept.state_dict()
        if self.adaptive is not None:
            if self._adaptation is not None:
                self._adaptation.settle()
            saved |= {"steps": self._steps, "adaptive": copy.deepcopy(self.adaptive)}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where the State was that state_dict() was called of.

        Raises:
            InvalidArgument: it has residuals and this has not, or the reverse, or they are those of
                another rank or kept in another way.
        """
        if (self.kept is None) != ("kept" not in state_dict):
            raise InvalidArgument(
                "the checkpoint was made "
                + ("without" if self.kept else "with")
                + " error feedback: call fsdp.compress() as it was called there"
            )
        if self.kept is not None:
            self.kept.load_state_dict(state_dict["kept"])
        if (self.adaptive is None) != ("adaptive" not in state_dict):
            raise InvalidArgument(
                "the checkpoint was made "
                + ("without" if self.adaptive else "with")
                + " adaptive bits: call fsdp.compress() as it was called there"
            )
        if self.adaptive is not None:
            self.adaptive, self._adaptation = copy.deepcopy(state_dict["adaptive"]), None
            self._steps, self._reduced = int(state_dict["steps"]), set()
        self._draws = int(state_dict["draws"])
        self._reductions = int(state_dict["reductions"])
        self._used = bool(state_dict["used"])

    def consolidate(self) -> None:
        """Make residuals the mean over the ranks, equal everywhere, by parameter. Collective.

        What is saved then can be loaded on any number of ranks: the correction that is pending is
        the same. By torch.distributed.checkpoint load it into a new state of which consolidate()
        was called too. The next backward makes residuals each rank's own again.

        Raises:
            InvalidArgument: ranks have residuals of other parameters, or parameters that not all
                ranks share.
        """
        if not self.everywhere:
            raise InvalidArgument(
                "consolidate: modules are sharded and replicated over some of the ranks only, so "
                "residuals of others' parameters would be mixed: save each rank's own"
            )
        if self.kept is not None:
            self.kept.consolidate()

    def weights_seed(self, seed: int, name: str) -> int:
        """Return the seed of the gather that begins now. Replicas of a shard get the same."""
        if _compat.in_backward():
            self._used = True
        elif self._used:
            self._draws += 1
            self._used = False
        return call_seed(seed, name, self._draws)

    def adaptation(
        self, module: str, communicator: Communicator, config: Config
    ) -> Adaptation | None:
        """Return what has the bits of a module's gradients, before they are reduced.

        A step begins with the first module that comes again.
        """
        if self.adaptive is None:
            return None
        if self._adaptation is None:
            self._adaptation = Adaptation(self.adaptive, "fsdp/statistics")
        if not self._reduced or module in self._reduced:
            self._steps += 1
            self._reduced.clear()
        self._reduced.add(module)
        self._adaptation.begin(communicator, self._steps, config)
        return self._adaptation

    def gradients_seed(self, seed: int, name: str, *, shared: bool = False) -> int:
        """Return the seed of the reduction that begins now; shared: the same on all ranks."""
        self._used = True
        self._reductions += 1
        owner = "all ranks" if shared else f"rank {dist.get_rank()}"
        return call_seed(seed, f"{name} of {owner}", self._reductions)


def compress(
    model: nn.Module,
    gradients: Config | None = GRADIENTS,
    weights: Config | None = None,
    *,
    exact: Callable[[str, torch.Size], bool] = one_dimensional,
    rules: Sequence[Rule] = (),
    feedback: Feedback | None = None,
    adaptive: AdaptiveBits | None = None,
) -> State:
    """Have the collectives of every module inside `model` that fully_shard wrapped compressed.

    Call it after the last fully_shard, on every rank alike; again to change what it set. Parameters
    are float32, float16 or bfloat16, as MixedPrecisionPolicy has them, on the CPU or a GPU (if
    cgx_ops is built with CUDA); with another
    dtype, or gathered by a tensor subclass's own means, they travel exact, with a warning.

    Args:
        model: holds FSDPModules, or is one.
        gradients: how they travel to be reduced; None: exact. Of Config all but the algorithm,
            gather_bits, intra_bits and communicator_type counts; "threshold" cannot be cut.
        weights: how they travel to be gathered; `WEIGHTS` for QSDP's; None: exact. Rounding to
            nearest biases training: use "shift" or "stochastic".
        exact: exact(name, shape) tells which parameters travel exact in either direction, by their
            names in `model` and the shapes of the whole parameters. Equal on all ranks.
        rules: a list of cgx_ops.torch.layers.Rule: settings of parameters by name, in both
            directions but for one that is None. Later rules win, and all win over `exact`. Equal on
            all ranks. Those of exclude_layer() and its like are for DistributedDataParallel alone.
        feedback: how residuals of gradients are kept, such as `LOCO`. None: Feedback(), where
            gradients.keeps_residuals says that there are any. On the CPU only.
        adaptive: a planner.AdaptiveBits has the bits of each parameter's gradient follow it, at the
            error of gradients.bits; those that `exact` or a rule speaks of stay. Measured on the
            host. Where all ranks share all shards only.

    Returns:
        The state of the noise and residuals: save it with each checkpoint for a continuation that
        is the same to the bit.

    Raises:
        InvalidArgument (a ValueError): no module is wrapped, or one is only replicated; a process
            group has no communicator of cgx_ops; feedback for gradients that travel exact, or with
            which it does not converge. ValueError: a module shards its parameters over several
            meshes. TypeError: gradients or weights is not a Config, or rules is no list of Rule.
    """
    for role, config in (("gradients", gradients), ("weights", weights)):
        if not isinstance(config, Config | None):
            raise TypeError(f"{role} is {config!r}; it must be a cgx_ops.Config or None")
    if not isinstance(rules, Sequence) or not all(isinstance(rule, Rule) for rule in rules):
        raise TypeError(f"rules is {rules!r}; it must be a list of cgx_ops.torch.layers.Rule")
    names = {module: name for name, module in model.named_modules()}
    wrapped = {name: module for module, name in names.items() if isinstance(module, FSDPModule)}
    if not wrapped:
        raise InvalidArgument(
            f"no module of this {type(model).__name__} is an FSDPModule: call "
            "torch.distributed.fsdp.fully_shard before compress"
        )
    gathered_by_name = reduced_by_name = [layers.translated(rule) for rule in rules]
    known = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    layers.warn_of_unmatched(known, Rules(rules))
    if gradients is None and weights is not None:
        # Ours all the same: a reduction tells that weights were used, and need new noise.
        gradients, reduced_by_name = Config(bits=EXACT_BITS), []
    if feedback is not None:
        if gradients is None:
            raise InvalidArgument("feedback is given, and gradients travel exact: leave it out")
        gradients = replace(gradients, error_feedback=True)  # refuses what does not converge
    elif gradients is not None:
        own = (gradients.with_own(**rule.overrides) for rule in reduced_by_name)
        if any(each.keeps_residuals for each in (gradients, *own)):
            feedback = Feedback()
    if adaptive is not None:
        if gradients is None or gradients.bits == EXACT_BITS:
            raise InvalidArgument(
                "adaptive bits need gradients of less than 32, whose error they keep"
            )
        adaptive.measured_by(gradients)  # refuses what cannot be predicted
    state = State(feedback, adaptive)
    for name, module in wrapped.items():
        for group in _compat.fsdp_groups(module):
            block = functools.partial(Block, name, group, names, exact)
            gather: Any
            reduce: Any
            state.everywhere &= _compat.fsdp_mesh_size(group) == dist.get_world_size()
            gather, reduce = map(_plain, _compat.fsdp_communications(group))
            if weights is not None:
                gather = _AllGather(block(gathered_by_name), weights, state, gather)
            if gradients is not None:
                reduce = _ReduceScatter(block(reduced_by_name), gradients, state, reduce)
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(reduce)
    if adaptive is not None and not state.everywhere:
        raise InvalidArgument(
            "adaptive bits: modules are sharded over some of the ranks only, which would choose "
            "others for the same parameters: leave `adaptive` out"
        )
    return state


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
            seed=self._state.weights_seed(self._config.seed, name),
            noise_rank=group.rank(),  # so that replicas get the same
            name=name,
            asynchronous=asynchronous,
        )
        return work if asynchronous else None


class _ReduceScatter(_Custom):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
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
        adaptation = self._state.adaptation(self._block.name, comm, self._config)
        found: list[Layer] = []
        if adaptation is not None and complete:
            parameters = self._block.parameters()
            found = [Layer(p.name, len(p.shape), p.numel * group.size()) for p in parameters]
            segments = adaptation.segments(found, given)
        used = [with_segment(self._config, segment) for segment in segments]
        kept, residual, residuals = self._state.kept, None, None
        keeps = [each.keeps_residuals for each in used]
        # Where gradients are missing, nobody knows whose a residual would be: it waits.
        if kept is not None and any(keeps) and complete:
            own = [p for p, keep in zip(self._block.parameters(), keeps, strict=True) if keep]
            residual = kept.take(self._block.name, input_tensor, group.size(), own)
            residuals = [
                residual[segment.offset :] if own else None
                for segment, own in zip(segments, keeps, strict=True)
            ]
        if adaptation is not None and found:
            rows = functools.partial(rows_of, ranks=group.size())
            lost: list[list[torch.Tensor] | None] | None = None
            if residual is not None:
                pairs = zip(segments, keeps, strict=True)
                lost = [rows(residual, segment) if own else None for segment, own in pairs]
            values = [rows(input_tensor, segment) for segment in segments]
            adaptation.measure(comm, self._config, found, given, values, lost, last=False)
        shared = any(each.compressor == "randk" for each in used)
        work = start(
            comm,
            "reduce_scatter",
            input_tensor,
            output_tensor,
            self._config,
            op=_OPS[kind],
            segments=segments,
            seed=self._state.gradients_seed(self._config.seed, name, shared=shared),
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
