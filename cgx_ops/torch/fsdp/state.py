"""State of FSDP2's compressed collectives: which noise comes next, residuals, bits that adapt.

What a checkpoint needs besides model and optimizer.
"""

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
from cgx_ops.torch.fsdp.feedback import Feedback, Kept


class State:
    """Which noise comes next, and residuals: what a checkpoint needs besides model and optimizer.

    Equal on all ranks, but for residuals. It has the state_dict() and load_state_dict() that
    torch.distributed.checkpoint asks for, and pickles.

    Weights get new noise in the first forward after a backward. Until then every gather of theirs
    sees the same noise, so backward and recomputed activations use forward's weights, and so do
    evaluations. Gradients get new noise in every reduction.
    """

    def __init__(
        self,
        feedback: Feedback | None = None,
        adaptive: AdaptiveBits | None = None,
        seed: int = 0,
    ) -> None:
        self._seed = seed
        self.kept = None if feedback is None else Kept(feedback)
        self.adaptive = adaptive
        self.everywhere = True
        self.trained: set[str] = set()  # modules with gradients to reduce
        self.modules: set[str] = set()  # whose parameters are sharded together
        self.parameters: set[str] = set()  # of the model
        self._adaptation: Adaptation | None = None
        self._steps = -1
        self._reduced: set[str] = set()  # modules, in this step
        self._draws = 0
        self._reductions = 0
        self._used = False  # a backward used this draw

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickles have: nothing that belongs to this process."""
        if self._adaptation is not None:
            self._adaptation.settle()
        return self.__dict__ | {"_adaptation": None}

    def state_dict(self) -> dict[str, Any]:
        """Return it by name: integers, and with error feedback this rank's residuals (copied).

        With adaptive bits it waits for averages on their way, and is collective after a step that
        left modules out: call it on all ranks.
        """
        saved: dict[str, Any] = {"draws": self._draws, "reductions": self._reductions}
        saved["used"] = int(self._used)
        if self.kept is not None:
            saved["kept"] = self.kept.state_dict()
        if self.adaptive is not None:
            if self._adaptation is not None:
                self._adaptation.settle()
            saved |= {"steps": self._steps, "adaptive": copy.deepcopy(self.adaptive)}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Continue where the State was that state_dict() was called of.

        Args:
            state_dict: what it returned.
            strict: False: drop residuals of layers that the model does not have, with a warning.

        Raises:
            InvalidArgument: it has residuals and this has not, or the reverse, or they are those of
                another rank or kept in another way, or of layers that the model does not have.
        """
        for key, what in (("kept", "error feedback"), ("adaptive", "adaptive bits")):
            has = getattr(self, key) is not None
            if has != (key in state_dict):
                raise InvalidArgument(
                    f"the checkpoint was made {'without' if has else 'with'} {what}: call "
                    "fsdp.compress() as it was called there"
                )
        kept, adaptive = None, copy.deepcopy(state_dict.get("adaptive"))
        by_layer: list[dict[str, Any]] = []
        if self.kept is not None:
            kept = Kept(self.kept.feedback)
            kept.load_state_dict(state_dict["kept"], self.modules, self.parameters)
            by_layer.append(kept.residuals.tensors)
        if adaptive is not None:
            by_layer.append(dict.fromkeys(adaptive.names))
        names = {*self.modules, *self.parameters}
        require_layers("fsdp.State", by_layer, names, strict=strict)
        self.kept = kept
        if adaptive is not None:
            adaptive.keep(names)
            self.adaptive, self._adaptation = adaptive, None
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

    def weights_seed(self, name: str) -> int:
        """Return the seed of the gather that begins now. Replicas of a shard get the same."""
        if parallel.in_backward():
            self._used = True
        elif self._used:
            self._draws += 1
            self._used = False
        return call_seed(self._seed, name, self._draws)

    def adaptation(
        self, block: Block, communicator: Communicator, config: Config
    ) -> Adaptation | None:
        """Return what has the bits of a block's gradients, before they are reduced.

        A step begins with the first module that comes again.
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
    def ends_a_step(self) -> bool:
        """Whether the module whose gradients are reduced is the last one of its step."""
        return self._reduced == self.trained

    def gradients_seed(self, name: str, *, shared: bool = False) -> int:
        """Return the seed of the reduction that begins now; shared: the same on all ranks."""
        self._used = True
        self._reductions += 1
        owner = "all ranks" if shared else f"rank {dist.get_rank()}"
        return call_seed(self._seed, f"{name} of {owner}", self._reductions)


torch.serialization.add_safe_globals([State])
