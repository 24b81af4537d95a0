"""Private interfaces of torch for process groups, DistributedDataParallel and FSDP2."""

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

# A handler that yields a store, the rank and the number of ranks for a URL.
Rendezvous = Callable[..., Iterator[Any]]

# ---- 1. process groups ---------------------------------------------------------------------------


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of a group's backend for a device; "" if it has no backends."""
    try:
        return group._get_backend(device).name()
    except RuntimeError:
        return ""


def wrap_env_rendezvous(wrap: Callable[[Rendezvous, Rendezvous], Rendezvous]) -> None:
    """Replace torch's handler of "env://" by wrap(that handler, the handler of "tcp://")."""
    from torch.distributed.rendezvous import _rendezvous_handlers as handlers

    handlers["env"] = wrap(handlers["env"], handlers["tcp"])


def allow_monitored_barrier(backend: str) -> None:
    """Let `torch.distributed.monitored_barrier` support a backend that implements it.

    torch accepts only gloo, by name. The rest of the function is unchanged. Call once per process.
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
    """Return the Store with which torch.distributed was initialized."""
    return dist.distributed_c10d._get_default_store()


def store_of(group: dist.ProcessGroup) -> Store | None:
    """Return a group's own part of the Store; None if it was made without torch.distributed."""
    return dist.distributed_c10d._world.pg_map.get(group, (None, None))[1]


