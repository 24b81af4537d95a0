"""Averages of gradients over the replicas of HSDP, in low rank or in few bits.

FSDP2 over a mesh of one dimension reduces gradients over the shards, then calls an all-reduce hook
with this rank's part of them. The hook averages it over the ranks with the same part of other
replicas: every parameter's part is a layer with its own factors and residual.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from cgx_ops import Config, Rules, Segment
from cgx_ops._core.consistency import require_same
from cgx_ops._core.log import Tensors
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.errors import InvalidArgument
from cgx_ops.torch._compat.parallel import group_or_default
from cgx_ops.torch.averaging.arithmetic import full_precision
from cgx_ops.torch.averaging.exact import all_gather_over, gather_over
from cgx_ops.torch.averaging.layers import Layer, segments_of
from cgx_ops.torch.averaging.loaded import require_layers
from cgx_ops.torch.averaging.power_sgd.exchange import Exchange
from cgx_ops.torch.averaging.power_sgd.plan import Bucket
from cgx_ops.torch.averaging.power_sgd.state import Factors, LowRankState
from cgx_ops.torch.averaging.reports import report_layers, report_start
from cgx_ops.torch.averaging.residuals import Residuals
from cgx_ops.torch.averaging.state import rules_of
from cgx_ops.torch.backend import process_group
from cgx_ops.torch.fsdp.block import Block, Parameter
from cgx_ops.torch.fsdp.power_sgd import PowerSGD
from cgx_ops.torch.graph.work import DTYPES

_CALLER = "fsdp.compress"
_EXACT = Config(bits=EXACT_BITS)


class Replicas(LowRankState):
    """The averages over the replicas: settings, and this rank's factors and residuals.

    Factors are equal on all replicas of a shard. A residual has the size of the rank's part of the
    parameter, including padding; after consolidate(), that of the whole parameter.

    Attributes:
        settings: in low rank, or in few bits; None: exact.
        shards: number of ranks that a replica is sharded over.
        counts: number of averages so far, by module.
        blocks: the modules.
    """

    kept = (
        "settings", "shards", "seed", "random_seed", "counts", "residuals", "factors",
        "next_stats_report", "total_numel_before_compression", "total_numel_after_compression",
    )  # fmt: skip

    def __init__(
        self,
        settings: PowerSGD | Config | None,
        group: dist.ProcessGroup | None = None,
        rules: Rules = Rules(),  # noqa: B008  (immutable)
        seed: int = 0,
    ) -> None:
        low_rank = settings if isinstance(settings, PowerSGD) else None
        config = (settings or _EXACT) if low_rank is None else low_rank.rest
        assert isinstance(config, Config)
        super().__init__(group, config, rules, "native", seed)
        self.settings, self.random_seed = settings, seed
        self.matrix_approximation_rank = low_rank.rank if low_rank else 0
        self.use_error_feedback = low_rank is not None and config.error_feedback is not False
        if low_rank:
            self.min_compression_rate = low_rank.min_compression_rate
            self.factor_bits, self.warm_start = low_rank.factor_bits, low_rank.warm_start
        self.shards = 1
        self.counts: dict[str, int] = {}
        self.blocks: list[Block] = []

    # ---- 1. averages -----------------------------------------------------------------------------

    @full_precision()
    def average_part(
        self, block: Block, part: torch.Tensor, earlier: torch.Tensor | None = None
    ) -> None:
        """Average this rank's part of a module's gradients over the replicas, in place.

        Args:
            block: the module.
            part: of the gradients, flat.
            earlier: parts of earlier batches, to be added first; they have the same size.

        Raises:
            InvalidArgument: `earlier` has another size, or the factors or residuals belong to
                another model or rank.
            RuntimeError: a peer is late or lost, or has gradients of other parameters.
        """
        if part.dtype not in DTYPES:
            block.averaged(part.numel(), part.dtype)  # warns
            _add(part, earlier)
            with process_group.uncompressed():
                dist.all_reduce(part, group=self.group)
            part.div_(self.group.size())
            return
        name = f"fsdp/replicas/{block.name}"
        step = self.counts.get(block.name, 0)
        self._report()
        with self.or_refuse(part.device, name):
            _add(part, earlier)
            parameters = block.averaged(part.numel(), part.dtype)
            if parameters is None or step < self._exact_steps:
                whole = [Segment(0, part.numel(), _EXACT)]
                future = self.average(part, self.config, segments=whole, seed=[0], name=name)
            else:
                self._lay_out()
                self.steps = max(self.steps, step)
                future = Exchange(
                    _CALLER, self, self._bucket(block, parameters, part, name)
                ).start()
        _wait(future)
        if parameters is not None:
            self.counts[block.name] = step + 1

    @property
    def _exact_steps(self) -> float:
        if self.settings is None:
            return float("inf")
        return self.settings.start if isinstance(self.settings, PowerSGD) else 0

    def _bucket(
        self, block: Block, parameters: list[Parameter], part: torch.Tensor, name: str
    ) -> Bucket:
        layers = [Layer(p.name, len(p.shape), p.numel) for p in parameters]
        pieces = part.split([p.numel for p in parameters])
        gradients = [
            piece.view(p.part_shape(self.shards))
            for p, piece in zip(parameters, pieces, strict=True)
        ]
        return Bucket(
            block.name, name, "fsdp/replicas", part, layers, gradients,
            [p.first for p in parameters], self.config, self.counts.get(block.name, 0),
            finds_unused=False, is_last=block is self.blocks[0],
        )  # fmt: skip

    def count(self, before: int, after: int, last: bool) -> None:
        """Count the elements of a module; with PowerSGD, rank 0 logs the counts when they are due.

        Args:
            before: number of gradient elements.
            after: number of sent elements.
            last: whether this is the step's last module.
        """
        logs = isinstance(self.settings, PowerSGD) and dist.get_rank() == 0
        super().count(before, after, last and logs)

    def _report(self) -> None:
        """Log that training starts, once."""
        if self.counts or not self.blocks:
            return
        parameters = [p for block in self.blocks for p in block.parameters()]
        key = id(self), "replicas"
        if isinstance(self.settings, PowerSGD):
            what = f"replicas of FSDP2 by PowerSGD of rank {self.settings.rank}, the rest"
            tensors = Tensors(len(parameters), None)
            report_start(key, what, self.process_group, self.config, "native", tensors)
            return
        layers = [Layer(p.name, len(p.shape), p.numel) for p in parameters]
        segments = segments_of(rules_of(self), layers, [0] * len(layers), self.config)
        names = [layer.name for layer in layers]
        what = "replicas of FSDP2"
        report_layers(key, what, self.process_group, self.config, names, segments)

    # ---- 2. consolidated residuals ---------------------------------------------------------------

    def consolidate(self) -> None:
        """Replace residuals by those of whole parameters, equal on all ranks. Collective.

        They are the means over the replicas. Factors start again.

        Raises:
            InvalidArgument: ranks have residuals of different parameters.
        """
        known = self.residuals.tensors
        if self.blocks:
            self._require_same_residuals()
        if not self.residuals.consolidated and self.blocks:
            self.residuals.consolidate(self.group)
            for parameter in self._parameters():
                blocks = all_gather_over(self.blocks[0].ranks, known[parameter.name])
                known[parameter.name] = parameter.cut_from(blocks).flatten()
        self.factors = Factors()

    def _require_same_residuals(self) -> None:
        """Require that all ranks, of all shards and replicas, have the same parameters' residuals.

        Collective over all ranks, so that all of them raise.
        """
        sizes = sorted((name, x.numel()) for name, x in self.residuals.tensors.items())
        require_same(
            "consolidate",
            {
                "consolidated residuals": self.residuals.consolidated,
                **{f"a residual of '{name}', elements:": numel for name, numel in sizes},
            },
            gather_over(group_or_default(None)),
            "Call consolidate() after the same step on all ranks",
            error=InvalidArgument,
        )

    def _parameters(self) -> list[Parameter]:
        """Return the parameters that have residuals, each as the only one of its block."""
        every = [p for block in self.blocks for p in block.parameters(frozen=True)]
        return [replace(p, first=0) for p in every if p.name in self.residuals.tensors]

    def _lay_out(self) -> None:
        """Replace consolidated residuals by this rank's parts."""
        if not self.residuals.consolidated:
            return
        parts, known = {}, self.residuals.tensors
        for parameter in self._parameters():
            whole = known[parameter.name]
            if whole.numel() != parameter.shape.numel():
                raise InvalidArgument(
                    f"the residual of parameter '{parameter.name}' has {whole.numel()} elements, "
                    f"but the parameter has {parameter.shape.numel()}: the state belongs to "
                    "another model; load this model's state"
                )
            blocks = whole.new_zeros(self.shards, parameter.numel)
            parameter.put_into(blocks, whole.view(parameter.shape))
            parts[parameter.name] = blocks[self.blocks[0].ranks.rank()].clone()
        known.update(parts)
        self.residuals.claim(*self.place)

    # ---- 3. checkpoints --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, under a key of this rank's shard if it differs.

        Returns:
            The state by name.
        """
        differs = self.matrix_approximation_rank or self.keeps_residuals()
        return self.saved() if self.residuals.consolidated or not differs else super().state_dict()

    def saved(self) -> dict[str, Any]:
        """Return the content of state_dict(), without the name of the shard.

        Returns:
            The saved attributes, by name.
        """
        # A list: torch.distributed.checkpoint would require the current keys of a dict.
        return super().saved() | {"counts": list(self.counts.items())}

    def restored(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Convert a checkpoint into attributes.

        Args:
            saved: what saved() returned.

        Returns:
            Attributes by name.

        Raises:
            InvalidArgument: the settings or the number of shards differ from the checkpoint's, or
                this rank's residuals are missing.
        """
        if saved["settings"] != self.settings:
            raise InvalidArgument(
                f"the checkpoint has replica_gradients={saved['settings']}, but fsdp.compress() "
                f"was called with {self.settings}: use the same"
            )
        residuals, factors = Residuals.restored(saved["residuals"]), saved["factors"].copy()
        shards = saved["shards"]
        if (
            shards != self.shards
            and (factors.q or residuals.tensors)
            and not residuals.consolidated
        ):
            raise InvalidArgument(
                f"the checkpoint has residuals and factors of {shards} shards, but the model has "
                f"{self.shards}: call the state's consolidate() on all ranks before you save the "
                "checkpoint"
            )
        own = {"residuals": residuals, "factors": factors, "counts": dict(saved["counts"])}
        return {name: saved[name] for name in self.kept} | own | {"shards": self.shards}

    def load_for(
        self, state_dict: Mapping[str, Any], names: Collection[str], *, strict: bool
    ) -> None:
        """Restore the state from what state_dict() returned, for a model with these parameters.

        Raises:
            InvalidArgument: the state does not fit the arguments of compress(), the number of
                ranks or the model.
        """
        loaded = Replicas(self.settings, self.process_group)
        loaded.shards = self.shards
        loaded.load_state_dict(dict(state_dict))
        by_layer = [loaded.residuals.tensors, loaded.factors.q]
        require_layers("fsdp.State", by_layer, names, strict=strict)
        self.__dict__.update({name: getattr(loaded, name) for name in self.kept})

    def __getstate__(self) -> dict[str, Any]:
        """Return the saved attributes, for pickles."""
        return self.saved()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the saved attributes, without the model."""
        self.__init__(state["settings"])
        self.shards = state["shards"]
        self.__dict__.update(self.restored(state))


def _wait(future: torch.futures.Future[torch.Tensor]) -> None:
    try:
        future.wait()
    except RuntimeError as error:
        error.add_note(
            "If replicas have gradients of different parameters, call "
            "set_reduce_scatter_unused_params(True) on the module"
        )
        raise


def _add(part: torch.Tensor, earlier: torch.Tensor | None) -> None:
    if earlier is None:
        return
    if earlier.numel() != part.numel():
        raise InvalidArgument(
            f"gradients of {earlier.numel()} elements were accumulated with "
            f"set_requires_all_reduce(False), but now there are {part.numel()}, because some "
            "parameters got no gradient: call set_reduce_scatter_unused_params(True) on the module"
        )
    part.add_(earlier)


torch.serialization.add_safe_globals([Replicas])
