"""compress_collectives(): compress the all-reduces of compiled graphs, without changes to the code.

The pass runs after inductor's own passes, including its fusion of DDP's all-reduces. It finds
`_c10d_functional.all_reduce` and `all_reduce_coalesced`, which functional collectives,
`dist.all_reduce`, DTensor and DDP's Python reducer become in a graph. Each is replaced by the
traced form of `torch.ops.cgx.quantized_allreduce`: native if cgx_ops has a communicator of the
group (backend "cgx"), else carried by the group's own collectives (gloo, NCCL). With a plan,
rewrite_groups.py first joins the all-reduces of each group.
"""

import hashlib
import logging
import warnings
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.fx

from cgx_ops import Communicator, Config
from cgx_ops.errors import InvalidArgument, NotFound
from cgx_ops.planner import Plan
from cgx_ops.torch._compat import graphs, parallel
from cgx_ops.torch.graph import inductor, rewrite_groups
from cgx_ops.torch.graph.carried_on_cuda import can_gather
from cgx_ops.torch.graph.rewrite_groups import AllReduce, joined
from cgx_ops.torch.graph.work import devices

_log = logging.getLogger(__name__)

Group = dist.ProcessGroup | str

_functional = torch.ops._c10d_functional
_WAIT = _functional.wait_tensor.default
_FORMS = (_functional.all_reduce.default, _functional.all_reduce_coalesced.default)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# The source files that determine the result of the pass.
_SOURCES = [Path(str(module.__file__)) for module in (graphs, rewrite_groups)] + [Path(__file__)]


class NothingRewritten(UserWarning):
    """A compress_collectives() block ended without a compressed all-reduce in any graph."""


# ---- 1. which all-reduces ------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """Which all-reduces are compressed: those for which refusal() returns None.

    Attributes:
        groups: names of process groups; None: all.
        dtypes: dtypes of the tensors.
        min_numel: minimum number of elements, over all tensors of a coalesced call.
    """

    groups: tuple[str, ...] | None
    dtypes: tuple[torch.dtype, ...]
    min_numel: int

    def refusal(self, values: list[torch.Tensor], op: str, group: str) -> str | None:
        """Return why an all-reduce of these (fake) tensors is not compressed; None if it is."""
        if op not in ("sum", "avg"):
            return f"op {op!r}; only sum and avg can be compressed"
        if self.groups is not None and group not in self.groups:
            return f"group {group!r} is not one of groups={list(self.groups)}"
        kinds = {value.dtype for value in values}
        if len(kinds) > 1:
            return "tensors of several dtypes in one call"
        for dtype in kinds - set(self.dtypes):
            return f"{dtype} is not one of dtypes={list(self.dtypes)}"
        places = {value.device for value in values}
        if len(places) > 1:
            return "tensors on several devices in one call"
        for device in {place.type for place in places} - set(devices()):
            return f"tensors on {device}, which this build of cgx_ops does not support"
        carrier = None if has_communicator(group) else parallel.group_by_name(group)
        if values[0].is_cuda and carrier is not None and not can_gather(carrier):
            return f"tensors on {places.pop()}, which gloo cannot gather"
        numels = [value.numel() for value in values]
        if not all(isinstance(numel, int) for numel in numels):
            return "a dynamic size; compile with dynamic=False"
        if sum(numels) < self.min_numel:
            return f"fewer than min_numel={self.min_numel} elements"
        return None


# ---- 2. replace an all-reduce --------------------------------------------------------------------


def has_communicator(group: str) -> bool:
    """Return whether cgx_ops has a communicator with the group's name."""
    try:
        Communicator.find(group)
    except NotFound:
        return False
    return True


def trace(values: list[torch.Tensor], op: str, group: str, config: Config) -> torch.fx.Graph:
    """Return the graph of quantized_allreduce_coalesced for these fake tensors."""
    carrier = "native" if has_communicator(group) else "c10d"

    def reduce(*xs: torch.Tensor) -> list[torch.Tensor]:
        options = {"op": op, "group_name": group, "carrier": carrier, "config": str(config)}
        return torch.ops.cgx.quantized_allreduce_coalesced(list(xs), **options)

    return graphs.trace(reduce, values)


