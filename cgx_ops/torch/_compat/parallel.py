"""The parts of torch that are not public: process groups, DistributedDataParallel and FSDP2.

1. rendezvous, process groups and their stores
2. FSDP2
3. DistributedDataParallel
"""

import datetime
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket as GradBucket
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store

# A handler of URLs: called with one, it yields a store, the rank and the number of ranks.
Rendezvous = Callable[..., Iterator[Any]]

# ---- 1. process groups ---------------------------------------------------------------------------


def wrap_env_rendezvous(wrap: Callable[[Rendezvous, Rendezvous], Rendezvous]) -> None:
    """Replace torch's handler of "env://" by wrap(it, the handler of "tcp://")."""
    from torch.distributed.rendezvous import _rendezvous_handlers as handlers

    handlers["env"] = wrap(handlers["env"], handlers["tcp"])


def allow_monitored_barrier(backend: str) -> None:
    """Let `torch.distributed.monitored_barrier` serve a backend that has one.

    It refuses all but gloo by name. Everything but that check happens as torch has it. Call once
    per process.
    """
    from torch.distributed import distributed_c10d as module

    distributed_c10d: Any = module
    original = distributed_c10d.monitored_barrier

    @functools.wraps(original)
    def monitored_barrier(
        group: Any = distributed_c10d.GroupMember.WORLD,
        timeout: Any = None,
        wait_all_ranks: bool = False,
    ) -> Any:
        if (
            distributed_c10d._rank_not_in_group(group)
            or distributed_c10d.get_backend(group) != backend
        ):
            return original(group, timeout, wait_all_ranks)
        if isinstance(timeout, int | float):
            timeout = datetime.timedelta(seconds=timeout)
        if timeout is None:
            timeout = distributed_c10d._get_default_timeout(backend)
        distributed_c10d._check_valid_timeout(timeout)
        chosen: Any = group_or_default(group)
        return chosen.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    distributed_c10d.monitored_barrier = monitored_barrier
    distributed: Any = torch.distributed
    distributed.monitored_barrier = monitored_barrier


def default_store() -> Store:
    """Return the Store over which torch.distributed was initialised."""
    return dist.distributed_c10d._get_default_store()


def store_of(group: dist.ProcessGroup) -> Store | None:
    """Return a group's own part of the Store; None: it was made without torch.distributed."""
    return dist.distributed_c10d._world.pg_map.get(group, (None, None))[1]


