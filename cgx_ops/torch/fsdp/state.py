"""State of FSDP2's compressed collectives: noise, residuals and adaptive bits, for checkpoints."""

import copy
from typing import Any

import torch
import torch.distributed as dist

from cgx_ops import Communicator, Config
from cgx_ops._core.call import call_seed
from cgx_ops.errors import InvalidArgument
from cgx_ops.planner import AdaptiveBits
from cgx_ops.torch._compat import parallel
from cgx_ops.torch.averaging.adaptation import Adaptation
from cgx_ops.torch.averaging.loaded import require_layers
from cgx_ops.torch.fsdp.block import Block
from cgx_ops.torch.fsdp.feedback import Feedback, ModuleResiduals
from cgx_ops.torch.fsdp.gathered_weights import Bases
from cgx_ops.torch.fsdp.replicas import Replicas


class State:
    """State of the compressed collectives of an FSDP2 model, to be saved with each checkpoint.

    `cgx_ops.torch.fsdp.compress` creates it. torch.distributed.checkpoint and pickle accept it.
    Everything except residuals, and PowerSGD's factors of shards, is equal on all ranks.

    Weights get new noise in the first forward after a backward. Until then every all-gather uses
    the same noise, so that forward, backward, recomputed activations and evaluations use the same
    weights. Gradients get new noise in every reduction.

    Args:
        feedback: how residuals are stored. None: no error feedback.
        adaptive: the adaptive bits, or None.
        seed: seed of random rounding.

    Attributes:
        adaptive: the adaptive bits, or None.
        replicas: the average over the replicas of HSDP, or None. Its `compression_stats()` returns
            the compression rate so far, and the number of elements before and after.

    Raises:
        InvalidArgument: `compress` raises it for arguments that are out of range.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.fsdp import fully_shard
        >>> from cgx_ops.torch import fsdp
        >>> dist.init_process_group("cgx", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = fully_shard(torch.nn.Linear(64, 64), mesh=init_device_mesh("cpu", (1,)))
        >>> state = fsdp.compress(model)
        >>> saved = state.state_dict()
        >>> state.load_state_dict(saved)
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        feedback: Feedback | None = None,
        adaptive: AdaptiveBits | None = None,
        seed: int = 0,
    ) -> None:
        self.seed = seed
        self.residuals = None if feedback is None else ModuleResiduals(feedback)
        self.adaptive = adaptive
        self.bases = Bases()
        self.replicas: Replicas | None = None
        self.everywhere = True
        self.trained: set[str] = set()  # names of modules with gradients to reduce
        self.modules: dict[str, set[str]] = {}  # names of each sharded group's parameters
        self.parameters: set[str] = set()  # names of the model's parameters
        self.groups: list[Any] = []  # FSDP's groups of parameters
        self._adaptation: Adaptation | None = None
        self._steps = -1
        self._reduced: set[str] = set()  # names of modules reduced in this step
        self._draws = 0
        self.reductions = 0
        self._used = False  # whether a backward used this draw

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for pickles, without those of this process."""
        if self._adaptation is not None:
            self._adaptation.settle()
        return self.__dict__ | {"_adaptation": None, "groups": []}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: counts, and with error feedback this rank's residuals.

        With adaptive bits, it waits for pending averages. It is then collective after a step that
        did not use all modules, so call it on all ranks.

        Returns:
            The state by name, with copies of the residuals.
        """
        saved: dict[str, Any] = {"seed": self.seed, "draws": self._draws}
        saved |= {"reductions": self.reductions, "used": int(self._used)}
        if self.residuals is not None:
            saved["residuals"] = self.residuals.state_dict()
        if self.adaptive is not None:
            if self._adaptation is not None:
                self._adaptation.settle()
            saved |= {"steps": self._steps, "adaptive": copy.deepcopy(self.adaptive)}
        if self.bases:
            saved["bases"] = self.bases.state_dict()
        if self.replicas is not None:
            saved["replicas"] = self.replicas.state_dict()
        return saved

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Restore the state from what `state_dict` returned.

        Args:
            state_dict: what `state_dict` returned, on this rank or through
                torch.distributed.checkpoint.
            strict: True: raise if there are residuals of layers that the model does not have.
                False: drop them with a warning.

        Raises:
            InvalidArgument: error feedback, adaptive bits or the average over replicas differ from
                the checkpoint's. Also if the residuals are another rank's, are stored differently,
                or belong to layers that the model does not have, or if entries are missing.
        """
        for key, what, has in (
            ("residuals", "error feedback", self.residuals is not None),
            ("adaptive", "adaptive bits", self.adaptive is not None),
            ("bases", "differences of weights", bool(self.bases)),
            ("replicas", "replicas", self.replicas is not None),
        ):
            if has != (key in state_dict):
                raise InvalidArgument(
                    f"the checkpoint was made {'without' if has else 'with'} {what}: call "
                    "fsdp.compress() with the same arguments as for the checkpoint"
                )
        if lacking := {"seed", "draws", "reductions", "used"} - set(state_dict):
            raise InvalidArgument(
                f"fsdp.State.load_state_dict: the state lacks {sorted(lacking)}: pass what "
                "state_dict() of this version of cgx_ops returned"
            )
        residuals, adaptive = None, copy.deepcopy(state_dict.get("adaptive"))
        by_layer: list[dict[str, Any]] = []
        if self.residuals is not None:
            residuals = ModuleResiduals(self.residuals.feedback)
            residuals.load_state_dict(state_dict["residuals"], self.modules)
            by_layer.append(residuals.by_name.tensors)
        if adaptive is not None:
            by_layer.append(dict.fromkeys(adaptive.names))
        names = {*self.modules, *self.parameters}
        require_layers("fsdp.State", by_layer, names, strict=strict)
        parts = self.bases.checked(state_dict["bases"], strict) if self.bases else {}
        if self.replicas is not None:
            self.replicas.load_for(state_dict["replicas"], self.parameters, strict=strict)
        self.bases.load(parts)
        self.residuals = residuals
        if adaptive is not None:
            adaptive.keep(names)
            self.adaptive, self._adaptation = adaptive, None
            self._steps, self._reduced = int(state_dict["steps"]), set()
        self.seed, self._draws = int(state_dict["seed"]), int(state_dict["draws"])
        self.reductions = int(state_dict["reductions"])
        self._used = bool(state_dict["used"])
        self.reshard()

    def reshard(self) -> None:
        """Free gathered weights, which are those of other settings, shards or counts.

        After a forward without gradients, FSDP keeps those of the root module, and of modules with
        reshard_after_forward=False.
        """
        for group in self.groups:
            parallel.fsdp_reshard(group)

    def consolidate(self) -> None:
        """Replace residuals by their mean over the ranks, by parameter. Collective.

        The factors of PowerSGD start again.

        A checkpoint that is saved afterwards can be loaded on any number of ranks; the pending
        correction is unchanged. To load it with torch.distributed.checkpoint, call `consolidate` on
        the new state, too, before the load. The next backward makes residuals different across
        ranks again.

        Raises:
            InvalidArgument: ranks have residuals of different parameters, or modules are sharded
                over some of the ranks only.
        """
        if not self.everywhere:
            raise InvalidArgument(
                "consolidate: modules are sharded and replicated over some of the ranks only, so "
                "residuals of different parameters would be mixed: save each rank's own"
            )
        if self.residuals is not None:
            self.residuals.consolidate()
        if self.replicas is not None:
            self.replicas.consolidate()

    def weights_seed(self, name: str) -> int:
        """Return the seed of an all-gather; replicas of a shard get the same.

        Args:
            name: name of the collective.

        Returns:
            The seed.
        """
        if parallel.in_backward():
            self._used = True
        elif self._used:
            self._draws += 1
            self._used = False
        return call_seed(self.seed, name, self._draws)

    def adaptation(
        self, block: Block, communicator: Communicator, config: Config
    ) -> Adaptation | None:
        """Return the adaptation of a block's bits, before its gradients are reduced.

        A step starts with the first module that comes a second time.

        Args:
            block: the block.
            communicator: its ranks.
            config: settings of the gradients.

        Returns:
            The adaptation; None without adaptive bits.
        """
        if self.adaptive is None:
            return None
        if self._adaptation is None:
            self._adaptation = Adaptation(self.adaptive, "fsdp/statistics")
        if not self._reduced or block.name in self._reduced:
            self._steps += 1
            self._reduced.clear()
        self._reduced.add(block.name)
        self._adaptation.begin(communicator, self._steps, config, block.rules)
        return self._adaptation

    @property
    def base_nbytes(self) -> int:
        """The bytes of this rank's copies of weights for differences, after the first gather."""
        return self.bases.nbytes

    @property
    def ends_a_step(self) -> bool:
        """Whether the module whose gradients are being reduced is the last one of its step."""
        return self._reduced == self.trained

    def begin_reduction(self) -> None:
        """Count a reduction of gradients, after which weights may change."""
        self._used = True
        self.reductions += 1

    def gradients_seed(self, name: str, *, shared: bool = False) -> int:
        """Return the seed of the reduction that was counted last.

        Args:
            name: name of the collective.
            shared: whether all ranks get the same seed.

        Returns:
            The seed.
        """
        owner = "all ranks" if shared else f"rank {dist.get_rank()}"
        return call_seed(self.seed, f"{name} of {owner}", self.reductions)


torch.serialization.add_safe_globals([Bases, State])