def group_or_default(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return a process group; for None, the default one, which must be initialized."""
    return dist.distributed_c10d._get_default_group() if group is None else group


def group_by_name(name: str) -> dist.ProcessGroup | None:
    """Return this rank's process group with a name, or None."""
    for group, known in dist.distributed_c10d._world.pg_names.items():
        if known == name:
            return group
    return None


def set_groups_made(count: int) -> None:
    """Set the number of groups that this process has made, by which torch names the next one."""
    dist.distributed_c10d._world.group_count = count


def set_ranks_of_default_group(size: int) -> None:
    """Set the ranks of the default group; torch sets them only when the group is initialized."""
    ranks = {rank: rank for rank in range(size)}
    dist.distributed_c10d._world.pg_group_ranks[group_or_default(None)] = ranks


def before_reconfigure(call: Callable[[dist.ProcessGroup, int], None]) -> None:
    """Let `torch.distributed._reconfigure` first call this with its group and uuid.

    Does nothing before torch 2.14. Call once per process.
    """
    distributed: Any = torch.distributed
    original = getattr(distributed, "_reconfigure", None)
    if original is None:
        return

    @functools.wraps(original)
    def reconfigure(uuid: int, handles: Any, group: Any = None, *args: Any, **keywords: Any) -> Any:
        call(group_or_default(group), uuid)
        return original(uuid, handles, group, *args, **keywords)

    distributed._reconfigure = distributed.distributed_c10d._reconfigure = reconfigure


def backends_of(group: dist.ProcessGroup) -> str | None:
    """Return a group's backends by device type; None if it was made without torch.distributed.

    dist.get_backend_config() raises in that case.
    """
    return dist.distributed_c10d._world.pg_backend_config.get(group)


def group_timeout(group: dist.ProcessGroup) -> datetime.timedelta | None:
    """Return the timeout of a group's collectives; None if its backend has none."""
    backends = [group._get_backend(device) for device in group._device_types]
    options = [getattr(backend, "options", backend) for backend in backends]
    return getattr(options[0], "_timeout", None) if options else None


# ---- 2. FSDP2 ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter of a module that `fully_shard` wrapped.

    Attributes:
        module: the module that has the parameter.
        name: its name in the module.
        shape: of the whole parameter (for a DTensor, of this rank's part).
        dim: the dimension that is divided among the ranks.
        padded: shape of each rank's block, including padding.
        sharded: the parameter that the optimizer updates, a DTensor.
        trainable: whether it gets a gradient.
        plain: whether its shard itself is gathered; a tensor subclass may send something else.
    """

    module: torch.nn.Module
    name: str
    shape: torch.Size
    dim: int
    padded: torch.Size
    sharded: torch.nn.Parameter
    trainable: bool
    plain: bool

    @property
    def numel(self) -> int:
        """The number of elements in each rank's block."""
        return self.padded.numel()


def fsdp_groups(module: Any) -> list[Any]:
    """Return the groups of parameters that FSDP gathers and reduces together for this module."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []  # as in torch 2.11


def fsdp_shard_group(group: Any) -> dist.ProcessGroup | None:
    """Return the ranks that a group of parameters is sharded over; None if only replicated."""
    return getattr(group.mesh_info, "shard_process_group", None)


def fsdp_mesh_size(group: Any) -> int:
    """Return the number of ranks that a group of parameters is sharded over or replicated on."""
    return group.mesh_info.mesh.size()


def fsdp_communications(group: Any) -> tuple[Any, Any]:
    """Return the functions that gather a group's parameters and reduce their gradients."""
    return group._all_gather_comm, group._reduce_scatter_comm


def fsdp_gathers_shards(group: Any) -> bool:
    """Return whether the next all-gather starts from the shards, not from parts of gathered values.

    In backward it starts from gathered values if reshard_after_forward is a number.
    """
    return group.is_sharded


def fsdp_reshard(group: Any) -> None:
    """Free a group's gathered weights, so that the next forward gathers them again."""
    group.wait_for_unshard()  # a prefetch would otherwise deliver them later
    group._to_sharded()  # reshard() has no effect after an exception in forward


def fsdp_parameters(group: Any) -> list[ShardedParameter]:
    """Return a group's parameters in the order of their positions in a block."""
    return [
        ShardedParameter(
            parameter._module_info.module,
            parameter._module_info.param_name,
            parameter._orig_size,
            parameter.fsdp_placement.dim,
            parameter.padded_sharded_param_size,
            parameter.sharded_param,
            parameter.sharded_param.requires_grad,
            not hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather"),
        )
        for parameter in group.fsdp_params
    ]


def fsdp_shards(group: Any) -> list[torch.Tensor]:
    """Return this rank's shards of a group's parameters, which share the parameters' memory."""
    return [parameter.sharded_param.detach().to_local() for parameter in group.fsdp_params]


def fsdp_device(group: Any) -> torch.device:
    """Return the device on which a group's gradients are reduced."""
    return group.device


def fsdp_all_reduces(group: Any) -> bool:
    """Return whether backward averages gradients over replicas (set_requires_all_reduce)."""
    return group.all_reduce_grads


def fsdp_divide_factor(group: Any) -> float | None:
    """Return what FSDP divides the sum of a group's gradients by; None: the number of ranks."""
    return group.gradient_divide_factor


def fsdp_all_reduce_hook(group: Any) -> Callable[[torch.Tensor], None] | None:
    """Return the function that FSDP calls with a group's reduced gradients."""
    return group._all_reduce_hook


def before_fsdp_reset(group: Any, call: Callable[[], None] | None) -> None:
    """Let `reset_iter_state()` of a group's model call this first; None ends it.

    Does nothing in releases of torch without this method.
    """
    group.__dict__.pop("_reset_iter_state", None)
    reset = getattr(group, "_reset_iter_state", None)
    if call is None or reset is None:
        return

    @functools.wraps(reset)
    def reset_all() -> None:
        call()
        reset()

    group._reset_iter_state = reset_all


def in_backward() -> bool:
    """Return whether autograd's engine is running on this thread."""
    return torch._C._current_graph_task_id() != -1


# ---- 3. DistributedDataParallel ------------------------------------------------------------------


def uncompiled(module: Any) -> Any:
    """Return the module inside a torch.compile wrapper; any other module unchanged."""
    return getattr(module, "_orig_mod", module)


def forward_pre_hooks(module: torch.nn.Module) -> dict[int, Any]:
    """Return a module's forward pre-hooks by number: the dict itself, not a copy."""
    return module._forward_pre_hooks


def comm_hooks(wrapper: torch.nn.parallel.DistributedDataParallel) -> list[Any]:
    """Return the registered communication hooks; a built-in one as its name."""
    hooks = [hook for hook, _ in getattr(wrapper, "_comm_hooks", ())]
    named = wrapper._get_ddp_logging_data().get("comm_hook")  # only for a built-in hook
    return hooks or ([named] if named else [])


def comm_hook_states(wrapper: torch.nn.parallel.DistributedDataParallel) -> list[Any]:
    """Return the states of the registered communication hooks."""
    return [state for _, state in getattr(wrapper, "_comm_hooks", ())]


def renew_comm_hooks(
    wrapper: torch.nn.parallel.DistributedDataParallel, of: type
) -> list[tuple[Callable[..., Any], Any]]:
    """Register a copy's hooks whose states have a type, and return them.

    A copy lists hooks that its new reducer does not have.
    """
    if wrapper._get_ddp_logging_data().get("comm_hook"):  # its reducer has the listed hooks
        return []
    listed = getattr(wrapper, "_comm_hooks", [])
    lost = [(hook, state) for hook, state in listed if isinstance(state, of)]
    if lost:
        wrapper._comm_hooks = []
    for hook, state in lost:
        wrapper.register_comm_hook(state, hook)
    return lost


def steps_in_backward(wrapper: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Return whether optimizers step during backward (_apply_optimizer_in_backward)."""
    return any(hasattr(p, "_in_backward_optimizers") for p in parameters_of(wrapper))


def has_mixed_precision(wrapper: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Return whether a model computes in another dtype than its parameters'."""
    return getattr(wrapper, "mixed_precision", None) is not None


def has_python_reducer(wrapper: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Return whether a compiled graph reduces gradients one by one, without buckets."""
    return bool(getattr(wrapper, "_use_python_reducer", False))


def parameters_of(
    wrapper: torch.nn.parallel.DistributedDataParallel,
) -> list[torch.nn.Parameter]:
    """Return the parameters that a model had when it was created."""
    return wrapper._module_parameters