def group_or_default(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return a process group; in place of None the default one, which must be initialised."""
    return dist.distributed_c10d._get_default_group() if group is None else group


def group_by_name(name: str) -> dist.ProcessGroup | None:
    """Return the process group of this rank that has a name, or None."""
    for group, known in dist.distributed_c10d._world.pg_names.items():
        if known == name:
            return group
    return None


def backends_of(group: dist.ProcessGroup) -> str | None:
    """Return a group's backends, by kind of device; None: it was made without torch.distributed.

    dist.get_backend_config() raises for the latter.
    """
    return dist.distributed_c10d._world.pg_backend_config.get(group)


def group_timeout(group: dist.ProcessGroup) -> datetime.timedelta | None:
    """Return how long a group's collectives may take; None if its backend does not say."""
    backends = [group._get_backend(device) for device in group._device_types]
    options = [getattr(backend, "options", backend) for backend in backends]
    return getattr(options[0], "_timeout", None) if options else None


# ---- 2. FSDP2 ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter of a module that `fully_shard` wrapped.

    Attributes:
        module: which holds it, and under which name.
        shape: of the whole parameter (of this rank's part of a DTensor).
        dim: which is divided among the ranks.
        numel: elements in each rank's block, padding included.
        trainable: whether it gets a gradient.
        plain: whether its shard is what is gathered; a tensor subclass may send something else.
    """

    module: torch.nn.Module
    name: str
    shape: torch.Size
    dim: int
    numel: int
    trainable: bool
    plain: bool


def fsdp_groups(module: Any) -> list[Any]:
    """Return the groups of parameters that FSDP gathers and reduces together for this module."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []  # as in torch 2.11


def fsdp_shard_group(group: Any) -> dist.ProcessGroup | None:
    """Return the ranks that a group of parameters is sharded over; None: it is replicated only."""
    return getattr(group.mesh_info, "shard_process_group", None)


def fsdp_mesh_size(group: Any) -> int:
    """Return how many ranks a group of parameters is sharded over or replicated on."""
    return group.mesh_info.mesh.size()


def fsdp_communications(group: Any) -> tuple[Any, Any]:
    """Return what gathers a group's parameters, and what reduces their gradients."""
    return group._all_gather_comm, group._reduce_scatter_comm


def fsdp_gathers_shards(group: Any) -> bool:
    """Tell whether the next all-gather starts from the shards, or from parts of what it gathered.

    The latter is so in backward where reshard_after_forward is a number.
    """
    return group.is_sharded


def fsdp_parameters(group: Any) -> list[ShardedParameter]:
    """Return a group's parameters in the order in which they lie in a block."""
    return [
        ShardedParameter(
            parameter._module_info.module,
            parameter._module_info.param_name,
            parameter._orig_size,
            parameter.fsdp_placement.dim,
            parameter.padded_sharded_param_size.numel(),
            parameter.sharded_param.requires_grad,
            not hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather"),
        )
        for parameter in group.fsdp_params
    ]


def in_backward() -> bool:
    """Tell whether autograd's engine is running this thread's code."""
    return torch._C._current_graph_task_id() != -1


# ---- 3. DistributedDataParallel ------------------------------------------------------------------


def uncompiled(module: Any) -> Any:
    """Return the module that torch.compile(module) was given; any other as it is."""
    return getattr(module, "_orig_mod", module)


def forward_pre_hooks(module: torch.nn.Module) -> dict[int, Any]:
    """Return what is called before a module's forward, by numbers: the very dict."""
    return module._forward_pre_hooks


def comm_hooks(wrapper: torch.nn.parallel.DistributedDataParallel) -> list[Any]:
    """Return the communication hooks that somebody registered; a built-in one by its name."""
    hooks = [hook for hook, _ in getattr(wrapper, "_comm_hooks", ())]
    named = wrapper._get_ddp_logging_data().get("comm_hook")  # of a built-in one alone
    return hooks or ([named] if named else [])


def comm_hook_states(wrapper: torch.nn.parallel.DistributedDataParallel) -> list[Any]:
    """Return the states of the communication hooks that somebody registered."""
    return [state for _, state in getattr(wrapper, "_comm_hooks", ())]


def renew_comm_hooks(
    wrapper: torch.nn.parallel.DistributedDataParallel, of: type
) -> list[tuple[Callable[..., Any], Any]]:
    """Register those hooks of a copy whose states are `of` a type, and return them.

    A copy lists hooks that its reducer, which is new, does not have.
    """
    if wrapper._get_ddp_logging_data().get("comm_hook"):  # this one has what it lists
        return []
    listed = getattr(wrapper, "_comm_hooks", [])
    lost = [(hook, state) for hook, state in listed if isinstance(state, of)]
    if lost:
        wrapper._comm_hooks = []
    for hook, state in lost:
        wrapper.register_comm_hook(state, hook)
    return lost


def steps_in_backward(wrapper: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Tell whether optimizers step as gradients come (_apply_optimizer_in_backward)."""
    return any(hasattr(p, "_in_backward_optimizers") for p in parameters_of(wrapper))


def has_mixed_precision(wrapper: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Tell whether it computes in another dtype than the parameters' (mixed_precision)."""
    return getattr(wrapper, "mixed_precision", None) is not None


def has_python_reducer(wrapper: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Tell whether gradients are reduced one by one in a compiled graph, without buckets."""
    return bool(getattr(wrapper, "_use_python_reducer", False))


def parameters_of(
    wrapper: torch.nn.parallel.DistributedDataParallel,
) -> list[torch.nn.Parameter]:
    """Return the parameters that it had when it was made."""
    return wrapper._module_parameters