def splice(graph: torch.fx.Graph, reduced: AllReduce, traced: torch.fx.Graph) -> None:
    """Replace an all-reduce and its waits by a traced graph with the same inputs and outputs.

    The nodes before the first wait replace the all-reduce; the rest goes to where the first result
    is needed. So computation in between still overlaps with the communication.
    """
    node, outputs = reduced.node, reduced.outputs
    order = {each: index for index, each in enumerate(graph.nodes)}
    users = [user for output, _ in outputs for user in output.users]
    needed = min(users, key=order.__getitem__, default=node.next)

    place = node
    new: dict[torch.fx.Node, Any] = {}
    sources = iter(reduced.inputs)
    results: Any = ()
    for inner in traced.nodes:
        if inner.op == "placeholder":
            new[inner] = next(sources)
        elif inner.op == "output":
            results = [new[result] for result in inner.args[0]]
        else:
            place = needed if inner.target is _WAIT else place
            with graph.inserting_before(place):
                new[inner] = graph.node_copy(inner, new.__getitem__)

    for output, index in outputs:
        for user in list(output.users):
            if user.target is _WAIT:
                user.replace_all_uses_with(results[index])
                graph.erase_node(user)
        output.replace_all_uses_with(results[index])
        if output is not node:
            graph.erase_node(output)
    graph.erase_node(node)


# ---- 3. the pass ---------------------------------------------------------------------------------


class Rewrite:
    """A context manager and graph pass that compresses all-reduces; made by compress_collectives().

    Nested blocks all apply.

    Attributes:
        config: settings of the messages.
        choice: which all-reduces are compressed.
        plan: which of them share a message; None: none.
    """

    def __init__(self, config: Config, choice: Choice, plan: Plan | None = None) -> None:
        self.config, self.choice, self.plan = config, choice, plan
        settings = repr((asdict(config), choice, plan))
        self._settings = hashlib.sha256(settings.encode()).hexdigest()[:16]
        self._before = self._counted()
        self._installed: AbstractContextManager[object] | None = None

    # Inductor stores its counters with a graph and restores them when it loads the graph from a
    # cache, so that a cache hit counts like a compilation.

    def _count(self, what: str) -> None:
        graphs.compile_counters()[f"cgx_ops rewrite {self._settings}: {what}"] += 1

    def _counted(self) -> Counter[str]:
        start = f"cgx_ops rewrite {self._settings}: "
        counted = graphs.compile_counters().items()
        return Counter({k.removeprefix(start): n for k, n in counted if k.startswith(start)})

    @property
    def counts(self) -> dict[str, int]:
        """Event counts since this object was created, or its block entered, by kind.

        The keys are "graphs", "rewritten", and the reasons why all-reduces were not compressed.
        Objects with the same settings share the counts.
        """
        now = self._counted()
        now.subtract(self._before)
        return {what: n for what, n in now.items() if n > 0}

    @property
    def rewritten(self) -> int:
        """Number of all-reduces compressed so far, including those in cached graphs."""
        return self.counts.get("rewritten", 0)

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Rewrite a graph in place."""
        self._count("graphs")
        graphs.sort_graph(graph)
        found = []
        for node in list(graph.nodes):
            if node.op != "call_function" or node.target not in _FORMS:
                continue
            inputs, op, group = graphs.arguments(node)
            nodes = inputs if isinstance(inputs, (list, tuple)) else [inputs]
            values = [each.meta["val"] for each in nodes]
            op, group = op.lower(), graphs.group_name(group)
            refusal = self.choice.refusal(values, op, group)
            _log.debug("all_reduce %s: %s", node, refusal or "compressed")
            self._count(refusal or "rewritten")
            if refusal is None:
                found.append(AllReduce(node, values, op, group))
        for each in found if self.plan is None else joined(graph, found, self.plan):
            splice(graph, each, trace(each.values, each.op, each.group, self.config))
        graph.lint()

    def uuid(self) -> object:
        """Return everything that determines the pass's effect on a graph, for the caches' keys.

        Ranks may share a cache, but the sizes of carried messages differ between ranks.
        """
        digest = hashlib.sha256()
        for path in _SOURCES:
            digest.update(path.read_bytes())
        groups = [(name, *where, has_communicator(name)) for name, where in graphs.groups()]
        return digest.hexdigest(), self._settings, devices(), groups

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return self, because inductor copies its configuration, including this pass."""
        return self

    def __enter__(self) -> Self:
        if self._installed is not None:
            raise InvalidArgument(
                "this compress_collectives() block is open already; create another"
            )
        self._before = self._counted()
        self._installed = graphs.post_grad_pass(self)
        self._installed.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        installed, self._installed = self._installed, None
        assert installed is not None
        installed.__exit__(kind, error, traceback)
        if kind is None and not self.rewritten:
            warnings.warn(self._why_nothing(), NothingRewritten, stacklevel=2)

    def _why_nothing(self) -> str:
        counts = self.counts
        compiled = counts.pop("graphs", 0)
        text = "compress_collectives() compressed nothing: "
        if counts:
            filtered = "; ".join(f"{n} of {what}" for what, n in counts.items())
            return text + f"no all-reduce of {compiled} compiled graphs matched: {filtered}"
        if compiled:
            text += f"{compiled} graphs were compiled in the block, none with an all-reduce. "
        else:
            text += (
                "no graph was compiled in the block. A model that ran before keeps its graphs: "
                "run it for the first time inside the block, or call torch._dynamo.reset(). "
            )
        text += (
            "DistributedDataParallel reduces gradients outside of graphs, unless "
            'torch._dynamo.config.optimize_ddp is "python_reducer" when it is created (now it is '
            f"{graphs.optimize_ddp()!r}) and backward() runs under compiled autograd. "
            'To compress these gradients, use the backend "cgx" or a hook of cgx_ops.torch.ddp.'
        )
        return text


