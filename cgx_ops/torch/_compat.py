"""The parts of torch that are not public: everything here may differ in the next release.

Tested with torch 2.13 and 2.11. What a release lacks costs speed only, never a right result;
`inductor.py` says how.
"""

import datetime
import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import torch.compiler.config
import torch.distributed as dist

# Marks wait_tensor as an operator with a side effect, which is what keeps unused collectives.
import torch.distributed._functional_collectives
import torch.fx
from torch._C._distributed_c10d import GradBucket as GradBucket
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._compile import _disable_dynamo
from torch.fx.node import has_side_effect
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map

TORCH_VERSION: str = torch.__version__

# A handler of URLs: called with one, it yields a store, the rank and the number of ranks.
Rendezvous = Callable[..., Iterator[Any]]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def keep_in_graphs(operator: Any) -> None:
    """Tell dead-code elimination that `operator` does something even if nobody reads its result."""
    has_side_effect(operator)


class _KeyTag(str):
    """A text that, in a cache's key, is followed by this rank's place in its process groups."""

    __slots__ = ()

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (f"{self}{groups()}",)


def key_compile_caches(files: Iterable[Path]) -> None:
    """Make torch.compile's caches on disk forget graphs that other versions of `files` made.

    The caches know an operator by its name only, not by what it decomposes into. A carried
    operator decomposes into messages of this rank's own sizes, and ranks share a cache: the key
    must tell them apart, too. Repeated calls have no effect.
    """
    config: Any = torch.compiler.config
    if isinstance(config.cache_key_tag, _KeyTag):
        return
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    config.cache_key_tag = _KeyTag(f"{config.cache_key_tag}cgx_ops:{digest.hexdigest()[:16]};")


def lower_as_collective(operator: Any, kernel: Any) -> None:
    """Make inductor treat a functional operator as it does its own collectives.

    That gives one order of all collectives on every rank, overlap with computation, and inputs
    whose memory is left alone until `wait_tensor`.

    Args:
        operator: the overload in the graph; its first argument is the tensor that is reduced, or
            the list of those that are.
        kernel: the overload with the same arguments that the compiled code calls.

    Raises:
        ImportError, AttributeError: this torch has no such lowering any more.
    """
    from torch._inductor import ir, lowering

    create: Callable[..., Any] = ir._CollectiveKernel.create_out_of_place

    def lower(x: Any, *arguments: Any) -> Any:
        return tree_map(ir.TensorBox.create, create(kernel, x, *arguments))

    lowering.add_layout_constraint(operator, lowering.constrain_to_fx_strides)
    lowering.register_lowering(operator, type_promotion_kind=None)(lower)


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


def compile_as_constants(*classes: type) -> None:
    """Let compiled functions make objects of these classes, and use them as constants.

    Objects are compared with ==, and a function is compiled again for another value. Each class has
    a method `__fx_repr__`. A release without such types has Dynamo trace the classes' own code.
    """
    try:
        from torch._library.opaque_object import MemberType, register_opaque_type
    except ImportError:
        return
    for each in classes:
        names = {name for name in dir(each) if not name.startswith("__")}
        members = dict.fromkeys(names | {"__str__", "__repr__", "__eq__"}, MemberType.USE_REAL)
        register_opaque_type(each, typ="value", members=members)


# ---- for rewrite.py ------------------------------------------------------------------------------


def declare_graph_pass(kind: type) -> None:
    """Have inductor take objects of `kind`, callable and with uuid(), for graph passes of its own.

    Passes without a uuid make it compile everything anew.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass

    CustomGraphPass.register(kind)


def post_grad_pass(run: Callable[[torch.fx.Graph], None]) -> AbstractContextManager[object]:
    """Return a context in which inductor calls run(graph) last, after the user's own passes."""
    from torch._inductor import config, custom_graph_pass

    before: Any = config.post_grad_custom_post_pass
    if before is None:
        passes: Any = run
    else:
        passes = [*(before if isinstance(before, (list, tuple)) else [before]), run]
        if not hasattr(custom_graph_pass, "get_custom_graph_passes"):  # as in torch 2.11
            passes = _chain(passes)
    return config.patch(post_grad_custom_post_pass=passes)


def _chain(passes: list[Any]) -> object:
    """Return one pass that runs these, for a torch that takes no list of them."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Chain(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            for each in passes:
                each(graph)

        def uuid(self) -> object:
            known = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in passes]
            return None if None in known else tuple(known)

    return Chain()


def sort_graph(graph: torch.fx.Graph) -> None:
    """Have every node follow what it needs, and otherwise stay where it is.

    Inductor does so after custom passes alone, and its fusion of DDP's all-reduces, which comes
    before them, leaves averages before the gradients that they are of.
    """
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(graph)


def compile_counters() -> Counter[str]:
    """Return inductor's counters; what a compilation adds to them, a cached graph adds again."""
    from torch._dynamo.utils import counters

    return counters["inductor"]


def trace(function: Callable[..., Any], values: list[torch.Tensor]) -> torch.fx.Graph:
    """Return the graph of function(*values), whose values are fake tensors; it runs nothing."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad():
        return make_fx(function, tracing_mode="fake")(*values).graph


def arguments(node: torch.fx.Node) -> list[Any]:
    """Return what a node calls its operator with, in the order of the operator's schema."""
    schema: Any = node.target._schema  # type: ignore[union-attr]
    rest = [a.name for a in schema.arguments[len(node.args) :]]
    return [*node.args, *(node.kwargs[name] for name in rest if name in node.kwargs)]


def group_name(group: Any) -> str:
    """Return the name of a process group; graphs hold the one or the other."""
    return group.group_name if isinstance(group, dist.ProcessGroup) else str(group)


def groups() -> list[tuple[str, tuple[int, int]]]:
    """Return the name, own rank and size of each process group that this rank is in."""
    if not dist.is_initialized():
        return []
    known = dist.distributed_c10d._world.pg_names.items()
    return sorted((str(name), (group.rank(), group.size())) for group, name in known)


def not_compiled(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Do as torch.compiler.disable, but import torch._dynamo (a second) when it is called."""
    return _disable_dynamo(function)


def optimize_ddp() -> object:
    """Return how DistributedDataParallel and torch.compile meet: "python_reducer", or others."""
    from torch._dynamo import config

    return config.optimize_ddp


# ---- for fsdp.py ---------------------------------------------------------------------------------


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


def default_store() -> Store:
    """Return the Store over which torch.distributed was initialised."""
    return dist.distributed_c10d._get_default_store()


def store_of(group: dist.ProcessGroup) -> Store | None:
    """Return a group's own part of the Store; None: it was made without torch.distributed."""
    return dist.distributed_c10d._world.pg_map.get(group, (None, None))[1]


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


# ---- for ddp*.py ---------------------------------------------------------------------------------


def group_or_default(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return a process group; in place of None the default one, which must be initialised."""
    return dist.distributed_c10d._get_default_group() if group is None else group


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
