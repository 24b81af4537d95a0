"""The all-reduce hook of each module, which averages its gradients over the replicas of HSDP."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cgx_ops import Config, Rules
from cgx_ops._core.consistency import require_same
from cgx_ops.errors import InvalidArgument
from cgx_ops.torch._compat import parallel
from cgx_ops.torch.averaging.exact import gather_over, raised_on_all
from cgx_ops.torch.averaging.state import ranks_of
from cgx_ops.torch.backend import process_group
from cgx_ops.torch.backend.groups import communicator_of
from cgx_ops.torch.fsdp.block import Block
from cgx_ops.torch.fsdp.power_sgd import PowerSGD
from cgx_ops.torch.fsdp.replicas import Replicas

_CALLER = "fsdp.compress"


class _AllReduce:
    """The hook of one group of parameters."""

    def __init__(self, group: Any, block: Block, replicas: Replicas) -> None:
        self._group, self._block, self._replicas = group, block, replicas
        self._earlier: torch.Tensor | None = None

    def __call__(self, part: torch.Tensor) -> None:
        """Average this rank's part of the gradients; without all-reduce, add it to the next one."""
        if not parallel.fsdp_all_reduces(self._group):
            self._earlier = part.clone() if self._earlier is None else self._earlier.add_(part)
            part.zero_()
            return
        self._replicas.average_part(self._block, part, self._earlier)
        self._earlier = None  # not before: a failed average may be repeated
        if parallel.fsdp_divide_factor(self._group) is not None:
            part.mul_(self._replicas.group.size())  # FSDP then sums over replicas

    def reset(self) -> None:
        """Discard the gradients that were not averaged."""
        self._earlier = None


def remove_hooks(modules: Mapping[Any, Any]) -> None:
    """Remove the hooks of an earlier compress().

    Args:
        modules: the FSDPModule of each group of parameters.
    """
    for group, module in modules.items():
        if isinstance(parallel.fsdp_all_reduce_hook(group), _AllReduce):
            module.set_all_reduce_hook(None)
            parallel.before_fsdp_reset(group, None)


def install_hooks(
    modules: Mapping[Any, Any],
    blocks: Mapping[Any, Block],
    replicas: dist.ProcessGroup | DeviceMesh,
    settings: PowerSGD | Config | None,
    rules: Rules,
    seed: int,
) -> Replicas:
    """Average the gradients of all modules over replicas, and make the replicas' weights equal.

    Hooks of an earlier compress() are replaced, unless this raises. An error on one rank is raised
    on all ranks.

    Args:
        modules: the FSDPModule of each group of parameters.
        blocks: the layout of each group of parameters.
        replicas: the ranks with the same shards.
        settings: in low rank, or in few bits; None: exact.
        rules: settings of parameters by name.
        seed: of random rounding, and of the first factors.

    Returns:
        The state.

    Raises:
        InvalidArgument: the ranks do not fit the modules, a module has another all-reduce hook, or
            replicas differ in their shards, parameters or settings. Also if another rank failed.
        TypeError: `replicas` or `settings` has another type, or a parameter is not on the CPU.
    """
    ranks, first = _group_of(replicas), next(iter(blocks.values()))
    with raised_on_all(_CALLER, first.ranks, ranks):
        if not isinstance(settings, PowerSGD | Config | None):
            raise TypeError(
                f"replica_gradients is {settings!r}; it must be a fsdp.PowerSGD, a cgx_ops.Config, "
                "or None"
            )
        for group, block in blocks.items():
            _require_fit(group, block, ranks, first)
    communicator_of(ranks)
    state = Replicas(settings, ranks, rules, seed)
    state.blocks, state.shards = list(blocks.values()), first.ranks.size()
    with raised_on_all(_CALLER, first.ranks):
        _require_same(state)
    with process_group.uncompressed():
        for group in modules:
            for shard in parallel.fsdp_shards(group):
                dist.broadcast(shard, group=ranks, group_src=0)
    for group, module in modules.items():
        hook = _AllReduce(group, blocks[group], state)
        module.set_all_reduce_hook(hook)
        parallel.before_fsdp_reset(group, hook.reset)
    return state


def _group_of(replicas: object) -> dist.ProcessGroup:
    if isinstance(replicas, dist.ProcessGroup):
        return replicas
    if not isinstance(replicas, DeviceMesh):
        raise TypeError(
            f"replicas is {replicas!r}; it must be a ProcessGroup or a DeviceMesh of one "
            'dimension, for example mesh["replicate"]'
        )
    if replicas.ndim != 1:
        raise InvalidArgument(
            f"replicas has the dimensions {replicas.mesh_dim_names or replicas.ndim}; pass the one "
            'over which weights are equal, for example mesh["replicate"]'
        )
    return replicas.get_group()


def _require_fit(group: Any, block: Block, replicas: dist.ProcessGroup, first: Block) -> None:
    where = f"module '{block.name}'" if block.name else "the root module"
    if parallel.fsdp_mesh_size(group) != block.ranks.size():
        raise InvalidArgument(
            f"{where} is on a mesh of replicas and shards, where FSDP2 averages over the replicas "
            'itself: call fully_shard(module, mesh=mesh["shard"]) and fsdp.compress(model, '
            'replicas=mesh["replicate"])'
        )
    shards, others = ranks_of(block.ranks), ranks_of(replicas)
    if shards != ranks_of(first.ranks):
        raise InvalidArgument(
            f"{where} is sharded over ranks {shards}, but others over {ranks_of(first.ranks)}: "
            "with replicas, call fully_shard with the same mesh for all modules"
        )
    if set(shards) & set(others) != {dist.get_rank()}:
        raise InvalidArgument(
            f"replicas are ranks {others}, but {where} is sharded over ranks {shards}: pass this "
            "rank and the ranks with the same shard in other replicas, which is "
            'mesh["replicate"] if fully_shard got mesh["shard"] of the same mesh'
        )
    if not isinstance(parallel.fsdp_all_reduce_hook(group), _AllReduce | None):
        raise InvalidArgument(
            f"{where} has an all-reduce hook already: with replicas, leave set_all_reduce_hook out"
        )
    for device in (parallel.fsdp_device(group), *(x.device for x in parallel.fsdp_shards(group))):
        if device.type != "cpu":
            raise TypeError(
                f"{where} is on {device}; replicas are averaged on the CPU only. Load parameters "
                "on 'meta' before compress(). On GPUs call fully_shard with the mesh of replicas "
                "and shards, and run backward in cgx_ops.torch.compressed()"
            )


def _require_same(state: Replicas) -> None:
    """Require that replicas have the same shards, parameters and settings. Collective."""
    ranks = state.blocks[0].ranks
    every = [p for block in state.blocks for p in block.parameters(frozen=True)]
    members = [f"rank {rank}" for rank in ranks_of(state.group)]
    require_same(
        _CALLER,
        {
            "shard": f"{ranks.rank()} of {ranks.size()}",
            "replica_gradients": state.settings,
            "rules": state.rules,
            "seed": state.seed,
            **{f"parameter '{p.name}':": (tuple(p.shape), p.dim) for p in every},
        },
        gather_over(state.group),
        "Call compress() with the same arguments and the same model on all replicas",
        error=InvalidArgument,
        members=members,
    )
