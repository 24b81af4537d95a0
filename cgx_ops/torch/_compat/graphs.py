"""Private interfaces of torch for compiled graphs, their caches and inductor.

If a torch release lacks one, only speed is lost, not correctness; see `graph/inductor.py`.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import torch.compiler.config
import torch.distributed as dist

# Marks wait_tensor as an operator with a side effect, which keeps unused collectives.
import torch.distributed._functional_collectives
import torch.fx
from torch._compile import _disable_dynamo
from torch.fx.node import has_side_effect
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map

TORCH_VERSION: str = torch.__version__

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def keep_in_graphs(operator: Any) -> None:
    """Keep `operator` in graphs even if its result is unused."""
    has_side_effect(operator)


class _KeyTag(str):
    """A text that, in a cache's key, is followed by this rank's position in its process groups."""

    __slots__ = ()

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (f"{self}{groups()}",)


def key_compile_caches(files: Iterable[Path]) -> None:
    """Make torch.compile's disk caches ignore graphs that other versions of `files` made.

    The caches identify an operator only by its name, not by its decomposition. A carried operator
    decomposes into messages whose sizes depend on the rank. Ranks may share a cache, so the key
    also depends on the rank. Repeated calls have no effect.
    """
    config: Any = torch.compiler.config
    if isinstance(config.cache_key_tag, _KeyTag):
        return
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    config.cache_key_tag = _KeyTag(f"{config.cache_key_tag}cgx_ops:{digest.hexdigest()[:16]};")


def lower_as_collective(operator: Any, kernel: Any) -> None:
    """Make inductor treat a functional operator like its own collectives.

    All ranks then have one order of all collectives. Collectives overlap with computation, and
    inductor does not reuse the memory of inputs before `wait_tensor`.

    Args:
        operator: the overload in the graph. Its first argument is the tensor, or the list of
            tensors, to reduce.
        kernel: the overload with the same arguments that the compiled code calls.

    Raises:
        ImportError: this torch has no such lowering.
        AttributeError: this torch has no such lowering.
    """
    from torch._inductor import ir, lowering

    create: Callable[..., Any] = ir._CollectiveKernel.create_out_of_place

    def lower(x: Any, *arguments: Any) -> Any:
        return tree_map(ir.TensorBox.create, create(kernel, x, *arguments))

    lowering.add_layout_constraint(operator, lowering.constrain_to_fx_strides)
    lowering.register_lowering(operator, type_promotion_kind=None)(lower)


def compile_as_constants(*classes: type) -> None:
    """Let compiled functions create objects of these classes and use them as constants.

    Objects are compared with ==, and a function is recompiled for another value. Each class has a
    method `__fx_repr__`. In a torch without such types, Dynamo traces the classes' own code.
    """
    try:
        from torch._library import opaque_object

        use_real = opaque_object.MemberType.USE_REAL
        kind = "constant"
        register: Any = getattr(opaque_object, "register_custom_class", None)
        if register is None:  # before torch 2.14
            kind, register = "value", opaque_object.register_opaque_type
    except (ImportError, AttributeError):
        return
    for each in classes:
        names = {name for name in dir(each) if not name.startswith("__")}
        members = dict.fromkeys(names | {"__str__", "__repr__", "__eq__"}, use_real)
        try:
            register(each, typ=kind, members=members)
        except TypeError:  # torch 2.11 only accepts classes with its metaclass
            return


def declare_graph_pass(kind: type) -> None:
    """Let inductor use objects of `kind`, callable and with uuid(), as graph passes.

    With passes without a uuid, it recompiles everything.
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
    """Return one pass that runs several, for a torch that does not accept a list."""
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
    """Sort a graph so that every node follows its inputs, and keep the order otherwise.

    Inductor sorts only after custom passes. Its earlier fusion of DDP's all-reduces leaves averages
    before the gradients that they depend on.
    """
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(graph)


def compile_counters() -> Counter[str]:
    """Return inductor's counters; a cached graph adds what its compilation added."""
    from torch._dynamo.utils import counters

    return counters["inductor"]


def trace(function: Callable[..., Any], values: list[torch.Tensor]) -> torch.fx.Graph:
    """Return the graph of function(*values) for fake tensors, without running it."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad():
        return make_fx(function, tracing_mode="fake")(*values).graph


def arguments(node: torch.fx.Node) -> list[Any]:
    """Return the arguments of a node's operator, in the order of the operator's schema."""
    schema: Any = node.target._schema  # type: ignore[union-attr]
    rest = [a.name for a in schema.arguments[len(node.args) :]]
    return [*node.args, *(node.kwargs[name] for name in rest if name in node.kwargs)]


def group_name(group: Any) -> str:
    """Return the name of a process group; graphs contain either names or groups."""
    return group.group_name if isinstance(group, dist.ProcessGroup) else str(group)


def groups() -> list[tuple[str, tuple[int, int]]]:
    """Return name, own rank and size of each process group of this rank."""
    if not dist.is_initialized():
        return []
    known = dist.distributed_c10d._world.pg_names.items()
    return sorted((str(name), (group.rank(), group.size())) for group, name in known)


def not_compiled(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Like torch.compiler.disable, but import torch._dynamo (a second) only when called."""
    return _disable_dynamo(function)


def optimize_ddp() -> object:
    """Return how torch.compile handles DistributedDataParallel, for example "python_reducer"."""
    from torch._dynamo import config

    return config.optimize_ddp