def compress_collectives(
    config: Config | None = None,
    *,
    groups: Iterable[Group] | None = None,
    dtypes: Iterable[torch.dtype] | None = None,
    min_numel: int = 1024,
    plan: Plan | None = None,
) -> Rewrite:
    """Compress the all-reduces (sum and avg) of graphs that torch.compile compiles.

    Use the result as a context manager around the first calls of the compiled model, including the
    first backward, which compiles the backward graph. Or pass it to torch.compile:
    `options={"post_grad_custom_post_pass": compress_collectives(config)}`. A compiled graph is
    kept: graphs compiled inside the block stay compressed after it, and graphs compiled earlier do
    not change. All ranks use the same arguments.

    Random rounding draws its seeds in the graph, separately in forward and backward. So an
    all-reduce that activation checkpointing repeats in backward is rounded differently;
    rounding="nearest" gives the same values.

    Args:
        config: compressor, bits and the other settings. None: `Config()`, which is 4 bits.
        groups: process groups or their names. None: all.
        dtypes: dtypes to compress. None: float32, float16 and bfloat16.
        min_numel: minimum number of elements of a compressed call.
        plan: joins the all-reduces of each group of the plan into one message, at the place of the
            last one, unless one needs another's result. Graphs have no parameter names, so tensors
            are matched by size, in the order of the graph. The bits of the plan are ignored.

    Returns:
        A context manager and graph pass. `rewritten` is the number of compressed all-reduces, and
        `counts` has the reasons for the others. It warns with NothingRewritten if the block ends
        without a compressed all-reduce.

    Raises:
        InvalidArgument: a dtype cannot be compressed, `groups` is empty, or `min_numel` is
            negative.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> import cgx_ops.torch
        >>> from cgx_ops import Config
        >>> dist.init_process_group("cgx", store=dist.HashStore(), rank=0, world_size=1)
        >>> @torch.compile
        ... def average(x):
        ...     dist.all_reduce(x, dist.ReduceOp.AVG)
        ...     return x
        >>> with cgx_ops.torch.compress_collectives(Config(bits=4)) as rewrite:
        ...     y = average(torch.ones(4096))
        >>> rewrite.rewritten
        1
        >>> dist.destroy_process_group()
    """
    config = Config() if config is None else config
    kinds = _DTYPES if dtypes is None else tuple(dict.fromkeys(dtypes))
    if not kinds or not set(kinds) <= set(_DTYPES):
        raise InvalidArgument(f"dtypes is {list(kinds)}; it must be some of {list(_DTYPES)}")
    if min_numel < 0:
        raise InvalidArgument(f"min_numel is {min_numel}; it must be 0 or more")
    names = None
    if groups is not None:
        names = tuple(map(graphs.group_name, groups))
        if not names:
            raise InvalidArgument("groups is empty; pass None for all groups")
    graphs.declare_graph_pass(Rewrite)
    inductor.key_caches()  # needed before the pass traces an operator
    return Rewrite(config, Choice(names, kinds, min_numel), plan)
